"""What is alive beside the held bytes while a layer runs, and where in the stage a layer stands.

The backward pass takes the layers last to first; each, when it is done, has freed what it held. Let e_l be the extra
bytes of layer l, alive beyond the held ones while its backward (or forward) runs, and after_l the held bytes of one
micro-batch in the layers behind l of its chunk. Then (4) is

    fixed + sum of in_flight * held + lead <= limit,        lead = max(transient, max over l of (e_l - after_l))

Order. Among the layers of a class, e descending in the order of execution makes lead smallest. Proof by exchange: let
i stand directly before j with e_i < e_j, and let A be the bytes behind j. Their part of lead is
max(e_i - b_j - A, e_j - A) = e_j - A, since e_i - b_j < e_j. Exchanged it is max(e_j - b_i - A, e_i - A) <= e_j - A,
and no other layer sees a change. So exchanging towards descending e never makes lead larger. This is why a stage
keeps much in its last layers and recomputes in its first.

Search. Extra bytes belong to whole plans, not to the edges of the flow, so the flow cannot see them. But only the last
layers matter: once E - R bytes lie behind a layer, E being the most extra bytes of any, it cannot raise lead above R.
So for a lead R the last class of each chunk ends in a *tail*: k copies of one plan of the frontier with e <= R, and
k b >= E - R; all other layers are the flow, at limit - R. Which R are tried, and with which tail,
follows from their estimated cost at the price of a byte, the slope of the frontiers where they meet the limit. What
comes out is placed and counted with its true extra bytes, and only that is believed.

The result is a good plan, not proven to be the best; how far it can be from that is known, because the flow with the
least lead seen is a bound for all plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from megatron_adacc.planner.dominance import Ints, undominated
from megatron_adacc.planner.frontier import LayerPaths, Points, enumerate_plans
from megatron_adacc.planner.grid import Grid
from megatron_adacc.planner.problem import Problem
from megatron_adacc.planner.solution import Extra, LayerAnswer, evaluate_layer

MOST_CANDIDATES = 32
# Plans of one layer that are carried at once before the frontier is given up for the lossless one.
MOST_PLANS = 300_000


class Remembered:
    """``extra``, asked once for each plan."""

    def __init__(self, problem: Problem, extra: Extra) -> None:
        self._sites = [[buffer.site for buffer in layer.buffers] for layer in problem.classes]
        self._extra = extra
        self._known: dict[tuple[int, tuple[str, ...]], int] = {}

    def __call__(self, class_index: int, actions: Mapping[str, str]) -> int:
        key = (class_index, tuple(actions[site] for site in self._sites[class_index]))
        if key not in self._known:
            self._known[key] = max(0, self._extra(class_index, actions))
        return self._known[key]


@dataclass(frozen=True)
class Candidates:
    """Plans of one class whose extra bytes are known."""

    points: Points
    extra: Ints


@dataclass(frozen=True)
class Design:
    """A lead, and for each class the tail: a candidate (None without) and how many layers have it. ``estimate``:
    what lead and tails cost at the price of a byte."""

    lead: int
    tails: tuple[tuple[int | None, int], ...]
    estimate: float


def find_candidates(
    problem: Problem, class_index: int, paths: LayerPaths, errors: Grid | None, extra: Extra
) -> Candidates:
    """Plans of the frontier from the least bytes to the most, and their extra bytes."""
    points = enumerate_plans(paths, most_plans=MOST_PLANS) or enumerate_plans(paths.lossless())
    assert points is not None  # without a limit on the plans carried
    lossless = np.flatnonzero(points.error == 0)
    chosen = _spread(lossless, points, MOST_CANDIDATES)
    if errors is not None and problem.error_budget:
        share = errors.floor(problem.error_budget) // problem.classes[class_index].count
        within = np.flatnonzero(points.error <= share)
        within = within[undominated(np.zeros_like(within), [points.nbytes[within], points.cost[within]])]
        half = MOST_CANDIDATES // 2
        chosen = np.unique(np.concatenate((_spread(lossless, points, half), _spread(within, points, half))))
    found = [extra(class_index, points.actions[i]) for i in chosen]
    return Candidates(points.subset(chosen), np.array(found, dtype=np.int64))


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


def byte_price(problem: Problem, found: list[Candidates], room: int) -> float:
    """Cost units that a byte of ``room`` is worth: at this price the cheapest plans need about the room."""

    def needed(price: float) -> int:
        total = 0
        for layer, own in zip(problem.classes, found, strict=True):
            value = own.points.cost + price * layer.in_flight * own.points.nbytes
            total += layer.count * layer.in_flight * int(own.points.nbytes[int(np.argmin(value))])
        return total

    low, high = 0.0, 1.0
    while needed(high) > room and high < 1e12:
        high *= 4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if needed(middle) > room else (low, middle)
    return high


def designs(problem: Problem, found: list[Candidates], price: float, most_extra: list[int]) -> list[Design]:
    """A design for each lead among the candidates' extra bytes, the cheapest estimate first. ``most_extra``: of each
    class, the most extra bytes that a layer of the flow is taken to need."""
    leads = sorted({problem.transient_bytes, *(int(e) for own in found for e in own.extra), *most_extra})
    planned: list[Design] = []
    for lead in leads:
        if lead < problem.transient_bytes:
            continue
        tails: list[tuple[int | None, int]] = []
        estimate = price * lead
        for i, (layer, own) in enumerate(zip(problem.classes, found, strict=True)):
            chunk = [j for j, other in enumerate(problem.classes) if other.chunk == layer.chunk]
            short = max(most_extra[j] for j in chunk) - lead
            if i != chunk[-1] or short <= 0 or not len(own.extra):
                tails.append((None, 0))
                continue
            # extra <= lead, and enough copies; never more than there are layers
            copies = np.minimum(-(-short // np.maximum(own.points.nbytes, 1)), layer.count)
            value = own.points.cost + price * layer.in_flight * own.points.nbytes
            penalty = np.where(own.extra <= lead, copies * (value - value.min()), np.inf)
            best = int(np.argmin(penalty))
            estimate += float(penalty[best])
            tails.append((best, int(copies[best])))
        # With the tails of a smaller lead this one has nothing to offer.
        if np.isfinite(estimate) and all(tuple(tails) != earlier.tails for earlier in planned):
            planned.append(Design(lead, tuple(tails), estimate))
    return sorted(planned, key=lambda design: design.estimate)


def without_tails(problem: Problem, found: list[Candidates], design: Design, errors: Grid | None) -> Problem | None:
    """The problem of the layers that are not in a tail, None where the tails alone pass the error budget."""
    fixed, budget = problem.fixed_bytes, problem.error_budget
    classes = []
    for layer, own, (plan, copies) in zip(problem.classes, found, design.tails, strict=True):
        classes.append(replace(layer, count=layer.count - copies))
        if plan is not None:
            fixed += layer.in_flight * copies * int(own.points.nbytes[plan])
            if budget is not None and errors is not None:
                budget -= copies * errors.value(int(own.points.error[plan]))
    if budget is not None and budget < 0:
        return None
    return replace(problem, classes=tuple(classes), fixed_bytes=fixed, error_budget=budget, transient_bytes=design.lead)


def placed(
    problem: Problem, found: list[Candidates], design: Design, layers: tuple[LayerAnswer, ...], extra: Extra
) -> tuple[LayerAnswer, ...]:
    """Flow and tails in the order of execution, with their extra bytes: of each class by descending extra bytes."""
    everything: list[LayerAnswer] = []
    for i, (layer, own, (plan, copies)) in enumerate(zip(problem.classes, found, design.tails, strict=True)):
        answers = [answer for answer in layers if answer.class_index == i]
        if plan is not None and copies:
            actions = own.points.actions[plan]
            answers += [LayerAnswer(i, actions, evaluate_layer(layer, actions))] * copies
        answers = [replace(answer, extra_bytes=extra(i, answer.actions)) for answer in answers]
        everything += sorted(answers, key=lambda a: (-a.extra_bytes, a.outcome.held_bytes, -a.outcome.cost_us))
    return tuple(everything)
