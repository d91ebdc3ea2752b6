"""Bytes of delayed groups (--adacc-dgr-group-size, --adacc-dgr-offload), counted before anything is built.

Gradients in float32 wait for the groups that are not due: all but the smallest group's at most. With offload m and v on
the device are those of the group that is due next, the largest at most (optim/offload.py).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron_adacc.cost.gpt_parameters import Tensor
from megatron_adacc.cost.job import Job
from megatron_adacc.cost.static_memory import StaticBytes
from megatron_adacc.megatron import state_flags
from megatron_adacc.megatron.state_bytes import BITS, moments_of


def groups_of(job: Job, stage: int, count: int) -> list[list[Tensor]]:
    """The parameters of a rank of the stage in groups, as the job makes them (delayed.py).

    Raises UserError where the stage has fewer layers than groups."""
    from megatron_adacc.optim.dgr import consecutive

    named = [(f"chunk{i}.{t.name}", t) for i, chunk in enumerate(job.tensors(stage)) for t in chunk]
    members = consecutive([(name, tensor.elements) for name, tensor in named], count)
    groups = [[named[index][1] for index in group] for group in members]
    tied = [tensor for group in groups[1:] for tensor in group if tensor.shared]
    rest = [[tensor for tensor in group if tensor not in tied] for group in groups]
    return [[*rest[0], *tied], *rest[1:]]


def waiting_bytes(groups: Sequence[Sequence[Tensor]]) -> int:
    """Of the gradients that wait, at most."""
    sizes = [sum(tensor.elements for tensor in group) for group in groups]
    return 4 * (sum(sizes) - min(sizes))


def device_moments(job: Job, groups: Sequence[Sequence[Tensor]], bits: int) -> int:
    """Of m and v on the device at most, where they are offloaded."""
    return max(moments_of(group, bits, job.tensor_parallel) for group in groups)


def of_stage(args: Namespace, job: Job, stage: int, static: StaticBytes) -> dict[str, Any]:
    """What the stage's ranks need with the groups of the flags; nothing without them.

    Raises UserError for a job whose updates cannot be delayed."""
    if args.adacc_dgr_group_size == 1 and not args.adacc_dgr_offload:
        return {}
    state_flags.check(args)
    groups = groups_of(job, stage, args.adacc_dgr_group_size)
    waiting = waiting_bytes(groups)
    found: dict[str, Any] = {"groups": len(groups), "waiting_bytes": waiting}
    if args.adacc_dgr_offload:
        found["offload"] = {}
        for bits in (32, *BITS):
            device = device_moments(job, groups, bits)
            away = sum(moments_of(group, bits, job.tensor_parallel) for group in groups)
            found["offload"][str(bits)] = {
                "device_bytes": device,
                "away_bytes": away,
                "total_bytes": static.total - static.moments + device + waiting,
            }
    return {"delayed": found}


def add_rows(table: Any, stages: Sequence[dict[str, Any]], alone: bool) -> None:
    """Rows of `adacc memory`'s table."""
    delayed = [stage["delayed"] for stage in stages if "delayed" in stage]
    if not delayed:
        return

    def add(label: str, values: Sequence[int]) -> None:
        each = [f"{values[0] / stages[0]['parameters']:.4g}"] if alone else []
        table.add_row(label, *(f"{value:,}" for value in values), *each)

    add(f"gradients that wait, of {delayed[0]['groups']} groups", [one["waiting_bytes"] for one in delayed])
    for bits in delayed[0].get("offload", ()):
        offload = [one["offload"][bits] for one in delayed]
        add(f"moments in {bits} bits, offloaded: on the device", [one["device_bytes"] for one in offload])
        add("  elsewhere", [one["away_bytes"] for one in offload])
        add("  total, with the gradients that wait", [one["total_bytes"] for one in offload])
