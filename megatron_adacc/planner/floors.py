"""Bytes that a layer needs at least while it runs, whatever its plan: linear in its actions.

The bytes that live while a layer runs, held + extra, belong to a whole plan: what a replay needs depends on what else
is held. But at each moment of the backward a buffer's own part is known from its own action: held it is there until its
last reader is done, made again or decoded at least while it is read. So

    held + extra >= max over floors of ( base + sum over buffers of adds[buffer, its action] )

for every plan. A floor's part of a buffer must not be larger for an action of fewer bytes, except that of a packed
buffer against the same buffer kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megatron_adacc.planner.dominance import Ints
from megatron_adacc.planner.problem import LayerClass
from megatron_adacc.planner.solution import COMPRESS, DROP, KEEP, RECOMPUTE


@dataclass(frozen=True)
class Floor:
    """``base_bytes``, and what a (site, action) adds to it; what is not named adds nothing."""

    base_bytes: int
    adds: Mapping[tuple[str, str], int]

    def of(self, actions: Mapping[str, str]) -> int:
        """What a plan with these actions needs at least, in bytes."""
        return self.base_bytes + sum(self.adds.get(item, 0) for item in actions.items())


def possible_actions(layer: LayerClass, index: int) -> list[str]:
    """What a buffer may get by itself."""
    buffer = layer.buffers[index]
    found = [KEEP, *(COMPRESS + codec.name for codec in buffer.codecs)] if buffer.storable else []
    return found if buffer.must_hold else [*found, RECOMPUTE if buffer.saved else DROP]


def without_needless(layer: LayerClass, floors: Sequence[Floor]) -> tuple[Floor, ...]:
    """The floors that are not below another one for every plan."""
    if not floors:
        return ()
    base = np.array([floor.base_bytes for floor in floors], dtype=np.int64)
    tables = []
    for i, buffer in enumerate(layer.buffers):
        actions = possible_actions(layer, i)
        adds = np.array([[floor.adds.get((buffer.site, a), 0) for a in actions] for floor in floors], dtype=np.int64)
        if adds.any():
            tables.append(adds)
    # Most are below the least of the highest one.
    least = base + sum(adds.min(axis=1) for adds in tables)
    most = base + sum(adds.max(axis=1) for adds in tables)
    index = np.flatnonzero(most >= least.max())
    # above[i, j]: by how much floor i is above floor j at least
    above = base[index][:, None] - base[index][None, :]
    for adds in tables:
        above += (adds[index][:, None, :] - adds[index][None, :, :]).min(axis=2)
    kept: list[int] = []
    for j in range(len(index)):
        others = [i for i in range(len(index)) if i != j and above[i, j] >= 0]
        # Of two that are the same the first stays.
        if all(above[j, i] >= 0 and j < i for i in others):
            kept.append(j)
    return tuple(floors[k] for k in index[kept].tolist())


def floors_of_seen(layer: LayerClass, held: Ints, extra: Ints) -> tuple[Floor, ...]:
    """The lower hull, in held bytes, of what plans with these held and extra bytes need: floors of these plans, and of
    others only if they need no less.

    held, extra: [plans]. Each floor is base + slope * held bytes with a slope between 0 and 1: more held bytes never
    mean that less is alive, and never more than they are."""
    points = sorted(zip(held.tolist(), (held + extra).tolist(), strict=True))
    if not points:
        return ()
    hull: list[tuple[int, int]] = []
    for x, y in points:
        while len(hull) > 1 and _above(hull[-2], hull[-1], (x, y)):
            hull.pop()
        if not hull or x > hull[-1][0]:
            hull.append((x, y))
    slopes = {Fraction(0), Fraction(1)}
    for (x0, y0), (x1, y1) in itertools.pairwise(hull):
        slope = Fraction(y1 - y0, x1 - x0)
        if 0 < slope < 1:
            slopes.add(slope)
    return tuple(_of_slope(layer, slope, points) for slope in sorted(slopes))


def _above(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _of_slope(layer: LayerClass, slope: Fraction, points: list[tuple[int, int]]) -> Floor:
    """All rounded down, so that it stays a floor."""
    base = min((y - slope * x).__floor__() for x, y in points)
    adds = {}
    for i, buffer in enumerate(layer.buffers):
        sizes = {codec.name: codec.bytes for codec in buffer.codecs}
        for action in possible_actions(layer, i):
            size = buffer.bytes if action == KEEP else sizes.get(action.removeprefix(COMPRESS), 0)
            if size:
                adds[buffer.site, action] = (slope * size).__floor__()
    return Floor(base, adds)
