"""Full fine-tuning, LoRA, and LoRA on bases of fewer bits: the demo's GPT, or a small one of its kind, on real text.

    python benchmarks/finetuning.py [--demo] [--pretrain 600] [--iterations 300] [--rank 16] [--out runs/finetuning]

The GPT is trained from random weights on one half of the source of Python's standard library, the files by name, and
then fine-tuned on the other, which it has not seen. Each run in a process of its own, one thread, fp32, no dropout, on
the same batches. Loss: on text of the second half that is kept apart, after the last step; times are of the
process's CPU, as other work on the machine lengthens the clock's. Prints a table, writes finetuning.json.
"""

import argparse
import json
import random
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_adacc.child import Child

ROOT = Path(__file__).resolve().parent.parent
BASES = ("16bit", "nf4", "nf4-double", "int8", "gptq4")
CALIBRATED = ("int8", "gptq4")
SETTINGS = {"attention-dropout": 0.0, "hidden-dropout": 0.0, "lr-warmup-iters": 20}
SMALL = {
    "num-layers": 4,
    "hidden-size": 128,
    "num-attention-heads": 4,
    "seq-length": 128,
    "max-position-embeddings": 128,
}
VOCABULARY = {"small": 1024, "demo": 8192}
# Adapters are trained with a higher rate than all parameters are, as is usual.
RATES = {"full": 3e-4, "adapters": 2e-3}
ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ .*lm loss: ([0-9.E+-]+)")
VALIDATION = re.compile(r"validation loss at iteration \d+ .*lm loss value: ([0-9.E+-]+)")
KIB = 1024


def prepare(folder: Path, vocabulary: int) -> None:
    """A tokenizer of the whole text, and a data set of each half; text.jsonl is of the second, to calibrate with."""
    from megatron_adacc.atomic import atomic_folder, sole_writer
    from megatron_adacc.megatron import text_dataset
    from megatron_adacc.megatron.documents import Skipped, standard_library

    if folder.exists():
        return
    files = sorted(source.path for source in standard_library(Skipped()))
    texts = [text for path in files if (text := Path(path).read_text(encoding="utf-8", errors="replace"))]
    halves = {"first": texts[: len(texts) // 2], "second": texts[len(texts) // 2 :]}
    with sole_writer(folder), atomic_folder(folder) as made:
        tokenizer = text_dataset.train_tokenizer(texts, vocabulary)
        text_dataset.save_tokenizer(tokenizer, made / "tokenizer")
        for name, half in halves.items():
            # Megatron takes its validation set from the end.
            random.Random(1234).shuffle(half)
            text_dataset.write(made / name, text_dataset.encode(half, tokenizer), vocabulary)
        lines = (json.dumps({"text": text}) for text in halves["second"][: len(halves["second"]) // 2])
        (made / "text.jsonl").write_text("\n".join(lines) + "\n")


def command(run: str, options: argparse.Namespace, report: Path) -> list[str]:
    """The training of one run: "pretrain", "full" or a base's format."""
    settings = yaml.safe_load((ROOT / "configs" / "gpt_demo.yaml").read_text()) | SETTINGS
    settings |= {} if options.demo else SMALL
    pretraining = run == "pretrain"
    iterations = options.pretrain if pretraining else options.iterations
    settings["lr"] = options.pretrain_lr if pretraining else RATES.get(run, RATES["adapters"])
    settings["min-lr"] = settings["lr"] / 10
    data, base = options.out / "data", options.out / "base"
    tokens = [
        *(sys.executable, str(ROOT / "benchmarks" / "finetuning_job.py")),
        *(token for flag, value in settings.items() for token in (f"--{flag}", str(value))),
        *("--train-iters", str(iterations), "--lr-decay-iters", str(iterations), "--ckpt-format", "torch"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(data / "tokenizer")),
        *("--data-path", str(data / ("first" if pretraining else "second")), "--split", "90,10,0"),
        *("--log-interval", "1", "--eval-interval", str(iterations), "--eval-iters", str(options.eval_iters)),
        *("--num-workers", "0", "--adacc-report", str(report)),
    ]
    if pretraining:
        return [*tokens, "--save", str(base), "--save-interval", str(iterations), "--no-save-optim"]
    tokens += ["--pretrained-checkpoint", str(base), "--finetune"]
    if run != "full":
        tokens += ["--adacc-lora-rank", str(options.rank)]
        tokens += [] if run == "16bit" else ["--adacc-base", run]
        tokens += ["--adacc-base-text", str(data / "text.jsonl")] if run in CALIBRATED else []
    return tokens


def train(run: str, options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """One run to its end: its losses, bytes and times. A run that is there already is read."""
    report, log, measured = (options.out / f"{run}{end}" for end in (".report.json", ".log", ".measured.json"))
    iterations = options.pretrain if run == "pretrain" else options.iterations
    validations: list[float] = []
    tokens = command(run, options, report)
    if measured.exists() and log.exists():
        validations = [float(match[1]) for match in VALIDATION.finditer(log.read_text())]
    else:
        task = progress.add_task(run, total=iterations)
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MEASURED": str(measured)}
        with Child(tokens, environment, log) as job:
            for line in job.lines():
                if match := ITERATION.search(line):
                    progress.update(task, completed=int(match[1]))
                if match := VALIDATION.search(line):
                    validations.append(float(match[1]))
        if job.code or not validations:
            raise SystemExit(f"{run} did not end well: see {log}")
    found = json.loads(measured.read_text())
    content = json.loads(report.read_text())
    times = found["cpu_ms"]
    return {
        "run": run,
        "validation": validations[-1],
        "first_loss": content["iterations"][0]["lm_loss"],
        "held_bytes": content["summary"]["held_bytes"],
        "step_cpu_ms": statistics.median(times[len(times) // 10 :]),
        **found["static"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The comparison, in Markdown."""
    names = {"full": "all parameters", "16bit": "LoRA, base as it is"}
    lora = next(row for row in rows if row["run"] == "16bit")
    lines = [
        "| KiB | frozen | trained | gradients, Adam | static | held | CPU ms a step | validation loss | to LoRA's |",
        "|:---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        parts = [row["frozen"], row["trained"], row["gradients"] + row["optimizer"]]
        numbers = [*parts, sum(parts), row["held_bytes"]]
        cells = [names.get(row["run"], f"LoRA, {row['run']}"), *(f"{number / KIB:,.0f}" for number in numbers)]
        cells += [f"{row['step_cpu_ms']:.0f}", f"{row['validation']:.4f}"]
        cells.append(f"{row['validation'] / lora['validation'] - 1:+.2%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="configs/gpt_demo.yaml at its own size, without dropout")
    parser.add_argument("--pretrain", type=int, default=600, metavar="N", help="steps that make the base")
    parser.add_argument("--pretrain-lr", type=float, default=1e-3, metavar="LR", help="their largest learning rate")
    parser.add_argument("--iterations", type=int, default=300, metavar="N", help="steps of each fine-tuning")
    parser.add_argument("--rank", type=int, default=16, metavar="R")
    parser.add_argument("--eval-iters", type=int, default=50, metavar="N")
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--no-full", action="store_true", help="leave the training of all parameters out")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "finetuning", metavar="DIR")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prepare(options.out / "data", VOCABULARY["demo" if options.demo else "small"])
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        base = train("pretrain", options, progress)
        rows = [train(run, options, progress) for run in (*(() if options.no_full else ("full",)), *options.bases)]
    (options.out / "finetuning.json").write_text(json.dumps([base, *rows], indent=1) + "\n")
    sys.stdout.write(f"the base's loss on the second half, first batch: {rows[0]['first_loss']:.4f}\n{table(rows)}\n")


if __name__ == "__main__":
    main()
