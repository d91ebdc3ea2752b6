"""What a plan is solved for: the limit, what shares the device, and who trains the same layers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_adacc.cost.limits import Limit
from megatron_adacc.cost.stage_plan import Room
from megatron_adacc.errors import UserError
from megatron_adacc.runtime.state_offer import StateOffer


@dataclass(frozen=True)
class Setting:
    """What auto plans for.

    ``limit``: None for what the device has, less a reserve. ``room``: called when the problem is solved, with
    the device; what the activations share it with. ``chunk_of``: by place of a layer, the virtual pipeline stage
    that it lies in, 0 where it is not named; ``in_flight``: by virtual stage, micro-batches held at the peak.
    ``groups``: process groups, each rank of which trains the same layers and gets the plan of the group's first.
    ``error_budget``: as in :func:`plan_stage`.
    ``preserve``: a context that puts back what a forward of the layers changes beside torch's default generators.
    ``main_gradients``: parameter gradients are added to memory that is in the room already, as Megatron's are.
    ``states``: what a limit in bytes shares with the activations, None for what no plan changes."""

    limit: Limit | None
    room: Callable[[torch.device], Room]
    chunk_of: Sequence[int] = ()
    in_flight: Sequence[int] = (1,)
    groups: Sequence[dist.ProcessGroup] = ()
    preserve: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    main_gradients: bool = False
    error_budget: float = 0.0
    min_bytes: int = 1024
    states: StateOffer | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.error_budget < math.inf:
            raise UserError(f"The error budget is {self.error_budget}, but an error is a number from 0 up.")


def device_limit(device: torch.device) -> Limit:
    """What a plan may use where nothing was said: the device's memory less a reserve of 5 %."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        import psutil

        total = psutil.virtual_memory().total
    return Limit(total_bytes=int(0.95 * total))
