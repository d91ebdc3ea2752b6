"""Plans for `adacc bench`, all from the costs that one process measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from megatron_adacc.errors import UserError
from megatron_adacc.planner import Plan

if TYPE_CHECKING:
    from megatron_adacc.cost.stage_plan import StagePlan


def answer(stage: StagePlan, limits: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """By name of the limit a plan (JSON) with what it promises, or why there is none.

    A limit is {"percent": of what plain layers hold} or {"peak": the most bytes that the step may have live, "plain":
    what the plain one was measured to have}, with "paper": true for the paper's formulation (one plan for all layers,
    no dependencies), which knows no peaks."""
    return {name: _one(stage, limit) for name, limit in limits.items()}


def _one(stage: StagePlan, limit: Mapping[str, Any]) -> dict[str, Any]:
    from megatron_adacc.cost.limits import Limit
    from megatron_adacc.cost.stage_plan import Room, plan_stage

    none = stage.predictions[0]
    try:
        if limit.get("paper"):
            return _of_the_paper(stage, int(limit["percent"]))
        if "percent" in limit:
            found = plan_stage(stage.facts, Limit(share=Fraction(int(limit["percent"]), 100)), Room())
        else:
            # What the model, its embeddings and its loss take beside the layers, as the plain step shows it.
            beside = int(limit["plain"]) - none.peak_bytes
            found = plan_stage(stage.facts, Limit(total_bytes=int(limit["peak"]) - beside), Room())
    except UserError as error:
        return {"failed": str(error)}
    predicted = found.predicted
    return {
        "plan": found.plan.to_json(), "held": predicted.held_bytes, "peak": predicted.peak_bytes,
        "added_us": predicted.step_us - none.step_us,
    }  # fmt: skip


def _of_the_paper(stage: StagePlan, percent: int) -> dict[str, Any]:
    from megatron_adacc.cost.stage_plan import plain_bytes
    from megatron_adacc.planner.paper import solve_paper
    from megatron_adacc.planner.problem import Problem

    classes = tuple(replace(fact.layer_class, in_flight=1) for fact in stage.facts)
    solution = solve_paper(Problem(classes, percent * plain_bytes(stage.facts) // 100, error_budget=0.0))
    if not solution.layers:
        return {"failed": "the paper's formulation has no plan for this limit"}
    plans = [fact.problem.layer_plan(solution.layers_of(i)[0].actions, None) for i, fact in enumerate(stage.facts)]
    plan = Plan(tuple(plans), f"paper {percent}%")
    return {"plan": plan.to_json(), "held": solution.held_bytes, "peak": None, "added_us": solution.cost_us}
