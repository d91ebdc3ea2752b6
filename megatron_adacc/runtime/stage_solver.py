"""Solve one pipeline stage, agreed between the ranks that train it, and solve it again when something has changed.

The first rank of the setting's groups solves; all take its plan, or its refusal. What may change after the first
answer: the limit (a failed allocation, memory above its share), bytes that the room did not know of (what the first
steps measured), the errors of lossy actions (what the monitor sees of them now), and layers in which nothing may be
lossy any more.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch

from megatron_adacc.cost.layer_problem import LayerProblem
from megatron_adacc.cost.limits import Limit
from megatron_adacc.cost.stage_plan import (
    ClassFacts,
    NothingFits,
    Room,
    StagePlan,
    given_stage,
    plain_bytes,
    plan_stage,
)
from megatron_adacc.errors import UserError
from megatron_adacc.planner import Plan
from megatron_adacc.planner.problem import CodecChoice
from megatron_adacc.planner.solution import held_as
from megatron_adacc.runtime.agree import check_equal, first_rank_says
from megatron_adacc.runtime.setting import Setting, device_limit
from megatron_adacc.runtime.state_offer import solve_with_states


@dataclass
class Change:
    """What differs now from what the setting says.

    ``limit``: in place of the setting's. ``more_bytes``: on the device beside what the room says. ``errors``: by site,
    the factor by which a lossy action's error has grown since it was measured. ``exact``: places of layers whose
    actions must be lossless."""

    limit: Limit | None = None
    more_bytes: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    exact: set[int] = field(default_factory=set)


class StageSolver:
    """See the module. ``change`` is for the caller to write, before solve(), alike on all ranks of the groups as far
    as ``exact`` goes; of the rest the first rank's counts. ``room``: of the last answer."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.change = Change()
        self.room: Room | None = None

    def error_of(self, stage: StagePlan, growth: Mapping[str, float]) -> float:
        """What the stage's plan costs now: the root mean square over its layers of their relative gradient errors, if
        by site the errors of lossy actions have grown by these factors, too; of those that are known on this rank."""
        squares = []
        for answer in stage.solution.layers:
            fact = stage.facts[answer.class_index]
            for buffer in (fact.with_lossy or fact.problem).layer_class.buffers:
                held = held_as(buffer, answer.actions[buffer.site])
                if isinstance(held, CodecChoice):
                    factor = self.change.errors.get(buffer.site, 1.0) * growth.get(buffer.site, 1.0)
                    squares.append(held.error * factor**2)
        return math.sqrt(math.fsum(squares) / len(stage.solution.layers)) if stage.solution.layers else 0.0

    def limit_on(self, device: torch.device) -> Limit:
        """What the next plan has to fit into."""
        return self.change.limit or self.setting.limit or device_limit(device)

    def solve(self, facts: Sequence[ClassFacts], given: Plan | None = None, least: bool = False) -> StagePlan:
        """The fastest plan within the limit, the same on all ranks of the groups. All call it at the same point.

        Args:
            facts: the classes that :meth:`parts` gives.
            given: a plan to be taken as it is, if it fits into the limit.
            least: where nothing fits, take the plan of the least memory.

        Raises:
            UserError: on all ranks: where nothing fits, or where a rank has other layers."""
        device = facts[0].simulator.device
        limit, room = self.limit_on(device), self.setting.room(device)
        room = replace(
            room,
            fixed_bytes=max(0, room.fixed_bytes + self.change.more_bytes),
            floor_bytes=max(0, room.floor_bytes + self.change.more_bytes),
        )
        check_equal([line for fact in facts for line in described(fact)], self.setting.groups)
        own: StagePlan | None = None
        states = self.setting.states if limit.total_bytes is not None else None
        message: tuple[str | None, int, str | None] = (None, 0, None)  # the plan, bytes of state, or why there is none
        if all(group.rank() == 0 for group in self.setting.groups):
            try:
                if states is None:
                    own, state_bytes = self._own(facts, limit, room, given, least), 0
                else:
                    own, state_bytes = solve_with_states(
                        states,
                        facts,
                        limit,
                        room,
                        least,
                        lambda room, least: self._own(facts, limit, room, given, least),
                    )
                message = (own.plan.to_json(), state_bytes, None)
            except UserError as error:
                message = (None, 0, str(error))
        text, state_bytes, refusal = first_rank_says(message, self.setting.groups)
        if refusal is not None:
            raise UserError(refusal)
        assert text is not None
        if states is not None:
            states.allow(state_bytes)
            room = states.room(room, state_bytes)
        self.room = room
        return own or given_stage(facts, Plan.from_json(text), limit, room)

    def _own(self, facts: Sequence[ClassFacts], limit: Limit, room: Room, given: Plan | None, least: bool) -> StagePlan:
        if given is not None:
            # One that is for other layers than these is not taken.
            with contextlib.suppress(UserError):
                found = given_stage(facts, given, limit, room)
                if _fits(found):
                    return found
        budget = self.setting.error_budget
        if budget:
            facts = [self._with_lossy(fact) for fact in facts]
        for _ in range(4):
            try:
                return plan_stage(facts, limit, room, error_budget=budget)
            except NothingFits as error:
                if not least or error.least_bytes is None:
                    raise
                limit = _raised(limit, error.least_bytes, facts)
        raise UserError("No plan was found, not even the one of the least memory; use the plan 'recompute'.")

    def _with_lossy(self, fact: ClassFacts) -> ClassFacts:
        """The class with lossy actions on offer, at the errors that are known now."""
        if self.change.exact & set(fact.places) or fact.with_lossy is None:
            return fact
        return replace(fact, problem=_with_errors(fact.with_lossy, self.change.errors))

    def parts(self, facts: Mapping[str, ClassFacts], names: Mapping[int, str]) -> list[ClassFacts]:
        """One class for each graph, virtual pipeline stage (which differ in how many micro-batches are in flight), and
        for layers that must be exact; in the order of execution. ``names``: by place, which of the facts."""
        chunk_of, in_flight = self.setting.chunk_of, self.setting.in_flight
        places: dict[tuple[int, str, bool], list[int]] = {}
        for place in sorted(names):
            chunk = chunk_of[place] if place < len(chunk_of) else 0
            places.setdefault((chunk, names[place], place in self.change.exact), []).append(place)
        parts = [facts[name].part(tuple(found), chunk, in_flight[chunk]) for (chunk, name, _), found in places.items()]
        return sorted(parts, key=lambda fact: (fact.layer_class.chunk, fact.places[0]))


def _fits(stage: StagePlan) -> bool:
    needed = stage.predicted.held_bytes if stage.limit.total_bytes is None else stage.predicted.peak_bytes
    return needed <= stage.limit_bytes


def _raised(limit: Limit, least_bytes: int, facts: Sequence[ClassFacts]) -> Limit:
    if limit.share is not None:
        return Limit(share=Fraction(least_bytes, plain_bytes(facts)))
    return Limit(total_bytes=least_bytes)


def _with_errors(problem: LayerProblem, factors: Mapping[str, float]) -> LayerProblem:
    buffers = tuple(
        replace(b, codecs=tuple(replace(c, error=c.error * factors[b.site] ** 2) for c in b.codecs))  # squares
        if b.site in factors
        else b
        for b in problem.layer_class.buffers
    )
    return replace(problem, layer_class=replace(problem.layer_class, buffers=buffers))


def described(fact: ClassFacts) -> list[str]:
    """What a plan depends on and all ranks that follow it must have in common, one line a buffer."""
    places = ", ".join(map(str, fact.places))
    return [f"layers {places} of {fact.problem.graph.module}"] + [
        f"{b.site} of {b.bytes} bytes" + (", held under any plan" if b.must_hold else "")
        for b in fact.layer_class.buffers
        if b.saved
    ]
