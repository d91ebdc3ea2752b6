"""What a layer needs at least while it runs, whatever its plan, from the moments of its rehearsal.

The simulator (cost/simulate.py) adds to the base of a moment what the plan holds, has decoded and rebuilt then. Of a
saved buffer's own part we know, from its action alone, at least

    keep        its bytes until its last handle is let go of
    compress    its packed bytes until then, and its bytes while it is decoded
    recompute   its bytes while it is rebuilt

where decoded and rebuilt reaches from the first handle that is asked to the last, and to the end of each that was
asked. Not known is what else a group of recipes rebuilds on the way, and which sources they keep alive; both only add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from megatron_adacc.cost.layer_problem import LayerProblem
from megatron_adacc.cost.simulate import WEIGHTS
from megatron_adacc.cost.timeline import Timeline
from megatron_adacc.planner.dominance import Ints
from megatron_adacc.planner.floors import Floor, without_needless
from megatron_adacc.planner.solution import COMPRESS, KEEP, RECOMPUTE


def layer_floors(problem: LayerProblem, timeline: Timeline, input_bytes: int) -> tuple[Floor, ...]:
    """Floors of held + extra bytes for all plans of the layer. ``input_bytes``: of its differentiable inputs."""
    graph = problem.graph
    storages = Counter(graph.buffers[b].storage for b in graph.saved)
    # Two saved states of one storage are held in the same bytes: for these nothing is known.
    alone = [b for b in graph.saved if storages[graph.buffers[b].storage] == 1]
    alone = [b for b in alone if graph.is_activation(b) and graph.buffers[b].origin not in WEIGHTS]
    unknown = sum(
        max(graph.buffers[b].nbytes for b in graph.saved if graph.buffers[b].storage == storage)
        for storage, times in storages.items()
        if times > 1
    )
    found = [*_forward(problem, timeline, input_bytes, alone), *_backward(problem, timeline, alone)]
    found = [Floor(floor.base_bytes - unknown, floor.adds) for floor in found]
    return without_needless(problem.layer_class, found)


def _backward(problem: LayerProblem, timeline: Timeline, buffers: Iterable[int]) -> list[Floor]:
    graph = problem.graph
    moments = len(timeline.backward)
    asked: dict[int, int] = {}
    released: dict[int, int] = {}
    for moment, interval in enumerate(timeline.backward):
        if interval.event == "unpack":
            asked.setdefault(interval.index, moment)
        elif interval.event == "release":
            released.setdefault(interval.index, moment)
    adds: dict[tuple[str, str], Ints] = {}
    for buffer in buffers:
        handles = [p.index for p in graph.packs if p.view.buffer == buffer and p.index not in timeline.dead]
        if not handles:
            continue
        # What an interval has is counted before the event that ends it.
        held, used = np.zeros((2, moments), dtype=np.int64)
        held[: max(released.get(h, moments) for h in handles) + 1] = 1
        times = [asked[h] for h in handles if h in asked]
        if times:
            used[min(times) + 1 : max(times) + 1] = 1
        for handle in handles:
            if handle in asked:
                used[asked[handle] + 1 : released.get(handle, moments) + 1] = 1
        adds.update(_of_buffer(problem, buffer, held, used))
    return _floors([interval.peak_bytes for interval in timeline.backward], adds)


def _forward(problem: LayerProblem, timeline: Timeline, input_bytes: int, buffers: Iterable[int]) -> list[Floor]:
    """What has been packed is held; while it lives by itself it costs nothing more."""
    graph = problem.graph
    inputs = {graph.buffers[spec.buffer].storage for spec in graph.inputs}
    sizes = {b.storage: b.nbytes for b in graph.buffers}
    packed: dict[int, int] = {}
    for moment, interval in enumerate(timeline.forward):
        if interval.event == "pack":
            packed.setdefault(graph.packs[interval.index].view.buffer, moment)
    bases = [
        interval.peak_bytes + input_bytes + sum(sizes[s] for s in interval.alive - inputs)
        for interval in timeline.forward
    ]
    adds: dict[tuple[str, str], Ints] = {}
    for buffer in buffers:
        storage = graph.buffers[buffer].storage
        if buffer not in packed or storage in inputs:
            continue
        held = np.arange(len(bases)) > packed[buffer]
        by_itself = np.array([storage in interval.alive for interval in timeline.forward], dtype=np.bool_)
        own = _of_buffer(problem, buffer, held.astype(np.int64), np.zeros(len(bases), dtype=np.int64))
        for (site, action), nbytes in own.items():
            adds[site, action] = np.where(by_itself, 0, nbytes) if action == KEEP else nbytes
    return _floors(bases, adds)


def _of_buffer(problem: LayerProblem, buffer: int, held: Ints, used: Ints) -> dict[tuple[str, str], Ints]:
    """By action, the buffer's bytes at each moment."""
    found = problem.graph.buffers[buffer]
    adds = {(found.site, KEEP): found.nbytes * held}
    if found.writer is not None:
        adds[found.site, RECOMPUTE] = found.nbytes * used
    for (site, label), offer in problem.offers.items():
        if site == found.site:
            adds[site, COMPRESS + label] = offer.packed_bytes * held + found.nbytes * used
    return adds


def _floors(bases: list[int], adds: Mapping[tuple[str, str], Ints]) -> list[Floor]:
    return [Floor(base, {item: int(own[i]) for item, own in adds.items() if own[i]}) for i, base in enumerate(bases)]
