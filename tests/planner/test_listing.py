"""All plans of one layer, and what they need at least."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from small_stages import every_plan, layers

from megatron_adacc.planner.floors import Floor, floors_of_seen, possible_actions, without_needless
from megatron_adacc.planner.grid import Grid
from megatron_adacc.planner.listing import all_plans, lightest_actions
from megatron_adacc.planner.problem import BufferItem, CodecChoice, LayerClass, OpItem, Problem
from megatron_adacc.planner.solution import evaluate_layer


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layers(0))
def test_the_plans_are_those_of_brute_force(layer: LayerClass) -> None:
    expected = {tuple(sorted(a.actions.items())) for a in every_plan(Problem((layer,), 0), 0, lambda *_: 0)}
    plans = all_plans(layer, Grid(2), lossless=False)
    assert plans is not None
    found = [plans.actions(i) for i in range(len(plans))]
    assert {tuple(sorted(actions.items())) for actions in found} == expected
    assert len(found) == len(expected)
    for i, actions in enumerate(found):
        outcome = evaluate_layer(layer, actions)
        assert (int(plans.nbytes[i]), plans.error[i] / 100) == (outcome.held_bytes, outcome.error)
        near = {j for j in range(len(found)) if sum(found[j][s] != actions[s] for s in actions) == 1}
        assert set(plans.neighbours(i)) == near
    exact = all_plans(layer, None, lossless=True)
    assert exact is not None
    assert len(exact) == sum(evaluate_layer(layer, actions).error == 0 for actions in found)
    lightest = lightest_actions(layer)
    if lightest is not None:
        assert evaluate_layer(layer, lightest).held_bytes >= min(plans.nbytes)
    assert all_plans(layer, None, lossless=False, most_ways=0) is None


def test_the_lightest_plan_of_a_layer_too_large_to_list():
    codec = CodecChoice("bits", 2, 1.0), CodecChoice("int4", 1, 1.0, error=0.1)
    buffers = (BufferItem("mask", 8, True, codec, must_hold=True), BufferItem("a", 9, True), BufferItem("t", 3, False))
    ops = (OpItem("t", 1, (), ("t",)), OpItem("a", 1, ("t", "mask"), ("a",)))
    layer = LayerClass("", buffers, ops)
    assert lightest_actions(layer) == {"mask": "compress:bits", "a": "recompute", "t": "drop"}
    fixed = LayerClass("", buffers, (OpItem("t", 1, (), ("t",)), OpItem("a", 1, ("t", "mask"), ("a",), False)))
    assert lightest_actions(fixed) == {"mask": "compress:bits", "a": "keep", "t": "drop"}
    assert lightest_actions(LayerClass("", (BufferItem("x", 1, True, storable=False),), ())) is None


TWO = LayerClass("", (BufferItem("a", 10, True), BufferItem("b", 5, True)), ())
FLOORS = st.builds(
    lambda base, *adds: Floor(base, dict(zip(itertools.product("ab", ("keep", "recompute")), adds, strict=True))),
    st.integers(-3, 9), *(st.integers(0, 5) for _ in range(4)),
)  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(FLOORS, max_size=6))
def test_only_needless_floors_are_left_out(floors: list[Floor]) -> None:
    kept = without_needless(TWO, floors)
    plans = [{"a": a, "b": b} for a in possible_actions(TWO, 0) for b in possible_actions(TWO, 1)]
    for actions in plans if floors else []:
        assert max(floor.of(actions) for floor in floors) == max(floor.of(actions) for floor in kept)
    for one, other in itertools.permutations(kept, 2):
        assert any(one.of(actions) < other.of(actions) for actions in plans)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 40), min_size=4, max_size=4))
def test_floors_of_plans_that_were_looked_at(extra: list[int]) -> None:
    """Never above, reached by the plan that needs least and by that with least extra bytes."""
    plans = all_plans(TWO.__class__("", TWO.buffers, (OpItem("o", 1, (), ("a", "b")),)), None, lossless=True)
    assert plans is not None
    layer, held = plans.layer, plans.nbytes
    floors = floors_of_seen(layer, held, held * 0 + extra)
    gaps = [int(held[i]) + extra[i] - max(floor.of(plans.actions(i)) for floor in floors) for i in range(len(plans))]
    assert min(gaps) >= 0
    assert gaps[min(range(4), key=lambda i: (held[i] + extra[i], held[i]))] == 0
    assert gaps[min(range(4), key=lambda i: (extra[i], -held[i]))] == 0
