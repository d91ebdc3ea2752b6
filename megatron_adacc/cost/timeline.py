"""What a layer's forward and backward need in memory beside what is saved, as a row of intervals.

Two rehearsals are recorded. In the first, nothing that autograd saves is held, so that it shows how long tensors
live by themselves (the natural bytes); in the second everything is held and the backward runs. A recording is cut
into intervals at each pack, unpack and release of a saved tensor. What the saved tensors take is known from the
graph, so the rest, gradients and temporaries, is

    base = bytes counted - bytes of the saved buffers that are held in the interval

and any plan's bytes are the base and what the plan holds, decodes and rebuilds there (cost/simulate.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_adacc.cost.live_bytes import LiveBytes
from megatron_adacc.cost.rehearsal import Call, Rehearsal
from megatron_adacc.graph.model import LayerGraph


@dataclass(frozen=True)
class Interval:
    """A stretch between two events. ``event``: what ended it, pack, unpack, release or end, of pack ``index``;
    ``now_bytes``: counted at its end; ``peak_bytes``: the most inside it."""

    event: str
    index: int
    now_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Timeline:
    """``natural``: the forward with nothing held; ``forward``, ``backward``: with everything held. In the
    backward's intervals the bytes are the base of the module's formula."""

    natural: tuple[Interval, ...]
    forward: tuple[Interval, ...]
    backward: tuple[Interval, ...]


class _Handle:
    """Stands for a saved tensor; its end is an event."""

    def __init__(self, recording: _Recording, index: int, tensor: Tensor | None) -> None:
        self.recording = recording
        self.index = index
        self.tensor = tensor

    def __del__(self) -> None:
        self.tensor = None
        self.recording.mark("release", self.index)


class _Recording:
    """Intervals of one rehearsal. The engine may run a CUDA backward in a thread of its own."""

    def __init__(self, live: LiveBytes, hold: bool) -> None:
        self.live = live
        self.hold = hold
        self.intervals: list[Interval] = []
        self.packs = 0
        self.open = True
        self._lock = threading.RLock()

    def mark(self, event: str, index: int) -> None:
        with self._lock:
            if self.open:
                now, peak = self.live.mark()
                self.intervals.append(Interval(event, index, now, peak))

    def pack(self, tensor: Tensor) -> Any:
        index, self.packs = self.packs, self.packs + 1
        self.live.see(tensor)
        self.mark("pack", index)
        return _Handle(self, index, tensor.detach() if self.hold else None)

    def unpack(self, handle: _Handle) -> Tensor:
        assert handle.tensor is not None
        self.mark("unpack", handle.index)
        return handle.tensor

    def take(self) -> tuple[Interval, ...]:
        with self._lock:
            taken, self.intervals = tuple(self.intervals), []
        return taken


class OtherSavesError(RuntimeError):
    """The rehearsal saved other tensors than the trace."""


def _check(graph: LayerGraph, recording: _Recording) -> None:
    if recording.packs != len(graph.packs):
        raise OtherSavesError(f"a rehearsal saved {recording.packs} tensors, its trace {len(graph.packs)}")


def _run(graph: LayerGraph, call: Call, hold: bool) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    live = LiveBytes([*call.inputs, *call.parameters])
    recording = _Recording(live, hold)
    with live:
        loss = call.forward(recording.pack, recording.unpack)
        recording.mark("end", 0)
        forward = recording.take()
        _check(graph, recording)
        if hold:
            loss.backward()
            recording.mark("end", 0)
        backward = recording.take()
        recording.open = False
        del loss
    return forward, backward


def record(graph: LayerGraph, rehearsal: Rehearsal, gradients_stay: bool = False) -> Timeline:
    """Run the layer twice forward and once backward.

    ``gradients_stay``: parameter gradients made in the backward live on and are part of the base; without it each
    is taken to go, when it is complete, into memory that was there before.

    Raises OtherSavesError where the layer then saves other tensors than its graph says."""
    with rehearsal.begin() as call:
        natural, _ = _run(graph, call, hold=False)
    with rehearsal.begin() as call:
        if not gradients_stay:
            call.drop_parameter_gradients()
        forward, backward = _run(graph, call, hold=True)
    return Timeline(natural, forward, _without_saved(graph, forward, backward))


def _without_saved(
    graph: LayerGraph, forward: tuple[Interval, ...], intervals: tuple[Interval, ...]
) -> tuple[Interval, ...]:
    gone = {i.index for i in forward if i.event == "release"}
    storage_of = {
        p.index: graph.buffers[p.view.buffer].storage
        for p in graph.packs
        if graph.is_activation(p.view.buffer) and p.index not in gone
    }
    inputs = {graph.buffers[spec.buffer].storage for spec in graph.inputs}
    size_of = {b.storage: b.nbytes for b in graph.buffers if b.storage not in inputs}
    handles: dict[int, set[int]] = {}
    for index, storage in storage_of.items():
        if storage in size_of:
            handles.setdefault(storage, set()).add(index)
    held = sum(size_of[storage] for storage in handles)
    found = []
    for interval in intervals:
        peak = interval.peak_bytes - held
        if interval.event == "release" and interval.index in storage_of:
            storage = storage_of[interval.index]
            waiting = handles.get(storage, set())
            waiting.discard(interval.index)
            if not waiting and handles.pop(storage, None) is not None:
                held -= size_of[storage]
        found.append(Interval(interval.event, interval.index, interval.now_bytes - held, peak))
    return tuple(found)
