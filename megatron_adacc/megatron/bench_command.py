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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_adacc.errors import UserError
from megatron_adacc.megatron.bench_progress import Told
from megatron_adacc.megatron.bench_run import REFERENCES, Case, Row
from megatron_adacc.megatron.bench_table import draw, summary, table
from megatron_adacc.megatron.trace_flags import model_flags, parse_known
from megatron_adacc.outputs import check_folders, write

PROGRAM = "adacc bench"
FORMAT = 1
PARTS = ("layers", "scaling")
PERCENTS = (5, 10, 25, 50)
PEERS = ("plain", "full", "selective", "checkpoint", "matmuls")
_TRIES = 3  # to bring a plan's measured peak below its peer's
COMPILED = ("compiled 0", "compiled 0.25", "compiled 0.5", "compiled 0.75")
OURS = ("recompute", "compress", "quantize")
STRATEGIES = (*PEERS, *COMPILED, *OURS, "keep", "paper", "auto")

SHORT = "adacc bench --suite cpu --part layers --model gpt --only plain full auto --percent 25 --rounds 1"

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
        "adacc bench --suite cpu|gpu [--part PART]... [--model MODEL]... [--only STRATEGY ...] [--percent P ...]\n"
        "                   [--rounds N] [--threads N] [--at-once N] [--json FILE|-] [--png FILE] [Megatron's flags]"
    )
    parser.description = "Compare strategies for activation memory on Megatron's layers, on this machine."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"""\
The whole suite takes an hour or more on a CPU: every strategy is a process of its own that imports, traces and
compiles for itself. Without a terminal, a line on stderr says what is finished. Some minutes are enough for

    {SHORT}"""
    parser.add_argument("--suite", choices=list(SUITES), help="cpu: small layers; gpu: those of GPT-345M")
    parser.add_argument(
        "--part",
        action="append",
        choices=PARTS,
        help="layers: all strategies on a GPT and a Llama-style layer; scaling: plain, full and auto while layers, "
        "sequence and micro-batch grow (default: both)",
    )
    parser.add_argument("--model", action="append", choices=("gpt", "llama"), help="of the part layers (default: both)")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="STRATEGY",
        help=f"of the part layers: {', '.join(STRATEGIES)} (default: all but keep; compiled without dropout)",
    )
    parser.add_argument(
        "--percent",
        nargs="*",
        type=int,
        default=list(PERCENTS),
        metavar="P",
        help=f"limits of auto and paper, of plain's bytes (default: {' '.join(map(str, PERCENTS))})",
    )
    parser.add_argument(
        "--rounds", type=int, default=7, metavar="N", help="steps of each strategy that are timed (default: 7)"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each process, on a CPU (default: 1)")
    parser.add_argument(
        "--at-once", type=int, default=6, metavar="N", help="processes that live at a time (default: 6)"
    )
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
    work = _work(own, size, flags)
    with Told(len(work)) as told:
        for title, case in _measured(own, work, told):
            cases.append({"title": title, **_data(case, _clock(own.suite))})
            if own.json != "-":
                console.print(title, style="bold", highlight=False)
                console.print(table(list(case.values()), _clock(own.suite)))
                for line in summary(case, _clock(own.suite)):
                    console.print(f"- {line}", highlight=False)
            if own.json and own.json != "-":  # what is measured is not lost when a later case fails
                write(own.json, json.dumps(content, indent=1) + "\n")
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
        if name not in STRATEGIES:
            raise UserError(f"--only knows {', '.join(STRATEGIES)}; {name!r} is none of them.")
    if any(not 0 < percent <= 100 for percent in own.percent):
        raise UserError("--percent takes whole numbers from 1 to 100.")
    check_folders(own.png, or_printed=own.json)
    if own.suite == "gpu":
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                "The suite gpu needs a CUDA device, and PyTorch sees none; adacc bench --suite cpu runs here."
            )


@dataclass(frozen=True)
class _Work:
    """A case that is to be measured. ``flags``: Megatron's; ``percents``: auto's limits, of plain's bytes."""

    title: str
    flags: list[str]
    names: Sequence[str]
    percents: Sequence[int]


def _work(own: Namespace, size: Size, flags: Sequence[str]) -> list[_Work]:
    parts = own.part or PARTS
    found = []
    for model in (own.model or ("gpt", "llama")) if "layers" in parts else ():
        for dropout in (0.1, 0.0) if model == "gpt" else (0.0,):
            title = f"{model}, {size.layers} layers, dropout {dropout:g}"
            names = own.only or [*PEERS, *(COMPILED if dropout == 0 else ()), *OURS, "paper", "auto"]
            found.append(_Work(title, flags_of(size, model, dropout, flags), names, own.percent))
    for flag, values in size.growing if "scaling" in parts else ():
        for value in values:
            extra = ["--" + flag, str(value)]
            extra += ["--max-position-embeddings", str(value)] if flag == "seq-length" else []
            of_case = flags_of(size, "gpt", 0.1, [*flags, *extra])
            found.append(_Work(f"scaling, {flag} {value}", of_case, ["plain", "full", "auto"], ()))
    return found


def _measured(own: Namespace, work: Sequence[_Work], told: Told) -> Iterator[tuple[str, dict[str, Row]]]:
    """Each case with its title, once it is measured."""
    for one in work:
        told.case(one.title)
        with Case(one.flags, own.rounds, own.threads, own.at_once, told) as case:
            _all_strategies(case, one.names, one.percents)
            yield one.title, case.rows


def _all_strategies(case: Case, names: Sequence[str], percents: Sequence[int]) -> None:
    """Peers first; then the paper's plans and ours, at the shares and at the bytes and peaks that peers needed."""
    peers = [name for name in names if name not in ("auto", "paper")]
    with_references = list(dict.fromkeys([*REFERENCES, *peers]))
    equal = [name for name in with_references if name != "plain" and name not in OURS] if "auto" in names else []
    case.expected = len(with_references) + len(percents) * (("auto" in names) + ("paper" in names)) + len(equal)
    case.compare(peers)
    plain = case.rows["plain"]
    limits: dict[str, dict[str, Any]] = {}
    if "paper" in names:
        limits |= {f"paper {percent}%": {"percent": percent, "paper": True} for percent in percents}
    if "auto" in names:
        limits |= {f"auto {percent}%": {"percent": percent} for percent in percents}
        lossless = [row for row in case.rows.values() if not row.note and row.name != "plain" and row.name not in OURS]
        limits |= {f"auto = {row.name} peak": {"peak": row.peak, "plain": plain.peak} for row in lossless}
    case.expected = len(case.rows) + len(limits)
    for _ in range(_TRIES):
        if limits:
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
