"""Which plans of a layer are looked at: from the frontier those from the least bytes to the most, or all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_adacc.planner.dominance import Ints, undominated
from megatron_adacc.planner.frontier import LayerPaths, Points, enumerate_plans
from megatron_adacc.planner.grid import Grid
from megatron_adacc.planner.listing import all_plans
from megatron_adacc.planner.problem import Problem
from megatron_adacc.planner.solution import Extra

MOST_CANDIDATES = 32
# If there are no more ways than this to give each buffer an action, all plans are looked at.
FEW_PLANS = 128
# Plans of one layer that are carried at once before the frontier is given up for the lossless one.
MOST_PLANS = 300_000


def look_at_plans(problem: Problem, paths: Sequence[LayerPaths], errors: Grid | None, extra: Extra) -> bool:
    """Ask for the extra bytes of some dozens of plans of each class; gives whether these are all."""
    complete = True
    for index, path in enumerate(paths):
        plans = all_plans(problem.classes[index], errors, problem.error_budget == 0, FEW_PLANS)
        if plans is not None:
            found = [plans.actions(i) for i in range(len(plans))]
        else:
            complete = False
            points = enumerate_plans(path, most_plans=MOST_PLANS) or enumerate_plans(path.lossless())
            assert points is not None  # without a limit on the plans carried
            found = [points.actions[i] for i in _candidates(problem, index, points, errors)]
        for actions in found:
            extra(index, actions)
    return complete


def _candidates(problem: Problem, class_index: int, points: Points, errors: Grid | None) -> Ints:
    """Plans of the frontier from the least bytes to the most."""
    lossless = np.flatnonzero(points.error == 0)
    if errors is None or not problem.error_budget:
        return _spread(lossless, points, MOST_CANDIDATES)
    share = errors.floor(problem.error_budget) // problem.classes[class_index].count
    within = np.flatnonzero(points.error <= share)
    within = within[undominated(np.zeros_like(within), [points.nbytes[within], points.cost[within]])]
    half = MOST_CANDIDATES // 2
    return np.unique(np.concatenate((_spread(lossless, points, half), _spread(within, points, half))))


def _spread(index: Ints, points: Points, most: int) -> Ints:
    """At most ``most`` of the points: those of the lower convex hull first, then evenly by bytes."""
    if len(index) <= most:
        return index
    hull: list[int] = []
    for i in index.tolist():
        while len(hull) > 1 and _above(points, hull[-2], hull[-1], i):
            hull.pop()
        hull.append(i)
    if len(hull) > most:
        hull = [hull[round(k)] for k in np.linspace(0, len(hull) - 1, most)]
    rest = [i for i in index.tolist() if i not in set(hull)]
    even = [rest[round(k)] for k in np.linspace(0, len(rest) - 1, most - len(hull))] if len(hull) < most else []
    return np.array(sorted({*hull, *even}), dtype=np.int64)


def _above(points: Points, a: int, b: int, c: int) -> bool:
    """Whether b is on or above the line from a to c, in (bytes, cost)."""
    (x0, y0), (x1, y1), (x2, y2) = ((int(points.nbytes[i]), int(points.cost[i])) for i in (a, b, c))
    return (y1 - y0) * (x2 - x0) >= (y2 - y0) * (x1 - x0)
