"""One plan for all layers of a class: for layers whose graph of plans is too wide."""

import json
import re
from pathlib import Path

import pytest

from megatron_adacc.planner import frontier
from megatron_adacc.planner.frontier import LayerPaths, TooWide
from megatron_adacc.planner.grid import Grid
from megatron_adacc.planner.problem import BufferItem, LayerClass, OpItem, Problem
from megatron_adacc.planner.problem_file import problem_from_json
from megatron_adacc.planner.stage import solve_stage
from megatron_adacc.planner.uniform import solve_uniform

LAYER = LayerClass(
    "", (BufferItem("a", 10, True), BufferItem("b", 6, True)), (OpItem("a", 9, (), ("a",)), OpItem("b", 2, (), ("b",))),
    count=3, in_flight=2,
)  # fmt: skip


def wide(inputs: int) -> LayerClass:
    """Pairs of an unsaved value and what is made of it; all values are made first, so that any set may be asked for."""
    values = tuple(OpItem(f"value{i}", 1, (), (f"v{i}",)) for i in range(inputs))
    results = tuple(OpItem(f"result{i}", 2, (f"v{i}",), (f"r{i}",)) for i in range(inputs))
    buffers = tuple(BufferItem(f"v{i}", 1, False, storable=False) for i in range(inputs))
    buffers += tuple(BufferItem(f"r{i}", 4, True) for i in range(inputs))
    return LayerClass("", buffers, (*values, *results), count=2)


def test_all_layers_of_a_class_have_the_same_plan():
    found = solve_uniform(Problem((LAYER,), 2 * 3 * 10 + 20, fixed_bytes=3))
    assert [dict(a.actions) for a in found.layers] == [{"a": "keep", "b": "recompute"}] * 3
    assert (found.status, found.cost_us, found.held_bytes, found.peak_bytes) == ("feasible", 6, 60, 63)
    # Layer by layer one more could keep b, at two micro-batches of 6.
    assert solve_stage(Problem((LAYER,), 2 * 3 * 10 + 20, fixed_bytes=3)).cost_us == 4


def test_extra_bytes_find_room():
    def extra(class_index, actions):
        return 7 if actions["b"] == "recompute" else 1

    found = solve_uniform(Problem((LAYER,), 60 + 6), extra)
    assert (dict(found.layers[0].actions), found.peak_bytes) == ({"a": "recompute", "b": "keep"}, 37)
    assert solve_uniform(Problem((LAYER,), 60 + 7), extra).cost_us == 6


def test_too_low_a_limit():
    layer = LayerClass("", (BufferItem("a", 10, True, must_hold=True),), (), count=3)
    assert solve_uniform(Problem((layer,), 29)).least_bytes == 30
    # With 5 beside it, 35 works and 34 does not.
    assert solve_uniform(Problem((layer,), 34), lambda class_index, actions: 5).status == "infeasible"
    assert solve_uniform(Problem((layer,), 35), lambda class_index, actions: 5).peak_bytes == 35


def test_a_layer_that_is_too_wide_gets_one_plan(monkeypatch):
    problem = Problem((wide(8),), 2 * 5 * 4 + 3)
    assert solve_stage(problem).status == "optimal"
    monkeypatch.setattr(frontier, "MOST_NODES", 100)
    with pytest.raises(TooWide, match="128 sets of buffers may be asked for at once"):
        LayerPaths(wide(8), Grid(0), None)
    found = solve_stage(problem)
    assert found.note == "All layers of a class have the same plan: their graph is too wide to give each its own."
    assert (found.status, found.cost_us, found.held_bytes) == ("feasible", 2 * 3 * 3, 40)


def test_the_documented_example_is_a_problem():
    text = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    example = re.search(r'(\{"limit_bytes".*?\})\n\ngives\n\n\s*(\{.*?\}\s*)\n\n', text, re.DOTALL)
    assert example is not None
    found = solve_stage(problem_from_json(example[1]))
    answer = json.loads(example[2])
    assert (answer["cost_us"], answer["held_bytes"]) == (found.cost_us, found.held_bytes)
    assert answer["actions"] == dict(found.layers[0].actions)
