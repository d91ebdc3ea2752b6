"""The least peak of a stage whose layers choose among given plans: a shortest path with several weights.

See :mod:`megatron_adacc.planner.least` for what the weights mean. Through the layers of a chunk, in the order of
execution, a *label* is what the layers so far come to:

    S   bytes that they hold            N   the most that a micro-batch had alive while one of them ran
    E   error                           W   by moment, bytes of all micro-batches alive

A label that another one is at most as large as in every weight is left out, and so is one that cannot end below the
peak that is known already. Then the chunks are put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_adacc.planner.dominance import Ints, undominated
from megatron_adacc.planner.problem import Problem

# Labels that are carried at once; if there are more, the most hopeful go on.
MOST_LABELS = 4000

# Above all bytes that the planner counts.
_NOTHING = 2**62


@dataclass(frozen=True)
class Choices:
    """Plans of one class: their numbers, held bytes, bytes needed while the layer runs (held ones included), error."""

    plans: Ints
    held: Ints
    needed: Ints
    error: Ints

    @staticmethod
    def undominated(plans: Ints, held: Ints, needed: Ints, error: Ints) -> Choices:
        """Those that no other one beats in all three; of equal ones the first."""
        kept = undominated(np.zeros(len(plans), dtype=np.int64), [held, needed, error])
        return Choices(plans[kept], held[kept], needed[kept], error[kept])


@dataclass(frozen=True)
class Found:
    """``plans``: by position; without any, there is nothing below. ``cut_short``: there were too many labels, and the
    least peak may be a smaller one."""

    peak_bytes: int
    plans: tuple[int, ...]
    cut_short: bool


@dataclass(frozen=True)
class _Labels:
    """``alive``: [moments, labels], W; ``lead``: [moments, labels], N - S where the moment's chunk is among those
    that are through; ``chosen``: [positions so far, labels], numbers of plans."""

    alive: Ints
    lead: Ints
    error: Ints
    chosen: Ints

    def subset(self, index: Ints) -> _Labels:
        return _Labels(self.alive[:, index], self.lead[:, index], self.error[index], self.chosen[:, index])


def least_peak(problem: Problem, choices: Sequence[Choices], budget: int, below: int | None) -> Found:
    """The least peak, and its plans by position, if it is less than ``below``.

    budget: of error, in the units of the choices."""
    nothing = _NOTHING if below is None else below
    if any(not len(own.plans) for own in choices):
        return Found(nothing, (), False)
    search = _Search(problem, choices, budget, nothing)
    none = np.zeros((len(search.moments), 1), dtype=np.int64)
    labels = _Labels(none, none, none[0], np.zeros((0, 1), dtype=np.int64))
    for chunk in search.chunks:
        labels = search.together(labels, search.through(chunk))
    peaks = search.peaks(labels.alive, labels.lead)
    if not len(peaks) or peaks.min() >= nothing:
        return Found(nothing, (), search.cut_short)
    best = int(np.argmin(peaks))
    positions = [position for chunk in search.chunks for position in search.positions[chunk]]
    plans = dict(zip(positions, labels.chosen[:, best].tolist(), strict=True))
    return Found(int(peaks[best]), tuple(plans[position] for position in range(len(plans))), search.cut_short)


class _Search:
    def __init__(self, problem: Problem, choices: Sequence[Choices], budget: int, below: int) -> None:
        self._problem, self._choices, self._budget, self._below = problem, choices, budget, below
        self.moments = problem.possible_peaks
        self.cut_short = False
        self.positions: dict[int, list[int]] = {}
        for position, index in enumerate(problem.sequence):
            self.positions.setdefault(problem.classes[index].chunk, []).append(position)
        self.chunks = sorted(self.positions)
        self._base = _ints(problem.fixed_bytes + moment.beside_bytes for moment in self.moments)
        self._heads = _ints(problem.transient_bytes if moment.head else 0 for moment in self.moments)
        self._times = np.array([moment.alive for moment in self.moments], dtype=np.int64).T  # [classes, moments]

    def peaks(self, alive: Ints, lead: Ints) -> Ints:
        """[moments, labels] twice -> [labels]"""
        return (self._base[:, None] + alive + np.maximum(lead, self._heads[:, None])).max(axis=0)

    def _least_alive(self, chunk: int) -> Ints:
        """[moments]: what the chunk's layers hold at least."""
        indices = [self._problem.sequence[position] for position in self.positions[chunk]]
        return sum((self._times[i] * int(self._choices[i].held.min()) for i in indices), start=self._base * 0)

    def through(self, chunk: int) -> _Labels:
        """The labels of a whole chunk."""
        problem = self._problem
        indices = [problem.sequence[position] for position in self.positions[chunk]]
        others = sum((self._least_alive(other) for other in self.chunks if other != chunk), start=self._base * 0)
        runs = _ints(moment.chunk == chunk for moment in self.moments)
        # Behind each layer: what is held at least, what has been left, and what the layers there need at least.
        held_behind, most_behind, left_behind, alive_behind = [0], [0], [0], [self._base * 0]
        for i in reversed(indices):
            own = self._choices[i]
            least = int(own.held.min())
            most_behind.append(max(int(own.needed.min()) + left_behind[-1], least + most_behind[-1]))
            held_behind.append(held_behind[-1] + least)
            left_behind.append(left_behind[-1] + problem.classes[i].left_bytes)
            alive_behind.append(alive_behind[-1] + self._times[i] * least)
        held = most = error = np.zeros(1, dtype=np.int64)
        alive = np.zeros((len(self.moments), 1), dtype=np.int64)
        chosen = np.zeros((0, 1), dtype=np.int64)
        uneven = [m for m in range(len(self.moments)) if len({int(self._times[i, m]) for i in indices}) > 1]
        for number, i in enumerate(indices):
            own, rest = self._choices[i], len(indices) - number - 1
            before, choice = (grid.ravel() for grid in np.indices((len(held), len(own.plans))))
            most = np.maximum(most[before], held[before] + own.needed[choice] + left_behind[rest])
            held = held[before] + own.held[choice]
            error = error[before] + own.error[choice]
            alive = alive[:, before] + self._times[i][:, None] * own.held[choice]
            # What it comes to at best.
            at_end = np.maximum(most, held + most_behind[rest]) - held - held_behind[rest]
            peaks = self.peaks(alive + (alive_behind[rest] + others)[:, None], runs[:, None] * at_end)
            index = np.flatnonzero((error <= self._budget) & (peaks < self._below))
            more = [w for m in uneven for w in (alive[m, index], alive[m, index] - held[index] * runs[m])]
            kept = index[undominated(index * 0, [held[index], most[index], error[index], *more])]
            if len(kept) > MOST_LABELS:
                kept = kept[np.argsort(peaks[kept], kind="stable")[:MOST_LABELS]]
                self.cut_short = True
            held, most, error, alive = held[kept], most[kept], error[kept], alive[:, kept]
            chosen = np.concatenate((chosen[:, before[kept]], own.plans[choice[kept]][None, :]))
        return _Labels(alive, runs[:, None] * (most - held), error, chosen)

    def together(self, one: _Labels, other: _Labels) -> _Labels:
        """The labels of both's chunks."""
        first, second = (grid.ravel() for grid in np.indices((len(one.error), len(other.error))))
        a, b = one.subset(first), other.subset(second)
        both = _Labels(a.alive + b.alive, a.lead + b.lead, a.error + b.error, np.concatenate((a.chosen, b.chosen)))
        peaks = self.peaks(both.alive, both.lead)
        index = np.flatnonzero((both.error <= self._budget) & (peaks < self._below))
        both = both.subset(index)
        weights = [*both.alive, *(both.alive + both.lead), both.error]
        kept = undominated(both.error * 0, weights)
        if len(kept) > MOST_LABELS:
            kept = kept[np.argsort(peaks[index][kept], kind="stable")[:MOST_LABELS]]
            self.cut_short = True
        return both.subset(kept)


def _ints(values: Iterable[int]) -> Ints:
    return np.array([int(value) for value in values], dtype=np.int64)
