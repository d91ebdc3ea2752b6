"""What a layer's forward and backward need in memory beside what is saved, as a row of intervals.

Two rehearsals are recorded and cut into intervals at each pack, unpack and release of a saved tensor. In the first
nothing that autograd saves is held, so that it shows how long these tensors live by themselves; in the second
everything is held and the backward runs. In both

    base = bytes counted - bytes of the saved buffers among them

is what gradients, temporaries and unsaved results take, and any plan's bytes are the base and what the plan holds,
decodes and rebuilds then (cost/simulate.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_adacc.cost.live_bytes import LiveBytes
from megatron_adacc.cost.rehearsal import Call, Rehearsal
from megatron_adacc.graph.model import LayerGraph


@dataclass(frozen=True)
class Interval:
    """A stretch between two events. ``event``: what ended it, pack, unpack or release of pack ``index``, op (in the
    forward), or end; ``now_bytes``: the base at its end; ``peak_bytes``: the largest base inside it; ``alive``: in
    the forward, the storages of the graph that were saved before and were still alive by themselves when it began."""

    event: str
    index: int
    now_bytes: int
    peak_bytes: int
    alive: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Timeline:
    """A layer's forward, in which nothing is held, and its backward."""

    forward: tuple[Interval, ...]
    backward: tuple[Interval, ...]

    @property
    def dead(self) -> frozenset[int]:
        """Packs of a branch that no output depends on: they are let go of when the forward returns."""
        return frozenset(i.index for i in self.forward if i.event == "release")


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

    def __init__(self, graph: LayerGraph, live: LiveBytes, hold: bool) -> None:
        self._graph = graph
        self._live = live
        self._hold = hold
        self._alive: frozenset[int] = frozenset()
        self._intervals: list[Interval] = []
        self._lock = threading.RLock()
        self.packs = 0
        self.open = True

    def mark(self, event: str, index: int) -> None:
        with self._lock:
            if self.open:
                mark = self._live.mark()
                self._intervals.append(Interval(event, index, mark.base_now, mark.base_peak, self._alive))
                self._alive = mark.alive

    def at_op(self) -> None:
        self.mark("op", 0)

    def pack(self, tensor: Tensor) -> Any:
        index, self.packs = self.packs, self.packs + 1
        self._live.see(tensor)
        self.mark("pack", index)
        if index < len(self._graph.packs):
            buffer = self._graph.packs[index].view.buffer
            if self._graph.is_activation(buffer):
                self._live.watch(tensor, self._graph.buffers[buffer].storage)
                self._alive |= {self._graph.buffers[buffer].storage}
                # It is no part of the base of the interval that begins.
                self._live.mark()
        return _Handle(self, index, tensor.detach() if self._hold else None)

    def unpack(self, handle: _Handle) -> Tensor:
        assert handle.tensor is not None
        self.mark("unpack", handle.index)
        return handle.tensor

    def take(self) -> tuple[Interval, ...]:
        with self._lock:
            taken, self._intervals = tuple(self._intervals), []
        return taken


class OtherSavesError(RuntimeError):
    """The rehearsal saved other tensors than the trace."""


def _check(graph: LayerGraph, recording: _Recording) -> None:
    if recording.packs != len(graph.packs):
        raise OtherSavesError(f"a rehearsal saved {recording.packs} tensors, its trace {len(graph.packs)}")


def _lasting(rehearsal: Rehearsal) -> list[StorageWeakRef]:
    """Storages that a forward uses and leaves behind for the next one: no layer is to be charged for them."""
    with rehearsal.begin() as call:
        live = LiveBytes([*call.inputs, *call.parameters])
        with live:
            call.forward(lambda tensor: None, _never)
        return live.lasting()


def _never(handle: Any) -> Tensor:
    raise AssertionError("a forward without a backward asks for nothing")


def _run(
    graph: LayerGraph, call: Call, hold: bool, lasting: list[StorageWeakRef]
) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    live = LiveBytes([*call.inputs, *call.parameters], lasting)
    recording = _Recording(graph, live, hold)
    with live:
        live.at_op = recording.at_op
        loss = call.forward(recording.pack, recording.unpack)
        live.at_op = None
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
    """Run the layer three times forward and once backward.

    ``gradients_stay``: parameter gradients made in the backward live on and are part of the base; without it each
    is taken to go, when it is complete, into memory that was there before.

    Raises OtherSavesError where the layer then saves other tensors than its graph says."""
    lasting = _lasting(rehearsal)
    with rehearsal.begin() as call:
        forward, _ = _run(graph, call, hold=False, lasting=lasting)
    with rehearsal.begin() as call:
        if not gradients_stay:
            call.drop_parameter_gradients()
        _, backward = _run(graph, call, hold=True, lasting=lasting)
    return Timeline(forward, backward)
