"""Why a buffer got its action: what the next best would have cost.

For a group of layers with equal plans and one of their buffers, the group's layers are planned again with that action
forbidden for that buffer, in the room that they had; all other layers stay as they are. The difference in cost is what
the action is worth. The bytes alive beside the held ones are taken to stay the same.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace

from megatron_adacc.planner.problem import BufferItem, Problem, of_one_moment
from megatron_adacc.planner.reason import Reason
from megatron_adacc.planner.solution import COMPRESS, DROP, KEEP, LayerAnswer, Solution
from megatron_adacc.planner.stage import layer_paths, solve_flow


def explain(problem: Problem, solution: Solution, time_limit_seconds: float = 60.0) -> tuple[Reason, ...]:
    """A reason for each buffer that is saved or held, of each group of layers with equal plans."""
    groups: dict[tuple[int, tuple[tuple[str, str], ...]], list[int]] = {}
    for place, layer in enumerate(solution.layers):
        groups.setdefault((layer.class_index, tuple(sorted(layer.actions.items()))), []).append(place)
    deadline = time.monotonic() + time_limit_seconds
    reasons = []
    for (class_index, _), places in groups.items():
        room = _room_of(problem, solution, class_index, places)
        answers = [solution.layers[place] for place in places]
        for buffer in problem.classes[class_index].buffers:
            if answers[0].actions[buffer.site] != DROP:
                reasons.append(_reason(room, buffer, answers, tuple(places), deadline))
    return tuple(reasons)


def _room_of(problem: Problem, solution: Solution, class_index: int, places: list[int]) -> Problem:
    """The problem of the layers ``places`` of one class alone, in the room that they have."""
    held = [problem.classes[a.class_index].in_flight * a.outcome.held_bytes for a in solution.layers]
    budget = problem.error_budget
    if budget is not None:
        others = math.fsum(a.outcome.error for place, a in enumerate(solution.layers) if place not in places)
        budget = max(0.0, budget - others)
    return replace(
        of_one_moment(problem),
        classes=(replace(problem.classes[class_index], count=len(places), left_bytes=0),),
        fixed_bytes=solution.peak_bytes - sum(held[place] for place in places),
        transient_bytes=0,
        error_budget=budget,
    )


def _reason(
    room: Problem, buffer: BufferItem, answers: list[LayerAnswer], places: tuple[int, ...], deadline: float
) -> Reason:
    action = answers[0].actions[buffer.site]
    (layer,) = room.classes
    without = _forbidden(buffer, action, room.limit_bytes)
    found = None
    if without is not None:
        buffers = tuple(without if b.site == buffer.site else b for b in layer.buffers)
        changed = replace(room, classes=(replace(layer, buffers=buffers),))
        now = time.monotonic()
        found = solve_flow(changed, [layer_paths(changed, 0)], now, max(0.1, deadline - now), lightest=False)
    if found is None or not found.layers:
        proven = found is None or found.status == "infeasible"
        return Reason(places, buffer.site, action, None, 0.0, 0, proven)
    seconds = Counter(a.actions[buffer.site] for a in found.layers)
    return Reason(
        places,
        buffer.site,
        action,
        " or ".join(name for name, _ in seconds.most_common()),
        found.cost_us - math.fsum(a.outcome.cost_us for a in answers),
        found.held_bytes - sum(layer.in_flight * a.outcome.held_bytes for a in answers),
        found.status == "optimal",
    )


def _forbidden(buffer: BufferItem, action: str, limit_bytes: int) -> BufferItem | None:
    """The buffer without the action, None when it has no other."""
    if action == KEEP:
        return replace(buffer, bytes=limit_bytes + 1)  # more than there is
    if action.startswith(COMPRESS):
        codecs = tuple(codec for codec in buffer.codecs if COMPRESS + codec.name != action)
        return replace(buffer, codecs=codecs)
    return replace(buffer, must_hold=True) if buffer.storable else None
