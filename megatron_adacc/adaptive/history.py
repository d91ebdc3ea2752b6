"""What was decided, when and why: one line of the log and one row of the report each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_adacc.cost.limits import written_bytes
from megatron_adacc.cost.stage_plan import Prediction
from megatron_adacc.graph.model import format_table
from megatron_adacc.planner import Compress, Keep, Plan
from megatron_adacc.runtime.attach import Handle

SHOWN = 3  # changed actions that a line names


@dataclass(frozen=True)
class Decision:
    """``effect``: what the solver predicts of it, where it was asked. ``plan``: the plan from then on, as bytes that a
    micro-batch's saved tensors have, by what becomes of them; empty where layers are traced again first."""

    step: int
    why: tuple[str, ...]
    changed: tuple[str, ...]
    effect: str = ""
    plan: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        effect = f" Predicted: {self.effect}." if self.effect else ""
        return f"step {self.step}: {'; '.join(self.why).rstrip('.')}. {'; '.join(self.changed)}.{effect}"

    def to_data(self) -> list[Any]:
        return [self.step, list(self.why), list(self.changed), self.effect, dict(self.plan)]

    @staticmethod
    def from_data(data: Sequence[Any]) -> Decision:
        """Raises ValueError where it is none."""
        step, why, changed, effect, plan = data
        return Decision(int(step), tuple(why), tuple(changed), str(effect), {str(k): int(v) for k, v in plan.items()})


def decision_table(decisions: Sequence[Decision]) -> str:
    """One row for each."""
    if not decisions:
        return "none"
    rows = [(str(d.step), "; ".join(d.why), "; ".join(d.changed), d.effect) for d in decisions]
    return format_table([("step", "why", "what changed", "predicted"), *rows])


def predicted_effect(before: Prediction, after: Prediction) -> str:
    """How two plans' predictions differ, for one micro-batch."""
    return (
        f"{before.step_us / 1e3:.1f} -> {after.step_us / 1e3:.1f} ms a micro-batch, peak "
        f"{written_bytes(before.peak_bytes)} -> {written_bytes(after.peak_bytes)}"
    )


def plan_changes(before: Plan, after: Plan, layers: int) -> list[str]:
    """What differs for some layers and sites, most of it counted."""
    found: dict[str, list[int]] = {}
    for place in range(layers):
        old, new = _actions_at(before, place), _actions_at(after, place)
        for site in sorted(old.keys() | new.keys()):
            was, now = old.get(site, "keep"), new.get(site, "keep")
            if was != now:
                found.setdefault(f"{site}: {was} -> {now}", []).append(place)
    words = [f"{change} in {_places(places)}" for change, places in found.items()]
    more = len(words) - SHOWN
    return words[:SHOWN] + ([f"and {more} more changes"] if more > 0 else [])


def _places(places: list[int]) -> str:
    return f"layer {places[0]}" if len(places) == 1 else f"{len(places)} layers"


def _actions_at(plan: Plan, place: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for layer in sorted(plan.layers, key=lambda layer: layer.layer is not None):
        if layer.layer in (None, place):
            found.update((site, str(action)) for site, action in layer.actions)
    return found


def bytes_by_action(handle: Handle) -> dict[str, int]:
    """Bytes of the tensors that the layers save for backward, by what becomes of them under the plan in force. Of each
    layer the call that it was last seen with counts; those without a settled trace do not."""
    found: dict[str, int] = {}
    for forward in handle.forwards:
        settled = [t for t in forward.cache.traces() if t.settled is not None and forward.layer in t.layers]
        if not settled:
            continue
        program = forward.cache.program(settled[-1], forward.layer)
        for buffer in program.graph.saved:
            match program.action(buffer):
                case Compress(codec, _):
                    name = codec
                case Keep():
                    name = "keep"
                case _:
                    name = "recompute"
            found[name] = found.get(name, 0) + program.graph.buffers[buffer].nbytes
    return dict(sorted(found.items()))
