"""Plans that can be worked out by hand, in both formulations."""

import pytest

from megatron_adacc.planner import milp, stage
from megatron_adacc.planner.problem import BufferItem, CodecChoice, LayerClass, OpItem, Problem

GIB = 2**30

pytestmark = pytest.mark.parametrize("solve", [milp.solve, stage.solve_stage])


def independent(sizes: list[int], recompute_us: list[float], limit_bytes: int, layers: int = 1) -> Problem:
    """Buffers that depend on nothing: keep, or lose the gain."""
    buffers = tuple(BufferItem(str(i), size, True) for i, size in enumerate(sizes))
    ops = tuple(OpItem(f"make{i}", us, (), (str(i),)) for i, us in enumerate(recompute_us))
    return Problem((LayerClass("", buffers, ops, layers),), limit_bytes)


@pytest.mark.parametrize(("limit_bytes", "cost_us"), [(60, 0), (45, 4), (35, 6), (25, 8), (19, 9), (13, 11), (0, 25)])
def test_three_tensors(solve, limit_bytes, cost_us):
    kept, packed, pack_us, again_us = (10, 20, 30), (4, 6, 9), (2, 3, 5), (9, 4, 12)
    buffers = tuple(
        BufferItem(site, size, True, (CodecChoice("int4", small, us),))
        for site, size, small, us in zip("abc", kept, packed, pack_us, strict=True)
    )
    ops = tuple(OpItem(f"make_{site}", us, (), (site,)) for site, us in zip("abc", again_us, strict=True))
    found = solve(Problem((LayerClass("", buffers, ops),), limit_bytes))
    assert (found.status, found.cost_us, found.gap) == ("optimal", cost_us, None)
    assert found.held_bytes <= limit_bytes


def test_one_byte_below_sixteen_gib(solve):
    sizes = [7 * GIB + 1, 9 * GIB - 1, 3 * GIB, 5 * GIB + 7]
    found = solve(independent(sizes, [700, 900, 300, 510], 16 * GIB - 1))
    (layer,) = found.layers
    assert [site for site, action in layer.actions.items() if action == "keep"] == ["0", "2", "3"]
    assert 700 + 900 + 300 + 510 - found.cost_us == 1510
    assert found.held_bytes == 15 * GIB + 8


def test_with_one_more_byte_the_better_pair_fits(solve):
    sizes = [7 * GIB + 1, 9 * GIB - 1, 3 * GIB, 5 * GIB + 7]
    found = solve(independent(sizes, [700, 900, 300, 510], 16 * GIB))
    assert 2410 - found.cost_us == 1600


def test_a_greedy_choice_by_gain_for_a_byte_is_not_the_best(solve):
    assert 25 + 2 + 27 + 28 - solve(independent([25, 5, 22, 26], [25, 2, 27, 28], 72)).cost_us == 57


def test_one_of_three_equal_ones(solve):
    found = solve(independent([1, 1, 1], [1, 1, 1], 1))
    assert 3 - found.cost_us == 1
    assert sorted(found.layers[0].actions.values()) == ["keep", "recompute", "recompute"]


def test_below_the_least_limit_that_limit_is_said(solve):
    held = BufferItem("x", 7, True, (CodecChoice("int4", 3, 1.0, error=0.5),), must_hold=True)
    problem = Problem((LayerClass("", (held,), (), count=4, in_flight=2),), 35, fixed_bytes=10, transient_bytes=2)
    found = solve(problem)
    assert (found.status, found.least_bytes, found.layers) == ("infeasible", 10 + 2 + 4 * 2 * 3, ())
    tight = Problem(problem.classes, 35, 10, error_budget=1.0, transient_bytes=2)
    assert solve(tight).least_bytes == 10 + 2 + 2 * (2 * 3 + 2 * 7)  # two of the four may be packed
    assert solve(Problem(problem.classes, found.least_bytes, 10, None, 2)).status == "optimal"


def test_what_can_neither_be_held_nor_made_has_no_limit(solve):
    lost = BufferItem("x", 7, True, storable=False)
    found = solve(Problem((LayerClass("", (lost,), ()),), 10**12))
    assert (found.status, found.least_bytes) == ("infeasible", None)


def test_a_chain_is_made_again_from_what_is_held(solve):
    # a -> b -> c; b is not saved. Dropping c costs b and c from a, which is then worth keeping.
    buffers = (BufferItem("a", 10, True), BufferItem("b", 1, False), BufferItem("c", 10, True))
    ops = (OpItem("c", 5, ("b",), ("c",)), OpItem("b", 3, ("a",), ("b",)), OpItem("a", 6, ("weight",), ("a",)))
    layer = LayerClass("", buffers, ops)
    found = solve(Problem((layer,), 10))
    assert (found.cost_us, dict(found.layers[0].actions)) == (6, {"a": "recompute", "b": "drop", "c": "keep"})
    assert found.layers[0].outcome.runs == ("a",)
    nothing = solve(Problem((layer,), 0))
    assert (nothing.cost_us, nothing.layers[0].outcome.runs) == (14, ("c", "b", "a"))


def test_a_random_op_is_not_run_again(solve):
    buffers = (BufferItem("mask", 8, True, (CodecChoice("bitmask", 1, 2.0, again_us=1.0),)), BufferItem("y", 16, True))
    ops = (OpItem("draw", 1, (), ("mask",), replayable=False), OpItem("mul", 4, ("mask",), ("y",)))
    found = solve(Problem((LayerClass("", buffers, ops),), 1))
    # Bits are made once (2), the product again (4), and for it the bits are decoded once more (1).
    assert (found.cost_us, dict(found.layers[0].actions)) == (7, {"mask": "compress:bitmask", "y": "recompute"})
    assert solve(Problem((LayerClass("", buffers, ops),), 0)).least_bytes == 1


def test_layers_of_a_class_get_different_plans(solve):
    found = solve(independent([10], [3], 25, layers=4))
    assert (found.cost_us, found.held_bytes) == (6, 20)
    assert sorted(layer.actions["0"] for layer in found.layers) == ["keep", "keep", "recompute", "recompute"]


def test_classes_with_other_micro_batches_in_flight(solve):
    # A byte of the first class counts three times.
    def make(name: str, in_flight: int) -> LayerClass:
        return LayerClass(name, (BufferItem("x", 10, True),), (OpItem("make", 5, (), ("x",)),), 2, in_flight)

    found = solve(Problem((make("first", 3), make("last", 1)), 50))
    assert [layer.actions["x"] for layer in found.layers_of(1)] == ["keep", "keep"]
    assert sorted(layer.actions["x"] for layer in found.layers_of(0)) == ["keep", "recompute"]
    assert (found.cost_us, found.held_bytes, found.peak_by_class) == (5, 50, (50, 50))


def test_a_stage_without_layers(solve):
    found = solve(Problem((), 5, fixed_bytes=3))
    assert (found.status, found.layers, found.cost_us, found.peak_bytes) == ("optimal", (), 0, 3)


def test_a_budget_of_nothing_allows_lossless_codecs_only(solve):
    codecs = (CodecChoice("int4", 1, 1.0, error=0.01), CodecChoice("bits", 2, 2.0))
    layer = LayerClass("", (BufferItem("x", 10, True, codecs, must_hold=True),), ())
    assert solve(Problem((layer,), 5)).layers[0].actions["x"] == "compress:int4"
    assert solve(Problem((layer,), 5, error_budget=0.0)).layers[0].actions["x"] == "compress:bits"
