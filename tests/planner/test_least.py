"""The least limit that has a plan, with extra bytes: against all plans of all layers."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stages import any_extra, every_stage, stages

from megatron_adacc.planner import least, listing, pairs
from megatron_adacc.planner.floors import Floor
from megatron_adacc.planner.least import least_memory
from megatron_adacc.planner.lexicographic import error_grid
from megatron_adacc.planner.problem import BufferItem, LayerClass, OpItem, Problem
from megatron_adacc.planner.solution import KEEP, RECOMPUTE, peak_by_class
from megatron_adacc.planner.stage import solve_stage


@settings(max_examples=120, deadline=None, derandomize=True)
@given(stages(), st.lists(st.integers(0, 40), min_size=1, max_size=31), st.booleans())
def test_the_least_limit_is_that_of_brute_force_and_has_a_plan(problem, numbers, floored) -> None:
    extra = any_extra(numbers)
    floors = [[Floor(min(numbers), {}), Floor(3, {("b0", KEEP): 1})] for _ in problem.classes] if floored else None
    if floors is not None:
        extra = lambda i, actions: max(any_extra(numbers)(i, actions), 4)  # noqa: E731
    expected = min((max(peak_by_class(problem, chosen)) for chosen in every_stage(problem, extra)), default=None)
    found = least_memory(problem, extra, floors, error_grid(problem))
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.peak_bytes, found.proven) == (expected, True)
    assert max(peak_by_class(problem, found.layers)) == expected
    # The same from the solver, which looks for it only where nothing fits.
    assert solve_stage(replace(problem, limit_bytes=expected), extra, floors).peak_bytes == expected
    refused = solve_stage(replace(problem, limit_bytes=max(0, expected - 1)), extra, floors)
    if expected:
        assert (refused.status, refused.least_bytes, refused.least_proven) == ("infeasible", expected, True)


def chain(count: int) -> Problem:
    """Each layer saves three buffers, made one from the other; what is not held doubles the bytes beside."""
    buffers = tuple(BufferItem(f"b{i}", 10 + i, True) for i in range(3))
    ops = tuple(OpItem(f"o{i}", 1 + i, (f"b{i - 1}",) if i else (), (f"b{i}",)) for i in range(3))
    return Problem((LayerClass("", buffers, ops, count),), 0)


def extra_of_chain(index, actions):
    """Only a middle plan needs little: the least limit is neither that of holding nothing nor of holding all."""
    return 5 if actions == {"b0": RECOMPUTE, "b1": KEEP, "b2": RECOMPUTE} else 40


def test_microseconds_do_not_matter():
    problem = chain(4)
    found = least_memory(problem, extra_of_chain, None, None)
    # The last layer holds 11 and needs 5; the others hold nothing and need 40.
    assert (found.peak_bytes, found.proven) == (40, True)
    assert [a.outcome.held_bytes for a in found.layers[:3]] == [0, 0, 0]
    (layer,) = problem.classes
    free = replace(layer, ops=tuple(replace(op, us=0.0) for op in layer.ops))
    assert least_memory(replace(problem, classes=(free,)), extra_of_chain, None, None).peak_bytes == 40
    one = replace(problem, classes=(replace(layer, count=1),))
    assert least_memory(one, extra_of_chain, None, None).peak_bytes == 16


@pytest.mark.parametrize(("module", "name", "value"), [(least, "MOST_ASKED", 3), (listing, "MOST_WAYS", 4)])
def test_what_is_not_proven_works_and_says_so(monkeypatch, module, name, value):
    problem = replace(chain(1), error_budget=0.0)
    monkeypatch.setattr(module, name, value)
    found = solve_stage(problem, extra_of_chain)
    assert (found.status, found.least_proven) == ("infeasible", False)
    again = solve_stage(replace(problem, limit_bytes=found.least_bytes), extra_of_chain)
    assert again.peak_bytes == found.least_bytes


def test_too_many_labels(monkeypatch):
    def extra(index, actions):
        return 100 - 4 * sum(10 + int(site[1]) for site, action in actions.items() if action == KEEP)

    problem = chain(4)
    exact = least_memory(problem, extra, None, None)
    monkeypatch.setattr(pairs, "MOST_LABELS", 1)
    found = least_memory(problem, extra, None, None)
    assert (exact.proven, found.proven) == (True, False)
    assert found.peak_bytes == max(peak_by_class(problem, found.layers)) >= exact.peak_bytes


def test_floors_save_questions():
    asked = []

    def extra(index, actions):
        asked.append(dict(actions))
        return extra_of_chain(index, actions)

    floors = [[Floor(35, {("b1", KEEP): -20, ("b0", KEEP): 5, ("b2", KEEP): 5})]]
    assert least_memory(chain(1), extra, floors, None).peak_bytes == 16
    assert len(asked) < 8
