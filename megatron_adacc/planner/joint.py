"""One limit for two kinds of memory: the optimizer's state in fewer bits, and activations in fewer bytes.

    minimise  micro_batches A(limit - b_i) + us_i + price e_i      over the forms i that the state may have

b_i, e_i and us_i are the state's bytes, its error and the microseconds that its update takes more; A(bytes) is what the
activations cost in microseconds with so many bytes, which never rises with them. price is the exchange: microseconds a
step for one unit of error. docs/states.md says what a unit is.

A solve of the activations is dear, so not every form gets one. The forms are sorted by bytes, most first, errors
rising. Between two that were asked for, i < j, none costs less than

    micro_batches A(limit - b_j) + min us + price e_{i+1}                                                     (8)

An interval whose bound (8) is not below the best that is known is closed; otherwise its middle is asked for. What each
planner would have done alone is asked for first: all of the limit to exact state, and all that activations can use
without cost to activations. So the answer is never worse than the better of the two, also where A is not exact.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_adacc.errors import UserError


@dataclass(frozen=True)
class StateForm:
    """A form of the state: ``bytes``, ``error`` (>= 0, units of the caller's), ``us`` microseconds that its update
    takes more than in the exact form."""

    bytes: int
    error: float
    us: float = 0.0


@dataclass(frozen=True)
class Activations[Plan]:
    """What the activations' planner answers: ``us`` added to a micro-batch; ``bytes`` in all at the peak, at most those
    that it was given; its plan."""

    us: float
    bytes: int
    plan: Plan


@dataclass(frozen=True)
class JointPlan[Plan]:
    """``form``: of the state. ``cost_us``: the objective; no choice costs less than ``bound_us``. ``state_bytes``: what
    the limit leaves to the state beside these activations, >= form.bytes. ``questions``: solves of the activations."""

    form: StateForm
    activations: Activations[Plan]
    cost_us: float
    bound_us: float
    state_bytes: int
    questions: int


def plan_jointly[Plan](
    forms: Sequence[StateForm],
    activations: Callable[[int], Activations[Plan] | None],
    limit_bytes: int,
    price_us: float,
    *,
    micro_batches: int = 1,
    kept_bytes: int | None = None,
    most_questions: int = 64,
) -> JointPlan[Plan] | None:
    """The cheapest pair within the limit; of equal costs the one of less error. None where nothing fits.

    Args:
        forms: any order; one that another beats in bytes, error and microseconds is passed over.
        activations: the answer for so many bytes, None where they do not suffice.
        price_us: microseconds of a step for a unit of error.
        micro_batches: of a step.
        kept_bytes: with which activations cost nothing, where that is known.
        most_questions: after so many the best known is given, with its bound; those asked first are always asked.

    Raises:
        UserError: no form, or a price or error that is negative or not finite.
    """
    if not forms:
        raise UserError("The state has no form at all: give at least one.")
    if not all(0 <= value < math.inf for value in (price_us, *(form.error for form in forms))):
        raise UserError("The price of an error and the errors of the state must be finite numbers from 0 up.")
    ordered = _useful(forms)
    asked: dict[int, Activations[Plan] | None] = {}

    def cost(index: int) -> float:
        if index not in asked:
            room = limit_bytes - ordered[index].bytes
            found = activations(room) if room >= 0 else None
            if found is not None and found.bytes > room:
                raise AssertionError(f"{found.bytes} bytes of activations were planned into {room}")
            asked[index] = found
        answer, form = asked[index], ordered[index]
        return math.inf if answer is None else micro_batches * answer.us + form.us + price_us * form.error

    def bound(first: int, last: int) -> float:
        """(8), for the forms between."""
        least = asked[last]
        if least is None:
            return math.inf
        us = min(form.us for form in ordered[first + 1 : last])
        return micro_batches * least.us + us + price_us * ordered[first + 1].error

    ends = {0, len(ordered) - 1}
    if kept_bytes is not None:
        fitting = (i for i, form in enumerate(ordered) if form.bytes <= limit_bytes - kept_bytes)
        ends.add(next(fitting, len(ordered) - 1))
    known = sorted(ends)
    best = min(known, key=lambda index: (cost(index), index))
    open_: list[tuple[float, int, int]] = []

    def consider(first: int, last: int) -> None:
        if last - first > 1:
            heapq.heappush(open_, (bound(first, last), first, last))

    for first, last in itertools.pairwise(known):
        consider(first, last)
    while open_ and len(asked) < most_questions and _better(open_[0], best, cost(best)):
        _, first, last = heapq.heappop(open_)
        middle = (first + last) // 2
        best = min(best, middle, key=lambda index: (cost(index), index))
        consider(first, middle)
        consider(middle, last)
    answer = asked[best]
    if answer is None:
        return None
    left = min((interval[0] for interval in open_), default=math.inf)
    return JointPlan(
        ordered[best], answer, cost(best), min(cost(best), left), limit_bytes - answer.bytes, len(asked)
    )  # fmt: skip


def _better(interval: tuple[float, int, int], best: int, cost: float) -> bool:
    """Whether a form between might cost less, or the same with less error."""
    least, first, _ = interval
    return least < cost or (least == cost < math.inf and first + 1 < best)


def _useful(forms: Sequence[StateForm]) -> list[StateForm]:
    """Most bytes first, without those that another one beats."""
    kept: list[StateForm] = []
    stairs: list[tuple[float, float]] = []  # (error, us) of what is kept: errors rise, microseconds fall
    for form in sorted(set(forms), key=lambda each: (each.bytes, each.error, each.us)):
        place = bisect.bisect_right(stairs, (form.error, form.us))
        if place and stairs[place - 1][1] <= form.us:
            continue
        end = place
        while end < len(stairs) and stairs[end][1] >= form.us:
            end += 1
        stairs[place:end] = [(form.error, form.us)]
        kept.append(form)
    return kept[::-1]


def combined(parts: Sequence[Sequence[StateForm]]) -> list[StateForm]:
    """The forms of a state of several parts, each in a form of its own; without those that another one beats.

    Their number grows with the parts: for a few parts. For many, take the hull (optim/layout.py)."""
    sums = [StateForm(0, 0.0)]
    for part in parts:
        sums = _useful([StateForm(a.bytes + b.bytes, a.error + b.error, a.us + b.us) for a in sums for b in part])
    return sums
