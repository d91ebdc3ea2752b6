"""What every launch needs."""

import contextlib

import torch


def device_of(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """Makes x's GPU the current one while a kernel is launched; does nothing for a CPU tensor."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
