"""The paper's formulation: one plan for all layers, costs without dependencies."""

from megatron_adacc.planner.paper import alone_us, solve_paper
from megatron_adacc.planner.problem import BufferItem, CodecChoice, LayerClass, OpItem, Problem
from megatron_adacc.planner.stage import solve_stage

# a -> t -> b -> c, t not saved
CHAIN = LayerClass(
    "",
    (BufferItem("a", 10, True), BufferItem("t", 5, False), BufferItem("b", 10, True), BufferItem("c", 10, True)),
    (OpItem("a", 6, (), ("a",)), OpItem("t", 1, ("a",), ("t",)), OpItem("b", 2, ("t",), ("b",)),
     OpItem("c", 4, ("b",), ("c",))),
)  # fmt: skip


def test_what_a_buffer_costs_alone():
    assert alone_us(CHAIN) == {"a": 6, "b": 3, "c": 4}


def test_what_depends_on_a_random_op_or_must_be_held_is_not_made_again():
    buffers = (
        BufferItem("mask", 1, True),
        BufferItem("t", 1, False),
        BufferItem("y", 4, True),
        BufferItem("z", 4, True),
    )
    ops = (
        OpItem("draw", 1, (), ("mask", "t"), replayable=False),
        OpItem("y", 2, ("mask",), ("y",)),
        OpItem("z", 2, ("t",), ("z",)),
    )
    assert alone_us(LayerClass("", buffers, ops)) == {"y": 2}


def test_the_true_cost_is_that_with_dependencies():
    # b (3) and c (4) are the cheapest to lose; truly c then needs b, which is made anyway: no more is paid.
    found = solve_paper(Problem((CHAIN,), 10))
    assert (found.cost_us, dict(found.layers[0].actions)) == (7, {"a": "keep", "b": "recompute", "c": "recompute",
                                                                  "t": "drop"})  # fmt: skip
    # With nothing held each is taken for its own part, t once; the whole chain costs just that here.
    assert solve_paper(Problem((CHAIN,), 0)).cost_us == 13


def test_what_several_need_is_counted_once_in_truth():
    buffers = (BufferItem("t", 1, False), BufferItem("x", 8, True), BufferItem("y", 8, True))
    ops = (OpItem("t", 10, (), ("t",)), OpItem("x", 1, ("t",), ("x",)), OpItem("y", 1, ("t",), ("y",)))
    found = solve_paper(Problem((LayerClass("", buffers, ops),), 0))
    assert found.cost_us == 12
    assert found.note == "One plan for all layers, without dependencies, which takes the cost for 22 us."


def test_all_layers_have_one_plan_and_leave_room_unused():
    layer = LayerClass("", (BufferItem("x", 10, True),), (OpItem("make", 3, (), ("x",)),), count=4)
    found = solve_paper(Problem((layer,), 39))
    assert [a.actions["x"] for a in found.layers] == ["recompute"] * 4
    assert (found.held_bytes, found.cost_us) == (0, 12)
    assert solve_stage(Problem((layer,), 39)).cost_us == 3


def test_codecs_and_the_error_budget():
    codec = CodecChoice("int4", 3, 1.0, error=0.25)
    layer = LayerClass("", (BufferItem("x", 10, True, (codec,)),), (OpItem("make", 3, (), ("x",)),), count=2)
    assert solve_paper(Problem((layer,), 6)).cost_us == 2
    assert solve_paper(Problem((layer,), 6, error_budget=0.5)).cost_us == 2
    assert solve_paper(Problem((layer,), 6, error_budget=0.49)).cost_us == 6


def test_too_low_a_limit():
    layer = LayerClass("", (BufferItem("x", 10, True, must_hold=True),), (), count=2)
    found = solve_paper(Problem((layer,), 19))
    assert (found.status, found.least_bytes) == ("infeasible", 20)
