"""Predicted against measured: what plans add to a step, and what pricing a layer takes.

    python benchmarks/prices.py [--rounds 9] [--plans 4] [--layers 2] [--hidden 512] [--heads 8] [--sequence 512]
                                [--batch 4]

The two-layer stack of benchmarks/engine.py, one thread. Plans: keep, recompute, and random ones that keep, recompute
or (masks) store as bits each saved buffer. Predicted: the prices of the ops that the plan runs again and of its
codecs, summed over the layers. Measured: the plan's step and the plain step take turns; the median of the
differences in CPU seconds, which a machine that others use too disturbs least, and their quartiles.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import sys
import time
from typing import Any

import torch
from engine import GptLayer, Variant
from torch import Tensor, nn

from megatron_adacc import attach, codecs
from megatron_adacc.cost.measured import MeasuredPrices
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.sampling import sample_of
from megatron_adacc.cost.timing import Sample
from megatron_adacc.graph.model import LayerGraph, Origin
from megatron_adacc.graph.recipes import group_recipes
from megatron_adacc.graph.replay import torch_dtype
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.planner import Action, Compress, LayerPlan, Plan, Recompute

MIN_BYTES = 1024


def random_actions(sample: Sample, draw: random.Random) -> tuple[tuple[str, Action], ...]:
    graph, evidence = sample.graph, sample.evidence
    actions: list[tuple[str, Action]] = []
    for buffer in sorted(graph.saved):
        small = graph.buffers[buffer].nbytes < MIN_BYTES or graph.buffers[buffer].origin != Origin.OP
        if small or draw.random() < 0.5:
            continue
        if buffer in evidence.verified:
            actions.append((graph.buffers[buffer].site, Recompute()))
        elif buffer in evidence.two_valued:
            actions.append((graph.buffers[buffer].site, Compress("bitmask")))
    return tuple(actions)


def predicted_us(sample: Sample, prices: MeasuredPrices, plan: LayerPlan) -> float:
    """What the plan adds to a step of one layer."""
    graph = sample.graph
    actions = {b: a for b in graph.saved for site, a in plan.actions if graph.buffers[b].site == site}
    dropped = [b for b, a in actions.items() if isinstance(a, Recompute)]
    groups = group_recipes(graph, set(graph.saved) - set(dropped), dropped)
    total = 0.0
    for group in groups:
        total += sum(prices.op_us(graph, step.op) or 0.0 for step in group.steps)
    for b, action in actions.items():
        if isinstance(action, Compress):
            base = graph.buffers[b].base
            price = prices.codec(codecs.get(action.codec), base.size, torch_dtype(base.dtype))
            read_by_groups = sum(b in group.sources for group in groups)
            total += price.encode_us + price.decode_us * (1 + read_by_groups)
    return total


def plan_of(actions: tuple[tuple[str, Action], ...], graph: LayerGraph, name: str) -> Plan:
    return Plan((LayerPlan(fingerprint(graph), actions),), name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("rounds", 9), ("plans", 4), ("layers", 2), ("hidden", 512), ("heads", 8), ("sequence", 512), ("batch", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    stack = nn.ModuleList(GptLayer(options.hidden, options.heads, options.sequence, 0.1) for _ in range(options.layers))
    x = torch.randn(options.batch, options.sequence, options.hidden, requires_grad=True)
    sample = sample_of(stack[0], x)
    prices = MeasuredPrices(torch.device("cpu"))
    prices.codec(codecs.get("bitmask"), (2, 2**15), torch.float32)  # compiles
    began = time.perf_counter()
    prices.measure(sample, Rehearsal(stack[0], stack[0].forward, (x,), {}))
    layer_seconds = time.perf_counter() - began
    for buffer in sample.evidence.two_valued:
        base = sample.graph.buffers[buffer].base
        prices.codec(codecs.get("bitmask"), base.size, torch_dtype(base.dtype))
    masks_seconds = time.perf_counter() - began - layer_seconds
    out = sys.stdout
    out.write(f"priced in {layer_seconds:.2f} s (ops and step) and {masks_seconds:.2f} s (codecs of masks), ")
    out.write(f"load {os.getloadavg()[0]:.1f}\n")

    def plain(layer: nn.Module, tensor: Tensor) -> Tensor:
        result = layer(tensor)
        assert isinstance(result, Tensor)
        return result

    draw = random.Random(0)
    variants: list[Variant] = [Variant("plain", stack, plain)]
    predictions: dict[str, float] = {}
    for name in ("keep", "recompute", *(f"random {i}" for i in range(options.plans))):
        layers = copy.deepcopy(stack)
        made: Any = name if not name.startswith("random") else plan_of(random_actions(sample, draw), sample.graph, name)
        variant = Variant(name, layers, plain, attach(layers, made))
        for _ in range(2):
            variant.step(x)
        assert variant.handle is not None
        predictions[name] = options.layers * predicted_us(sample, prices, variant.handle.plan.layers[0])
        variants.append(variant)
    plain_seconds: list[float] = []
    added: dict[str, list[float]] = {v.name: [] for v in variants[1:]}
    for _ in range(options.rounds):
        for variant in variants[1:]:
            before = variants[0].step(x)[0]
            added[variant.name].append(1e3 * (variant.step(x)[0] - before))
            plain_seconds.append(before)
    step = statistics.median(plain_seconds)
    predicted_step = options.layers * prices.step_us(sample.graph) / 1e6
    out.write(f"plain step: {step:.3f} s; predicted {predicted_step:.3f} s; load {os.getloadavg()[0]:.1f}\n\n")
    out.write("| plan | predicted ms | measured ms | quartiles | predicted / measured | % of plain |\n")
    out.write("|---|---|---|---|---|---|\n")
    for name, predicted in predictions.items():
        low, middle, high = statistics.quantiles(added[name], n=4)
        ratio = f"{predicted / 1e3 / middle:.2f}" if predicted else ""
        out.write(
            f"| {name} | {predicted / 1e3:.1f} | {middle:.1f} | {low:.1f} .. {high:.1f} | {ratio} | "
            f"{100 * middle / 1e3 / step:.1f} |\n"
        )


if __name__ == "__main__":
    main()
