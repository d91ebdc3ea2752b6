"""Delayed group updates and the gradient guard in Megatron's loop (docs/states.md).

A step of Megatron's then is: gradients are copied and unscaled; the guard looks at them, unless one is inf or NaN; they
are clipped by --clip-grad; the groups take them in, and the one that is due is updated.

What ranks share stays alike because they decide alike: the guard's norms and the compensation's sum are reduced over
the ranks that Megatron reduces its gradient norm over, each tensor counted once; and a tied embedding is in the first
group on the first stage and on the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_adacc.optim.dgr import groups_by_connectivity
from megatron_adacc.optim.guard import GradientGuard

if TYPE_CHECKING:
    from megatron_adacc.megatron.state_plan import StateAdamW


def named(chunks: Sequence[torch.nn.Module]) -> dict[str, Parameter]:
    """Trained parameters of this rank's model chunks by name; names of chunks differ."""
    return {
        f"chunk{index}.{name}": parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }


def delay(
    optimizer: StateAdamW, made: Any, chunks: Sequence[torch.nn.Module], main: Mapping[int, Tensor], count: int
) -> None:
    """Let the optimizer update one of its groups a step.

    Args:
        made: Megatron's wrapper.
        main: by id of a model's parameter what is updated in its place.
        count: of groups.

    Raises:
        UserError: the stage has fewer layers than groups."""
    own = {id(p) for p in optimizer.parameters()}
    groups = groups_by_connectivity(named(chunks).items(), count)
    tied = [p for group in groups[1:] for p in group if getattr(p, "shared_embedding", False)]
    rest = [[p for p in group if not any(p is one for one in tied)] for group in groups]
    rest[0] += tied
    updated: list[list[Parameter]] = [[main.get(id(p), p) for p in group] for group in rest]  # type: ignore[misc]
    updated = [[p for p in group if id(p) in own] for group in updated]
    group = made.get_grad_stats_parallel_group()

    def reduce(total: Tensor) -> None:
        dist.all_reduce(total, group=group)

    optimizer.delay(updated, reduce if dist.get_world_size(group) > 1 else None, counts)


def counts(parameter: Tensor) -> bool:
    """Whether Megatron counts the parameter's gradient on this rank, and not on one that holds the same."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)


def guard(made: Any, optimizer: StateAdamW, rule: str, loss: Callable[[], float | None]) -> GradientGuard:
    """Look at gradients and loss of each step before Megatron clips. ``loss``: every rank calls it, in every step."""
    watch = GradientGuard(rule)
    group = made.get_grad_stats_parallel_group()
    norms_of = _Norms(optimizer, group)
    prepare: Callable[[], bool] = made.prepare_grads

    def prepare_grads() -> bool:
        found_inf = bool(prepare())
        known = loss()
        if not found_inf:
            grads = [p.grad for p in optimizer.parameters() if p.grad is not None]
            watch.check_norms(norms_of(), grads, known)
        return found_inf

    made.prepare_grads = prepare_grads
    return watch


class _Norms:
    """Norms of all parameters' gradients, the same list on every rank of the group.

    Shards of one parameter on several ranks have one place in the list: by the parameter's number on its stage where
    all ranks of the group with that stage have the same ones."""

    def __init__(self, optimizer: StateAdamW, group: dist.ProcessGroup) -> None:
        from megatron.core import parallel_state

        self._optimizer, self._group = optimizer, group
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        sizes = torch.zeros(stages, dtype=torch.int64)
        sizes[stage] = len(optimizer.parameters())
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        sizes = sizes.to(device)
        dist.all_reduce(sizes, dist.ReduceOp.MAX, group=group)
        self._first, self._count, self._device = int(sizes[:stage].sum()), int(sizes.sum()), device

    def __call__(self) -> list[float]:
        squares = torch.zeros(self._count, dtype=torch.float64)
        for place, parameter in enumerate(self._optimizer.parameters(), self._first):
            if parameter.grad is not None and counts(parameter):
                squares[place] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).double().square()
        squares = squares.to(self._device)
        dist.all_reduce(squares, group=self._group)
        return [math.sqrt(value) for value in squares.tolist()]
