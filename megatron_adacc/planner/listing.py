"""All plans of one layer, as long as they are not too many: what its buffers get, and the bytes that are then held.

Nothing here looks at microseconds, so that the least memory of a layer is the same whatever was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_adacc.planner.dominance import Ints
from megatron_adacc.planner.floors import Floor, possible_actions
from megatron_adacc.planner.grid import Grid
from megatron_adacc.planner.problem import LayerClass
from megatron_adacc.planner.solution import COMPRESS, KEEP, Violation, evaluate_layer
from megatron_adacc.planner.validate import in_order

# Ways to give each buffer an action, the impossible ones included.
MOST_WAYS = 2**18


@dataclass(frozen=True)
class AllPlans:
    """``choices``: [plans, buffers], of each buffer the number of its action among ``options``; ``nbytes`` and
    ``error`` (units): [plans]. ``place``: by the way's number (the first buffer counts most), the plan or -1."""

    layer: LayerClass
    options: tuple[tuple[str, ...], ...]
    choices: NDArray[np.int8]
    nbytes: Ints
    error: Ints
    place: Ints

    def __len__(self) -> int:
        return len(self.nbytes)

    def actions(self, plan: int) -> dict[str, str]:
        """By site."""
        return {
            buffer.site: options[choice]
            for buffer, options, choice in zip(self.layer.buffers, self.options, self.choices[plan], strict=True)
        }

    def neighbours(self, plan: int) -> list[int]:
        """The plans that differ from it in one buffer."""
        strides, own = _strides(self.options), self.choices[plan].tolist()
        way = sum(choice * stride for choice, stride in zip(own, strides, strict=True))
        ways = [
            way + (other - choice) * stride
            for choice, options, stride in zip(own, self.options, strides, strict=True)
            for other in range(len(options))
            if other != choice
        ]
        return [int(self.place[w]) for w in ways if self.place[w] >= 0]

    def at_least(self, floors: tuple[Floor, ...]) -> Ints:
        """[plans]: what each needs at least while it runs, in bytes."""
        needed = self.nbytes.copy()
        for floor in floors:
            total = np.full(len(self), floor.base_bytes, dtype=np.int64)
            for i, (buffer, options) in enumerate(zip(self.layer.buffers, self.options, strict=True)):
                adds = np.array([floor.adds.get((buffer.site, action), 0) for action in options], dtype=np.int64)
                if adds.any():
                    total += adds[self.choices[:, i]]
            needed = np.maximum(needed, total)
        return needed


def all_plans(layer: LayerClass, errors: Grid | None, lossless: bool, most_ways: int | None = None) -> AllPlans | None:
    """Every plan that (1), (2) and (3) allow and that holds nothing that nobody asks for; None where there are too many
    ways to look at. ``lossless``: without the codecs that have an error."""
    lossy = {(b.site, COMPRESS + c.name) for b in layer.buffers for c in b.codecs if c.error and lossless}
    options = tuple(
        tuple(a for a in possible_actions(layer, i) if (buffer.site, a) not in lossy)
        for i, buffer in enumerate(layer.buffers)
    )
    ways = math.prod(len(found) for found in options)
    if ways > (MOST_WAYS if most_ways is None else most_ways):
        return None
    columns = np.empty((len(options), ways), dtype=np.int8)
    for column, stride, found in zip(columns, _strides(options), options, strict=True):
        column[:] = np.arange(ways) // stride % len(found)
    fits = _possible(layer, options, columns)
    choices = np.ascontiguousarray(columns[:, fits].T)
    nbytes, error = np.zeros((2, len(choices)), dtype=np.int64)
    for i, (buffer, found) in enumerate(zip(layer.buffers, options, strict=True)):
        codecs = {COMPRESS + codec.name: codec for codec in buffer.codecs}
        sizes = [buffer.bytes if a == KEEP else codecs[a].bytes if a in codecs else 0 for a in found]
        units = [errors.units(codecs[a].error) if errors and a in codecs else 0 for a in found]
        nbytes += np.array(sizes, dtype=np.int64)[choices[:, i]]
        error += np.array(units, dtype=np.int64)[choices[:, i]]
    place = np.full(ways, -1, dtype=np.int64)
    place[fits] = np.arange(len(choices))
    return AllPlans(layer, options, choices, nbytes, error, place)


def _strides(options: tuple[tuple[str, ...], ...]) -> list[int]:
    sizes = [len(found) for found in options]
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _possible(layer: LayerClass, options: tuple[tuple[str, ...], ...], columns: NDArray[np.int8]) -> NDArray[np.bool_]:
    """[ways]: whether the way is a plan; ops taken from the last to the first, as their readers ask for them."""
    ways = columns.shape[1]
    index = {buffer.site: i for i, buffer in enumerate(layer.buffers)}
    held = []
    for own, column in zip(options, columns, strict=True):
        holds = np.array([a == KEEP or a.startswith(COMPRESS) for a in own], dtype=np.bool_)
        held.append(holds[column])
    asked = [np.zeros(ways, dtype=np.bool_) for _ in layer.buffers]
    fits = np.ones(ways, dtype=np.bool_)
    written = {site for op in layer.ops for site in op.writes}
    for op in reversed(in_order(layer)):
        runs = np.zeros(ways, dtype=np.bool_)
        for site in op.writes:
            i = index[site]
            runs |= ~held[i] & (True if layer.buffers[i].saved else asked[i])
        if not op.replayable:
            fits &= ~runs
        for site in op.reads:
            if site in index:
                asked[index[site]] |= runs
    for i, buffer in enumerate(layer.buffers):
        if buffer.site not in written:
            fits &= held[i] | ~(asked[i] | buffer.saved)
        if not buffer.saved and not buffer.must_hold:
            fits &= ~held[i] | asked[i]
    return fits


def lightest_actions(layer: LayerClass) -> dict[str, str] | None:
    """A plan of few bytes without an error, by trying buffer after buffer, the largest first; for layers with too many
    plans to look at. None where none was found."""
    options = {}
    for i, buffer in enumerate(layer.buffers):
        exact = {COMPRESS + codec.name for codec in buffer.codecs if not codec.error} | {KEEP}
        found = possible_actions(layer, i)
        options[buffer.site] = [a for a in found if a in exact or not a.startswith(COMPRESS)]
    # All that autograd needs is held, the rest is not: with that nothing runs again.
    actions = {b.site: options[b.site][0 if b.saved or b.must_hold else -1] for b in layer.buffers if options[b.site]}
    try:
        least = evaluate_layer(layer, actions).held_bytes
    except (Violation, KeyError):
        return None
    for buffer in sorted(layer.buffers, key=lambda b: -b.bytes):
        for action in options[buffer.site]:
            try:
                held = evaluate_layer(layer, {**actions, buffer.site: action}).held_bytes
            except Violation:
                continue
            if held < least:
                actions, least = {**actions, buffer.site: action}, held
    return actions
