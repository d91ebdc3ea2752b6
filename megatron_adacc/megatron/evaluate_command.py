"""`adacc evaluate`: accuracy and perplexity of a Megatron checkpoint on a cloze task, with or without a GPU.

    adacc evaluate --task lambada.jsonl --checkpoint DIR [--config FILE] <the flags that the model was trained with>
    adacc evaluate --task lambada.jsonl --checkpoint ADAPTERS --base BASE ...

The task is a local file (megatron/evaluate_task.py says what is in it); nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_adacc.child import Child
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import evaluate_task
from megatron_adacc.megatron.planning import whole
from megatron_adacc.megatron.trace_flags import flags_of_file, parse_known
from megatron_adacc.outputs import check_folders, write

PROGRAM = "adacc evaluate"
FORMAT = 1
_PROGRESS = re.compile(r"adacc: evaluated (\d+) of (\d+) micro-batches")


def configure(parser: argparse.ArgumentParser) -> None:
    """Our own options; all others are Megatron's flags."""
    parser.usage = (
        "adacc evaluate --task FILE.jsonl --checkpoint DIR [--base DIR] [--config FILE] [--json FILE|-]\n"
        "                      [--nproc-per-node N] [Megatron's flags]"
    )
    parser.description = (
        'Accuracy and perplexity on a cloze task. A line of the task is {"text": ...}, whose last word is predicted; '
        '{"context": ..., "target": ...}; or {"context": ..., "choices": [...], "answer": 0}. Give the flags of model '
        "and tokenizer that the checkpoint was trained with, or --use-checkpoint-args."
    )
    parser.add_argument("--task", metavar="FILE", help="the task as JSONL, a local file")
    parser.add_argument("--checkpoint", metavar="DIR", help="as Megatron's --save wrote it")
    parser.add_argument("--base", metavar="DIR", help="the base of the LoRA adapters that --checkpoint holds")
    parser.add_argument("--config", metavar="FILE", help="a YAML of Megatron's flags by name, such as configs/*.yaml")
    parser.add_argument("--json", metavar="FILE", help="write the result, with each example's score, as JSON; - prints")
    parser.add_argument("--nproc-per-node", default="1", metavar="N", help="processes (default: 1)")


def run(args: Namespace) -> int:
    """Evaluate, print, write. Returns the job's exit code where it fails. Raises UserError for a mistake in the
    options or in the task."""
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False, exit_on_error=False)
    configure(parser)
    own, rest = parse_known(parser, args.arguments)
    for name in ("task", "checkpoint"):
        if getattr(own, name) is None:
            raise UserError(
                f"--{name} is missing: adacc evaluate --task FILE.jsonl --checkpoint DIR <Megatron's flags>."
            )
    check_folders(or_printed=own.json)
    for name in ("checkpoint", "base"):
        folder = getattr(own, name)
        if folder is not None and not Path(folder).is_dir():
            raise UserError(f"--{name} {folder} is no folder: name the one that Megatron's --save wrote.")
    evaluate_task.read(own.task)  # a mistake in it is told before Megatron is started
    flags = job_flags([*(flags_of_file(own.config) if own.config else []), *rest], own.checkpoint)
    ranks = whole("--nproc-per-node", own.nproc_per_node)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        base = [] if own.base is None else ["--base", own.base]
        code, tail = _job(["--task", own.task, "--result", str(result), *base, *flags], ranks)
        if code != 0:
            sentences = [line for line in tail if line.startswith(f"{PROGRAM}: ")]
            sys.stderr.write("".join(sentences[:1] or tail))
            return code if code > 0 else 1
        found = json.loads(result.read_text())
    content = {"format": FORMAT, "task": own.task, "checkpoint": own.checkpoint, **found}
    text = json.dumps(content, indent=1) + "\n"
    if own.json == "-":
        sys.stdout.write(text)
        return 0
    _show(content)
    if own.json:
        write(own.json, text)
    return 0


def job_flags(flags: list[str], checkpoint: str) -> list[str]:
    """Megatron's flags of the evaluation: the model's, without optimizer and random states.

    Raises UserError for flags that name another checkpoint or task of ours."""
    given = {token.split("=")[0] for token in flags if token.startswith("--")}
    for flag, ours in (("--load", "--checkpoint"), ("--pretrained-checkpoint", "--base")):
        if flag in given:
            raise UserError(f"{flag} is what {ours} says: leave it out.")
    defaults = {"--micro-batch-size": "4", "--train-iters": "1", "--lr": "1e-3", "--eval-iters": "0"}
    added = [token for name, value in defaults.items() if name not in given for token in (name, value)]
    fixed = ["--skip-train", "--no-load-optim", "--no-load-rng", "--exit-on-missing-checkpoint", "--load", checkpoint]
    return [*flags, *added, *fixed]


def _job(arguments: list[str], ranks: int) -> tuple[int, list[str]]:
    """Exit code and last lines of the job; a bar on stderr shows how far it is, where somebody looks at it."""
    from rich.console import Console
    from rich.progress import Progress

    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "megatron_adacc.megatron.evaluate_job", *arguments]
    console = Console(stderr=True)
    with (
        Child(command, {"HF_HUB_OFFLINE": "1"}) as job,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("evaluating", total=None)
        for line in job.lines():
            if match := _PROGRESS.search(line):
                progress.update(task, completed=int(match[1]), total=int(match[2]))
    return job.code, list(job.tail)[-40:]


def _show(content: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    def figure(value: float | None) -> str:
        return "beyond 1e308" if value is None else f"{value:,.3f}"

    table = Table(title=f"{content['task']}, iteration {content['iteration']} of {content['checkpoint']}")
    for name in ("examples", "accuracy", "perplexity", "per token"):
        table.add_column(name, justify="right")
    accuracy = f"{content['accuracy']:.2%} ± {content['accuracy_se']:.2%}"
    table.add_row(
        str(content["examples"]), accuracy, figure(content["perplexity"]), figure(content["token_perplexity"])
    )
    console = Console(highlight=False)
    console.print(table)
    if content["truncated"]:
        console.print(f"{content['truncated']} sequences are longer than --seq-length: only their ends were read.")
