"""`adacc plan`: plan for a GPU that is not there, beside what others do.

    adacc plan --config configs/gpt_345m.yaml --device v100-32gb --micro-batch 8 --limit 20GiB -o plan.json

Every pipeline stage of the job is traced on fake tensors, priced from the device table and solved. All figures are
predicted; docs/planning.md says how. The plan file is for --adacc-plan FILE on all ranks of that job.
"""

from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from dataclasses import replace
from typing import Any

from megatron_adacc.cost.limits import Limit
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import planning
from megatron_adacc.megatron.plan_notes import notes_of
from megatron_adacc.megatron.plan_table import actions_data, show, static_data
from megatron_adacc.outputs import check_folders, write
from megatron_adacc.planner import LayerPlan, Plan
from megatron_adacc.planner.quiet import solver_prints_to_stderr

PROGRAM = "adacc plan"
FORMAT = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Our own options; all others are Megatron's flags."""
    parser.usage = (
        "adacc plan --device NAME [--config FILE] [--micro-batch N] [--limit LIMIT] [--error-budget ERROR]\n"
        "                  [--world N] [-o PLANFILE] [--json FILE|-] [Megatron's flags]"
    )
    parser.description = "Plan for a GPU that is not there, beside what others do."
    planning.add_options(parser)
    parser.add_argument("-o", "--output", metavar="PLANFILE", help="write the plan, for --adacc-plan PLANFILE")


def run(args: Namespace) -> int:
    """Trace, solve, print, write. Raises UserError for a mistake in the flags, and where nothing fits into a limit that
    was given or for a plan that is to be written."""
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False, exit_on_error=False)
    configure(parser)
    own, request = planning.read(parser, args.arguments)
    check_folders(own.output, or_printed=own.json)
    from megatron_adacc.megatron.offline_facts import learn
    from megatron_adacc.megatron.offline_flags import fused_functions

    with solver_prints_to_stderr():
        job = learn(request.flags, request.device, request.world_size)
        limit = request.limit or Limit(total_bytes=job.limit_bytes)
        limit_bytes = job.limit_bytes if limit.total_bytes is None else limit.total_bytes
        chosen = planning.auto(job, limit)
        outcomes = [*planning.references(job, limit_bytes), chosen]
        if request.error_budget > 0:
            chosen = planning.auto(job, limit, request.error_budget, "auto lossy")
            outcomes.append(chosen)
    content = _data(job, limit, limit_bytes, outcomes, chosen)
    text = json.dumps(content, indent=1) + "\n"
    refused = chosen.refusal is not None and (own.output or request.limit)
    if own.json == "-":
        sys.stdout.write(text)
    else:
        show(job, limit, limit_bytes, outcomes, chosen, None if refused else chosen.refusal)
    if own.json and own.json != "-":
        write(own.json, text)
    if refused:
        raise UserError(chosen.refusal)
    if own.output:
        with solver_prints_to_stderr():
            plan = plan_of(job, chosen)
        write(own.output, plan.to_json() + "\n")
        if fused_functions(job.args):
            sys.stderr.write(
                f"{PROGRAM}: {own.output} does not name the tensors of what Megatron compiles, and a run that compiles "
                "it may refuse the file: plan and train with --no-bias-gelu-fusion, --no-bias-swiglu-fusion and "
                "--no-bias-dropout-fusion.\n"
            )
    return 0


def plan_of(job: planning.OfflineJob, chosen: planning.Outcome) -> Plan:
    """The plans of all stages as one file, with what they are for and why they are as they are."""
    from megatron_adacc.planner.explain import explain

    alone = len(chosen.plans) == 1
    layers: list[LayerPlan] = []
    reasons = []
    for stage, solved in enumerate(chosen.plans):
        number = None if alone else stage
        layers += [replace(layer, stage=number) for layer in solved.plan.layers]
        places = [place for fact in solved.facts for place in fact.places]
        for reason in explain(solved.problem, solved.solution, time_limit_seconds=10.0):
            reasons.append(replace(reason, stage=number, layers=tuple(sorted(places[i] for i in reason.layers))))
    return Plan(tuple(layers), chosen.name, notes_of(job.args, job.device.name), tuple(reasons))


def _data(
    job: planning.OfflineJob,
    limit: Limit,
    limit_bytes: int,
    outcomes: list[planning.Outcome],
    chosen: planning.Outcome,
) -> dict[str, Any]:
    schedule = job.job.schedule
    stages = []
    for index, stage in enumerate(job.stages):
        figures = {
            o.name: {
                "held_bytes": o.stages[index].held_bytes,
                "peak_bytes": o.stages[index].peak_bytes,
                "micro_batch_us": o.stages[index].step_us,
            }
            for o in outcomes
        }
        plan = chosen.plans[index]
        solver = {"seconds": plan.solution.solver_seconds, "verdict": plan.verdict, "error": plan.error}
        stages.append(
            {
                "stage": stage.stage,
                "layers": sum(len(fact.places) for fact in stage.facts),
                "fixed_bytes": stage.room.fixed_bytes,
                "static": static_data(stage, chosen),
                "strategies": figures,
                "solver": solver,
                "classes": actions_data(plan),
            }
        )
    return {
        "format": FORMAT,
        "predicted": True,
        "device": job.device.name,
        "memory_bytes": job.device.memory_bytes,
        "limit": str(limit),
        "limit_bytes": limit_bytes,
        "micro_batch_size": job.args.micro_batch_size,
        "micro_batches": schedule.micro_batches,
        "data_parallel": job.args.data_parallel_size,
        "strategies": {
            o.name: {
                "held_bytes": o.held_bytes,
                "peak_bytes": o.peak_bytes,
                "step_ms": o.step_us / 1e3,
                "samples_per_second": o.samples_per_second,
                "fits": o.fits,
            }
            for o in outcomes
        },
        "chosen": chosen.name,
        "refusal": chosen.refusal,
        "stages": stages,
        "assumptions": list(job.assumptions),
    }
