"""Train a small GPT on real text with each strategy, from the same seed, and compare. Called by demo.sh."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_adacc.atomic import write_text
from megatron_adacc.child import Child

ROOT = Path(__file__).resolve().parent.parent
PLANS = ("off", "full", "auto", "selective", "recompute")
MIB = 2**20
ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ .*lm loss: ([0-9.E+-]+)")


def flags(config: Path) -> list[str]:
    """The command-line flags that a YAML of Megatron's settings stands for."""
    settings = yaml.safe_load(config.read_text())
    return [token for name, value in settings.items() for token in (f"--{name}", str(value))]


def command(plan: str, limit: str | None, iterations: int, data: Path, report: Path) -> list[str]:
    """The training command: what a user would type, with one plan."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
        str(ROOT / "pretrain_gpt.py"),
        *flags(ROOT / "configs" / "gpt_demo.yaml"),
        *("--train-iters", str(iterations), "--lr-decay-iters", str(max(iterations, 10))),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(data / "tokenizer")),
        *("--data-path", str(data / "text_document"), "--split", "95,5,0"),
        *("--log-interval", "1", "--eval-interval", "1000", "--eval-iters", "0", "--num-workers", "0"),
        *("--adacc-plan", plan, "--adacc-report", str(report)),
        *(() if limit is None else ("--adacc-limit", limit)),
    ]


def train(plan: str, limit: str | None, iterations: int, data: Path, out: Path, console: Console) -> dict:
    """Run one plan to the end; returns the report's summary. Exits with the job's code if it fails."""
    report, log = out / f"{plan}.json", out / f"{plan}.log"
    report.unlink(missing_ok=True)
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with (
            Child(command(plan, limit, iterations, data, report), environment, log) as job,
            Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress,
        ):
            task = progress.add_task(plan, total=iterations, loss="starting")
            for line in job.lines():
                if found := ITERATION.search(line):
                    progress.update(task, completed=int(found[1]), loss=f"lm loss {float(found[2]):.3f}")
    except KeyboardInterrupt:
        console.print("demo: interrupted")
        sys.exit(130)
    if job.code != 0:
        console.print("".join(list(job.tail)[-20:]), markup=False, highlight=False)
        console.print(f"demo: the run with --adacc-plan {plan} failed with exit code {job.code}; its log is {log}.")
        sys.exit(job.code if job.code > 0 else 1)
    return json.loads(report.read_text())["summary"]


def prepare(data: Path, console: Console) -> int:
    """Make the data set, unless it is there; returns the command's exit code."""
    process = subprocess.Popen([sys.executable, "-m", "megatron_adacc.cli", "prepare-data", "--output", str(data)])
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The terminal has told the command as well: let it clear away what it began.
        process.wait()
        console.print("demo: interrupted")
        return 130


def table(rows: list[dict]) -> Table:
    """The comparison, with time and memory as ratios to the first row."""
    result = Table(title="GPT of 10 M parameters, 4 x 256 tokens a step; ratios to off")
    for name in ("plan", "step ms", "held MiB", "peak MiB", "final loss"):
        result.add_column(name, justify="left" if name == "plan" else "right", no_wrap=True)
    first = rows[0]
    for row in rows:
        cells = [row["strategy"]]
        for key, scale in (("step_ms_median", 1), ("held_bytes", MIB), ("peak_bytes", MIB)):
            cells.append(f"{row[key] / scale:.0f} ({row[key] / first[key]:.2f} x)")
        result.add_row(*cells, f"{row['final_lm_loss']:.6f}")
    return result


def other_work() -> float:
    """Processes that ran or waited to run beside a training's threads, as a mean over the last minute; 0 where the
    system does not say."""
    return max(0.0, os.getloadavg()[0] - (os.cpu_count() or 1)) if hasattr(os, "getloadavg") else 0.0


def main() -> int:
    """Prepare the data, run every plan, print the table, write the summary."""
    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description=__doc__)
    parser.add_argument("--iterations", type=int, default=30, metavar="N", help="iterations for each plan")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "demo", metavar="DIR", help="where to write")
    parser.add_argument(
        "--plans", nargs="+", choices=PLANS, default=PLANS, metavar="PLAN", help="off and full always run"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="train on what `adacc prepare-data` wrote there")
    args = parser.parse_args()
    if args.iterations < 1:
        parser.error(f"--iterations is {args.iterations}, but at least 1 is needed")
    if args.data is not None and not (args.data / "tokenizer").exists():
        parser.error(f"{args.data} has no tokenizer: make it with `adacc prepare-data --output {args.data}`")
    console, started, load = Console(), time.monotonic(), 0.0
    args.output.mkdir(parents=True, exist_ok=True)
    data = args.data or args.output / "data"
    if args.data is None and (code := prepare(data, console)):
        return code
    rows: list[dict] = []
    plans = [plan for plan in PLANS if plan in {"off", "full", *args.plans}]
    for plan in plans:
        # auto gets the memory that full recompute was seen to need, and little more: it keeps dropout masks as bits.
        limit = f"{int(1.05 * rows[plans.index('full')]['peak_bytes'])}B" if plan == "auto" else None
        rows.append(train(plan, limit, args.iterations, data, args.output, console))
        load = max(load, other_work())
    write_text(args.output / "summary.json", json.dumps(rows, indent=1) + "\n")
    console.print(table(rows))
    console.print("auto: limited to the peak of full and 5 % more. These plans are lossless: all losses are equal.")
    console.print("held: kept for the backward pass after one forward; peak: the largest in a step.")
    if load > 1.0:
        console.print(
            f"Other work ran on this machine (a load of {load:.1f} beside ours), and the plans trained one after the "
            "other: their step times cannot be compared, bytes and losses can."
        )
    console.print(f"{time.monotonic() - started:.0f} s in all; {args.output / 'summary.json'}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
