"""Solve times of the planner for a GPT layer.

    python benchmarks/planner_solve.py [--repeats 3]

The layer has the shape of Megatron's unfused GPT layer (33 ops; hidden size 1024, 16 heads, sequence 1024,
micro-batch 8, two bytes an element). Its costs are a roofline's, 100 TFLOP/s and 800 GB/s with 4 us a launch, and its
errors are made up: nothing here was measured. For 24, 48 and 96 layers at five limits between the least memory and all
kept, the median of the repeats, everything from the problem to the Solution included:

    lossless   errors not allowed
    lossy      int8 and int4 offered beside it, an error budget of 0.05 a layer
    floors     lossless, and a layer needs, beside what it holds, 300 MB and 0.6 of what it does not keep; this is known
               of all plans
    position   the same, asked for plan by plan
    paper      the paper's formulation, lossless: its cost against lossless'
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping

from megatron_adacc.planner.floors import Floor
from megatron_adacc.planner.paper import solve_paper
from megatron_adacc.planner.problem import BufferItem, CodecChoice, LayerClass, OpItem, Problem
from megatron_adacc.planner.solution import COMPRESS, KEEP, RECOMPUTE, Solution
from megatron_adacc.planner.stage import solve_stage

FLOPS_PER_US = 100e6
BYTES_PER_US = 0.8e6
LAUNCH_US = 4.0

# The largest relative gradient errors of the layer with one buffer packed that were seen for codes of 8 and 4 bits,
# scaled by how sensitive the buffer is; what matters here is that they differ.
ERROR_INT8, ERROR_INT4 = 0.007, 0.11


def gpt_layer(count: int = 1, lossy: bool = False, hidden: int = 1024, sequence: int = 1024, batch: int = 8,
              heads: int = 16, in_flight: int = 1) -> LayerClass:  # fmt: skip
    """Megatron's unfused GPT layer as ops and buffers; bytes of two-byte elements, masks of one byte."""
    tokens = batch * sequence
    act, scores, stat = tokens * hidden, batch * heads * sequence * sequence, tokens
    buffers: list[BufferItem] = []
    ops: list[OpItem] = []

    def add(name: str, reads: tuple[str, ...], numel: int, saved: bool, flops: float = 0.0, width: int = 2,
            sensitivity: float = 0.0, mask: bool = False, extra: tuple[str, ...] = ()) -> None:  # fmt: skip
        traffic = numel * width * (1 + len(reads))
        us = LAUNCH_US + max(flops / FLOPS_PER_US, traffic / BYTES_PER_US)
        nbytes = numel * width
        codecs: list[CodecChoice] = []
        if mask:
            codecs.append(CodecChoice("bitmask", numel // 8 + 16, round(2.5 * nbytes / BYTES_PER_US, 2), 0.0,
                                      round(1.2 * nbytes / BYTES_PER_US, 2)))  # fmt: skip
        elif lossy and sensitivity:
            for codec, share, factor, error in (("int8", 0.53, 2.2, ERROR_INT8), ("int4", 0.28, 2.6, ERROR_INT4)):
                codecs.append(CodecChoice(codec, int(nbytes * share) + 64, round(factor * nbytes / BYTES_PER_US, 2),
                                          round(error * sensitivity, 6), round(nbytes / BYTES_PER_US, 2)))  # fmt: skip
        buffers.append(BufferItem(name, nbytes, saved, tuple(codecs), storable=saved))
        for site in extra:  # the mean and the reciprocal deviation of a norm
            buffers.append(BufferItem(site, stat * 4, True))
        ops.append(OpItem(name, round(us, 2), reads, (name, *extra), replayable=not mask))

    buffers.append(BufferItem("input", act * 2, True, must_hold=True))
    add("norm1", ("input",), act, True, sensitivity=0.7, extra=("norm1.mean", "norm1.rstd"))
    add("qkv_mm", ("norm1",), 3 * act, False, 6 * act * hidden)
    add("qkv", ("qkv_mm",), 3 * act, True, sensitivity=1.0)
    add("scores", ("qkv",), scores, False, 2 * scores * hidden / heads)
    add("scaled", ("scores",), scores, False)
    add("masked", ("scaled",), scores, False)
    add("softmax", ("masked",), scores, True, sensitivity=0.3)
    add("probs_mask", (), scores, True, width=1, mask=True)
    add("probs_masked", ("softmax", "probs_mask"), scores, False)
    add("probs", ("probs_masked",), scores, True, sensitivity=0.35)
    add("context_bmm", ("probs", "qkv"), act, False, 2 * scores * hidden / heads)
    add("context", ("context_bmm",), act, True, sensitivity=0.8)
    add("projection", ("context",), act, False, 2 * act * hidden)
    add("projection_bias", ("projection",), act, False)
    add("attn_mask", (), act, True, width=1, mask=True)
    add("attn_masked", ("projection_bias", "attn_mask"), act, False)
    add("attn_scaled", ("attn_masked",), act, False)
    add("residual1", ("input", "attn_scaled"), act, True, sensitivity=1.3)
    add("norm2", ("residual1",), act, True, sensitivity=0.6, extra=("norm2.mean", "norm2.rstd"))
    add("fc1", ("norm2",), 4 * act, False, 8 * act * hidden)
    add("fc1_bias", ("fc1",), 4 * act, True, sensitivity=0.9)
    add("gelu_cube", ("fc1_bias",), 4 * act, True, sensitivity=0.2)
    add("gelu_inner", ("fc1_bias", "gelu_cube"), 4 * act, False)
    add("gelu_tanh", ("gelu_inner",), 4 * act, True, sensitivity=0.25)
    add("gelu_outer", ("gelu_tanh",), 4 * act, True, sensitivity=0.22)
    add("gelu_half", ("fc1_bias",), 4 * act, True, sensitivity=0.5)
    add("gelu", ("gelu_half", "gelu_outer"), 4 * act, True, sensitivity=0.85)
    add("fc2", ("gelu",), act, False, 8 * act * hidden)
    add("fc2_bias", ("fc2",), act, False)
    add("mlp_mask", (), act, True, width=1, mask=True)
    add("mlp_masked", ("fc2_bias", "mlp_mask"), act, False)
    add("mlp_scaled", ("mlp_masked",), act, False)
    add("output", ("residual1", "mlp_scaled"), act, False)
    return LayerClass("gpt", tuple(buffers), tuple(ops), count, in_flight)


SHARES = (0.1, 0.25, 0.4, 0.6, 0.9)
LAYERS = (24, 48, 96)


def bytes_between(layer: LayerClass, share: float) -> int:
    """Bytes of all layers at ``share`` of the way from the least memory to everything kept."""
    kept = sum(b.bytes for b in layer.buffers if b.saved)
    masks = {b.site: b.codecs[0].bytes for b in layer.buffers if b.codecs and b.codecs[0].name == "bitmask"}
    least = sum(masks.get(b.site, b.bytes if b.must_hold else 0) for b in layer.buffers if b.saved)
    return int((least + share * (kept - least)) * layer.count)


def extra_bytes(layer: LayerClass) -> Callable[[int, Mapping[str, str]], int]:
    """Bytes beside the held ones, made up: a constant, and a part of what has to come back."""
    sizes = {b.site: b.bytes for b in layer.buffers if b.saved}

    def extra(class_index: int, actions: Mapping[str, str]) -> int:
        gone = sum(size for site, size in sizes.items() if actions[site] != KEEP)
        packed = sum(size for site, size in sizes.items() if actions[site].startswith(COMPRESS))
        return 300_000_000 + (gone - packed) * 6 // 10

    return extra


def floors_of(layer: LayerClass) -> tuple[Floor, ...]:
    """What held and extra bytes are for all plans."""
    adds: dict[tuple[str, str], int] = {}
    for b in layer.buffers:
        if b.saved:
            adds |= {(b.site, KEEP): b.bytes, (b.site, RECOMPUTE): b.bytes * 6 // 10}
            adds |= {(b.site, COMPRESS + codec.name): codec.bytes for codec in b.codecs}
    return (Floor(300_000_000, adds),)


def timed(solve: Callable[[], Solution], repeats: int) -> tuple[float, float, Solution]:
    """Median wall and CPU seconds, and the answer."""
    walls, processors = [], []
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        found = solve()
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return statistics.median(walls), statistics.median(processors), found


def verdict(found: Solution) -> str:
    return found.status if found.gap is None else f"gap {found.gap:.2%}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Solve times of the planner.")
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    solve_stage(Problem((gpt_layer(),), 10**10))  # OR-Tools is loaded before the clock starts
    out = sys.stdout.write
    out(f"{platform.processor() or platform.machine()}, seconds of wall (CPU), median of {repeats}\n\n")
    out("| layers | share | lossless | | lossy | | floors | | position | | paper: cost against lossless |\n")
    out("|---|---|---|---|---|---|---|---|---|---|---|\n")
    for count in LAYERS:
        plain, lossy = gpt_layer(count), gpt_layer(count, lossy=True)
        for share in SHARES:
            limit = bytes_between(plain, share)
            first = Problem((plain,), limit, error_budget=0.0)
            second = Problem((lossy,), limit, error_budget=0.05 * count)
            third = Problem((plain,), limit + 1_000_000_000, error_budget=0.0)
            cells = []
            answers = []
            for solve in (
                lambda problem=first: solve_stage(problem),
                lambda problem=second: solve_stage(problem),
                lambda problem=third, layer=plain: solve_stage(problem, extra_bytes(layer), [floors_of(layer)]),
                lambda problem=third, layer=plain: solve_stage(problem, extra_bytes(layer)),
            ):
                wall, processor, found = timed(solve, repeats)
                answers.append(found)
                cells.append(f"{wall:.3f} ({processor:.3f}) | {verdict(found)}")
            ratio = solve_paper(first).cost_us / answers[0].cost_us
            out(f"| {count} | {share} | {' | '.join(cells)} | {ratio:.3f} |\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
