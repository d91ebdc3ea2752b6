"""The least limit that has a plan: what a stage's layers need at least, over all their plans, wherever they stand.

What a plan means for the memory of its stage are two numbers: the bytes b that it holds, and M = held + extra, the most
that lives while the layer runs. With g_l for the bytes that the backwards behind l have left, and S_l for the held
bytes of the layers before l in its chunk,

    peak = max over moments of  fixed + beside + sum of alive * held - S + N      N = max over l of ( S_l + M_l + g_l )

S: of the whole chunk. All of it grows with b and with M. So of the plans of a class only those count that no other
beats in both, a handful; and going through the layers in the order of execution, only the pairs (S, N) that no other
beats (and what is alive at each moment, and the error, where these say more): a shortest path with two weights.

M is asked for plan by plan, which takes milliseconds, and there are many plans. But floors bound it: the search is made
with the floor for a plan whose M is not known; then the plans of what came out are asked. When it consists of known
ones it is the least of all. Where that takes too long, or a layer has too many plans to list, what is known by then is
a limit that works, and it is not said that it is the least.

No microseconds are used: the least limit is the same whatever was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_adacc.planner.floors import Floor, possible_actions
from megatron_adacc.planner.grid import Grid
from megatron_adacc.planner.listing import AllPlans, all_plans, lightest_actions
from megatron_adacc.planner.pairs import Choices, least_peak
from megatron_adacc.planner.problem import LayerClass, Problem
from megatron_adacc.planner.solution import COMPRESS, Extra, LayerAnswer, Outcome, Violation, evaluate_layer

# So many plans are asked for their extra bytes.
MOST_ASKED = 400


@dataclass(frozen=True)
class Least:
    """``layers`` in the order of execution, and their peak. ``proven``: no plan has a smaller one."""

    layers: tuple[LayerAnswer, ...]
    peak_bytes: int
    proven: bool


def least_memory(
    problem: Problem, extra: Extra, floors: Sequence[Sequence[Floor]] | None, errors: Grid | None
) -> Least | None:
    """The plans of the least peak that were found; the problem's limit plays no part. None where there is no plan.

    errors: of lexicographic.error_grid."""
    budget = errors.floor(problem.error_budget) if errors is not None and problem.error_budget is not None else 0
    lossless = problem.error_budget == 0
    pools = [
        _pool(layer, tuple(floors[i]) if floors is not None else (), errors, lossless, _asking(extra, i))
        for i, layer in enumerate(problem.classes)
    ]
    if any(pool.first is None for pool in pools):
        return None
    for pool in pools:
        pool.ask([pool.first])
    search = _Search(problem, pools, budget)
    if search.best is None:  # the least errors are above the budget
        return None
    search.by_neighbours()
    proven = search.prove()
    layers = tuple(
        pools[index].answer(index, plan) for index, plan in zip(problem.sequence, search.best_plans, strict=True)
    )
    return Least(layers, search.best, proven)


def _asking(extra: Extra, index: int) -> Callable[[Mapping[str, str]], int]:
    return lambda actions: max(0, extra(index, actions))


class _Pool:
    """The plans of one class: held bytes, error, and what each needs while it runs, as far as it is known.

    ``complete``: all there are are listed."""

    def __init__(self, layer: LayerClass, floors: Sequence[Floor], ask: Callable[[Mapping[str, str]], int]) -> None:
        self._layer, self._floors, self._ask = layer, floors, ask
        self.complete = False
        self.nbytes = self.error = self.needed = np.zeros(0, dtype=np.int64)
        self.known = np.zeros(0, dtype=np.bool_)
        self.first: int | None = None
        self.asked = 0

    def actions(self, plan: int) -> Mapping[str, str]:
        raise NotImplementedError

    def neighbours(self, plan: int) -> list[int]:
        """Plans that differ in one buffer, and may need less or hold less."""
        raise NotImplementedError

    def ask(self, plans: Sequence[int | None]) -> None:
        """What these need, exactly."""
        for plan in plans:
            if plan is not None and not self.known[plan]:
                self.needed[plan] = self.nbytes[plan] + self._ask(self.actions(plan))
                self.known[plan] = True
                self.asked += 1

    def choices(self, known_only: bool) -> Choices:
        plans = np.flatnonzero(self.known) if known_only else np.arange(len(self.nbytes))
        # Of equal ones the known first.
        plans = plans[np.argsort(~self.known[plans], kind="stable")]
        return Choices.undominated(plans, self.nbytes[plans], self.needed[plans], self.error[plans])

    def ideal(self) -> Choices:
        """A plan, which need not exist, that holds and needs no more than any."""
        held = sum(min([b.bytes, *(codec.bytes for codec in b.codecs)]) for b in self._layer.buffers if b.must_hold)
        needed = [held]
        for floor in self._floors:
            adds = [
                min(floor.adds.get((buffer.site, action), 0) for action in possible_actions(self._layer, i))
                for i, buffer in enumerate(self._layer.buffers)
            ]
            needed.append(floor.base_bytes + sum(adds))
        one = np.array([[0], [held], [max(needed)], [0]], dtype=np.int64)
        return Choices(*one)

    def answer(self, index: int, plan: int) -> LayerAnswer:
        actions = self.actions(plan)
        return LayerAnswer(
            index, actions, evaluate_layer(self._layer, actions), int(self.needed[plan] - self.nbytes[plan])
        )


class _Listed(_Pool):
    """All plans are listed."""

    def __init__(self, plans: AllPlans, floors: tuple[Floor, ...], ask: Callable[[Mapping[str, str]], int]) -> None:
        super().__init__(plans.layer, floors, ask)
        self._plans = plans
        self.complete = True
        self.nbytes, self.error = plans.nbytes, plans.error
        self.needed = plans.at_least(floors)
        self.known = np.zeros(len(plans), dtype=np.bool_)
        exact = np.flatnonzero(plans.error == plans.error.min()) if len(plans) else np.zeros(0, dtype=np.int64)
        if len(exact):
            self.first = int(exact[np.lexsort((self.needed[exact], self.nbytes[exact]))[0]])

    def actions(self, plan: int) -> Mapping[str, str]:
        return self._plans.actions(plan)

    def neighbours(self, plan: int) -> list[int]:
        return self._plans.neighbours(plan)


class _Met(_Pool):
    """Only plans that were met are listed, by their actions."""

    def __init__(
        self, layer: LayerClass, floors: tuple[Floor, ...], errors: Grid | None, lossless: bool,
        ask: Callable[[Mapping[str, str]], int],
    ) -> None:  # fmt: skip
        super().__init__(layer, floors, ask)
        self._errors, self._lossless = errors, lossless
        self._met: dict[tuple[str, ...], int] = {}
        self._listed: list[dict[str, str]] = []
        lightest = lightest_actions(layer)
        if lightest is not None:
            self.first = self._meet(lightest)

    def actions(self, plan: int) -> Mapping[str, str]:
        return self._listed[plan]

    def neighbours(self, plan: int) -> list[int]:
        actions = self._listed[plan]
        found = [
            self._meet({**actions, buffer.site: other})
            for i, buffer in enumerate(self._layer.buffers)
            for other in possible_actions(self._layer, i)
            if other != actions[buffer.site]
        ]
        return [plan for plan in found if plan is not None]

    def _meet(self, actions: dict[str, str]) -> int | None:
        key = tuple(actions[buffer.site] for buffer in self._layer.buffers)
        if key in self._met:
            return self._met[key]
        try:
            outcome = evaluate_layer(self._layer, actions)
        except Violation:
            return None
        if self._lossless and outcome.error:
            return None
        plan = self._met[key] = len(self._listed)
        self._listed.append(actions)
        needed = max([outcome.held_bytes, *(floor.of(actions) for floor in self._floors)])
        self.nbytes = np.append(self.nbytes, outcome.held_bytes)
        self.error = np.append(self.error, self._units(outcome, actions))
        self.needed = np.append(self.needed, needed)
        self.known = np.append(self.known, False)
        return plan

    def _units(self, outcome: Outcome, actions: Mapping[str, str]) -> int:
        if self._errors is None or not outcome.error:
            return 0
        codecs = {(b.site, COMPRESS + c.name): c.error for b in self._layer.buffers for c in b.codecs}
        return sum(self._errors.units(codecs.get(item, 0.0)) for item in actions.items())


def _pool(
    layer: LayerClass, floors: tuple[Floor, ...], errors: Grid | None, lossless: bool,
    ask: Callable[[Mapping[str, str]], int],
) -> _Pool:  # fmt: skip
    plans = all_plans(layer, errors, lossless)
    return _Listed(plans, floors, ask) if plans is not None else _Met(layer, floors, errors, lossless, ask)


class _Search:
    """The least peak of plans that are known, and whether others could have a smaller one."""

    def __init__(self, problem: Problem, pools: Sequence[_Pool], budget: int) -> None:
        self._problem, self._pools, self._budget = problem, pools, budget
        self.best: int | None = None
        self.best_plans: tuple[int, ...] = ()
        self._update()

    def by_neighbours(self) -> None:
        """Ask the neighbours of what is best, as long as that makes it better."""
        seen: set[tuple[int, int]] = set()
        while True:
            new = [
                item
                for item in dict.fromkeys(zip(self._problem.sequence, self.best_plans, strict=True))
                if item not in seen
            ]
            if not new or self._spent():
                return
            for index, plan in new:
                seen.add((index, plan))
                pool = self._pools[index]
                for other in pool.neighbours(plan):
                    better = pool.needed[other] < pool.needed[plan] or pool.nbytes[other] < pool.nbytes[plan]
                    if better and not pool.known[other] and not self._spent():
                        pool.ask([other])
            self._update()

    def prove(self) -> bool:
        """Whether nothing that is not known can have a smaller peak; what could is asked."""
        while not self._spent():
            choices = [pool.choices(known_only=False) if pool.complete else pool.ideal() for pool in self._pools]
            found = least_peak(self._problem, choices, self._budget, self.best)
            if not found.plans or found.cut_short:
                return not found.cut_short
            if not all(pool.complete for pool in self._pools):
                return False
            pairs = set(zip(self._problem.sequence, found.plans, strict=True))
            unknown = sorted((i, plan) for i, plan in pairs if not self._pools[i].known[plan])
            assert unknown, "a smaller peak of plans that are known was overlooked"
            for index, plan in unknown:
                self._pools[index].ask([plan])
            self._update()
        return False

    def _update(self) -> None:
        choices = [pool.choices(known_only=True) for pool in self._pools]
        found = least_peak(self._problem, choices, self._budget, self.best)
        if found.plans:
            self.best, self.best_plans = found.peak_bytes, found.plans

    def _spent(self) -> bool:
        return sum(pool.asked for pool in self._pools) >= MOST_ASKED
