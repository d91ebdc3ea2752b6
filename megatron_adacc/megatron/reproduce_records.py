"""What runs of the reproduction left behind: one record a run, beside the report that the job wrote.

DIR/117m/baseline-8.run.json       the command, and whether it finished or did not get its memory
DIR/117m/baseline-8.report.json    the job's own (--adacc-report)
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_adacc.atomic import write_text
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.reproduce_jobs import EXPERIMENTS, METHODS, Experiment, Method

KIND = "megatron-adacc reproduction run"
FORMAT = 1
FINISHED = "finished"
NO_MEMORY = "no memory"

# What a job prints that did not get its memory: torch's words, the step's that gave up, and the planner's.
_NO_MEMORY = re.compile(r"out of memory|did not get its memory|No plan fits into", re.IGNORECASE)


@dataclass(frozen=True)
class Record:
    """One run. ``outcome``: FINISHED or NO_MEMORY; ``search``: of a search for the largest micro-batch, too short for a
    throughput; ``extra``: flags of Megatron's beyond the experiment's. What the report says is None without one:
    ``step_ms`` is a median, ``peak_bytes`` the largest over ranks."""

    model: str
    method: str
    micro_batch: int
    sequence: int
    ranks: int
    small: bool
    search: bool
    extra: tuple[str, ...]
    outcome: str
    device: str | None = None
    iterations: int | None = None
    step_ms: float | None = None
    samples_per_second: float | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None
    final_loss: float | None = None


def name_of(method: Method, micro_batch: int, search: bool) -> str:
    """The start of the run's file names."""
    return f"{method.key}-{micro_batch}{'-search' if search else ''}"


def outcome_of(code: int, text: str) -> str | None:
    """What came of a job, from its exit code and output; None for a failure that has nothing to do with memory."""
    if code == 0:
        return FINISHED
    return NO_MEMORY if _NO_MEMORY.search(text) else None


def save(
    path: Path, experiment: Experiment, method: Method, micro_batch: int, search: bool, extra: Sequence[str],
    outcome: str, command: Sequence[str], report: Path,
) -> None:  # fmt: skip
    """Write the record of a run that has ended."""
    content = {
        "kind": KIND,
        "format": FORMAT,
        "model": experiment.key,
        "method": method.key,
        "micro_batch": micro_batch,
        "sequence": experiment.sequence,
        "ranks": experiment.ranks,
        "small": experiment.small,
        "search": search,
        "extra": list(extra),
        "outcome": outcome,
        "command": list(command),
        "report": report.name if outcome == FINISHED else None,
    }
    write_text(path, json.dumps(content, indent=1) + "\n")


def done_before(path: Path, command: Sequence[str]) -> str | None:
    """The outcome of a run of the very same command that was recorded there, None without."""
    if not path.exists():
        return None
    content = _json(path)
    report = content.get("report")
    there = report is None or (path.parent / report).is_file()
    return content.get("outcome") if content.get("command") == list(command) and there else None


def load(folder: Path) -> list[Record]:
    """All records under a folder, sorted. Raises UserError for a file that cannot be read as one."""
    found = [_load(path) for path in sorted(folder.glob("*/*.run.json"))]
    return sorted(found, key=lambda one: (_place(EXPERIMENTS, one.model), one.micro_batch, _place(METHODS, one.method)))


def _place(known: dict[str, Any], key: str) -> int:
    return list(known).index(key)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; delete it and run it again.") from None
    return content if isinstance(content, dict) else {}


def _load(path: Path) -> Record:
    content = _json(path)
    known = content.get("model") in EXPERIMENTS and content.get("method") in METHODS
    if content.get("kind") != KIND or content.get("format") != FORMAT or not known:
        raise UserError(
            f"{path} is no record of a run, or one of another version: delete it and run scripts/reproduce_*.sh again."
        )
    try:
        names = ("model", "method", "micro_batch", "sequence", "ranks", "small", "search", "outcome")
        fields: dict[str, Any] = {name: content[name] for name in names} | {"extra": tuple(content["extra"])}
        if content["report"] is not None:
            fields |= _figures(_json(path.parent / content["report"]))
        return Record(**fields)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{path} or its report lacks {error}: delete both and run it again.") from None


def _figures(report: dict[str, Any]) -> dict[str, Any]:
    summary = report["summary"]
    return {
        "device": report["device"],
        "iterations": summary["iterations"],
        "step_ms": summary["step_ms_median"],
        "samples_per_second": 1e3 * report["run"]["global_batch_size"] / summary["step_ms_median"],
        "held_bytes": summary["held_bytes"],
        "peak_bytes": summary["peak_bytes"],
        "final_loss": summary["final_lm_loss"],
    }
