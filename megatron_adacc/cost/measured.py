"""Prices of the device at hand: measured once, then read from the disk cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist

from megatron_adacc.codecs import Codec
from megatron_adacc.cost.cache import PriceCache
from megatron_adacc.cost.prices import CodecPrice, StepPrice
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.timing import OPS_SECONDS, Sample, replayed_groups, time_codec, time_layer, time_ops
from megatron_adacc.graph.groups import GroupName, named_group
from megatron_adacc.graph.model import LayerGraph, Tagged, View
from megatron_adacc.graph.recipes import Step
from megatron_adacc.graph.replay import Context
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.graph.tracer import CALL_PREFIX, COMPILED

Shared = Callable[[Collection[int]], Collection[int]]


class MeasuredPrices:
    """The ``Prices`` of a device. Layers are measured with :meth:`measure`; codecs when they are first asked for.

    ``cache``: where prices are looked up and written. ``budget_seconds``: for the ops and
    the step of one layer; three rounds are run in any case."""

    def __init__(
        self, device: torch.device, cache: PriceCache | None = None, budget_seconds: float = OPS_SECONDS
    ) -> None:
        self.device = device
        self._cache = cache
        self._budget_seconds = budget_seconds
        self._ops: dict[str, dict[int, float]] = {}
        self._steps: dict[str, StepPrice] = {}
        self._codecs: dict[str, CodecPrice] = {}
        self._fingerprints: dict[int, tuple[LayerGraph, str]] = {}

    def measure(self, sample: Sample, rehearsal: Rehearsal | None = None, shared: Shared | None = None) -> None:
        """Time the ops of one layer, and its step if there is a rehearsal of its call.

        ``shared``: as for :func:`megatron_adacc.graph.verify.verify`; all ranks with which the layer exchanges
        tensors call this together, and measure unless each of them knows the prices."""
        graph = sample.graph
        name = fingerprint(graph)
        keys = op_keys(graph, sample)
        step_key = f"step {name}"
        ops = self._known(keys.values())
        step = self._cache.get(step_key, 2) if self._cache is not None else None
        complete = ops is not None and (step is not None or rehearsal is None)
        if shared is not None:
            everything = graph.saved
            complete = len(shared(everything if complete else ())) == len(everything)
        if complete:
            assert ops is not None
            self._ops[name] = {op: ops[key] for op, key in keys.items()}
            self._steps |= {name: StepPrice(*step)} if step is not None else {}
            return
        fixed = shared is not None
        if rehearsal is None:
            found = time_ops(sample, self._budget_seconds, fixed=fixed)
            prices = {}
        else:
            found, price = time_layer(sample, rehearsal, self._budget_seconds, fixed)
            self._steps[name] = price
            prices = {step_key: [price.step_us, price.forward_us]}
        self._ops[name] = found
        prices |= {keys[op]: [us] for op, us in found.items()}
        if self._cache is not None:
            self._cache.update(prices)

    def _known(self, keys: Collection[str]) -> dict[str, float] | None:
        """The cached prices of all keys, None where one is missing."""
        found = {key: self._cache.get(key, 1) if self._cache is not None else None for key in keys}
        known = {key: value[0] for key, value in found.items() if value is not None}
        return known if len(known) == len(found) else None

    def op_us(self, graph: LayerGraph, op: int) -> float | None:
        """See ``Prices``. Raises KeyError for a graph that was not measured."""
        return self._ops[self._name(graph)].get(op)

    def step_us(self, graph: LayerGraph) -> float:
        """See ``Prices``. Raises KeyError for a graph whose step was not measured."""
        return self._steps[self._name(graph)].step_us

    def forward_us(self, graph: LayerGraph) -> float:
        """Microseconds of the forward alone. Raises KeyError as ``step_us``."""
        return self._steps[self._name(graph)].forward_us

    def codec(self, codec: Codec, size: Sequence[int], dtype: torch.dtype) -> CodecPrice:
        """See ``Prices``. The first time for a codec, number of elements and dtype compiles and measures."""
        key = codec_key(codec, size, dtype)
        price = self._codecs.get(key)
        if price is None:
            cached = self._cache.get(key, 2) if self._cache is not None else None
            price = CodecPrice(*cached) if cached is not None else self._time_codec(key, codec, size, dtype)
            self._codecs[key] = price
        return price

    def _time_codec(self, key: str, codec: Codec, size: Sequence[int], dtype: torch.dtype) -> CodecPrice:
        price = time_codec(codec, size, dtype, self.device)
        if self._cache is not None:
            self._cache.update({key: [price.encode_us, price.decode_us]})
        return price

    def _name(self, graph: LayerGraph) -> str:
        # A fingerprint takes milliseconds, and a planner asks for every op.
        known = self._fingerprints.get(id(graph))
        if known is None or known[0] is not graph:
            known = self._fingerprints[id(graph)] = (graph, fingerprint(graph))
        return known[1]


def codec_key(codec: Codec, size: Sequence[int], dtype: torch.dtype) -> str:
    """What a codec's price depends on: its options, the number of elements, channels where it has them, dtype."""
    options = " ".join(f"{f.name}={getattr(codec, f.name)}" for f in dataclasses.fields(codec))
    shape = tuple(size) if codec.channel_axis is not None else (torch.Size(size).numel(),)
    return f"codec {options} {shape} {str(dtype).removeprefix('torch.')}"


def op_keys(graph: LayerGraph, sample: Sample) -> dict[int, str]:
    """By op that a recipe runs, what its price depends on."""
    found = {}
    for group in replayed_groups(graph, sample.evidence):
        for step in group.steps:
            key = op_key(graph, step, sample.context)
            target = graph.ops[step.op].target
            if target == COMPILED or target.startswith(CALL_PREFIX):
                # The name says nothing about what is computed: such a price serves equal graphs alone.
                key = f"{key} {fingerprint(graph)}"
            found[step.op] = key
    return found


def op_key(graph: LayerGraph, step: Step, context: Context) -> str:
    """The op's name, its arguments without the places of their buffers, the sizes of its process groups, and
    what decides where its result is written: which operands are copied before, which are free after."""
    op = graph.ops[step.op]
    fate = [(b in step.copies, b in step.frees) for b in op.reads]
    uses = [_described(graph.buffers[b].base, context) for b in op.uses]
    arguments = _described((op.args, op.kwargs), context)
    groups = [named_group(a) for a in op.args if isinstance(a, str)] if op.collective else []
    sizes = [group.size() for group in groups if group is not None]
    return f"op {op.target} {arguments} {uses} {sizes} {fate}"


def _described(argument: object, context: Context) -> object:
    """An argument tree as nested lists of plain values."""
    if isinstance(argument, View):
        return [list(argument.size), list(argument.stride), argument.dtype]
    if isinstance(argument, tuple):
        return [_described(a, context) for a in argument]
    if isinstance(argument, Tagged):
        live = context.live(argument)
        if isinstance(live, GroupName):
            return f"group of {dist.get_world_size(live.group())}"
        return f"{argument.kind} {argument.note}" if argument.kind == "object" else f"{argument.kind} {argument.value}"
    return argument
