"""The planner's question for a traced layer, and the way from its answer back to the engine's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc.codecs import Codec
from megatron_adacc.cost.layer_problem import LayerProblem, bitmask_offers, layer_problem
from megatron_adacc.cost.prices import CodecPrice
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.sampling import sample_of
from megatron_adacc.cost.simulate import Simulator
from megatron_adacc.cost.timeline import record
from megatron_adacc.graph.model import LayerGraph
from megatron_adacc.planner import Compress, Recompute
from megatron_adacc.planner.problem import Problem
from megatron_adacc.planner.stage import solve_stage


class OneEach:
    """An op costs 1 us, a codec 0.25 us each way."""

    def op_us(self, graph: LayerGraph, op: int) -> float | None:
        return 1.0

    def codec(self, codec: Codec, size: Sequence[int], dtype: torch.dtype) -> CodecPrice:
        return CodecPrice(0.25, 0.25)


class Layer(nn.Module):
    """[16, 32] -> the same. ``dead``: a branch that saves tensors and that no output depends on."""

    def __init__(self, dead: bool = False) -> None:
        super().__init__()
        self.linear, self.dropout, self.dead = nn.Linear(32, 32), nn.Dropout(0.5), dead

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.linear(x).tanh().exp()
        if self.dead:
            y.cos().sin()
        return self.dropout(y) * mask


def problem_of(layer: Layer, min_bytes: int = 0) -> tuple[LayerProblem, Simulator]:
    torch.manual_seed(0)
    x, mask = torch.randn(16, 32, requires_grad=True), torch.rand(16, 32)
    sample = sample_of(layer, x, mask)
    timeline = record(sample.graph, Rehearsal(layer, layer.forward, (x, mask), {}))
    offers = bitmask_offers(sample.graph, sample.evidence, min_bytes)
    problem = layer_problem(sample.graph, sample.evidence, OneEach(), offers, min_bytes=min_bytes, dead=timeline.dead)
    return problem, Simulator(sample.graph, timeline, sample.context)


def test_bytes_and_what_can_become_of_them() -> None:
    problem, _ = problem_of(Layer())
    items = {item.site: item for item in problem.layer_class.buffers if item.saved}
    assert {site: item.bytes for site, item in items.items()} == {
        "input:0": 2048, "input:1": 0, "/tanh.0": 2048, "/exp.0": 2048, "dropout/div_.0": 2048,
    }  # fmt: skip
    assert problem.shared_bytes == 2048  # the mask, which all layers have
    assert {site for site, item in items.items() if item.must_hold} == {"input:0", "input:1", "dropout/div_.0"}
    (bits,) = items["dropout/div_.0"].codecs
    assert (bits.name, bits.us, bits.again_us, bits.error) == ("bitmask", 0.5, 0.25, 0.0)
    assert 64 <= bits.bytes <= 80
    replayable = {op.name.split()[1] for op in problem.layer_class.ops if op.replayable}
    assert {"aten.addmm.default", "aten.tanh.default", "aten.exp.default"} <= replayable
    assert "aten.bernoulli_.float" not in replayable


def test_small_buffers_are_held() -> None:
    problem, _ = problem_of(Layer(), min_bytes=2049)
    assert all(item.must_hold and not item.codecs for item in problem.layer_class.buffers if item.saved)


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("limit", [10**6, 8000, 6000, 4200, 2200])
def test_answers_hold_what_the_engine_would(limit: int, dead: bool) -> None:
    """The planner's bytes are the simulator's, also where a branch's saves are let go of."""
    problem, simulator = problem_of(Layer(dead))
    (answer,) = solve_stage(Problem((problem.layer_class,), limit, 0, 0.0)).layers
    memory = simulator.memory(problem.fates(answer.actions))
    assert memory.held == answer.outcome.held_bytes <= limit
    plan = problem.layer_plan(answer.actions, 3)
    assert plan.layer == 3
    assert problem.actions_of(plan) == answer.actions
    assert all(isinstance(action, (Recompute, Compress)) for _, action in plan.actions)


def test_saves_that_no_output_depends_on_cost_nothing() -> None:
    plain, _ = problem_of(Layer())
    problem, simulator = problem_of(Layer(dead=True))
    assert {problem.graph.buffers[b].site for b in problem.released} == {"/cos.0"}
    assert sum(b.bytes for b in problem.layer_class.buffers if b.saved) == sum(
        b.bytes for b in plain.layer_class.buffers if b.saved
    )
    assert simulator.memory(problem.fates({})).held == 8192
