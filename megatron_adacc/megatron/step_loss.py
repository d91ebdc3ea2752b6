"""The loss of a step, known to all ranks before the optimizer's step: the gradient guard looks at it (docs/states.md).

Megatron reports the loss after the update, and on the last pipeline stage alone. Here the losses of the micro-batches
are noted as its forward-backward function returns them, and summed over all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_adacc.patches.training_training import Step


class StepLoss:
    """Of the step that runs."""

    def __init__(self) -> None:
        self._mine: list[dict[str, Any]] = []

    def around(self, around_step: Callable[[Step], tuple]) -> Callable[[Step], tuple]:
        """What runs a step, with the losses noted that it returns."""
        return lambda step: around_step(self._noted(step))

    def _noted(self, step: Step) -> Step:
        @functools.wraps(step.forward_backward)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            self._mine = []
            losses = step.forward_backward(*args, **kwargs)
            self._mine = list(losses or [])
            return losses

        return replace(step, forward_backward=forward_backward)

    def mean(self) -> float | None:
        """Over the step's tokens, alike on all ranks, which must call it together; None where nothing is known.

        A micro-batch's loss is (sum, tokens), or a mean of its own, as Megatron's loss functions return it. Ranks that
        hold the same loss count it alike, so a sum over all ranks changes no mean."""
        total = torch.zeros(2, dtype=torch.float64)
        for losses in self._mine:
            value = losses.get("lm loss")
            if isinstance(value, torch.Tensor | tuple | list):
                pair = torch.as_tensor(value).detach().double().cpu().view(-1)
                total += pair if pair.numel() == 2 else torch.stack([pair.mean(), torch.ones((), dtype=torch.float64)])
        total = total.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(total)
        summed, count = total.tolist()
        return summed / count if count else None
