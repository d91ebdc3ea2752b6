"""Why a buffer got its action."""

import json

from megatron_adacc.planner import LayerPlan, Plan, Recompute
from megatron_adacc.planner.explain import explain
from megatron_adacc.planner.problem import BufferItem, CodecChoice, LayerClass, OpItem, Problem
from megatron_adacc.planner.reason import Reason, table
from megatron_adacc.planner.stage import solve_stage

BUFFERS = (
    BufferItem("a", 10, True, (CodecChoice("int4", 4, 2.0),)),
    BufferItem("b", 20, True, (CodecChoice("int4", 6, 3.0),)),
    BufferItem("in", 5, True, must_hold=True),
    BufferItem("t", 5, False),
)
OPS = (OpItem("a", 9, (), ("a",)), OpItem("b", 4, (), ("b",)))


def test_what_the_second_best_costs():
    problem = Problem((LayerClass("", BUFFERS, OPS),), 5 + 16)
    found = solve_stage(problem)
    assert (found.cost_us, found.held_bytes) == (3, 21)  # a 10, b packed 6
    assert explain(problem, found) == (
        # Without keeping a: packed for 2, and b as it is, packed for 3.
        Reason((0,), "a", "keep", "compress:int4", 2.0, -6),
        # Without packing b: made again for 4.
        Reason((0,), "b", "compress:int4", "recompute", 1.0, -6),
        Reason((0,), "in", "keep", None, 0.0, 0),
    )


def test_only_the_layers_of_the_group_are_planned_again():
    layer = LayerClass("", (BufferItem("x", 10, True),), (OpItem("make", 3, (), ("x",)),), count=3, in_flight=2)
    problem = Problem((layer,), 45, fixed_bytes=3)
    found = solve_stage(problem)
    assert [a.actions["x"] for a in found.layers] == ["recompute", "keep", "keep"]
    assert explain(problem, found) == (
        Reason((0,), "x", "recompute", None, 0.0, 0),
        Reason((1, 2), "x", "keep", "recompute", 6.0, -40),
    )


def test_the_error_budget_of_the_other_layers_is_theirs():
    codec = CodecChoice("int4", 1, 1.0, error=0.5)
    layer = LayerClass("", (BufferItem("x", 10, True, (codec,)),), (OpItem("make", 3, (), ("x",)),), count=2)
    problem = Problem((layer,), 2, error_budget=0.5)
    found = solve_stage(problem)
    by_action = {reason.action: reason for reason in explain(problem, found)}
    assert (by_action["compress:int4"].second, by_action["compress:int4"].more_us) == ("recompute", 2.0)
    assert by_action["recompute"].second is None  # keeping needs ten bytes, packing an error that is spent


def test_as_text():
    reasons = (
        Reason((0, 1, 2, 5), "long/site", "keep", "recompute", 1234.56, -2048),
        Reason((0, 1, 2, 5), "s", "keep", None, 0.0, 0),
        Reason((3,), "s", "recompute", "keep or compress:int4", 2.0, 0),
        Reason((3,), "t", "recompute", "keep", 9.0, 1, proven=False),
        Reason((3,), "u", "recompute", None, 0.0, 0, proven=False),
    )
    assert table(reasons).splitlines() == [
        "layers 0-2, 5",
        "  s          keep: nothing else is possible within the limit",
        "  long/site  keep: recompute instead would cost 1,234.6 us more and hold 2,048 bytes less",
        "layer 3",
        "  u  recompute: the time was over before the answer",
        "  t  recompute: keep instead would cost at most 9.0 us more and hold 1 bytes more",
        "  s  recompute: keep or compress:int4 instead would cost 2.0 us more and hold as many bytes",
    ]


def test_without_time_nothing_is_claimed():
    problem = Problem((LayerClass("", BUFFERS, OPS),), 5 + 16)
    reasons = explain(problem, solve_stage(problem), time_limit_seconds=-1.0)
    assert reasons[2] == Reason((0,), "in", "keep", None, 0.0, 0)  # nothing to ask for
    assert all(reason.more_us >= 0 for reason in reasons)


def test_reasons_in_a_plan_file():
    first = Reason((0, 1, 2, 5), "s", "keep", "recompute", 12.5, -2048, stage=0)
    second = Reason((3,), "s", "recompute", None, 0.0, 0, proven=False, stage=1)
    layers = (LayerPlan("00", (("s", Recompute()),), None, 0), LayerPlan("01", (), 3, 1))
    plan = Plan(layers, "auto", (("seq-length", "64"),), (first, second))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert json.loads(plan.to_json())["reasons"][0]["layers"] == [[0, 2], [5, 5]]
    assert again.of_stage(1) == Plan(layers[1:], "auto", plan.notes, (second,))
    assert "stage" not in json.loads(Plan((LayerPlan("00", ()),)).to_json())["layers"][0]
