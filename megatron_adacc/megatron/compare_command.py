"""`adacc compare-training`: what strategies cost in accuracy, by training with each from the same seeds on real text.

    adacc compare-training --output runs/accuracy [--iterations 600] [--seeds 1 2 3] [--outliers both]

Runs every strategy with every seed, then all again with planted outlier channels (megatron/compare_job.py), and writes
study.json and curves.png to the folder. Called again, it runs only what is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import megatron_adacc
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.compare_study import Compared, Outcome, Run, Settings, compare, execute, finite, kept
from megatron_adacc.megatron.planning import whole
from megatron_adacc.megatron.trace_flags import flags_of_file, parse_known
from megatron_adacc.outputs import write

if TYPE_CHECKING:
    from rich.table import Table

PROGRAM = "adacc compare-training"
MIB = 2**20
STRATEGIES = ("off", "full", "auto", "auto lossy", "compress", "quantize")
_CONDITIONS = {"without": (False,), "with": (True,), "both": (False, True)}


def configure(parser: argparse.ArgumentParser) -> None:
    """Our own options; all others are Megatron's flags."""
    parser.usage = (
        "adacc compare-training --output DIR [--iterations N] [--seeds S ...] [--strategies NAME ...]\n"
        "                              [--outliers without|with|both] [Megatron's flags]"
    )
    parser.description = (
        "Train the same GPT on the same text with each strategy and seed, and compare validation losses. Megatron's "
        "flags behind ours override the config's. Runs that DIR has already are not run again."
    )
    parser.add_argument("--output", metavar="DIR", help="folder of the study; made if it is not there")
    parser.add_argument("--iterations", default="600", metavar="N", help="of each training (default: %(default)s)")
    parser.add_argument("--seeds", nargs="+", default=["1", "2", "3"], metavar="S", help="(default: 1 2 3)")
    parser.add_argument(
        "--strategies", nargs="+", default=list(STRATEGIES), metavar="NAME",
        help=f"of {', '.join(map(repr, STRATEGIES))} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--outliers", default="both", metavar="WHICH",
        help="without planted outlier channels, with them, or both (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--factor", default="60", metavar="F", help="of planted channels (default: %(default)s)")
    parser.add_argument("--limit", default="20%", metavar="LIMIT", help="of auto (default: 20%%)")
    parser.add_argument("--lossy-limit", default="8%", metavar="LIMIT", help="of auto lossy (default: 8%%)")
    parser.add_argument("--error-budget", default="0.3", metavar="E", help="of auto lossy (default: %(default)s)")
    parser.add_argument("--eval-iterations", default="50", metavar="N", help="of the validation (default: %(default)s)")
    parser.add_argument("--config", metavar="FILE", help="a YAML of Megatron's flags (default: the demo's GPT)")
    parser.add_argument("--data", metavar="DIR", help="as adacc prepare-data writes it (default: made in DIR/data)")
    parser.add_argument(
        "--script", metavar="FILE", help="the training script (default: this project's pretrain_gpt.py)"
    )
    parser.add_argument("--nproc-per-node", default="1", metavar="N", help="processes a training (default: 1)")


def run(args: Namespace) -> int:
    """Run what is missing, print the table, write study.json and curves.png. Raises UserError for a mistake in the
    options, for a folder with runs of other settings, and where a training fails."""
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False, exit_on_error=False)
    configure(parser)
    own, megatron_flags = parse_known(parser, args.arguments)
    settings = _settings(own, megatron_flags)
    runs = _runs(own)
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("The curves need matplotlib: install megatron-adacc with its plots extra.")
    outcomes = [kept(settings, one) for one in runs]
    try:
        settings.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {settings.output} cannot be made: {error.strerror}.") from None
    if None in outcomes:
        settings = _with_data(settings, own.data)
    found, failures = _run_all(settings, runs, outcomes)
    rows = compare(found)
    content = {
        "format": 1,
        "iterations": settings.iterations,
        "factor": settings.factor,
        "model": list(settings.model),
        "strategies": {name: list(flags) for name, flags in settings.strategies.items()},
        "compared": [asdict(row) for row in rows],
        "runs": [asdict(one) for one in found],
    }
    write(str(settings.output / "study.json"), json.dumps(finite(content), indent=1) + "\n")
    from megatron_adacc.megatron.compare_chart import save_png

    if found:
        save_png(found, settings.output / "curves.png")
        _show(rows, settings)
    if failures:
        raise UserError("\n".join(failures))
    return 0


def strategies(limit: str, lossy_limit: str, error_budget: str, iterations: int) -> dict[str, tuple[str, ...]]:
    """Our flags of each strategy. Lossy ones warm up for a tenth of the training, at most 100 steps; gradients are
    compared with exact ones ten times, and nothing follows from it."""
    checked = (
        *("--adacc-check-gradients-every", str(max(1, iterations // 10))),
        *("--adacc-max-gradient-error", "1e9"),
        *("--adacc-warmup-steps", str(min(100, iterations // 10))),
    )
    return {
        "off": ("--adacc-plan", "off"),
        "full": ("--adacc-plan", "full"),
        "auto": ("--adacc-plan", "auto", "--adacc-limit", limit),
        "auto lossy": (
            *("--adacc-plan", "auto", "--adacc-limit", lossy_limit, "--adacc-error-budget", error_budget),
            *checked,
        ),
        "compress": ("--adacc-plan", "compress", *checked),
        "quantize": ("--adacc-plan", "quantize", *checked),
    }


def _settings(own: Namespace, megatron_flags: Sequence[str]) -> Settings:
    if own.output is None:
        raise UserError("--output is missing: name the folder of the study, such as runs/accuracy.")
    try:
        factor = float(own.factor)
    except ValueError:
        factor = math.nan
    if not 1 <= factor < math.inf:
        raise UserError(f"--factor is {own.factor!r}, but it must be a number of at least 1.")
    script = Path(own.script) if own.script else Path(megatron_adacc.__file__).parents[1] / "pretrain_gpt.py"
    if not script.is_file():
        raise UserError(f"There is no training script {script}: name one with --script.")
    if any(token.startswith("--adacc-") for token in megatron_flags):
        raise UserError("adacc compare-training sets the --adacc-* flags of each run itself: leave them out.")
    if own.config:
        model = flags_of_file(own.config)
    else:
        with resources.as_file(resources.files("megatron_adacc.configs").joinpath("gpt_demo.yaml")) as path:
            model = flags_of_file(str(path))
    iterations = whole("--iterations", own.iterations)
    return Settings(
        iterations=iterations,
        eval_iterations=whole("--eval-iterations", own.eval_iterations),
        model=(*model, *megatron_flags),
        data=(),
        strategies=strategies(own.limit, own.lossy_limit, own.error_budget, iterations),
        factor=factor,
        script=script,
        output=Path(own.output),
        ranks=whole("--nproc-per-node", own.nproc_per_node),
    )


def _runs(own: Namespace) -> list[Run]:
    for name in own.strategies:
        if name not in STRATEGIES:
            raise UserError(f"--strategies has {name!r}, but there are {', '.join(map(repr, STRATEGIES))}.")
    if own.outliers not in _CONDITIONS:
        raise UserError(f"--outliers is {own.outliers!r}, but it is one of {', '.join(_CONDITIONS)}.")
    seeds = [whole("--seeds", text) for text in own.seeds]
    names = [name for name in STRATEGIES if name in own.strategies]
    conditions, unique = _CONDITIONS[own.outliers], list(dict.fromkeys(seeds))
    return [Run(name, seed, outliers) for outliers in conditions for seed in unique for name in names]


def _with_data(settings: Settings, data: str | None) -> Settings:
    folder = Path(data) if data is not None else settings.output / "data"
    if data is None:
        made = subprocess.run(
            [sys.executable, "-m", "megatron_adacc.cli", "prepare-data", "--output", str(folder)],
            stdout=subprocess.DEVNULL,
        )
        if made.returncode != 0:
            raise UserError(f"The data set {folder} could not be made; adacc prepare-data says above why.")
    elif not (folder / "tokenizer").is_dir():
        raise UserError(f"--data {folder} holds no data set of adacc prepare-data: make one with it.")
    flags = (
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer")),
        *("--data-path", str(folder / "text_document"), "--split", "95,5,0"),
    )
    return replace(settings, data=flags)


def _run_all(
    settings: Settings, runs: Sequence[Run], outcomes: Sequence[Outcome | None]
) -> tuple[list[Outcome], list[str]]:
    """What is known of the runs, and why some failed: the others are run all the same."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True, highlight=False)
    found: list[Outcome] = []
    failures: list[str] = []
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:
        for number, (one, known) in enumerate(zip(runs, outcomes, strict=True), 1):
            words = f"{number}/{len(runs)} {one.name}"
            if known is not None:
                console.print(f"{words}: done before")
                found.append(known)
                continue
            task = progress.add_task(words, total=settings.iterations, loss="starting")

            def tell(iteration: int, loss: float, task: int = task) -> None:
                progress.update(task, completed=iteration, loss=f"loss {loss:.3f}")  # type: ignore[arg-type]

            try:
                outcome = execute(settings, one, tell)
            except UserError as error:
                failures.append(str(error))
                progress.update(task, loss="failed")
                continue
            found.append(outcome)
            progress.update(task, loss=f"validation {outcome.validation:.4f}")
    return found, failures


def table(rows: Sequence[Compared], iterations: int) -> Table:
    """The comparison for people; losses as mean over the seeds, and their standard deviation."""
    from rich.table import Table

    made = Table(title=f"{iterations} iterations; validation loss as mean and standard deviation over the seeds")
    names = (
        "planted outliers",
        "strategy",
        "seeds",
        "validation loss",
        "beside off",
        "training loss",
        "gradient error",
    )
    for name in (*names, "held MiB", "step ms"):
        made.add_column(name, justify="left" if name in names[:2] else "right")
    for number, row in enumerate(rows):
        made.add_row(
            "yes" if row.outliers else "no",
            row.strategy,
            str(row.seeds),
            _with_spread(row.validation, row.validation_sd, "{:.4f}"),
            "" if row.beside_off is None else _with_spread(row.beside_off, row.beside_off_sd, "{:+.2%}"),
            _number(row.training, "{:.4f}"),
            "" if row.gradient_error is None else f"{row.gradient_error:.3g}",
            f"{row.held_bytes / MIB:.1f}",
            f"{row.step_ms:.0f}",
            end_section=number + 1 < len(rows) and rows[number + 1].outliers != row.outliers,
        )
    return made


def _with_spread(value: float, deviation: float | None, form: str) -> str:
    spread = "" if deviation is None else f" ± {form.replace('+', '').format(deviation)}"
    return _number(value, form) + spread


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "diverged"


def _show(rows: Sequence[Compared], settings: Settings) -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "140"))
    console = Console(width=width, highlight=False, markup=False)
    console.print(table(rows, settings.iterations))
    console.print("gradient error: of a layer, relative, beside exact gradients; the largest at the last comparison.")
    console.print(f"{settings.output / 'study.json'}, {settings.output / 'curves.png'}", soft_wrap=True)
