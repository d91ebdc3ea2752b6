"""`adacc frontier`: what a memory limit costs in time, from no recompute to everything recomputed.

    adacc frontier --config configs/gpt_345m.yaml --device v100-32gb --png frontier.png --html frontier.html

Our plan is solved for a row of limits, and so is the paper's formulation (planner/paper.py: one plan for all layers, no
dependencies), whose plans are then followed like ours: what they really need and cost. Beside them stand Megatron's
full and selective recompute and direct quantization. All figures are predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron_adacc.cost.limits import Limit, written_bytes
from megatron_adacc.cost.stage_plan import NothingFits, Prediction, question, uniform_predicted
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import planning
from megatron_adacc.megatron.plan_table import console
from megatron_adacc.outputs import check_folders, write
from megatron_adacc.planner.quiet import solver_prints_to_stderr

PROGRAM = "adacc frontier"
FORMAT = 1
POINTS = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Our own options; all others are Megatron's flags."""
    parser.usage = (
        "adacc frontier --device NAME [--config FILE] [--micro-batch N] [--error-budget ERROR] [--points N]\n"
        "                      [--png FILE] [--html FILE] [--json FILE|-] [--world N] [Megatron's flags]"
    )
    parser.description = "What a memory limit costs in time, predicted for a GPU that is not there."
    planning.add_options(parser, limit=None)
    parser.add_argument("--points", metavar="N", help=f"limits to solve for (default: {POINTS})")
    parser.add_argument("--png", metavar="FILE", help="draw the frontier")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page: drawing and table")


def run(args: Namespace) -> int:
    """Solve, print, draw. Raises UserError for a mistake in the flags, and where a drawing is asked for without
    matplotlib."""
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False, exit_on_error=False)
    configure(parser)
    own, request = planning.read(parser, args.arguments)
    if request.limit is not None:
        raise UserError("adacc frontier goes through all limits: leave --limit out.")
    points = POINTS if own.points is None else planning.whole("--points", own.points)
    check_folders(own.png, own.html, or_printed=own.json)
    if own.png or own.html:
        from megatron_adacc.megatron import frontier_chart

        frontier_chart.need_matplotlib()
    from megatron_adacc.megatron.offline_facts import learn

    with solver_prints_to_stderr():
        content = frontier(learn(request.flags, request.device, request.world_size), points, request.error_budget)
    text = json.dumps(content, indent=1) + "\n"
    if own.json == "-":
        sys.stdout.write(text)
    else:
        _show(content)
    if own.json and own.json != "-":
        write(own.json, text)
    if own.png:
        frontier_chart.save_png(content, own.png)
    if own.html:
        write(own.html, frontier_chart.page(content))
    return 0


def frontier(job: planning.OfflineJob, points: int, error_budget: float = 0.0) -> dict[str, Any]:
    """Every strategy's points as JSON's types: bytes of the fullest stage, milliseconds of a training step.

    "auto" and "paper" (and "auto lossy") are lists in the order of falling limits, without repetition."""
    references = planning.references(job, job.limit_bytes)
    most, least = references[0].peak_bytes, planning.least_bytes(job)
    limits = [most - round((most - least) * i / max(1, points - 1)) for i in range(points)]
    runs: dict[str, Callable[[Limit], planning.Outcome | None]] = {
        "auto": lambda limit: _auto(job, limit, 0.0, "auto"),
        "paper": lambda limit: _paper(job, limit),
    }
    if error_budget:
        runs["auto lossy"] = lambda limit: _auto(job, limit, error_budget, "auto lossy")
    curves: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for name, limit in _progress([(name, limit) for name in runs for limit in limits]):
        found = runs[name](Limit(total_bytes=limit))
        if found is not None:
            point = {"limit_bytes": limit, **_point(found, references[0])}
            if not curves[name] or curves[name][-1]["step_ms"] != point["step_ms"]:
                curves[name].append(point)
    args = job.args
    return {
        "format": FORMAT,
        "predicted": True,
        "device": job.device.name,
        "device_name": job.device.full_name,
        "memory_bytes": job.device.memory_bytes,
        "limit_bytes": job.limit_bytes,
        "model": f"{args.num_layers} layers, hidden {args.hidden_size}, sequence {args.seq_length}, "
        f"micro-batch {args.micro_batch_size}",
        "stages": len(job.stages),
        "references": {one.name: _point(one, references[0]) for one in references},
        "curves": curves,
        "assumptions": list(job.assumptions),
    }


def _point(one: planning.Outcome, plain: planning.Outcome) -> dict[str, Any]:
    return {
        "held_bytes": one.held_bytes,
        "peak_bytes": one.peak_bytes,
        "step_ms": one.step_us / 1e3,
        "of_none": one.step_us / plain.step_us,
        "samples_per_second": one.samples_per_second,
    }


def _auto(job: planning.OfflineJob, limit: Limit, error_budget: float, name: str) -> planning.Outcome | None:
    found = planning.auto(job, limit, error_budget, name)
    return found if found.refusal is None else None


def _paper(job: planning.OfflineJob, limit: Limit) -> planning.Outcome | None:
    """The paper's formulation within the limit, as far as it knows; what its plans then need may be more."""
    from megatron_adacc.planner.paper import solve_paper

    stages: list[Prediction] = []
    for stage in job.stages:
        facts = stage.facts
        try:
            solution = solve_paper(question(facts, limit, stage.room, 0.0))
        except NothingFits:
            return None
        if not solution.layers:
            return None
        first = [solution.layers_of(index)[0] for index in range(len(facts))]
        memories = [
            fact.simulator.memory(fact.problem.fates(answer.actions)) for fact, answer in zip(facts, first, strict=True)
        ]
        added = [answer.outcome.cost_us for answer in first]
        stages.append(uniform_predicted(facts, stage.room, "paper", memories, added))
    return planning.outcome(job, "paper", stages, limit.total_bytes or 0)


def _progress(work: list[tuple[str, int]]) -> Iterable[tuple[str, int]]:
    """The same items, with a bar on stderr where somebody looks at it."""
    if not sys.stderr.isatty():
        return work
    return _with_bar(work)


def _with_bar(work: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("solving", total=len(work))
        for item in work:
            progress.update(task, description=f"{item[0]} within {written_bytes(item[1])}")
            yield item
            progress.advance(task)


def rows(content: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table: a heading, then the references, then each curve from the highest limit to the lowest."""
    found: list[tuple[str, ...]] = [("strategy", "limit", "held", "peak", "step ms", "of none", "samples/s")]
    named = [(name, point) for name, point in content["references"].items()]
    named += [(name, point) for name, curve in content["curves"].items() for point in curve]
    for name, point in named:
        found.append(
            (
                name,
                f"{point['limit_bytes'] / 2**30:.2f} GiB" if "limit_bytes" in point else "",
                f"{point['held_bytes'] / 2**30:.2f} GiB",
                f"{point['peak_bytes'] / 2**30:.2f} GiB",
                f"{point['step_ms']:.1f}",
                f"{point['of_none']:.3f}",
                f"{point['samples_per_second']:.2f}",
            )
        )
    return found


def title(content: dict[str, Any]) -> str:
    """What the figures are of."""
    stages = "" if content["stages"] == 1 else f", fullest of {content['stages']} stages"
    return f"Predicted on {content['device_name']}: {content['model']}{stages}"


def _show(content: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    out = console()
    heading, *lines = rows(content)
    out.print(title(content))
    table = Table(box=box.SIMPLE_HEAD)
    for number, name in enumerate(heading):
        table.add_column(name, justify="left" if number == 0 else "right")
    for number, line in enumerate(lines):
        ends = number + 1 == len(lines) or lines[number + 1][0] != line[0]
        table.add_row(*line, end_section=ends and line[0] not in planning.REFERENCES[:-1])
    out.print(table)
    for sentence in content["assumptions"]:
        out.print(sentence)
