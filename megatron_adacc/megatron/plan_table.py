"""What `adacc plan` prints: strategies side by side, and what becomes of each tensor."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from megatron_adacc.cost.limits import Limit, written_bytes
from megatron_adacc.cost.stage_plan import StagePlan
from megatron_adacc.planner.reason import runs, written_places

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from megatron_adacc.megatron.offline_facts import StageFacts
    from megatron_adacc.megatron.planning import OfflineJob, Outcome

_WIDTH = 132
_ANY_WIDTH = 10_000


def console() -> Console:
    """As wide as the terminal; where there is none, as COLUMNS says or wide enough for the tables."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", str(_WIDTH)))
    return Console(width=width, highlight=False, markup=False)


def waiting(words: str) -> AbstractContextManager[Any]:
    """Inside, `words` and a spinner stand on stderr, where somebody looks at it."""
    from rich.console import Console

    return Console(stderr=True).status(words) if sys.stderr.isatty() else nullcontext()


def actions_data(plan: StagePlan) -> list[dict[str, Any]]:
    """One entry for layers of a class with equal actions: places, and for each saved tensor its action and bytes."""
    groups: dict[tuple[int, tuple[tuple[str, str], ...]], list[int]] = {}
    for index, fact in enumerate(plan.facts):
        answers = plan.solution.layers_of(index)
        for place, answer in zip(fact.places, answers, strict=True):
            groups.setdefault((index, tuple(answer.actions.items())), []).append(place)
    found = []
    for (index, actions), places in groups.items():
        problem, chosen = plan.facts[index].problem, dict(actions)
        graph, fates = problem.graph, problem.fates(chosen)
        sites, seen = [], set()
        shared = {graph.buffers[s.buffer].storage for s in graph.inputs if not s.requires_grad}
        for buffer in graph.saved:
            item = graph.buffers[buffer]
            nbytes = 0 if item.storage in seen else item.nbytes
            seen.add(item.storage)
            held = fates.packed.get(buffer, 0 if buffer in fates.dropped else nbytes)
            sites.append(
                {
                    "site": item.site,
                    "role": str(graph.role(buffer)),
                    "bytes": nbytes,
                    "action": chosen.get(item.site, "keep"),
                    "held_bytes": held,
                    "shared": item.storage in shared,
                }
            )
        found.append({"module": graph.module, "layers": [list(run) for run in runs(tuple(places))], "sites": sites})
    return found


def show(
    job: OfflineJob,
    limit: Limit,
    limit_bytes: int,
    outcomes: Sequence[Outcome],
    chosen: Outcome,
    refusal: str | None,
) -> None:
    """Print everything; ``refusal``: that of ``chosen``, where nobody else says it."""
    out = console()
    _strategies(out, job, limit, limit_bytes, outcomes)
    _static(out, job, chosen)
    if len(job.stages) > 1:
        _stages(out, outcomes, limit_bytes)
    fullest = max(range(len(job.stages)), key=lambda i: chosen.stages[i].peak_bytes)
    where = "" if len(job.stages) == 1 else f" of stage {fullest}"
    _actions(out, chosen.plans[fullest], f"{chosen.name}: what becomes of the saved tensors of each layer{where}")
    for stage, plan in enumerate(chosen.plans):
        place = "" if len(job.stages) == 1 else f"stage {stage}: "
        lossy = f", relative gradient error {plan.error:.3g} (assumed)" if plan.error else ""
        out.print(f"{place}{plan.verdict}, solved in {plan.solution.solver_seconds:.2f} s{lossy}.")
    for sentence in job.assumptions:
        out.print(sentence)
    if chosen.refusal is not None:
        out.print(" ".join([*([refusal] if refusal else []), "The plan shown is the one of the least memory."]))


def _strategies(out: Console, job: OfflineJob, limit: Limit, limit_bytes: int, outcomes: Sequence[Outcome]) -> None:
    from rich import box
    from rich.table import Table

    schedule, args = job.job.schedule, job.args
    work = f"micro-batch {args.micro_batch_size}, {schedule.micro_batches} of them a step"
    ranks = f", {args.world_size} ranks" if args.world_size > 1 else ""
    title = f"Predicted on {job.device.full_name}: {work}{ranks}; limit {limit}"
    out.print(title)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("strategy", no_wrap=True)
    suffix = "" if len(job.stages) == 1 else " (fullest stage)"
    for name in (f"held{suffix}", f"peak{suffix}", "of the device", "step ms", "of none", "samples/s"):
        table.add_column(name, justify="right")
    table.add_column("fits")
    plain = outcomes[0].step_us
    for one in outcomes:
        fits = "yes" if one.fits else f"no, {written_bytes(one.peak_bytes - limit_bytes)} too much"
        if not one.fits and one.peak_bytes <= limit_bytes:
            fits = "no"
        table.add_row(
            one.name,
            written_bytes(one.held_bytes),
            written_bytes(one.peak_bytes),
            f"{one.peak_bytes / job.device.memory_bytes:.1%}",
            f"{one.step_us / 1e3:.1f}",
            f"{one.step_us / plain:.3f}",
            f"{one.samples_per_second:.2f}",
            fits,
        )
    out.print(table)


_STATIC = {
    "parameters": "parameters",
    "gradients": "gradients",
    "master": "fp32 master copy",
    "moments": "optimizer's moments",
    "total_bytes": "total",
    "planned_moments": "moments with the state plan",
    "planned_away": "  elsewhere",
    "planned_waiting": "gradients that wait",
    "planned_total_bytes": "total with it",
}


def static_data(stage: StageFacts, chosen: Outcome) -> dict[str, Any]:
    """Bytes of parameters, gradients and optimizer state of a rank on the stage, without the job's state plan and with
    it, as far as it has one: ``planned_moments`` on the device at most, ``planned_away`` elsewhere, ``planned_bits``
    what all blocks have at first."""
    state = stage.state
    found = {name: getattr(state.static, name) for name in ("parameters", "gradients", "master", "moments")}
    found["total_bytes"] = state.static.total
    if state.offer is not None and chosen.state_bytes:
        nbytes = chosen.state_bytes[stage.stage]
        moments = nbytes - state.waiting_bytes
        found |= {
            "planned_moments": moments,
            "planned_away": state.away_bytes,
            "planned_waiting": state.waiting_bytes,
            "planned_total_bytes": state.static.total - state.static.moments + nbytes,
            "planned_bits": state.bits_in((state.away_bytes or moments) + state.waiting_bytes),
        }
    return found


def _static(out: Console, job: OfflineJob, chosen: Outcome) -> None:
    from rich import box
    from rich.table import Table

    rows = [static_data(stage, chosen) for stage in job.stages]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("through the whole training", no_wrap=True)
    for stage in job.stages:
        table.add_column("a rank" if len(rows) == 1 else f"stage {stage.stage}", justify="right")
    for name, label in _STATIC.items():
        if name in rows[0] and any(row[name] for row in rows):
            table.add_row(label, *(written_bytes(row[name]) for row in rows))
    if "planned_bits" in rows[0]:
        table.add_row("  bits of most blocks at first", *(str(row["planned_bits"]) for row in rows))
    out.print(table)


def _stages(out: Console, outcomes: Sequence[Outcome], limit_bytes: int) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        title="By pipeline stage: held GiB / peak GiB / ms of a micro-batch (!: does not fit)",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("stage")
    for one in outcomes:
        table.add_column(one.name, justify="right")
    for stage in range(len(outcomes[0].stages)):
        cells = []
        for one in outcomes:
            found = one.stages[stage]
            mark = "" if found.peak_bytes <= limit_bytes else " !"
            held, peak = found.held_bytes / 2**30, found.peak_bytes / 2**30
            cells.append(f"{held:.2f} / {peak:.2f}{mark} / {found.step_us / 1e3:.1f}")
        table.add_row(str(stage), *cells)
    out.print(table)


def _actions(out: Console, plan: StagePlan, title: str) -> None:
    groups = actions_data(plan)
    for module in dict.fromkeys(group["module"] for group in groups):
        alike = [group for group in groups if group["module"] == module]
        sites = {site["site"] for group in alike for site in group["sites"]}
        parts = [alike] if all({s["site"] for s in g["sites"]} == sites for g in alike) else [[g] for g in alike]
        for part in parts:
            out.print(title)
            table = _table_of(part, " ")
            needed = out.measure(table, options=out.options.update(width=_ANY_WIDTH)).maximum
            width = out.width
            if needed > width and (sys.stdout.isatty() or "COLUMNS" in os.environ):
                table = _table_of(part, "\n")  # a codec above its bytes, rather than bytes above their unit
            else:
                out.width = max(width, needed)
            out.print(table)
            out.width = width


def _table_of(part: Sequence[dict[str, Any]], between: str) -> Table:
    """``between``: what stands between a codec and its bytes."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("site", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for group in part:
        places = tuple(p for first, last in group["layers"] for p in range(first, last + 1))
        table.add_column(written_places(places), justify="left")
    for row in zip(*(group["sites"] for group in part), strict=True):
        note = " (all layers together)" if row[0]["shared"] else ""
        cells = (_cell(site, between) for site in row)
        table.add_row(row[0]["site"] + note, written_bytes(row[0]["bytes"]), *cells)
    table.add_section()
    own = [[site for site in group["sites"] if not site["shared"]] for group in part]
    table.add_row(
        "a layer",
        written_bytes(sum(site["bytes"] for site in own[0])),
        *(written_bytes(sum(site["held_bytes"] for site in sites)) for sites in own),
    )
    return table


def _cell(site: dict[str, Any], between: str) -> str:
    if site["action"] == "recompute":
        return "recompute"
    if site["action"] == "keep":
        return "keep"
    codec = site["action"].removeprefix("compress:").partition("[")[0]
    return f"{codec}{between}{written_bytes(site['held_bytes'])}"
