"""From a traced layer, its evidence and prices to the planner's question, and from its answer to a layer plan.

What the engine can do decides what the question offers. It holds only what autograd saves, in the last state of
its storage, and the layer's inputs; it runs ops again that have no barrier; a saved buffer whose recipe was not
proven, one that no visible op wrote and one too small to matter are held under any plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from megatron_adacc import codecs
from megatron_adacc.codecs import Codec
from megatron_adacc.cost.prices import Prices
from megatron_adacc.cost.simulate import Fates
from megatron_adacc.graph.model import FLOAT_DTYPES, Buffer, LayerGraph, Origin
from megatron_adacc.graph.recipes import source_problem
from megatron_adacc.graph.replay import torch_dtype
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.graph.verify import Evidence
from megatron_adacc.planner import Action, Compress, LayerPlan, Recompute
from megatron_adacc.planner.problem import BufferItem, CodecChoice, LayerClass, OpItem
from megatron_adacc.planner.solution import evaluate_layer

MIN_BYTES = 1024


@dataclass(frozen=True)
class Offer:
    """A way to hold buffer ``buffer`` packed: the action, the codec that does it, the bytes it makes, and the
    relative gradient error it costs (0 for a lossless codec)."""

    buffer: int
    action: Compress
    codec: Codec
    packed_bytes: int
    error: float = 0.0

    @property
    def label(self) -> str:
        """The codec's name with those options that tell it from another offer."""
        options = ",".join(f"{name}={value}" for name, value in self.action.options)
        return self.action.codec + (f"[{options}]" if options else "")


def offer(graph: LayerGraph, buffer: int, action: Compress, error: float = 0.0) -> Offer:
    """The offer to hold a buffer as ``action`` says."""
    base = graph.buffers[buffer].base
    codec = codecs.get(action.codec, **dict(action.options))
    return Offer(buffer, action, codec, codec.packed_bytes(base.size, torch_dtype(base.dtype)), error)


def bitmask_offers(graph: LayerGraph, evidence: Evidence, min_bytes: int = MIN_BYTES) -> tuple[Offer, ...]:
    """The lossless offers: two-valued tensors as bits."""
    return tuple(
        offer(graph, b, Compress("bitmask"))
        for b in sorted(evidence.two_valued)
        if not held_anyway(graph, b, min_bytes) and graph.last_state(b) and _packable(graph.buffers[b])
    )


def _packable(buffer: Buffer) -> bool:
    return buffer.base.dtype in FLOAT_DTYPES - {"float64"} or buffer.base.dtype == "bool"


def held_anyway(graph: LayerGraph, buffer: int, min_bytes: int) -> bool:
    """Whether a saved buffer is held as it is under any plan that is made here: the layer's input, tensors
    that the engine does not see into, integers, and what is small, a scalar or expanded."""
    found = graph.buffers[buffer]
    base = found.base
    if found.origin != Origin.OP or not base.size or base.expanded or found.nbytes < min_bytes:
        return True
    return found.nbytes == 0 or (base.dtype not in FLOAT_DTYPES and base.dtype != "bool")


@dataclass(frozen=True)
class LayerProblem:
    """One layer class as the planner takes it, and the way back.

    ``shared_bytes``: inputs without gradient that are held whatever the plan; the layers have them in common.
    ``released``: saved buffers that are let go of when the forward returns, because no output depends on what saved
    them; the engine holds one only where a recipe starts from it."""

    graph: LayerGraph
    layer_class: LayerClass
    offers: Mapping[tuple[str, str], Offer]
    shared_bytes: int
    released: frozenset[int] = frozenset()

    def fates(self, actions: Mapping[str, str]) -> Fates:
        """The planner's actions by buffer, for the simulator."""
        graph = self.graph
        packed, dropped = {}, self._passed(actions)
        for index in graph.saved:
            site = graph.buffers[index].site
            action = actions.get(site, "keep")
            if action == "recompute":
                dropped.add(index)
            elif action.startswith("compress:"):
                packed[index] = self.offers[site, action.removeprefix("compress:")].packed_bytes
        return Fates(packed, frozenset(dropped))

    def _passed(self, actions: Mapping[str, str]) -> set[int]:
        """Released buffers that recipes pass through: if they were not dropped, the recipes would start from them."""
        if not self.released:
            return set()
        complete = {b.site: actions.get(b.site, "keep" if b.saved else "drop") for b in self.layer_class.buffers}
        runs = set(evaluate_layer(self.layer_class, complete).runs)
        made = {site for op in self.layer_class.ops if op.name in runs for site in op.writes}
        sites = {b: self.graph.buffers[b].site for b in self.released}
        return {b for b, site in sites.items() if site in made and actions.get(site) == "drop"}

    def layer_plan(self, actions: Mapping[str, str], layer: int | None) -> LayerPlan:
        """The planner's actions as a plan for the layer at this place; what is kept is not named."""
        graph = self.graph
        found: list[tuple[str, Action]] = []
        passed = self._passed(actions)
        for index in sorted(graph.saved):
            site = graph.buffers[index].site
            action = actions.get(site, "keep")
            if action == "recompute" or index in passed:
                found.append((site, Recompute()))
            elif action.startswith("compress:"):
                found.append((site, self.offers[site, action.removeprefix("compress:")].action))
        return LayerPlan(fingerprint(graph), tuple(found), layer)

    def actions_of(self, plan: LayerPlan) -> dict[str, str]:
        """A layer plan as the planner's actions, by every site of the class."""
        chosen = dict(plan.actions)
        found = {}
        for item in self.layer_class.buffers:
            match chosen.get(item.site):
                case Recompute():
                    found[item.site] = "recompute" if item.saved else "drop"
                case Compress() as action:
                    label = next(o.label for (s, _), o in self.offers.items() if s == item.site and o.action == action)
                    found[item.site] = f"compress:{label}"
                case _:
                    found[item.site] = "keep" if item.saved or item.must_hold else "drop"
        return found


def layer_problem(
    graph: LayerGraph, evidence: Evidence, prices: Prices, offers: Iterable[Offer], *,
    min_bytes: int = MIN_BYTES, count: int = 1, in_flight: int = 1, chunk: int = 0, name: str = "",
    dead: Collection[int] = (),
) -> LayerProblem:  # fmt: skip
    """The planner's question for ``count`` layers with this graph.

    ``offers``: the codecs for each buffer, lossless and lossy. ``dead``: packs that are let go of when the forward
    returns (cost/timeline.py). Bytes are exact, times microseconds."""
    by_buffer: dict[int, list[Offer]] = {}
    for one in offers:
        by_buffer.setdefault(one.buffer, []).append(one)
    live = {p.view.buffer for p in graph.packs if p.index not in dead}
    # What is written by ops that can run again but has no proven recipe counts as held: a recipe may start from it.
    released = frozenset(
        b for b in graph.saved
        if b not in live and (b in evidence.verified or not _writable_again(graph, b))
    )  # fmt: skip
    saved = set(graph.saved) - released
    shared_storages = {graph.buffers[spec.buffer].storage for spec in graph.inputs if not spec.requires_grad} - {
        graph.buffers[spec.buffer].storage for spec in graph.inputs if spec.requires_grad
    }
    items: list[BufferItem] = []
    shared: dict[int, int] = {}
    listed: set[int] = set()
    packed_anyway = {
        b for b in live if graph.buffers[b].origin not in (Origin.PARAMETER, Origin.MODULE_BUFFER)
    }  # fmt: skip
    counted: set[int] = set()
    for buffer in graph.buffers:
        index = buffer.index
        if buffer.origin not in (Origin.OP, Origin.INPUT, Origin.OPAQUE):
            if index in packed_anyway:
                # A constant that autograd saved is held as any other tensor, and always there to be read.
                items.append(BufferItem(buffer.site, buffer.nbytes, saved=True, must_hold=True))
                listed.add(index)
            elif source_problem(graph, buffer) is not None:
                items.append(BufferItem(buffer.site, buffer.nbytes, saved=False, storable=False))
                listed.add(index)
            continue
        listed.add(index)
        nbytes = buffer.nbytes
        if buffer.storage in shared_storages:
            if index in saved:
                shared[buffer.storage] = nbytes
            nbytes = 0
        is_input = buffer.origin == Origin.INPUT
        storable = (is_input and graph.last_state(index)) or index in saved or index in released
        must_hold = index in saved and (held_anyway(graph, index, min_bytes) or index not in evidence.verified)
        if storable and (index in saved or index in released):
            # Two saved states of one storage are held in the same bytes.
            nbytes = 0 if buffer.storage in counted else nbytes
            counted.add(buffer.storage)
        choices = tuple(_choice(one, prices, buffer) for one in by_buffer.get(index, ()))
        items.append(BufferItem(buffer.site, nbytes, index in saved, choices, must_hold, storable))
    ops = []
    for op in graph.ops:
        us = prices.op_us(graph, op.index) if op.barrier is None else None
        reads = tuple(graph.buffers[b].site for b in op.reads if b in listed)
        writes = tuple(graph.buffers[b].site for b in op.writes if b in listed)
        if writes:
            ops.append(OpItem(f"{op.index} {op.target}", us or 0.0, reads, writes, replayable=us is not None))
    found = LayerClass(name or graph.module, tuple(items), tuple(ops), count, in_flight, chunk)
    table = {(graph.buffers[o.buffer].site, o.label): o for several in by_buffer.values() for o in several}
    return LayerProblem(graph, found, table, sum(shared.values()), released)


def _writable_again(graph: LayerGraph, buffer: int) -> bool:
    """Whether no barrier is among the ops that wrote the buffer's storage up to this state."""
    state: int | None = buffer
    while state is not None:
        writer = graph.buffers[state].writer
        if writer is None or graph.ops[writer].barrier is not None:
            return False
        state = graph.buffers[state].previous
    return True


def _choice(one: Offer, prices: Prices, buffer: Buffer) -> CodecChoice:
    """Errors of different buffers are independent: their squares add, and the planner adds."""
    price = prices.codec(one.codec, buffer.base.size, torch_dtype(buffer.base.dtype))
    return CodecChoice(one.label, one.packed_bytes, price.encode_us + price.decode_us, one.error**2, price.decode_us)
