"""Ranks that replay collectives together must drop the same buffers: what one of them could not prove, none uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist

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
