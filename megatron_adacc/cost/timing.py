"""Prices measured on the device at hand, under the conditions of the training itself.

Ops are not timed one by one on made-up tensors but where they will run: in the replay of everything that has a
proven recipe, step after step, with the same results written over dead operands, the same frees and the same
allocator. A price is the median over rounds of the time from one step's end to the next one's; the first round
warms up.

    CUDA   events recorded between the steps, read after one synchronisation: the device's time
    CPU    the wall clock; where other processes hold the cores and one thread computes, its CPU time, which is what
           the wall clock would show on a quiet machine

A first touch of memory costs more than the arithmetic of a pointwise op on a CPU: the kernel zeroes each page. Blocks
of 32 MiB or more get new pages each time, unless the C library finds a hole in its heap. Codecs are therefore timed
with the frees of a training step between them, and with a heap that is full.

A replay follows the backward of the layer above, which has filled the caches with what is of no use to it; so a forward
and backward of the layer runs before each timed replay, and is timed itself. Before a decode the caches are emptied.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_adacc.codecs import Codec, State
from megatron_adacc.codecs.bitmask import Bitmask, BitmaskState
from megatron_adacc.cost.prices import CodecPrice, StepPrice
from megatron_adacc.cost.rehearsal import Call, Rehearsal
from megatron_adacc.graph.model import LayerGraph
from megatron_adacc.graph.recipes import Group, group_recipes
from megatron_adacc.graph.replay import Context, Replayer
from megatron_adacc.graph.verify import Evidence, gather

LEAST_ROUNDS = 3
MOST_ROUNDS = 15
OPS_SECONDS = 1.2  # for the ops of a layer and its step
CODEC_SECONDS = 0.15
MOST_HOLES = 8
CACHE_BYTES = 2**26  # more than the last cache of the devices that were tried
CODEC_SAMPLE_ELEMENTS = 2**23  # a larger tensor is timed by a part of it: codecs are linear in its size
BUSY = 1.05  # wall time by CPU time beyond which the cores are taken for shared with others


@dataclass(frozen=True)
class Sample:
    """What one traced forward left behind: the arguments of :func:`megatron_adacc.graph.verify.verify`.

    ``saved`` holds, by buffer, the base tensors of saved activations, ``sources`` those of parameters, inputs
    and constants."""

    graph: LayerGraph
    evidence: Evidence
    saved: Mapping[int, Tensor]
    sources: Mapping[int, Tensor]
    context: Context
    module: nn.Module


class Clock(Protocol):
    """Notes moments; gives the microseconds between them afterwards."""

    def mark(self) -> None: ...

    def intervals_us(self) -> list[float]: ...


class CpuClock:
    """Wall and CPU time of this process. ``threads``: how many compute."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        self._marks.append((time.perf_counter(), time.process_time()))

    def intervals_us(self) -> list[float]:
        first, last = self._marks[0], self._marks[-1]
        busy = last[0] - first[0] > BUSY * (last[1] - first[1])
        # CPU time of several threads is their sum and says nothing about how long the step took.
        kind = 1 if self._threads == 1 and busy else 0
        return [1e6 * (b[kind] - a[kind]) for a, b in itertools.pairwise(self._marks)]


class CudaClock:
    """Events on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def intervals_us(self) -> list[float]:
        self._events[-1].synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(self._events)]


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock(torch.get_num_threads())


def replayed_groups(graph: LayerGraph, evidence: Evidence) -> tuple[Group, ...]:
    """The recipes of everything that was verified: they run every op that some plan can run."""
    stored = set(graph.saved) - evidence.verified
    return group_recipes(graph, stored, sorted(evidence.verified))


def rounds_us(
    run: Callable[[Clock], None], device: torch.device, budget_seconds: float, fixed: bool = False,
    before: Callable[[], None] | None = None,
) -> list[float]:  # fmt: skip
    """Medians over rounds of the intervals between the marks that ``run`` sets, after one round to warm up.

    At least three rounds; more while the budget lasts, unless ``fixed``: ranks that replay collectives together must
    do equally many. ``before`` is called before each round but the first."""
    start = time.perf_counter()
    run(clock_for(device))
    rounds: list[list[float]] = []
    while len(rounds) < LEAST_ROUNDS or (not fixed and len(rounds) < MOST_ROUNDS):
        began = time.perf_counter()
        if before is not None:
            before()
        clock = clock_for(device)
        run(clock)
        rounds.append(clock.intervals_us())
        now = time.perf_counter()
        if len(rounds) >= LEAST_ROUNDS and now + (now - began) - start > budget_seconds:
            break
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def time_ops(
    sample: Sample, budget_seconds: float = OPS_SECONDS, before: Callable[[], None] | None = None, fixed: bool = False
) -> dict[int, float]:
    """Microseconds of every op that some recipe of the graph runs, by op. Other ops are never replayed.

    All ranks that share the graph's collectives must call this together. ``before`` is called before each timed
    replay; ``fixed``: do equally many rounds on all ranks, because ``before`` has collectives."""
    graph, context = sample.graph, sample.context
    found: dict[int, float] = {}
    groups = replayed_groups(graph, sample.evidence)
    # An opaque submodule may draw random numbers unseen; the training's own must stay as they are.
    devices = [context.device] if context.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for group in groups:
            # A plan stores masks as bits: replay may write over what it decoded.
            private = sample.evidence.two_valued & frozenset(group.sources)
            run = partial(_replay, sample, Replayer(graph, group, context, private), private)
            together = fixed or any(graph.ops[step.op].collective for step in group.steps)
            medians = rounds_us(run, context.device, budget_seconds / len(groups), together, before)
            found |= {step.op: us for step, us in zip(group.steps, medians, strict=True)}
    return found


def _replay(sample: Sample, replayer: Replayer, private: frozenset[int], clock: Clock) -> None:
    env = gather(sample.graph, replayer.group.sources, sample.saved, sample.sources, sample.context)
    env |= {b: env[b].clone() for b in private}
    clock.mark()
    with torch.no_grad():
        replayer.run(env, sample.module, clock.mark)


def time_codec(
    codec: Codec, size: Sequence[int], dtype: torch.dtype, device: torch.device, budget_seconds: float = CODEC_SECONDS,
    content: Tensor | None = None,
) -> CodecPrice:  # fmt: skip
    """What the codec takes for a contiguous tensor of this size and dtype, compiled beforehand if it compiles.

    ``content``: a tensor of the training to encode; without it, normal numbers, or two values for bitmask. What is
    larger than 2**23 elements is timed by a part of it and scaled."""
    timed = _part(tuple(size), codec.channel_axis)
    scale = math.prod(size) / max(1, math.prod(timed))
    state: State | None = BitmaskState.on(device) if isinstance(codec, Bitmask) and device.type == "cuda" else None
    codec.warm_up(dtype, device, state, timed)
    if content is None:
        content = _made_up(codec, timed, dtype, device)
    elif timed != tuple(size):
        content = content.reshape(tuple(size))[tuple(slice(n) for n in timed)].contiguous()
    state = codec.observe(content) if state is None else state  # known beforehand, as in the training
    scratch = _cache_scratch(device)
    with _full_heap(content):
        run = partial(_transcode, codec, content, state, scratch)
        encode_us, _, decode_us = rounds_us(run, device, budget_seconds)
    return CodecPrice(encode_us * scale, decode_us * scale)


@contextlib.contextmanager
def _full_heap(like: Tensor) -> Iterator[None]:
    """Inside, the CPU's heap has no hole as large as this tensor, as when a backward pass begins and everything that
    was saved is there: whether a decoded tensor needs new pages must not hang on what was freed before."""
    held: list[Tensor] = []
    while like.device.type == "cpu" and len(held) < MOST_HOLES:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held.append(torch.zeros_like(like))
        if resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before > like.nbytes // resource.getpagesize() // 2:
            break
    try:
        yield
    finally:
        held.clear()


def _cache_scratch(device: torch.device) -> Tensor:
    """What pushes everything else out of the caches when it is read."""
    return torch.zeros(CACHE_BYTES // 4, device=device)


def _transcode(codec: Codec, content: Tensor, state: State | None, scratch: Tensor, clock: Clock) -> None:
    clock.mark()
    packed = codec.encode(content, state)
    clock.mark()
    scratch.sum()
    clock.mark()
    decoded = codec.decode(packed)
    del decoded, packed  # the frees are part of the price: what is given back must be taken again
    clock.mark()


def _part(size: tuple[int, ...], channel_axis: int | None) -> tuple[int, ...]:
    """The size, its longest dimension but that of the channels cut to the elements of a sample."""
    numel = math.prod(size)
    if numel <= CODEC_SAMPLE_ELEMENTS:
        return size
    channels = None if channel_axis is None else channel_axis % len(size)
    others = [i for i in range(len(size)) if i != channels]
    if not others:
        return size
    longest = max(others, key=lambda i: size[i])
    kept = max(1, size[longest] * CODEC_SAMPLE_ELEMENTS // numel)
    return tuple(kept if i == longest else n for i, n in enumerate(size))


def _made_up(codec: Codec, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    normal = torch.randn(size, device=device, generator=generator)
    return (normal > 0 if isinstance(codec, Bitmask) else normal).to(dtype)


class StepTimer:
    """Runs a plain forward and backward of the layer when called, and notes how long they took."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self._call = call
        self._device = device
        self._us: list[float] = []
        self._forward_us: list[float] = []
        call.drop_parameter_gradients()

    def __call__(self) -> None:
        clock = clock_for(self._device)
        clock.mark()
        # Not the tensor itself: an output that its own node holds would never be freed.
        loss = self._call.forward(lambda tensor: tensor.detach(), lambda tensor: tensor)
        clock.mark()
        loss.backward()
        del loss
        for tensor in self._call.inputs:
            tensor.grad = None
        clock.mark()
        forward_us, backward_us = clock.intervals_us()
        self._forward_us.append(forward_us)
        self._us.append(forward_us + backward_us)

    @property
    def price(self) -> StepPrice:
        """The medians so far."""
        return StepPrice(statistics.median(self._us), statistics.median(self._forward_us))


def time_layer(
    sample: Sample, rehearsal: Rehearsal, budget_seconds: float = OPS_SECONDS, fixed: bool = False
) -> tuple[dict[int, float], StepPrice]:
    """Microseconds of the ops as :func:`time_ops` gives them, and of a plain forward and backward of the layer, which
    take turns."""
    with rehearsal.begin() as call:
        step = StepTimer(call, sample.context.device)
        ops = time_ops(sample, budget_seconds, step, fixed)
        for _ in range(0 if ops else LEAST_ROUNDS):  # nothing is replayed
            step()
        return ops, step.price
