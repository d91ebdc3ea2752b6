"""What a plan makes of one layer's memory: bytes held for the backward, and the most that lives while it runs.

The stash is followed through the events of a recorded rehearsal (cost/timeline.py): a kept buffer lives until its
last handle and the last recipe that starts from it are gone; a packed one likewise, and what is decoded until its
readers had it; the first reader of a group of recipes runs all of its steps, with their copies, frees and results
that are written over operands. In the forward, a saved tensor that the plan does not keep lives as long as it
does by itself. So

    bytes in an interval = base of the interval + what the plan holds, has decoded and has rebuilt then
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_adacc.cost.timeline import Timeline
from megatron_adacc.graph.model import LayerGraph, Origin
from megatron_adacc.graph.recipes import Group, group_recipes
from megatron_adacc.graph.replay import Context, Replayer

WEIGHTS = (Origin.PARAMETER, Origin.MODULE_BUFFER, Origin.ATTRIBUTE, Origin.CONSTANT, Origin.LITERAL)


@dataclass(frozen=True)
class Fates:
    """A plan by buffer of one graph: what is kept, what is packed in how many bytes, what is recomputed. Saved
    activations that are in none of them are kept."""

    packed: Mapping[int, int]
    dropped: frozenset[int]


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer under a plan. ``held``: after its forward, the differentiable input included;
    ``shared``: inputs without gradient that are held, which the layers of a stage have in common; ``forward``
    and ``backward``: the most that lives while they run, held bytes included."""

    held: int
    shared: int
    forward: int
    backward: int

    @property
    def extra(self) -> int:
        """What the layer needs beyond its held bytes while it runs."""
        return max(self.forward, self.backward) - self.held


class Simulator:
    """Follows plans through one layer's timeline. Groups and their steps are compiled once for each."""

    def __init__(self, graph: LayerGraph, timeline: Timeline | None, context: Context) -> None:
        self._graph = graph
        self._timeline = timeline
        self._context = context
        self._dead = timeline.dead if timeline is not None else frozenset()
        self._storage_bytes = {b.storage: b.nbytes for b in graph.buffers}
        self._inputs: dict[int, bool] = {}  # by storage, whether a gradient flows to it
        for spec in graph.inputs:
            storage = graph.buffers[spec.buffer].storage
            self._inputs[storage] = self._inputs.get(storage, False) or spec.requires_grad

    @property
    def device(self) -> torch.device:
        """Where the layer trains."""
        return self._context.device

    @property
    def timeline(self) -> Timeline | None:
        """The rehearsal that is followed; None where a layer is taken to need what it holds."""
        return self._timeline

    @property
    def input_bytes(self) -> int:
        """Bytes of the differentiable inputs, held or not."""
        graph = self._graph
        found = {graph.buffers[s.buffer].storage: graph.buffers[s.buffer].nbytes for s in graph.inputs}
        return sum(size for storage, size in found.items() if self._inputs[storage])

    def of_graph(self, graph: LayerGraph) -> Simulator:
        """The same rehearsal, read with another graph of the same saved tensors; further packs are never asked for."""
        return Simulator(graph, self._timeline, self._context)

    def groups(self, fates: Fates) -> tuple[Group, ...]:
        """The groups of recipes that the engine makes for a plan."""
        stored = frozenset(b for b in self._graph.saved if b not in fates.dropped)
        return group_recipes(self._graph, stored, [b for b in self._graph.saved if b in fates.dropped])

    def memory(self, fates: Fates) -> LayerMemory:
        """The bytes of a plan. Raises ValueError for a buffer that is dropped and has no recipe."""
        groups = self.groups(fates)
        held, shared = self._held(fates, groups)
        if self._timeline is None:
            return LayerMemory(held, shared, held, held)
        forward = self._forward(fates)
        backward = _Backward(self._graph, fates, groups, self._context, self._timeline).peak()
        return LayerMemory(held, shared, max(held, forward), max(held, backward))

    def _held(self, fates: Fates, groups: tuple[Group, ...]) -> tuple[int, int]:
        own: dict[int, int] = {}
        shared: dict[int, int] = {}
        live = _live_buffers(self._graph, self._dead)
        sources = {b for group in groups if any(t in live for t in group.targets) for b in group.sources}
        sources = {b for b in sources if self._graph.buffers[b].origin not in WEIGHTS}
        packed = sum(size for b, size in fates.packed.items() if b in live or b in sources)
        kept = [b for b in (*live, *sources) if b not in fates.packed and b not in fates.dropped]
        for index in kept:
            buffer = self._graph.buffers[index]
            table = own if self._inputs.get(buffer.storage, True) else shared
            table[buffer.storage] = buffer.nbytes
        return sum(own.values()) + packed, sum(shared.values())

    def _forward(self, fates: Fates) -> int:
        """The inputs live throughout: whoever calls the layer has them."""
        assert self._timeline is not None
        graph = self._graph
        kept: set[int] = set()
        packed: dict[int, int] = {}
        highest = 0
        for interval in self._timeline.forward:
            saved = (kept | interval.alive) - self._inputs.keys()
            held = sum(self._storage_bytes[storage] for storage in saved) + sum(packed.values())
            highest = max(highest, interval.peak_bytes + held)
            if interval.event == "pack":
                index = graph.packs[interval.index].view.buffer
                if index in fates.packed:
                    packed[index] = fates.packed[index]
                elif graph.is_activation(index) and index not in fates.dropped:
                    kept.add(graph.buffers[index].storage)
        return highest + self.input_bytes


def _live_buffers(graph: LayerGraph, dead: frozenset[int]) -> dict[int, None]:
    """Buffers that some handle stands for after the forward, parameters and module buffers not among them."""
    skipped = (Origin.PARAMETER, Origin.MODULE_BUFFER)
    found = (p.view.buffer for p in graph.packs if p.index not in dead)
    return dict.fromkeys(b for b in found if graph.buffers[b].origin not in skipped)


class _Rebuild:
    """A group during the backward."""

    def __init__(self, graph: LayerGraph, group: Group, context: Context, packed: frozenset[int]) -> None:
        self.group = group
        self.steps = Replayer(graph, group, context, packed).storage_steps()
        self.readers: dict[int, set[int]] = {b: set() for b in group.targets}
        self.pending: dict[int, set[int]] = {}
        self.live: set[int] = set()

    @property
    def alive(self) -> bool:
        return any(self.readers.values())


class _Backward:
    """The stash of one layer call, followed through the events of its backward."""

    def __init__(
        self, graph: LayerGraph, fates: Fates, groups: tuple[Group, ...], context: Context, timeline: Timeline
    ) -> None:
        self._graph = graph
        self._fates = fates
        self._timeline = timeline
        packed = frozenset(fates.packed)
        self._rebuilds = [_Rebuild(graph, group, context, packed) for group in groups]
        self._rebuild_of = {b: r for r in self._rebuilds for b in r.group.targets}
        dead = timeline.dead
        self._buffer_of = {
            p.index: p.view.buffer for p in graph.packs if graph.is_activation(p.view.buffer) and p.index not in dead
        }
        self._handles: dict[int, set[int]] = {}
        for index, buffer in self._buffer_of.items():
            self._handles.setdefault(buffer, set()).add(index)
            if buffer in self._rebuild_of:
                self._rebuild_of[buffer].readers[buffer].add(index)
        self._waiting: dict[int, set[int]] = {}  # of a decoded buffer, handles still to be asked
        self._in_nodes: dict[int, set[int]] = {}  # of a decoded or rebuilt buffer, handles whose node may have it

    def peak(self) -> int:
        highest = 0
        for interval in self._timeline.backward:
            highest = max(highest, interval.peak_bytes + self._bytes())
            if interval.index not in self._buffer_of or interval.event == "end":
                continue
            if interval.event == "unpack":
                highest = max(highest, interval.now_bytes + self._unpack(interval.index))
            elif interval.event == "release":
                self._release(interval.index)
        return highest

    def _bytes(self) -> int:
        """What the stash holds, has decoded and rebuilt now."""
        graph = self._graph
        storages: dict[int, int] = {}
        needed = {b for b, handles in self._handles.items() if handles}
        needed |= {b for r in self._rebuilds if r.alive for b in r.group.sources}
        total = 0
        for index in needed:
            buffer = graph.buffers[index]
            if index in self._fates.packed:
                total += self._fates.packed[index]
            elif index not in self._fates.dropped and buffer.origin not in WEIGHTS:
                storages[buffer.storage] = buffer.nbytes
        total += sum(storages.values())
        alive = {b for b, handles in self._in_nodes.items() if handles} | {b for b, w in self._waiting.items() if w}
        alive |= {b for r in self._rebuilds for b in r.live}
        return total + sum(graph.buffers[b].nbytes for b in alive)

    def _unpack(self, index: int) -> int:
        """A handle is asked; gives the most that the stash needs on the way."""
        buffer = self._buffer_of[index]
        if buffer in self._fates.packed:
            if not self._waiting.get(buffer):
                self._waiting[buffer] = set(self._handles[buffer])
            self._waiting[buffer].discard(index)
            self._in_nodes.setdefault(buffer, set()).add(index)
            return self._bytes()
        rebuild = self._rebuild_of.get(buffer)
        if rebuild is None:
            return self._bytes()
        highest = 0
        if buffer not in rebuild.live and buffer not in {b for b, h in self._in_nodes.items() if h}:
            before = self._bytes()
            highest = before + _replay_peak(self._graph, rebuild, self._fates)
            rebuild.pending = {b: set(readers) for b, readers in rebuild.readers.items() if readers}
            rebuild.live = set(rebuild.pending)
        waiting = rebuild.pending.get(buffer, set())
        waiting.discard(index)
        if not waiting:
            rebuild.live.discard(buffer)
        self._in_nodes.setdefault(buffer, set()).add(index)
        return max(highest, self._bytes())

    def _release(self, index: int) -> None:
        buffer = self._buffer_of[index]
        for table in (self._handles, self._waiting, self._in_nodes):
            table.get(buffer, set()).discard(index)
        rebuild = self._rebuild_of.get(buffer)
        if rebuild is not None:
            rebuild.readers[buffer].discard(index)
            rebuild.pending.get(buffer, set()).discard(index)
            if not rebuild.pending.get(buffer):
                rebuild.live.discard(buffer)


def _replay_peak(graph: LayerGraph, rebuild: _Rebuild, fates: Fates) -> int:
    """The most that a group's replay allocates at once, its results included."""
    env: dict[int, int] = {}  # buffer -> number of its storage
    sizes: dict[int, int] = {}
    users: dict[int, int] = {}
    live = highest = 0

    def allocate(buffer: int, size: int) -> None:
        nonlocal live
        number = len(sizes)
        sizes[number], users[number] = size, 1
        env[buffer] = number
        live += size

    def drop(buffer: int) -> None:
        nonlocal live
        number = env.pop(buffer, None)
        if number is not None:
            users[number] -= 1
            if not users[number]:
                live -= sizes[number]

    for step in rebuild.steps:
        for buffer in step.loads:
            if buffer in fates.packed and buffer not in env:
                allocate(buffer, graph.buffers[buffer].nbytes)
        for buffer in step.copies:
            size = graph.buffers[buffer].nbytes
            drop(buffer)
            allocate(buffer, size)
        for buffer in step.fresh:
            allocate(buffer, graph.buffers[buffer].nbytes)
        for before, after in step.moves:
            if before in env:
                env[after] = env.pop(before)
        for buffer in step.outputs:
            if step.over is not None and step.over in env:
                env[buffer] = env[step.over]
                users[env[buffer]] += 1
            else:
                allocate(buffer, graph.buffers[buffer].nbytes)
        highest = max(highest, live)
        for buffer in step.frees:
            drop(buffer)
    return highest
