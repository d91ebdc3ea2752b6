"""What a run's report says of its plan: saved tensors of each layer, gradient errors, and what other limits cost."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from megatron_adacc.adaptive.controller import AdaptiveHandle
from megatron_adacc.cost.limits import Limit
from megatron_adacc.cost.stage_plan import NothingFits, Prediction, plain_bytes, plan_stage
from megatron_adacc.planner import Compress, Keep

POINTS = 9  # of a frontier
SECONDS = 2.0  # for each of them


def plan_of_layers(handle: AdaptiveHandle, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """One entry a layer with a settled trace, as builtins: its number, and its saved tensors in the order of the graph.

    ``bytes``: of the tensor; ``held_bytes``: what the plan holds of it. Tensors of one storage count once.
    ``numbers``: Megatron's numbers of the layers, by place."""
    found = []
    for forward in handle.attached.forwards:
        settled = [t for t in forward.cache.traces() if t.settled is not None and forward.layer in t.layers]
        if not settled:
            continue
        program = forward.cache.program(settled[-1], forward.layer)
        graph = program.graph
        tensors, seen = [], set()
        for index in graph.saved:
            buffer, action = graph.buffers[index], program.action(index)
            nbytes = 0 if buffer.storage in seen else buffer.nbytes
            seen.add(buffer.storage)
            match action:
                case Compress(codec, _):
                    name, held = codec, program.packed_bytes(index)
                case Keep():
                    name, held = "keep", nbytes
                case _:
                    name, held = "recompute", 0
            if nbytes:
                role = str(graph.role(index))
                tensors.append({"site": buffer.site, "role": role, "action": name, "bytes": nbytes, "held_bytes": held})
        found.append({"layer": numbers[forward.layer], "tensors": tensors})
    return found


def frontier(handle: AdaptiveHandle) -> dict[str, Any] | None:
    """What other limits would cost on this stage, by the run's own solver and costs; None without a solved plan.

    ``unit``: "held" for limits that are a share of the activations, "peak" for bytes of the device. Points are
    predictions of a micro-batch, from the loosest limit to the least that works; ``chosen`` is the plan in force."""
    auto, stage = handle.policy.auto, handle.stage
    if auto is None or stage is None:
        return None
    setting, room, facts = auto.solver.setting, auto.solver.room, stage.facts
    assert room is not None  # there is a plan
    none, full = stage.predictions[:2]
    whole = stage.limit.total_bytes is not None
    plain = plain_bytes(facts)
    most = none.peak_bytes if whole else plain
    least = full.peak_bytes if whole else 0
    points: list[Prediction] = []
    limits = [most - round((most - least) * i / (POINTS - 1)) for i in range(POINTS)]
    while limits:
        nbytes = limits.pop(0)
        limit = Limit(total_bytes=nbytes) if whole else Limit(share=Fraction(nbytes, max(1, plain)))
        try:
            solved = plan_stage(facts, limit, room, error_budget=setting.error_budget, time_limit_seconds=SECONDS)
        except NothingFits as error:
            # The end of the curve: what the solver says is the least that works.
            limits = [] if error.least_bytes is None or not least < error.least_bytes < most else [error.least_bytes]
            most = nbytes
            continue
        if not points or solved.predicted != points[-1]:
            points.append(solved.predicted)
    return {
        "unit": "peak" if whole else "held",
        "limit_bytes": stage.limit_bytes,
        "error_budget": setting.error_budget,
        "points": [_point(one) for one in points],
        "chosen": _point(stage.predicted),
        "none": _point(none),
        "full": _point(full),
    }


def _point(one: Prediction) -> dict[str, Any]:
    return {"held_bytes": one.held_bytes, "peak_bytes": one.peak_bytes, "step_us": one.step_us}
