"""Trainings that differ in their strategy alone: what is run, what is kept of each, and how they compare.

Each training is a process of its own with the same flags, seed and data. What is known of a finished one is one JSON
file in the folder of the study; a run whose file is there is not run again.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_adacc.atomic import write_text
from megatron_adacc.child import Child
from megatron_adacc.errors import UserError

FORMAT = 1
LAST = 50  # steps whose mean is the training loss

_NUMBER = r"([-+0-9.E]+|nan|inf)"
_ITERATION = re.compile(rf"iteration\s+(\d+)/\s*\d+ .*lm loss: {_NUMBER}", re.IGNORECASE)
_VALIDATION = re.compile(rf"validation loss at iteration \d+ .*lm loss value: {_NUMBER}", re.IGNORECASE)


@dataclass(frozen=True)
class Settings:
    """What all runs have in common. ``model``: Megatron's flags of model and optimizer; ``data``: those of the data;
    ``strategies``: our flags by name; ``factor``: of planted channels; ``ranks``: processes of a run."""

    iterations: int
    eval_iterations: int
    model: tuple[str, ...]
    data: tuple[str, ...]
    strategies: Mapping[str, tuple[str, ...]]
    factor: float
    script: Path
    output: Path
    ranks: int = 1


@dataclass(frozen=True)
class Run:
    """One training: a strategy, a seed, with planted channels or without."""

    strategy: str
    seed: int
    outliers: bool

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.strategy.replace(' ', '-')}{'-outliers' if self.outliers else ''}-seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """A finished run. ``losses``: of every iteration, infinite where it was no number; ``validation``: loss after the
    last one; ``step_ms``: median of the second half; ``held_bytes``, ``peak_bytes``: of the last step;
    ``gradient_errors``: (iteration, largest over the layers), where layers were compared with exact ones."""

    strategy: str
    seed: int
    outliers: bool
    losses: tuple[float, ...]
    validation: float
    step_ms: float
    held_bytes: int
    peak_bytes: int | None
    gradient_errors: tuple[tuple[int, float], ...]

    @property
    def training(self) -> float:
        """Mean loss of the last steps."""
        return statistics.fmean(self.losses[-LAST:])


def job_flags(settings: Settings, run: Run) -> list[str]:
    """All that decides what the run computes, as the script's flags."""
    count = str(settings.iterations)
    return [
        *settings.model,
        *("--train-iters", count, "--lr-decay-iters", str(max(settings.iterations, 10)), "--seed", str(run.seed)),
        *("--log-interval", "1", "--eval-interval", count, "--eval-iters", str(settings.eval_iterations)),
        # A strategy that ruins the training is a result, not a reason to stop.
        *("--num-workers", "0", "--no-check-for-nan-in-loss-and-grad"),
        *settings.strategies[run.strategy],
    ]


def command(settings: Settings, run: Run, report: Path) -> list[str]:
    """What is started: the script itself, or the job that plants channels first."""
    start = [sys.executable]
    if settings.ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.ranks)]
    if run.outliers:
        start += ["-m", "megatron_adacc.megatron.compare_job", f"{settings.factor:g}"]
    return [*start, str(settings.script), *job_flags(settings, run), *settings.data, "--adacc-report", str(report)]


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """What a kept result must have been made with."""
    return {
        "format": FORMAT,
        "flags": job_flags(settings, run),
        "factor": settings.factor if run.outliers else None,
        "ranks": settings.ranks,
    }


def kept(settings: Settings, run: Run) -> Outcome | None:
    """The result of an earlier call. Raises UserError where it was made with other settings."""
    path = settings.output / f"{run.name}.run.json"
    try:
        content = json.loads(path.read_text())
        found, outcome = content["made_with"], _outcome(content["outcome"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a run of this command ({error}): delete it.") from None
    wanted = identity(settings, run)
    if found != wanted:
        differing = next((name for name in wanted if found.get(name) != wanted[name]), "format")
        raise UserError(
            f"{path} is of a run with other settings ({differing}): name another --output, or give the same options."
        )
    return outcome


def _outcome(data: Mapping[str, Any]) -> Outcome:
    def number(value: float | None) -> float:
        return math.inf if value is None else float(value)

    return Outcome(
        **{
            **data,
            "losses": tuple(number(loss) for loss in data["losses"]),
            "validation": number(data["validation"]),
            "gradient_errors": tuple((int(step), float(error)) for step, error in data["gradient_errors"]),
        }
    )


def finite(value: Any) -> Any:
    """The same for JSON, which has no infinity: None in its place."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {name: finite(one) for name, one in value.items()}
        case list() | tuple():
            return [finite(one) for one in value]
    return value


def execute(settings: Settings, run: Run, tell: Callable[[int, float], None]) -> Outcome:
    """Run one training to its end and keep what is known of it. ``tell(iteration, loss)`` is called as it goes.

    Raises UserError where it fails, naming its log."""
    report, log = settings.output / f"{run.name}.report.json", settings.output / f"{run.name}.log"
    report.unlink(missing_ok=True)
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    environment = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    validation: float | None = None
    with Child(command(settings, run, report), environment, log) as job:
        for line in job.lines():
            if match := _ITERATION.search(line):
                tell(int(match[1]), float(match[2]))
            if match := _VALIDATION.search(line):
                validation = float(match[1])
    if job.code != 0 or validation is None or not report.exists():
        why = f"ended with exit code {job.code}" if job.code else "did not come to its validation"
        raise UserError(f"The run {run.name} {why}; its log is {log}, and ends with\n{''.join(list(job.tail)[-12:])}")
    outcome = outcome_of(run, json.loads(report.read_text()), validation)
    content = {"made_with": identity(settings, run), "outcome": finite(asdict(outcome))}
    write_text(settings.output / f"{run.name}.run.json", json.dumps(content, indent=1) + "\n")
    return outcome


def outcome_of(run: Run, report: Mapping[str, Any], validation: float) -> Outcome:
    """From what --adacc-report wrote."""
    rows = report["iterations"]
    errors: dict[int, float] = {}
    for one in report.get("gradient_errors", []):
        errors[one["step"]] = max(errors.get(one["step"], 0.0), one["error"])
    return Outcome(
        run.strategy,
        run.seed,
        run.outliers,
        tuple(_loss(row["lm_loss"]) for row in rows),
        _loss(validation),
        statistics.median(row["step_ms"] for row in rows[len(rows) // 2 :]),
        rows[-1]["held_bytes"],
        rows[-1]["peak_bytes"],
        tuple(sorted(errors.items())),
    )


def _loss(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.inf


@dataclass(frozen=True)
class Compared:
    """One strategy over its seeds: mean and sample standard deviation (None for one seed) of the validation loss, and
    of its relative difference to off with the same seed (None for off, and where off was not run)."""

    strategy: str
    outliers: bool
    seeds: int
    validation: float
    validation_sd: float | None
    beside_off: float | None
    beside_off_sd: float | None
    training: float
    step_ms: float
    held_bytes: int
    peak_bytes: int | None
    gradient_error: float | None


def compare(outcomes: Sequence[Outcome]) -> list[Compared]:
    """One row a strategy and condition, in the order in which they first appear."""
    groups: dict[tuple[bool, str], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.outliers, one.strategy), []).append(one)
    off = {(one.outliers, one.seed): one.validation for one in outcomes if one.strategy == "off"}
    rows = []
    for (outliers, strategy), group in groups.items():
        pairs = [(one.validation, off[outliers, one.seed]) for one in group if (outliers, one.seed) in off]
        beside = [_ratio(mine, other) for mine, other in pairs] if strategy != "off" else []
        errors = [error for one in group for _, error in one.gradient_errors[-1:]]
        peaks = [one.peak_bytes for one in group if one.peak_bytes is not None]
        rows.append(
            Compared(
                strategy,
                outliers,
                len(group),
                statistics.fmean(one.validation for one in group),
                _deviation([one.validation for one in group]),
                statistics.fmean(beside) if beside else None,
                _deviation(beside),
                statistics.fmean(one.training for one in group),
                statistics.median(one.step_ms for one in group),
                max(one.held_bytes for one in group),
                max(peaks) if len(peaks) == len(group) else None,
                max(errors) if errors else None,
            )
        )
    return rows


def _ratio(mine: float, other: float) -> float:
    return mine / other - 1 if math.isfinite(other) else math.nan


def _deviation(values: Sequence[float]) -> float | None:
    if len(values) < 2 or not all(math.isfinite(value) for value in values):
        return None
    return statistics.stdev(values)
