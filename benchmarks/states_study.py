"""State in blocks at 60 % of the static bytes beside Megatron's AdamW: a small GPT of the demo's kind on real text, or
with --demo the demo's own.

    python benchmarks/states_study.py [--demo] [--iterations 600] [--seeds 3] [--out DIR] [--png FILE]

    full    Megatron as it is                 auto    --adacc-state-plan auto --adacc-state-limit 60%

Each run in a process of its own, one thread, the two arms of a seed one after the other, on the same data. The
validation loss is that after the last iteration; times are of the process's CPU, as other work on the machine lengthens
the clock's. Writes states.json.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from drift import SMOOTH, smooth
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_adacc.child import Child

ROOT = Path(__file__).resolve().parent.parent
ARMS = {
    "full": ["--adacc-state-plan", "full"],
    "auto": ["--adacc-state-plan", "auto", "--adacc-state-limit", "60%"],
}
SMALLER = {
    "num-layers": 4,
    "hidden-size": 128,
    "num-attention-heads": 4,
    "seq-length": 128,
    "max-position-embeddings": 128,
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
}
ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ .*lm loss: ([0-9.E+-]+)")
VALIDATION = re.compile(r"validation loss at iteration \d+ .*lm loss value: ([0-9.E+-]+)")
STATIC = re.compile(r"static bytes .* \(([0-9.]+)%\)")


@dataclass
class Outcome:
    """``losses``: of every iteration. ``validation``: after the last. ``static_share``: of the bytes of parameters,
    gradients and state without a state plan. ``cpu_ms``: of each training step."""

    arm: str
    seed: int
    losses: list[float]
    validation: float
    static_share: float
    cpu_ms: list[float]

    @property
    def step_ms(self) -> float:
        """The median; the first steps compile."""
        return statistics.median(self.cpu_ms[len(self.cpu_ms) // 10 :])


def command(arm: str, seed: int, options: argparse.Namespace, report: Path) -> list[str]:
    settings = yaml.safe_load((ROOT / "configs" / "gpt_demo.yaml").read_text()) | ({} if options.demo else SMALLER)
    settings |= {"lr-warmup-iters": options.iterations // 10, "seed": seed}
    data = options.data
    return [
        *(sys.executable, str(ROOT / "benchmarks" / "states_job.py")),
        *(token for flag, value in settings.items() for token in (f"--{flag}", str(value))),
        *("--train-iters", str(options.iterations), "--lr-decay-iters", str(options.iterations)),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(data / "tokenizer")),
        *("--data-path", str(data / "text_document"), "--split", "95,5,0", "--num-workers", "0"),
        *("--log-interval", "1", "--eval-interval", str(options.iterations), "--eval-iters", str(options.eval_iters)),
        *("--adacc-report", str(report), *ARMS[arm]),
    ]


def run(arm: str, seed: int, options: argparse.Namespace, progress: Progress) -> Outcome:
    stem = options.out / f"{arm}-{seed}"
    report, log, times = (stem.with_suffix(end) for end in (".json", ".log", ".times"))
    environment = {"OMP_NUM_THREADS": "1", "CPU_TIMES": str(times), "HF_HUB_OFFLINE": "1"}
    task = progress.add_task(f"{arm}, seed {seed}", total=options.iterations)
    found, share = None, 1.0
    with Child(command(arm, seed, options, report), environment, log) as job:
        for line in job.lines():
            if match := ITERATION.search(line):
                progress.update(task, completed=int(match[1]))
            if match := VALIDATION.search(line):
                found = float(match[1])
            if match := STATIC.search(line):
                share = float(match[1]) / 100
    if job.code or found is None:
        raise SystemExit(f"{arm}, seed {seed}, did not end well: see {log}")
    losses = [row["lm_loss"] for row in json.loads(report.read_text())["iterations"]]
    return Outcome(arm, seed, losses, found, share, json.loads(times.read_text()))


def table(outcomes: list[Outcome]) -> str:
    lines = [
        "| seed | AdamW: validation loss | blocks, 60 %: validation loss | difference | step, of AdamW's |",
        "|---:|---:|---:|---:|---:|",
    ]
    differences = []
    for seed in sorted({one.seed for one in outcomes}):
        full, auto = (next(o for o in outcomes if (o.arm, o.seed) == (arm, seed)) for arm in ARMS)
        differences.append(auto.validation / full.validation - 1)
        lines.append(
            f"| {seed} | {full.validation:.4f} | {auto.validation:.4f} | {differences[-1]:+.2%} | "
            f"{auto.step_ms / full.step_ms:.3f} |"
        )
    lines.append(f"\nmean difference {statistics.mean(differences):+.3%}")
    return "\n".join(lines)


def draw(outcomes: list[Outcome], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True)
    colours = dict(zip(sorted({one.seed for one in outcomes}), ("tab:blue", "tab:orange", "tab:green"), strict=False))
    for seed, colour in colours.items():
        full, auto = (smooth(next(o for o in outcomes if (o.arm, o.seed) == (arm, seed)).losses) for arm in ARMS)
        steps = range(1, len(full) + 1)
        above.plot(steps, full, "--", color=colour, linewidth=1, label=f"AdamW, seed {seed}")
        above.plot(steps, auto, "-", color=colour, linewidth=1, label=f"blocks at 60 %, seed {seed}")
        below.plot(steps, [100 * (a / b - 1) for a, b in zip(auto, full, strict=True)], color=colour, linewidth=1)
    below.axhline(0, color="black", linewidth=0.8)
    above.set(ylabel=f"training loss (mean of {SMOOTH} steps)")
    below.set(xlabel="step", ylabel="beside AdamW, %")
    above.legend(fontsize=8)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="the demo's GPT in its own size, with its dropout")
    parser.add_argument("--iterations", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--eval-iters", type=int, default=100)
    parser.add_argument(
        "--data", type=Path, default=ROOT / "runs" / "demo" / "data", help="as scripts/demo.sh makes it"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "states")
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.data / "tokenizer").exists():
        subprocess.run(
            [sys.executable, "-m", "megatron_adacc.cli", "prepare-data", "--output", str(options.data)], check=True
        )
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        outcomes = [run(arm, 1234 + seed, options, progress) for seed in range(options.seeds) for arm in ARMS]
    (options.out / "states.json").write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    sys.stdout.write(table(outcomes) + "\n")
    if options.png is not None:
        draw(outcomes, options.png)


if __name__ == "__main__":
    main()
