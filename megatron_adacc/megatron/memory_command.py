"""`adacc memory`: what a model's parameters, gradients and optimizer state need, before anything is trained.

    adacc memory --params 1.5e9 --optimizer adam --precision fp16
    adacc memory --config configs/gpt_345m.yaml --micro-batch-size 8 --world 8

The first counts parameters of no particular model. The second reads a model by Megatron's flags and shows every
pipeline stage. No GPU is needed and nothing is built.
"""

import argparse
import json
import math
import os
import sys
from argparse import Namespace
from typing import Any

from megatron_adacc.atomic import write_text
from megatron_adacc.cost.job import Job
from megatron_adacc.cost.static_memory import OPTIMIZERS, PRECISIONS, StaticBytes, Training, of_elements
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.trace_flags import flags_of_file, parse_known

PROGRAM = "adacc memory"
FORMAT = 1
GIB = 2**30

_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "master": "fp32 master copy",
    "moments": "optimizer's moments",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Our own options; all others are Megatron's flags."""
    parser.usage = (
        "adacc memory --params N [--optimizer adam|sgd] [--precision fp32|fp16|bf16] [--world N] [--zero 0|1|2|3]\n"
        "       adacc memory [--config FILE] [--micro-batch N] [--world N] [Megatron's flags]"
    )
    parser.description = "Say what parameters, gradients and optimizer state need on each rank."
    parser.add_argument("--params", metavar="N", help="number of parameters, such as 1.5e9")
    parser.add_argument("--precision", metavar="NAME", help=f"with --params: {', '.join(PRECISIONS)} (default: fp32)")
    parser.add_argument("--optimizer", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} (default: adam)")
    parser.add_argument(
        "--zero",
        metavar="STAGE",
        help="with --params: 0 divides nothing among the ranks, 1 the optimizer's state, "
        "2 gradients too, 3 parameters too (default: 0)",
    )
    parser.add_argument("--world", metavar="N", help="ranks of the job (default: what the splits need)")
    parser.add_argument("--config", metavar="FILE", help="a YAML of Megatron's flags by name, such as configs/*.yaml")
    parser.add_argument("--micro-batch", metavar="N", help="the same as --micro-batch-size N")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - prints them instead of the table")
    parser.set_defaults(arguments=[])


def run(args: Namespace) -> int:
    """Count and print. Raises UserError for a mistake in the flags or files given."""
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False, exit_on_error=False)
    configure(parser)
    own, rest = parse_known(parser, args.arguments)
    if own.params is None and own.config is None and not rest:
        raise UserError("Give a model: --params N, or --config FILE and Megatron's flags (see adacc memory --help).")
    content = _of_parameters(own, rest) if own.params is not None else _of_job(own, rest)
    text = json.dumps(content, indent=1) + "\n"
    if own.json and own.json != "-":
        try:
            write_text(own.json, text)
        except OSError as error:
            raise UserError(f"{own.json} cannot be written: {error.strerror}.") from None
    if own.json == "-":
        sys.stdout.write(text)
    else:
        _show(content)
    return 0


def _whole(flag: str, text: str | None, default: int) -> int:
    """A whole number that is not negative; 1.5e9 is one."""
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{flag} is {text!r}, but it must be a number.") from None
    if not math.isfinite(value) or value != int(value) or value < 0:
        raise UserError(f"{flag} is {text}, but it must be a whole number that is not negative.")
    return int(value)


def _of_parameters(own: Namespace, rest: list[str]) -> dict[str, Any]:
    if own.config is not None or own.micro_batch is not None or rest:
        other = "--config" if own.config else "--micro-batch" if own.micro_batch else rest[0]
        raise UserError(f"--params counts parameters of no particular model, so it does not go with {other}.")
    elements = _whole("--params", own.params, 0)
    world = _whole("--world", own.world, 1)
    if world == 0:
        raise UserError("--world is 0, but a job has at least one rank.")
    training = Training(
        precision=own.precision or "fp32",
        optimizer=own.optimizer or "adam",
        zero=_whole("--zero", own.zero, 0),
        data_parallel=world,
    )
    return {"format": FORMAT, "parameters": elements, "stages": [_stage(0, elements, of_elements(elements, training))]}


def _stage(stage: int, parameters: int, static: StaticBytes) -> dict[str, Any]:
    return {
        "stage": stage,
        "parameters": parameters,
        "bytes": {name: getattr(static, name) for name in _PARTS},
        "total_bytes": static.total,
        "bytes_per_parameter": static.total / parameters,
    }


def _of_job(own: Namespace, rest: list[str]) -> dict[str, Any]:
    for name in ("precision", "zero"):
        if getattr(own, name) is not None:
            raise UserError(f"--{name} goes with --params; a model's is said by Megatron's flags.")
    flags = [*(flags_of_file(own.config) if own.config else []), *rest]
    if own.optimizer is not None:
        flags += ["--optimizer", own.optimizer]
    if own.micro_batch is not None:
        flags += ["--micro-batch-size", own.micro_batch]
    from megatron_adacc.megatron.read_job import job_of_flags, ranks_of_one_replica

    smallest = ranks_of_one_replica(flags)
    world = _whole("--world", own.world, smallest)
    if world == 0 or world % smallest:
        raise UserError(
            f"--world is {world}, but the model is split over {smallest} ranks: give a multiple of {smallest}."
        )
    job = job_of_flags(PROGRAM, flags, world)
    return {
        "format": FORMAT,
        "parameters": _all_parameters(job),
        "stages": [_stage(stage, job.parameters(stage), job.static_bytes(stage)) for stage in range(len(job.stages))],
    }


def _all_parameters(job: Job) -> int:
    from megatron_adacc.cost.gpt_parameters import count

    return count(job.model)


def _show(content: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    stages = content["stages"]
    table = Table(title=f"{content['parameters']:,} parameters: bytes a rank holds through the whole training")
    table.add_column("what")
    for stage in stages:
        table.add_column("a rank" if len(stages) == 1 else f"stage {stage['stage']}", justify="right")
    if len(stages) == 1:
        table.add_column("a parameter", justify="right")
    rows = [(label, [stage["bytes"][name] for stage in stages]) for name, label in _PARTS.items()]
    for label, values in [*rows, ("in all", [stage["total_bytes"] for stage in stages])]:
        cells = [f"{value:,}" for value in values]
        if len(stages) == 1:
            cells.append(f"{values[0] / stages[0]['parameters']:.4g}")
        table.add_row(label, *cells, style="bold" if label == "in all" else None)
    table.add_row("in GiB", *(f"{stage['total_bytes'] / GIB:.2f}" for stage in stages))
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "100"))
    Console(width=width).print(table)
