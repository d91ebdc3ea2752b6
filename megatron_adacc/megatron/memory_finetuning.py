"""`adacc memory --lora-rank R --base FORMAT`: whether a fine-tuning fits, and where."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron_adacc.cost import devices, finetuning
from megatron_adacc.cost.finetuning import FineTuning
from megatron_adacc.cost.job import Job
from megatron_adacc.cost.static_memory import Training
from megatron_adacc.errors import UserError

GIB = 2**30
TARGETS = "linear_qkv,linear_proj,linear_fc1,linear_fc2"


def check(own: Namespace, rank: int) -> None:
    """Raises UserError for options that need adapters, without a rank."""
    for name in ("base", "lora_targets"):
        if getattr(own, name) is not None and rank == 0:
            raise UserError(
                f"--{name.replace('_', '-')} needs --lora-rank: without adapters all of a model is trained."
            )
    if own.base is not None and own.base not in finetuning.FORMATS:
        raise UserError(f"The base is {own.base!r}, but the known formats are {', '.join(finetuning.FORMATS)}.")


def of_parameters(elements: int, own: Namespace, rank: int, training: Training) -> dict[str, Any]:
    """The content of a model of so many parameters. Raises UserError as cost/finetuning.py."""
    if own.lora_targets is not None:
        raise UserError("--lora-targets goes with a model; with --params all linear layers have adapters.")
    return _content(own, rank, elements, [finetuning.of_parameters(elements, own.base or "16bit", rank, training)])


def of_job(job: Job, own: Namespace, rank: int, parameters: int) -> dict[str, Any]:
    """The same of a job. Raises UserError as cost/finetuning.py."""
    targets = (own.lora_targets or TARGETS).split(",")
    stages = [
        finetuning.of_job(job, stage, own.base or "16bit", rank, targets) for stage in range(len(job.stages))
    ]  # fmt: skip
    return _content(own, rank, parameters, stages)


def _content(own: Namespace, rank: int, parameters: int, stages: Sequence[FineTuning]) -> dict[str, Any]:
    need = max(stage.total for stage in stages)
    memory = {name: devices.device(name).memory_bytes for name in devices.device_names()}
    return {
        "parameters": parameters,
        "base": own.base or "16bit",
        "lora_rank": rank,
        "stages": [
            {
                "stage": index,
                "parameters": stage.parameters,
                "base_bytes": stage.base,
                "trained_parameters": stage.trained,
                "adapter_bytes": {
                    name: getattr(stage.adapters, name) for name in ("parameters", "gradients", "master", "moments")
                },
                "layer_input_bytes": stage.inputs,
                "outside_bytes": stage.outside,
                "total_bytes": stage.total,
                "full_training_bytes": stage.full.total,
            }
            for index, stage in enumerate(stages)
        ],
        "devices": {name: {"memory_bytes": size, "left_bytes": size - need} for name, size in memory.items()},
    }


def show(content: dict[str, Any]) -> None:
    """Print it as tables, and what is not in them."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    stages = content["stages"]
    table = Table(
        title=f"{content['parameters']:,} parameters, base {content['base']}, adapters of rank {content['lora_rank']}",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("bytes on each rank", no_wrap=True)
    for stage in stages:
        table.add_column("bytes" if len(stages) == 1 else f"stage {stage['stage']}", justify="right")

    def add(label: str, values: list[int], style: str | None = None) -> None:
        table.add_row(label, *(f"{value:,}" for value in values), style=style)

    add("base, frozen", [stage["base_bytes"] for stage in stages])
    bits = [8 * stage["base_bytes"] / stage["parameters"] for stage in stages]
    table.add_row("  bits a parameter", *(f"{each:.3f}" for each in bits))
    add("adapters: trained parameters", [stage["trained_parameters"] for stage in stages])
    for name, label in (
        ("parameters", "  their bytes"), ("gradients", "  gradients"), ("master", "  fp32 master copy"),
        ("moments", "  optimizer's moments"),
    ):  # fmt: skip
        add(label, [stage["adapter_bytes"][name] for stage in stages])
    shapes = stages[0]["layer_input_bytes"] is not None
    if shapes:
        add("the layers' inputs, under full recompute", [stage["layer_input_bytes"] for stage in stages])
        add("activations outside the layers, at most", [stage["outside_bytes"] for stage in stages])
    add("total", [stage["total_bytes"] for stage in stages], "bold")
    table.add_row("in GiB", *(f"{stage['total_bytes'] / GIB:.2f}" for stage in stages), end_section=True)
    add("all parameters trained: without activations", [stage["full_training_bytes"] for stage in stages])
    table.add_row("in GiB", *(f"{stage['full_training_bytes'] / GIB:.2f}" for stage in stages))
    fits = Table(title="one of these for each rank", box=box.SIMPLE_HEAD)
    for column in ("device", "memory, GiB", "left, GiB"):
        fits.add_column(column, justify="left" if column == "device" else "right")
    for name, device in content["devices"].items():
        left = device["left_bytes"]
        fits.add_row(
            name, f"{device['memory_bytes'] / GIB:.2f}", f"{left / GIB:.2f}" if left >= 0 else "[red]too small[/red]"
        )
    console = Console(highlight=False, width=60 + 20 * len(stages))
    console.print(table)
    console.print(fits)
    missing = "what a layer needs inside (adacc trace)" if shapes else "activations"
    console.print(
        f"Not counted: {missing}, weights that are decoded for a moment, outlier columns of int8, CUDA's own."
    )
