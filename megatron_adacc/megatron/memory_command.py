"""`adacc memory`: what a model's parameters, gradients and optimizer state need, before anything is trained.

    adacc memory --params 1.5e9 --optimizer adam --precision fp16
    adacc memory --config configs/gpt_345m.yaml --micro-batch-size 8 --world 8
    adacc memory --params 65e9 --base nf4-double --lora-rank 64

The first counts parameters of no particular model. The second reads a model by Megatron's flags and shows every
pipeline stage, with what lies outside its layers. The third is a fine-tuning (memory_finetuning.py). What the layers
hold is for `adacc trace` to say. No GPU is needed and nothing is built.
"""

import argparse
import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron_adacc.cost.devices import device, device_names
from megatron_adacc.cost.gpt_parameters import count
from megatron_adacc.cost.in_flight import heaviest
from megatron_adacc.cost.job import Job
from megatron_adacc.cost.static_memory import OPTIMIZERS, PRECISIONS, StaticBytes, Training, of_elements
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import delayed_bytes, memory_finetuning, state_bytes
from megatron_adacc.megatron.trace_flags import flags_of_file, parse_known
from megatron_adacc.outputs import check_folders, write

PROGRAM = "adacc memory"
FORMAT = 1
GIB = 2**30

_FP32_GRADIENTS = "--accumulate-allreduce-grads-in-fp32"

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
        f"                    [{_FP32_GRADIENTS}]\n"
        "       adacc memory [--config FILE] [--micro-batch N] [--world N] [--device NAME] [Megatron's flags]\n"
        "       adacc memory ... --adacc-dgr-group-size N [--adacc-dgr-offload]\n"
        "       adacc memory ... --lora-rank R [--base 16bit|nf4|nf4-double|int8|gptq4] [--lora-targets NAMES]"
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
    parser.add_argument(
        "--device",
        metavar="NAME",
        default="cuda",
        help=f"with a model: where it is trained: cuda or cpu, or a GPU, for which bytes are cuda's: "
        f"{', '.join(device_names())} (default: cuda)",
    )
    # A job's own flags say the same.
    parser.add_argument(
        "--lora-rank", "--adacc-lora-rank", metavar="R", help="train adapters of this rank beside a frozen base"
    )
    parser.add_argument(
        "--base", "--adacc-base", metavar="FORMAT", help="with --lora-rank: the base's format (default: 16bit)"
    )
    parser.add_argument(
        "--lora-targets", "--adacc-lora-targets", metavar="NAMES",
        help="with --lora-rank and a model: layers with an adapter (default: all)",
    )  # fmt: skip
    for flag in ("--adacc-lora-alpha", "--adacc-base-text"):  # these change no bytes
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - prints them instead of the table")
    parser.set_defaults(arguments=[])


def run(args: Namespace) -> int:
    """Count and print. Raises UserError for a mistake in the flags or files given."""
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False, exit_on_error=False)
    configure(parser)
    own, rest = parse_known(parser, args.arguments)
    if own.params is None and own.config is None and not rest:
        raise UserError("Give a model: --params N, or --config FILE and Megatron's flags (see adacc memory --help).")
    check_folders(or_printed=own.json)
    if own.device not in ("cuda", "cpu"):
        device(own.device)  # a GPU of the table, or a sentence
    memory_finetuning.check(own, _whole("--lora-rank", own.lora_rank, 0))
    content = _of_parameters(own, rest) if own.params is not None else _of_job(own, rest)
    text = json.dumps(content, indent=1) + "\n"
    if own.json and own.json != "-":
        write(own.json, text)
    if own.json == "-":
        sys.stdout.write(text)
    elif own.lora_rank is not None:
        memory_finetuning.show(content)
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
    wide = rest == [_FP32_GRADIENTS]
    if own.config is not None or own.micro_batch is not None or (rest and not wide):
        other = "--config" if own.config else "--micro-batch" if own.micro_batch else rest[0]
        raise UserError(f"--params counts parameters of no particular model, so it does not go with {other}.")
    elements = _whole("--params", own.params, 0)
    world = _whole("--world", own.world, 1)
    if world == 0:
        raise UserError("--world is 0, but a job has at least one rank.")
    training = Training(
        precision=own.precision or ("fp32" if own.lora_rank is None else "bf16"),
        optimizer=own.optimizer or "adam",
        gradient_bytes=4 if wide else None,
        zero=_whole("--zero", own.zero, 0),
        data_parallel=world,
    )
    if own.lora_rank is not None:
        rank = _whole("--lora-rank", own.lora_rank, 0)
        return {"format": FORMAT, **memory_finetuning.of_parameters(elements, own, rank, training)}
    static = of_elements(elements, training)
    stage = {**_stage(0, elements, static), **state_bytes.of_parameters(elements, training, static)}
    return {"format": FORMAT, "parameters": elements, "stages": [stage]}


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
    from megatron_adacc.megatron.memory_check import megatron_static_bytes
    from megatron_adacc.megatron.read_job import args_of_flags, job_of_args, ranks_of_one_replica

    smallest = ranks_of_one_replica(flags)
    world = _whole("--world", own.world, smallest)
    if world == 0 or world % smallest:
        raise UserError(
            f"--world is {world}, but the model is split over {smallest} ranks: give a multiple of {smallest}."
        )
    cuda = own.device != "cpu"
    args = args_of_flags(PROGRAM, flags, world, cuda)
    job = job_of_args(args, cuda)
    if own.lora_rank is not None:
        rank = _whole("--lora-rank", own.lora_rank, 0)
        return {"format": FORMAT, **memory_finetuning.of_job(job, own, rank, count(job.model))}
    stages = [
        {
            **_stage(stage, job.parameters(stage), job.static_bytes(stage)),
            **state_bytes.of_stage(job, stage, job.static_bytes(stage)),
            **delayed_bytes.of_stage(args, job, stage, job.static_bytes(stage)),
            **_outside(job, stage),
        }
        for stage in range(len(job.stages))
    ]
    return {
        "format": FORMAT,
        "parameters": count(job.model),
        "stages": stages,
        "megatron_static_bytes": megatron_static_bytes(args, job),
    }


def _outside(job: Job, stage: int) -> dict[str, Any]:
    """What a stage holds outside its layers, see cost/job.py."""
    room = job.room(stage)
    return {
        "layers": [chunk.layers for chunk in job.stages[stage]],
        "in_flight": heaviest(job.schedule, stage, [chunk.layers for chunk in job.stages[stage]]),
        "outside_held_bytes": [chunk.held for chunk in job.outer_bytes(stage)],
        "fixed_bytes": room.fixed_bytes,
        "transient_bytes": room.transient_bytes,
        "end_bytes": room.end_bytes,
        "step_bytes": room.step_bytes,
    }


def _show(content: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    stages = content["stages"]
    alone = len(stages) == 1
    title = f"{content['parameters']:,} parameters: bytes on each rank" + ("" if alone else " of a pipeline stage")
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("through the whole training")  # what gives way in a narrow terminal
    for stage in stages:
        table.add_column("bytes" if alone else f"stage {stage['stage']}", justify="right", no_wrap=True)
    if alone:
        table.add_column("a parameter", justify="right", no_wrap=True)
        table.add_column("GiB", justify="right", no_wrap=True)

    def add(label: str, values: list[int], style: str | None = None, each: bool = False) -> None:
        share = [f"{values[0] / stages[0]['parameters']:.4g}" if each else "", in_gib(values[0])] if alone else []
        table.add_row(label, *(f"{value:,}" for value in values), *share, style=style)

    for name, label in _PARTS.items():
        add(label, [stage["bytes"][name] for stage in stages], each=True)
    add("total", [stage["total_bytes"] for stage in stages], "bold", each=True)
    if not alone:
        table.add_row("in GiB", *(in_gib(stage["total_bytes"]) for stage in stages))
    state_bytes.add_rows(table, stages, alone)
    delayed_bytes.add_rows(table, stages, alone)
    table.add_section()
    if "layers" in stages[0]:
        table.add_row("[bold]outside the layers[/bold]")
        add("alive whenever a layer runs, with the above", [stage["fixed_bytes"] for stage in stages])
        add("and between forward and backward", [stage["transient_bytes"] for stage in stages])
        add("total while the optimizer steps", [stage["step_bytes"] for stage in stages])
        layers, alive = ([_joined(stage[name]) for stage in stages] for name in ("layers", "in_flight"))
        table.add_row("[bold]the layers[/bold]")
        table.add_row("layers" + _of_chunks(stages), *layers)
        table.add_row("micro-batches in flight" + _of_chunks(stages), *alive)
    wide = str(60 + 20 * (3 if alone else len(stages)))
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", wide))
    console = Console(width=width, highlight=False)
    console.print(table)
    if "megatron_static_bytes" in content:
        console.print(
            f"Megatron's own estimate of the parameters, gradients and optimizer state of the fullest rank is "
            f"{content['megatron_static_bytes']:,} bytes; docs/memory.md says what it leaves out."
        )


def in_gib(nbytes: int) -> str:
    """Empty where nothing would be seen."""
    return f"{nbytes / GIB:,.2f}" if nbytes >= GIB / 100 else ""


def _joined(values: Sequence[int]) -> str:
    return " + ".join(map(str, values))


def _of_chunks(stages: list[dict[str, Any]]) -> str:
    return " of its chunks" if len(stages[0]["layers"]) > 1 else ""
