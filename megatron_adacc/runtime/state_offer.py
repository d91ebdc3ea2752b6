"""The optimizer's state beside the activations: what one limit in bytes leaves to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_adacc.cost.limits import Limit
from megatron_adacc.cost.stage_plan import ClassFacts, NothingFits, Room, StagePlan, none_predicted
from megatron_adacc.planner.joint import Activations, StateForm, plan_jointly


@dataclass(frozen=True)
class StateOffer:
    """What the optimizer's state on this rank may become.

    ``counted_bytes``: of m and v as the room counts them. ``forms``: alike on all ranks that get one plan; a single one
    where the state is settled. ``price``: of a unit of error, as a share of a step without a plan. ``micro_batches``:
    of a step. ``workspace_bytes``: what the update and a change of form need beside the state, when no activation is
    alive. ``allow``: told how many bytes m and v may take from now on; called on every rank after each solve."""

    counted_bytes: int
    forms: Sequence[StateForm]
    price: float
    micro_batches: int
    workspace_bytes: int
    allow: Callable[[int], None]

    def room(self, room: Room, state_bytes: int) -> Room:
        """The room with so many bytes of m and v."""
        more = state_bytes - self.counted_bytes
        step = max(room.floor_bytes, room.fixed_bytes + self.workspace_bytes)
        return replace(room, fixed_bytes=max(0, room.fixed_bytes + more), floor_bytes=max(0, step + more))

    @property
    def least_bytes(self) -> int:
        """Of the smallest form."""
        return min(form.bytes for form in self.forms)


def solve_with_states(
    offer: StateOffer,
    facts: Sequence[ClassFacts],
    limit: Limit,
    room: Room,
    least: bool,
    solve: Callable[[Room, bool], StagePlan],
) -> tuple[StagePlan, int]:
    """The stage's plan and the bytes of m and v beside it; see megatron_adacc/planner/joint.py.

    Args:
        limit: in bytes, of everything.
        room: with the state as the offer counts it.
        least, solve: solve(room, least) is the activations' plan in a room; with least the one of least memory where
            none fits.

    Raises:
        NothingFits: not even with the smallest state."""
    total = limit.total_bytes
    assert total is not None

    def ask(left: int) -> Activations[StagePlan] | None:
        state_bytes = total - left
        try:
            found = solve(offer.room(room, state_bytes), False)
        except NothingFits:
            return None
        return Activations(found.solution.cost_us, found.predicted.peak_bytes - state_bytes, found)

    plain_us = offer.micro_batches * sum(len(fact.places) * fact.step_us for fact in facts)
    kept = none_predicted(facts, offer.room(room, 0)).peak_bytes
    joint = plan_jointly(
        offer.forms, ask, total, offer.price * plain_us, micro_batches=offer.micro_batches, kept_bytes=kept
    )
    if joint is None:
        return solve(offer.room(room, offer.least_bytes), least), offer.least_bytes
    # What is left beyond the largest form is nobody's.
    return joint.activations.plan, min(joint.state_bytes, max(form.bytes for form in offer.forms))
