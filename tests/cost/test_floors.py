"""What a layer needs at least under any plan, against the simulator's account of each plan."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, assume, given, settings
from random_layer import ROWS, WIDTH, RandomLayer, Recipe, recipes
from torch import Tensor, nn

from megatron_adacc.cost.floors import layer_floors
from megatron_adacc.cost.layer_problem import LayerProblem, layer_problem, offer
from megatron_adacc.cost.prices import CodecPrice
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.sampling import sample_of
from megatron_adacc.cost.simulate import Simulator
from megatron_adacc.cost.timeline import record
from megatron_adacc.graph.model import LayerGraph
from megatron_adacc.planner import Compress
from megatron_adacc.planner.floors import Floor
from megatron_adacc.planner.listing import all_plans
from megatron_adacc.planner.solution import evaluate_layer


class Prices:
    """Everything costs the same."""

    def op_us(self, graph: LayerGraph, op: int) -> float | None:
        return 1.0

    def codec(self, *_: object) -> CodecPrice:
        return CodecPrice(1.0, 1.0)


def learnt(layer: nn.Module, x: Tensor) -> tuple[LayerProblem, Simulator, tuple[Floor, ...]]:
    """Every floating-point tensor that is saved may be packed as int8 too."""
    sample = sample_of(layer, x)
    timeline = record(sample.graph, Rehearsal(layer, layer.forward, (x,), {}))
    graph = sample.graph
    offers = [
        offer(graph, b, Compress("group_int8", (("group_size", 32),)))
        for b in graph.saved
        if graph.last_state(b) and graph.buffers[b].origin == "op" and graph.buffers[b].base.dtype == "float32"
    ]
    problem = layer_problem(graph, sample.evidence, Prices(), offers, min_bytes=0, dead=timeline.dead)  # type: ignore[arg-type]
    simulator = Simulator(graph, timeline, sample.context)
    return problem, simulator, layer_floors(problem, timeline, simulator.input_bytes)


def some_plans(problem: LayerProblem, seed: int) -> list[dict[str, str]]:
    """All of them, or some dozens of many."""
    plans = all_plans(problem.layer_class, None, lossless=False)
    if plans is None:
        return []
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(plans), generator=generator)[:40].tolist()
    return [plans.actions(plan) for plan in chosen]


@settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
@given(recipe=recipes)
def test_no_plan_needs_less(recipe: Recipe) -> None:
    torch.manual_seed(0)
    layer = RandomLayer(recipe)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    problem, simulator, floors = learnt(layer, x)
    plans = some_plans(problem, 0)
    assume(plans)
    for actions in plans:
        held = evaluate_layer(problem.layer_class, actions).held_bytes
        needed = held + simulator.memory(problem.fates(actions)).extra
        assert needed >= max(floor.of(actions) for floor in floors)
