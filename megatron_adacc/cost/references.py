"""What others do about activations, on the same account as a plan of ours (cost/stage_plan.py): for tables beside it.

    full        Megatron's --recompute-granularity full: every layer keeps its input (stage_plan.full_predicted)
    selective   Megatron's --recompute-granularity selective --recompute-modules core_attn: scores, softmax, dropout
                and weighted sum of the attention run again, random numbers included (arXiv 2205.05198, section 5)
    quantized   direct INT4 of everything that autograd saves, in groups, without outlier separation

Selective recompute is followed by the simulator of plans: in a copy of the layer's graph its ops may all run again,
and what goes into the attention is saved, as Megatron's checkpoint does. Its time is that of the attention's ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_adacc.cost.analytic import AnalyticPrices
from megatron_adacc.cost.layer_problem import offer
from megatron_adacc.cost.simulate import Fates, LayerMemory
from megatron_adacc.cost.stage_plan import ClassFacts, Prediction, Room, uniform_predicted
from megatron_adacc.graph.model import LayerGraph, Op, Origin, Pack
from megatron_adacc.graph.replay import torch_dtype
from megatron_adacc.planner import Compress, LayerPlan

CORE_ATTENTION = "core_attention"


def selective_predicted(facts: Sequence[ClassFacts], room: Room, prices: AnalyticPrices) -> Prediction:
    """Every layer runs its core attention again. Layers that have none keep everything."""
    added = [prices.ops_us(f.problem.graph, core_ops(f.problem.graph)) for f in facts]
    return uniform_predicted(facts, room, "selective", [_without_core(f) for f in facts], added)


def core_ops(graph: LayerGraph) -> tuple[Op, ...]:
    """The ops of the layer's core attention."""
    return tuple(op for op in graph.ops if CORE_ATTENTION in op.module.split("."))


def _without_core(fact: ClassFacts) -> LayerMemory:
    graph = fact.problem.graph
    core = core_ops(graph)
    inside = {b for op in core for b in op.writes}
    results = {view.buffer for op in graph.ops if op not in core for view in op.views()} & inside
    dropped = frozenset(b for b in graph.saved if b in inside and b not in results)
    if not dropped:
        return fact.kept
    ops = list(graph.ops)
    for op in core:
        ops[op.index] = replace(op, barrier=None)
    buffers = list(graph.buffers)
    # A global buffer of Megatron's that a product is written to, whatever is in it, serves again.
    for index in {v.buffer for op in core for v in op.views()} - inside:
        if buffers[index].origin == Origin.OPAQUE:
            storage = max(b.storage for b in buffers) + 1
            buffers[index] = replace(buffers[index], origin=Origin.CONSTANT, storage=storage, previous=None)
    # A checkpoint holds its inputs, also those that autograd would not have saved.
    given = {v.buffer: v for op in core for v in op.views() if v.buffer not in inside and v.buffer not in graph.saved}
    packs = [*graph.packs]
    for buffer, view in given.items():
        if graph.buffers[buffer].origin == Origin.OP:
            packs.append(Pack(len(packs), view))
    changed = replace(graph, ops=tuple(ops), buffers=tuple(buffers), packs=tuple(packs))
    return fact.simulator.of_graph(changed).memory(Fates({}, dropped))


def quantized_predicted(
    facts: Sequence[ClassFacts], room: Room, prices: AnalyticPrices, plans: Sequence[LayerPlan]
) -> Prediction:
    """Each class under its plan of one layer, in which nothing is recomputed: ``plans`` of runtime/policy.py."""
    memories, added = [], []
    for fact, plan in zip(facts, plans, strict=True):
        graph, packed, us = fact.problem.graph, {}, 0.0
        for index in graph.saved:
            action = plan.action(graph.buffers[index].site)
            if isinstance(action, Compress):
                one, base = offer(graph, index, action), graph.buffers[index].base
                price = prices.codec(one.codec, base.size, torch_dtype(base.dtype))
                packed[index] = one.packed_bytes
                us += price.encode_us + price.decode_us
        memories.append(fact.simulator.memory(Fates(packed, frozenset())))
        added.append(us)
    return uniform_predicted(facts, room, "quantized", memories, added)
