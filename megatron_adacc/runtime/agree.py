"""Ranks that replay collectives together must drop the same buffers: what one of them could not prove, none uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist

from megatron_adacc.errors import UserError
from megatron_adacc.graph.groups import GroupName, named_group
from megatron_adacc.graph.schema import FUNCTIONAL_COLLECTIVES
from megatron_adacc.graph.tracer import Traced


def process_groups(traced: Traced) -> list[dist.ProcessGroup]:
    """The process groups of the graph's collectives, each once, in order of first use."""
    names = [value.name for value in traced.objects if isinstance(value, GroupName)]
    for op in traced.graph.ops:
        if op.target.startswith(f"{FUNCTIONAL_COLLECTIVES}."):
            names += [a for a in op.args if isinstance(a, str)]  # among them reductions, such as "sum"
    groups = {name: named_group(name) for name in names}
    return [group for group in groups.values() if group is not None and group.size() > 1]


def agreement(traced: Traced) -> Callable[[Collection[int]], Collection[int]] | None:
    """A function that gives those of some saved buffers which every rank of the graph's groups has among its
    own; all ranks must call it at the same points. None where the graph has no collectives."""
    groups = process_groups(traced)
    if not groups:
        return None
    saved = traced.graph.saved

    def shared(buffers: Collection[int]) -> Collection[int]:
        flags = torch.tensor([b in buffers for b in saved], dtype=torch.int32, device=traced.device)
        # With several groups a refusal travels along one after the other: as often as there are groups.
        for _, group in itertools.product(range(len(groups)), groups):
            dist.all_reduce(flags, dist.ReduceOp.MIN, group=group)
        return frozenset(b for b, ok in zip(saved, flags.tolist(), strict=True) if ok)

    return shared


def check_equal(
    lines: Sequence[str], groups: Sequence[dist.ProcessGroup],
    what: str = "other layers than rank {other}, which must train by the same plan",
) -> None:  # fmt: skip
    """All ranks of each group say the same ``lines``, or UserError on all of them, naming a rank that differs from
    the group's first and the first difference. ``what``: what the lines are of. All ranks call this at the same
    point."""
    differences: list[str] = []
    for group in groups:
        if group.size() == 1:
            continue
        found: list[list[str]] = [[]] * group.size()
        dist.all_gather_object(found, list(lines), group=group)
        for rank, other in enumerate(found):
            pairs = itertools.zip_longest(found[0], other, fillvalue="nothing")
            different = next(((a, b) for a, b in pairs if a != b), None)
            if different is not None:
                ranks = dist.get_process_group_ranks(group)
                differences.append(
                    f"Rank {ranks[rank]} has {what.format(other=ranks[0])}: {different[1]} where rank {ranks[0]} has "
                    f"{different[0]}."
                )
                break
    # A group whose own ranks agree must hear of another's difference, or it would wait for ranks that have stopped.
    for group in groups:
        if group.size() > 1:
            everyone: list[list[str]] = [[]] * group.size()
            dist.all_gather_object(everyone, differences, group=group)
            differences = [text for several in everyone for text in several]
    if differences:
        raise UserError(differences[0])


def first_rank_says[T](value: T, groups: Sequence[dist.ProcessGroup]) -> T:
    """The value of the rank that is the first of all groups, on all ranks. All call this at the same point."""
    for group in groups:
        if group.size() > 1:
            box = [value]
            dist.broadcast_object_list(box, group=group, group_src=0)
            value = box[0]
    return value
