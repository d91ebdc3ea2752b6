"""Bytes beside the held ones, by position: the order of layers, the peak, answers against all plans in all orders."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_stages import any_extra, every_stage, stages

from megatron_adacc.planner.floors import Floor
from megatron_adacc.planner.position import placed
from megatron_adacc.planner.problem import BufferItem, CodecChoice, LayerClass, Moment, OpItem, Problem
from megatron_adacc.planner.solution import (
    COMPRESS,
    DROP,
    KEEP,
    RECOMPUTE,
    LayerAnswer,
    Outcome,
    Violation,
    evaluate_layer,
    peak_by_class,
)  # fmt: skip
from megatron_adacc.planner.stage import solve_stage


def layer_of(class_index: int, held_bytes: int, extra_bytes: int) -> LayerAnswer:
    return LayerAnswer(
        class_index, {"x": f"{held_bytes} and {extra_bytes}"}, Outcome(held_bytes, 0.0, 0.0, ()), extra_bytes
    )


def test_the_peak_of_a_stage_by_hand():
    # Two micro-batches in flight, three layers that hold 10, 20, 30 and need 25, 5, 1 beside that.
    problem = Problem((LayerClass("", (), (), 3, 2),), 1000, fixed_bytes=100, transient_bytes=3)
    layers = (layer_of(0, 10, 25), layer_of(0, 20, 5), layer_of(0, 30, 1))
    # All held: 100 + 120. Last layer +1, middle -30 + 5, first -50 + 25; the loss head +3.
    assert peak_by_class(problem, layers) == (223,)
    assert peak_by_class(problem, layers[::-1]) == (100 + 120 + 25,)


def test_other_classes_of_the_chunk_are_freed_and_other_chunks_are_not():
    def classes(chunk: int) -> tuple[LayerClass, ...]:
        return LayerClass("first", (), (), 1, 1, 0), LayerClass("second", (), (), 1, 1, chunk)

    layers = (layer_of(0, 10, 50), layer_of(1, 30, 5))
    assert peak_by_class(Problem(classes(0), 1000), layers) == (10 + 50, 10 + 30 + 5)
    assert peak_by_class(Problem(classes(1), 1000), layers) == (40 + 50, 10 + 30 + 5)


def test_moments_gradients_and_layers_in_turn_by_hand():
    classes = LayerClass("a", (), (), 2, 1, 0, left_bytes=7), LayerClass("b", (), (), 1, 1, 0, left_bytes=4)
    layers = (layer_of(0, 10, 25), layer_of(1, 20, 5), layer_of(0, 30, 1))
    problem = Problem(classes, 1000, fixed_bytes=100, transient_bytes=50, order=(0, 1, 0))
    # All held: 160. Middle -30 + 7 + 5, first -50 + 11 + 25.
    assert peak_by_class(problem, layers) == (100 + 60 + 50, 210)
    quiet = replace(problem, transient_bytes=0)
    assert peak_by_class(quiet, layers) == (161, 160)
    # Two micro-batches of a and three of b; then one of a, beside 90 bytes, when the head cannot run.
    moments = Moment(0, (2, 3)), Moment(0, (1, 1), 90, head=False)
    assert peak_by_class(replace(problem, moments=moments), layers) == (100 + 80 + 60 + 50, 290)
    assert peak_by_class(replace(quiet, moments=moments[1:]), layers) == (90 + 161, 250)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60)), min_size=1, max_size=5), st.integers(1, 3),
    st.integers(0, 40),
)  # fmt: skip
def test_the_order_is_the_best(pairs: list[tuple[int, int]], in_flight: int, left_bytes: int) -> None:
    problem = Problem((LayerClass("", (), (), len(pairs), in_flight, 0, left_bytes),), 0)
    answers = [layer_of(0, *pair) for pair in pairs]
    peaks = [peak_by_class(problem, order) for order in itertools.permutations(answers)]
    needs = {id(answer.actions): answer.extra_bytes for answer in answers}
    ordered = placed(problem, answers, lambda index, actions: needs[id(actions)])
    assert peak_by_class(problem, ordered) == min(peaks)
    if not left_bytes:
        assert [a.extra_bytes for a in ordered] == sorted(needs.values(), reverse=True)


# ---- solve_stage with extra bytes ----


def one_buffer(count: int, limit_bytes: int) -> Problem:
    layer = LayerClass("", (BufferItem("x", 10, True),), (OpItem("make", 3, (), ("x",)),), count)
    return Problem((layer,), limit_bytes)


def extra_of_one(class_index: int, actions: Mapping[str, str]) -> int:
    return 12 if actions["x"] == RECOMPUTE else 1


def test_much_is_kept_in_the_last_layers_and_recomputed_in_the_first():
    found = solve_stage(one_buffer(4, 24), extra_of_one)
    # The last two hold 20, and need 1 more; when the first two run, with 12 beside, these are freed.
    assert [layer.actions["x"] for layer in found.layers] == ["recompute", "recompute", "keep", "keep"]
    assert [layer.extra_bytes for layer in found.layers] == [12, 12, 1, 1]
    assert (found.cost_us, found.held_bytes, found.peak_bytes) == (6, 20, 21)
    assert found.status == "optimal"


def test_extra_bytes_that_do_not_fit_make_the_least_limit():
    found = solve_stage(one_buffer(4, 11), extra_of_one)
    # Nothing held: 12. The last layer held: 10, and 12 - 10 for the layer before it.
    assert (found.status, found.layers, found.least_bytes) == ("infeasible", (), 12)
    assert solve_stage(one_buffer(4, 12), extra_of_one).peak_bytes == 12


def test_without_extra_bytes_the_same_as_without_the_question():
    problem = one_buffer(6, 37)
    plain, asked = solve_stage(problem), solve_stage(problem, lambda class_index, actions: 0)
    assert (asked.status, asked.cost_us, asked.peak_bytes) == (plain.status, plain.cost_us, plain.peak_bytes)


@st.composite
def chains(draw: st.DrawFn) -> LayerClass:
    """Up to three buffers, each made from the one before."""
    count = draw(st.integers(1, 3))
    buffers, ops = [], []
    for i in range(count):
        size = draw(st.integers(1, 20))
        codecs = (
            CodecChoice("q", draw(st.integers(0, size)), draw(st.integers(0, 4)), draw(st.sampled_from([0, 0.25]))),
        )
        buffers.append(BufferItem(f"b{i}", size, True, codecs[: draw(st.integers(0, 1))], draw(st.integers(0, 5)) == 0))
        ops.append(OpItem(f"o{i}", draw(st.integers(1, 9)), (f"b{i - 1}",) if i else (), (f"b{i}",)))
    return LayerClass("", tuple(buffers), tuple(ops), draw(st.integers(1, 3)), draw(st.integers(1, 2)))


def all_plans(layer: LayerClass, extra) -> list[LayerAnswer]:
    plans = []
    options = [[KEEP, RECOMPUTE, DROP, *(COMPRESS + c.name for c in b.codecs)] for b in layer.buffers]
    for choice in itertools.product(*options):
        actions = dict(zip((b.site for b in layer.buffers), choice, strict=True))
        try:
            plans.append(LayerAnswer(0, actions, evaluate_layer(layer, actions), extra(0, actions)))
        except Violation:
            continue
    return plans


@settings(max_examples=120, deadline=None, derandomize=True)
@given(chains(), st.integers(0, 1000), st.sampled_from([None, 0.0, 0.25, 0.5]), st.integers(0, 9), st.integers(0, 20))
def test_answers_against_all_plans_in_all_orders(layer, share, error_budget, part, constant) -> None:
    sizes = {b.site: b.bytes for b in layer.buffers}

    def extra(class_index: int, actions: Mapping[str, str]) -> int:
        return constant + sum(sizes[site] for site, action in actions.items() if action != KEEP) * part // 6

    most = layer.count * layer.in_flight * sum(sizes.values()) + constant + 30
    problem = Problem((layer,), most * share // 1000, 0, error_budget, transient_bytes=2)
    best, least = None, None
    for layers in itertools.combinations_with_replacement(all_plans(layer, extra), layer.count):
        if error_budget is not None and sum(a.outcome.error for a in layers) > error_budget:
            continue
        ordered = tuple(sorted(layers, key=lambda a: -a.extra_bytes))
        peak = max(peak_by_class(problem, ordered))
        least = peak if least is None else min(peak, least)
        cost_us = sum(a.outcome.cost_us for a in layers)
        if peak <= problem.limit_bytes and (best is None or cost_us < best):
            best = cost_us
    found = solve_stage(problem, extra)
    if best is None:
        assert (found.status, found.least_bytes, found.least_proven) == ("infeasible", least, True)
        again = solve_stage(Problem((layer,), found.least_bytes, 0, error_budget, 2), extra)
        assert again.peak_bytes == least
        return
    assert (found.status, found.cost_us, found.gap) == ("optimal", best, None)
    assert found.peak_bytes <= problem.limit_bytes
    assert found.peak_bytes == max(peak_by_class(problem, found.layers))
    assert all(extra(0, a.actions) == a.extra_bytes for a in found.layers)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(stages(), st.lists(st.integers(0, 40), min_size=1, max_size=31), st.integers(0, 100))
def test_any_extra_bytes_at_any_moments_in_any_order(problem: Problem, numbers: list[int], share: int) -> None:
    extra = any_extra(numbers)
    rated = [
        (max(peak_by_class(problem, chosen)), sum(a.outcome.cost_us for a in chosen))
        for chosen in every_stage(problem, extra)
    ]
    assume(rated)
    least, most = min(peak for peak, _ in rated), max(peak for peak, _ in rated)
    problem = replace(problem, limit_bytes=least + (most - least) * share // 100)
    best = min(cost for peak, cost in rated if peak <= problem.limit_bytes)
    found = solve_stage(problem, extra)
    assert found.peak_bytes <= problem.limit_bytes
    if found.status == "optimal":
        assert found.cost_us == best
    else:
        # Only where layers of two kinds lie in turn, and which of a kind's plans stands where matters.
        assert problem.sequence != tuple(sorted(problem.sequence))
        assert best <= found.cost_us <= best * (1 + found.gap) + 1e-9


def test_floors_bound_more_layers_than_can_be_listed():
    """A bound from floors alone: where they are exact, so is the answer, and few plans are asked for."""
    buffers = tuple(BufferItem(f"b{i}", 10 + i, True) for i in range(12))
    ops = tuple(OpItem(f"o{i}", 5 + i % 3, (), (f"b{i}",)) for i in range(12))
    problem = Problem((LayerClass("", buffers, ops, 30),), 2500)
    asked = []

    def extra(index: int, actions: Mapping[str, str]) -> int:
        asked.append(actions)
        return 200 + sum(b.bytes // 2 for b in buffers if actions[b.site] == RECOMPUTE)

    sizes = {
        (b.site, action): b.bytes if action == KEEP else b.bytes // 2 for b in buffers for action in (KEEP, RECOMPUTE)
    }
    found = solve_stage(problem, extra, [[Floor(200, sizes)]])
    assert (found.status, found.note) == ("optimal", "")
    assert len(asked) < 20
    assert found.peak_bytes <= 2500
    seen = solve_stage(problem, extra)
    assert found.cost_us <= seen.cost_us <= found.cost_us * 1.01
    assert "those that were looked at" in seen.note


@pytest.mark.parametrize("in_flight", [1, 3])
def test_two_chunks_each_end_in_what_frees_room(in_flight):
    def chunk(number: int) -> LayerClass:
        return LayerClass(
            f"chunk {number}", (BufferItem("x", 10, True),), (OpItem("make", 3, (), ("x",)),), 3, in_flight, number
        )

    problem = Problem((chunk(0), chunk(1)), 40 * in_flight + 1)
    found = solve_stage(problem, extra_of_one)
    for number in (0, 1):
        assert [layer.actions["x"] for layer in found.layers_of(number)] == ["recompute", "keep", "keep"]
    assert found.peak_by_class == (40 * in_flight + 1, 40 * in_flight + 1)
