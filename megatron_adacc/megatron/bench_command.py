"""`adacc bench`: strategies for activation memory side by side, on Megatron's layers and on this machine.

    adacc bench --suite cpu [--json FILE] [--png FILE] [--part layers|scaling] [--rounds 7] [Megatron's flags]

Suites: `cpu` has small layers, `gpu` those of GPT-345M. Parts: `layers` compares all strategies on a GPT layer and on a
Llama-style one (SwiGLU, RoPE, grouped queries, RMSNorm); `scaling` shows plain, full recompute and auto at full
recompute's peak while layers, sequence and micro-batch grow. Flags of Megatron's come after the suite's own and
replace them. Every strategy runs in a process of its own; a step is one forward and backward of the model, without an
optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from megatron_adacc.atomic import write_text
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.bench_run import Case, Row
from megatron_adacc.megatron.bench_table import draw, summary, table
from megatron_adacc.megatron.trace_flags import model_flags, parse_known

PROGRAM = "adacc bench"
FORMAT = 1
PERCENTS = (5, 10, 25, 50)
PEERS = ("plain", "full", "selective", "checkpoint", "matmuls")
_TRIES = 3  # to bring a plan's measured peak below its peer's
COMPILED = ("compiled 0", "compiled 0.25", "compiled 0.5", "compiled 0.75")
OURS = ("recompute", "compress", "quantize")

GPT = {"normalization": "LayerNorm"}
LLAMA = {
    "normalization": "RMSNorm", "swiglu": True, "group-query-attention": True, "position-embedding-type": "rope",
    "disable-bias-linear": True, "untie-embeddings-and-output-weights": True,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Of a suite's base case."""

    hidden: int
    heads: int
    layers: int
    sequence: int
    micro_batch: int
    precision: tuple[str, ...] = ()
    growing: tuple[tuple[str, tuple[int, ...]], ...] = ()


SUITES = {
    "cpu": Size(
        512, 8, 2, 512, 4,
        growing=(
            ("num-layers", (2, 4, 8, 16)), ("seq-length", (256, 512, 1024, 2048)), ("micro-batch-size", (1, 4, 16)),
        ),
    ),
    "gpu": Size(
        1024, 16, 4, 1024, 8, ("--fp16",),
        growing=(
            ("num-layers", (2, 4, 8, 16)), ("seq-length", (256, 512, 1024, 2048)),
            ("micro-batch-size", (1, 2, 4, 8, 16)),
        ),
    ),
}  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """Our own options; all others are Megatron's flags."""
    parser.usage = (
        "adacc bench --suite cpu|gpu [--part PART] [--rounds N] [--json FILE] [--png FILE] [Megatron's flags]"
    )
    parser.description = "Compare strategies for activation memory on Megatron's layers, on this machine."
    parser.add_argument("--suite", choices=list(SUITES), help="cpu: small layers; gpu: those of GPT-345M")
    parser.add_argument("--part", action="append", choices=("layers", "scaling"), help="default: both")
    parser.add_argument("--model", action="append", choices=("gpt", "llama"), help="of the part layers; default: both")
    parser.add_argument("--only", nargs="+", metavar="STRATEGY", help="of the part layers; default: all")
    parser.add_argument(
        "--percent", nargs="*", type=int, default=list(PERCENTS), help="auto's limits, of plain's bytes"
    )
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="steps of each strategy that are timed")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each process, on a CPU")
    parser.add_argument("--at-once", type=int, default=6, metavar="N", help="processes that live at a time")
    parser.add_argument("--json", metavar="FILE", help="write all figures; - prints them instead of the tables")
    parser.add_argument("--png", metavar="FILE", help="draw step time over peak memory of the first case")
    parser.set_defaults(arguments=[])


def run(args: Namespace) -> int:
    """Measure, print, write. Raises UserError for a mistake in the options."""
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False, exit_on_error=False)
    configure(parser)
    own, flags = parse_known(parser, args.arguments)
    _check(own)
    size = SUITES[own.suite]
    console = Console(width=None if sys.stdout.isatty() else 130)  # a file has no width
    cases: list[dict[str, Any]] = []
    content: dict[str, Any] = {"format": FORMAT, "suite": own.suite, "machine": _machine(), "cases": cases}
    parts = own.part or ["layers", "scaling"]
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True),
        transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task("")
        for title, case in _cases(own, size, flags, parts, lambda words: progress.update(task, description=words)):
            cases.append({"title": title, **_data(case, _clock(own.suite))})
            if own.json != "-":
                progress.console.print(title, style="bold", highlight=False)
                console.print(table(list(case.values()), _clock(own.suite)))
                for line in summary(case, _clock(own.suite)):
                    console.print(f"- {line}", highlight=False)
            if own.json and own.json != "-":  # what is measured is not lost when a later case fails
                _write(own.json, content)
            if own.png and len(cases) == 1:
                draw(case, title, _clock(own.suite), Path(own.png))
    if own.json == "-":
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    return 0


def _check(own: Namespace) -> None:
    if own.suite is None:
        raise UserError("adacc bench needs --suite cpu or --suite gpu.")
    for name in ("rounds", "threads"):
        if getattr(own, name) < 1:
            raise UserError(f"--{name} must be 1 or more; it is {getattr(own, name)}.")
    for name in own.only or ():
        known = {*PEERS, *COMPILED, *OURS, "keep", "auto", "paper"}
        if name not in known:
            raise UserError(f"--only knows {', '.join(sorted(known))}; {name!r} is none of them.")
    if any(not 0 < percent <= 100 for percent in own.percent):
        raise UserError("--percent takes whole numbers from 1 to 100.")
    for path in (own.png, None if own.json == "-" else own.json):
        if path is not None and not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            raise UserError(f"{path} cannot be written: its folder does not exist.")
    if own.suite == "gpu":
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                "The suite gpu needs a CUDA device, and PyTorch sees none; adacc bench --suite cpu runs here."
            )


def _cases(
    own: Namespace, size: Size, flags: Sequence[str], parts: Sequence[str], said: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, Row]]]:
    """Each case with its title, once it is measured."""
    for model in (own.model or ("gpt", "llama")) if "layers" in parts else ():
        for dropout in (0.1, 0.0) if model == "gpt" else (0.0,):
            title = f"{model}, {size.layers} layers, dropout {dropout:g}"
            names = own.only or [*PEERS, *(COMPILED if dropout == 0 else ()), *OURS, "paper", "auto"]
            with _case(own, flags_of(size, model, dropout, flags), f"{title}: ", said) as case:
                _all_strategies(case, names, own.percent)
                yield title, case.rows
    for flag, values in size.growing if "scaling" in parts else ():
        for value in values:
            title = f"scaling, {flag} {value}"
            extra = ["--" + flag, str(value)]
            extra += ["--max-position-embeddings", str(value)] if flag == "seq-length" else []
            with _case(own, flags_of(size, "gpt", 0.1, [*flags, *extra]), f"{title}: ", said) as case:
                _all_strategies(case, ["plain", "full", "auto"], ())
                yield title, case.rows


def _case(own: Namespace, flags: Sequence[str], prefix: str, said: Callable[[str], None]) -> Case:
    return Case(flags, own.rounds, own.threads, own.at_once, lambda words: said(prefix + words))


def _all_strategies(case: Case, names: Sequence[str], percents: Sequence[int]) -> None:
    """Peers first; then the paper's plans and ours, at the shares and at the bytes and peaks that peers needed."""
    peers = [name for name in names if name not in ("auto", "paper")]
    case.compare(peers)
    plain = case.rows["plain"]
    limits: dict[str, dict[str, Any]] = {}
    if "paper" in names:
        limits |= {f"paper {percent}%": {"percent": percent, "paper": True} for percent in percents}
    if "auto" in names:
        limits |= {f"auto {percent}%": {"percent": percent} for percent in percents}
        lossless = [row for row in case.rows.values() if not row.note and row.name != "plain" and row.name not in OURS]
        limits |= {f"auto = {row.name} peak": {"peak": row.peak, "plain": plain.peak} for row in lossless}
    for _ in range(_TRIES if limits else 0):
        case.compare(list(limits), case.learn(limits))
        limits = _lowered(case, limits)


def _lowered(case: Case, limits: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Limits by peak whose plan was measured to need more: the model beside the layers is known only roughly."""
    lower = {}
    for name, limit in limits.items():
        row = case.rows[case.rows[name].same_as or name]
        if "peak" in limit and row.times and row.peak > case.rows[_peer_of(name)].peak:
            lower[name] = {**limit, "peak": limit["peak"] - (row.peak - case.rows[_peer_of(name)].peak)}
    for other, row in case.rows.items():
        if row.same_as in lower:  # it keeps the figures that will be gone
            case.rows[other] = replace(case.rows[row.same_as], name=other)
    return lower


def _peer_of(name: str) -> str:
    return name.removeprefix("auto = ").removesuffix(" peak")


def flags_of(size: Size, model: str, dropout: float, more: Sequence[str]) -> list[str]:
    """Megatron's flags of a case."""
    settings: dict[str, Any] = {
        "hidden-size": size.hidden, "num-attention-heads": size.heads, "seq-length": size.sequence,
        "max-position-embeddings": size.sequence, "micro-batch-size": size.micro_batch, "lr": 1e-3,
        "hidden-dropout": dropout, "attention-dropout": dropout, "transformer-impl": "local",
        **(GPT if model == "gpt" else {**LLAMA, "num-query-groups": size.heads // 2}),
    }  # fmt: skip
    tokens: list[str] = []
    for name, value in settings.items():
        tokens += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    # The number of layers is left out of what describes one layer, and comes last.
    layers = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    layers.add_argument("--num-layers", default=str(size.layers))
    given, rest = parse_known(layers, more)
    return [*model_flags([*tokens, *size.precision, *rest]), "--num-layers", given.num_layers]


def _clock(suite: str) -> int:
    """CPU seconds on a CPU, which a machine that others use disturbs least; wall seconds on a GPU."""
    return 0 if suite == "cpu" else 1


def _machine() -> dict[str, Any]:
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine(),
        "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }  # fmt: skip


def _data(rows: dict[str, Row], clock: int) -> dict[str, Any]:
    return {"strategies": [row.to_data(clock) for row in rows.values()], "summary": summary(rows, clock)}


def _write(path: str, content: dict[str, Any]) -> None:
    try:
        write_text(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None
