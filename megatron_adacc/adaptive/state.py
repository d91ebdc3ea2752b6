"""The state of an adaptive handle as builtins, for a checkpoint, and back.

With it a run goes on as if it had never stopped: the same plan from the first forward on, the same outlier channels,
the same next check. It holds no tensors and no class of ours, so that a checkpoint loads without us.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_adacc.adaptive.history import Decision
from megatron_adacc.adaptive.monitor import Key
from megatron_adacc.adaptive.staged import Staged
from megatron_adacc.cost.limits import Limit
from megatron_adacc.errors import UserError
from megatron_adacc.planner import Plan

if TYPE_CHECKING:
    from megatron_adacc.adaptive.controller import AdaptiveHandle

FORMAT = 2


def state_of(handle: AdaptiveHandle) -> dict[str, Any]:
    """Steps, schedule, stage, plan, outlier lists, what was learned of the memory, watches and decisions."""
    policy = handle.policy
    change = None if policy.auto is None else policy.auto.solver.change
    return {
        "format": FORMAT,
        "steps": handle.steps,
        "schedule": handle.schedule.to_data(),
        "lossy": policy.lossy,
        "plan": policy.known(handle.plan).to_json(),
        "exact": sorted(policy.exact),
        "limit": None if change is None or change.limit is None else change.limit.to_data(),
        "more_bytes": 0 if change is None else change.more_bytes,
        "errors": {} if change is None else dict(change.errors),
        "loss": handle.loss_watch.to_data(),
        "references": [[k.place, k.site, k.channels, error] for k, error in handle.monitor.references.items()],
        "moves": [[k.place, k.site, k.channels, moves] for k, moves in handle.monitor.moves.items() if moves],
        "lists": [
            [place, key.site, key.codec.name, key.channels, list(state.channels)]
            for place, forward in enumerate(handle.attached.forwards)
            for key, state in handle.attached.states.outliers(forward.module)
        ],
        "decisions": [decision.to_data() for decision in handle.decisions],
    }


def load_state(handle: AdaptiveHandle, state: Mapping[str, Any]) -> None:
    """Go on from a state_of(). Raises UserError, and changes nothing, when it is no such state."""
    try:
        if state["format"] != FORMAT:
            raise ValueError(f"its format is {state['format']}, this version writes {FORMAT}")
        steps, lossy, exact = int(state["steps"]), bool(state["lossy"]), frozenset(map(int, state["exact"]))
        plan = Plan.from_json(state["plan"])
        limit = None if state["limit"] is None else Limit.from_data(state["limit"])
        more_bytes, errors = int(state["more_bytes"]), {str(k): float(v) for k, v in state["errors"].items()}
        references = {Key(p, s, c): float(error) for p, s, c, error in state["references"]}
        # Checkpoints of before have none.
        moves = {Key(p, s, c): int(count) for p, s, c, count in state.get("moves", ())}
        lists: dict[int, dict[tuple[str, str, int], list[int]]] = {}
        for place, site, codec, channels, listed in state["lists"]:
            lists.setdefault(int(place), {})[site, codec, int(channels)] = [int(channel) for channel in listed]
        decisions = [Decision.from_data(data) for data in state["decisions"]]
        schedule = handle.schedule.from_data(state["schedule"])
        loss = handle.loss_watch.from_data(state["loss"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"This is no state of an adaptive handle: {error!s}.") from error
    policy: Staged = handle.policy
    if plan.layers:
        policy.resume(plan, lossy, exact)
    elif lossy:
        policy.begin_lossy()
        policy.trace_again = False
    handle.attached.trace_again()
    if policy.auto is not None:
        change = policy.auto.solver.change
        change.limit, change.more_bytes, change.errors = limit, more_bytes, errors
    for place, forward in enumerate(handle.attached.forwards):
        handle.attached.states.give(forward.module, lists.get(place, {}))
    handle.steps, handle.schedule, handle.decisions, handle.loss_watch = steps, schedule, decisions, loss
    handle.monitor.references, handle.monitor.moves = references, moves
