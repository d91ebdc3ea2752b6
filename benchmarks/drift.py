"""Does adaptation matter? The demo's GPT on real text, with channels that grow in the middle of the training.

    python benchmarks/drift.py [--iterations 500] [--drift-at 250] [--lr 1e-3 --warm-up 5] [--error-budget 0.05]
                               [--out runs/drift] [--png docs/images/drift.png]

    off                  Megatron without us
    off, two threads     the same numbers added in another order: how far apart two equally good runs end
    auto                 lossy within the error budget, adapting
    auto, never checked  the same plan and channels to the end
    compress, compress, never checked, quantize: every buffer lossy, for the distance

Each in a process of its own, one thread (but that one), the same seed and data; the validation loss is that of the last
iteration. What was run before with the same flags is not run again. Writes drift.json beside the picture of the losses,
smoothed over 20 steps, minus off's.
"""

import argparse
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_adacc.child import Child

ROOT = Path(__file__).resolve().parent.parent
NEVER = ["--adacc-min-interval", "1000000", "--adacc-max-interval", "1000000"]
WARM_UP = ["--adacc-warmup-steps", "50"]
AUTO = ["--adacc-plan", "auto", "--adacc-limit", "20%", *WARM_UP]
COMPRESS = ["--adacc-plan", "compress", *WARM_UP]
TWO_THREADS = "off, two threads"
STRATEGIES = {
    "off": ["--adacc-plan", "off"],
    TWO_THREADS: ["--adacc-plan", "off"],
    "auto": AUTO,
    "auto, never checked": [*AUTO, *NEVER],
    "compress": COMPRESS,
    "compress, never checked": [*COMPRESS, *NEVER],
    "quantize": ["--adacc-plan", "quantize", *WARM_UP, *NEVER],
}
ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ .*lm loss: ([0-9.E+-]+)")
VALIDATION = re.compile(r"validation loss at iteration \d+ .*lm loss value: ([0-9.E+-]+)")
SMOOTH = 20


@dataclass
class Outcome:
    """``losses``: of every iteration. ``validation``: after the last. ``decisions``: as the report has them."""

    name: str
    losses: list[float]
    validation: float
    decisions: list[dict]


def command(name: str, options: argparse.Namespace, report: Path) -> list[str]:
    settings = yaml.safe_load((ROOT / "configs" / "gpt_demo.yaml").read_text())
    settings |= {"lr": options.lr, "min-lr": options.lr / 10, "lr-warmup-iters": options.warm_up}
    data = options.data
    return [
        *(sys.executable, str(ROOT / "benchmarks" / "drift_job.py")),
        *(token for flag, value in settings.items() for token in (f"--{flag}", str(value))),
        *("--train-iters", str(options.iterations), "--lr-decay-iters", str(options.iterations)),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(data / "tokenizer")),
        *("--data-path", str(data / "text_document"), "--split", "95,5,0", "--num-workers", "0"),
        *("--log-interval", "1", "--eval-interval", str(options.iterations), "--eval-iters", str(options.eval_iters)),
        *("--adacc-report", str(report), *STRATEGIES[name]),
        *(("--adacc-error-budget", str(options.error_budget)) if "auto" in STRATEGIES[name] else ()),
    ]


def run(name: str, options: argparse.Namespace, progress: Progress) -> Outcome:
    slug = name.replace(", ", "-").replace(" ", "-")
    if "auto" in STRATEGIES[name]:
        slug += f"-{options.error_budget:g}"
    kept = options.out / f"{slug}.outcome.json"
    made_with = [str(options.drift_at), *command(name, options, Path("report"))]
    if kept.exists() and (found := json.loads(kept.read_text()))["made_with"] == made_with:
        return Outcome(**found["outcome"])
    report, log = options.out / f"{slug}.json", options.out / f"{slug}.log"
    environment = {"DRIFT_AT": str(options.drift_at), "OMP_NUM_THREADS": "2" if name == TWO_THREADS else "1"}
    task = progress.add_task(name, total=options.iterations)
    validation = None
    with Child(command(name, options, report), environment, log) as job:
        for line in job.lines():
            if match := ITERATION.search(line):
                progress.update(task, completed=int(match[1]))
            if match := VALIDATION.search(line):
                validation = float(match[1])
    if job.code or validation is None:
        raise SystemExit(f"{name} did not end well: see {log}")
    content = json.loads(report.read_text())
    outcome = Outcome(name, [row["lm_loss"] for row in content["iterations"]], validation, content["decisions"])
    kept.write_text(json.dumps({"made_with": made_with, "outcome": asdict(outcome)}))
    return outcome


def table(outcomes: list[Outcome]) -> str:
    off = outcomes[0].validation
    lines = [
        "| strategy | validation loss | beside off | training loss, last 50 steps | decisions |",
        "|---|---|---|---|---|",
    ]
    for one in outcomes:
        last = sum(one.losses[-50:]) / len(one.losses[-50:])
        changes = f"{len(one.decisions)}"
        lines.append(
            f"| {one.name} | {one.validation:.5f} | {one.validation / off - 1:+.4%} | {last:.4f} | {changes} |"
        )
    return "\n".join(lines)


def smooth(values: list[float]) -> list[float]:
    windows = (values[max(0, i - SMOOTH + 1) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def draw(outcomes: list[Outcome], drift_at: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(2, 3))
    off = smooth(outcomes[0].losses)
    for one in outcomes:
        steps = range(1, len(one.losses) + 1)
        above.plot(steps, smooth(one.losses), label=one.name, linewidth=1)
        if one is not outcomes[0]:
            below.plot(steps, [100 * (a / b - 1) for a, b in zip(smooth(one.losses), off, strict=True)], label=one.name)
    for axes in (above, below):
        axes.axvline(drift_at, color="grey", linestyle=":", linewidth=1)
        axes.grid(alpha=0.3)
    above.set_ylabel(f"loss (mean of {SMOOTH} steps)")
    below.set_ylabel("loss beside off, %")
    below.set_xlabel(f"step (channels grow at step {drift_at})")
    below.axhline(0, color="black", linewidth=0.8, label="off")
    below.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--drift-at", type=int, default=250)
    parser.add_argument("--eval-iters", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3, help="falls to a tenth")
    parser.add_argument("--error-budget", type=float, default=0.05, help="of auto")
    parser.add_argument("--warm-up", type=int, default=5, help="of the learning rate, steps")
    parser.add_argument(
        "--data", type=Path, default=ROOT / "runs" / "demo" / "data", help="as scripts/demo.sh makes it"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "drift")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.data / "tokenizer").exists():
        subprocess.run(
            [sys.executable, "-m", "megatron_adacc.cli", "prepare-data", "--output", str(options.data)], check=True
        )
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        outcomes = [run(name, options, progress) for name in options.only]
    (options.out / "drift.json").write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    sys.stdout.write(table(outcomes) + "\n")
    if options.png is not None:
        draw(outcomes, options.drift_at, options.png)


if __name__ == "__main__":
    main()
