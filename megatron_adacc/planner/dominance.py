"""Which points no other point is at most as large as in every coordinate. Exact, on int64 arrays."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_BLOCK = 256


def undominated(group: Ints, coordinates: list[Ints]) -> Ints:
    """Indices of the points that no other of their group is at most as large as in all coordinates; of equal points
    the first in order stays. Sorted by group, then by the coordinates, the first one first.

    group, coordinates[i]: [points] -> [kept]. Coordinates that are equal for all points cost nothing."""
    varying = [c for c in coordinates if len(c) and (c != c[0]).any()]
    varying = varying or coordinates[:1]
    order = np.lexsort((*reversed(varying), group))
    if len(order) < 2:
        return order
    sorted_group, columns = group[order], [c[order] for c in varying]
    if len(columns) <= 2:
        return order[_falling(sorted_group, columns[-1])]
    starts = np.flatnonzero(np.diff(sorted_group, prepend=sorted_group[0] - 1))
    ends = [*starts[1:].tolist(), len(order)]
    kept = [
        start + (_staircase(part[1], part[2]) if len(part) == 3 else _in_blocks(part))
        for start, end in zip(starts.tolist(), ends, strict=True)
        for part in [[c[start:end] for c in columns]]
    ]
    return order[np.concatenate(kept)]


def _falling(group: Ints, value: Ints) -> NDArray[np.bool_]:
    """Of points in order of group and of their first coordinate: those whose value is below all before it."""
    span = int(value.max()) - int(value.min()) + 1
    # Each later group starts below all earlier ones, so that one running minimum serves all groups.
    rank = np.cumsum(np.diff(group, prepend=group[0]) != 0)
    value = value - rank * span
    keep = np.ones(len(value), dtype=np.bool_)
    keep[1:] = value[1:] < np.minimum.accumulate(value)[:-1]
    return keep


def _staircase(second: Ints, third: Ints) -> Ints:
    """Places, in order of the first coordinate, that no earlier point beats in the other two."""
    stair_second: list[int] = []  # rises
    stair_third: list[int] = []  # falls
    kept = []
    for place, (a, b) in enumerate(zip(second.tolist(), third.tolist(), strict=True)):
        at = bisect_right(stair_second, a)
        if at and stair_third[at - 1] <= b:
            continue
        kept.append(place)
        start = end = bisect_left(stair_second, a)
        while end < len(stair_third) and stair_third[end] >= b:
            end += 1
        stair_second[start:end] = [a]
        stair_third[start:end] = [b]
    return np.array(kept, dtype=np.int64)


def _in_blocks(columns: list[Ints]) -> Ints:
    """The same for any number of coordinates: each block against what is kept so far, then within itself."""
    points = np.stack(columns)
    kept = np.zeros(0, dtype=np.int64)
    for start in range(0, points.shape[1], _BLOCK):
        block = np.arange(start, min(start + _BLOCK, points.shape[1]))
        if len(kept):
            block = block[~_beaten(points[:, kept], points[:, block])]
        within = np.ones(len(block), dtype=np.bool_)
        if len(block) > 1:
            less = np.ones((len(block), len(block)), dtype=np.bool_)
            for row in points[:, block]:
                less &= row[:, None] <= row[None, :]
            within = ~np.triu(less, 1).any(axis=0)
        kept = np.concatenate((kept, block[within]))
    return kept


def _beaten(by: Ints, points: Ints) -> NDArray[np.bool_]:
    """[coordinates, kept], [coordinates, points] -> [points]"""
    less = np.ones((by.shape[1], points.shape[1]), dtype=np.bool_)
    for mine, theirs in zip(by, points, strict=True):
        less &= mine[:, None] <= theirs[None, :]
    return less.any(axis=0)
