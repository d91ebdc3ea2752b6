"""What launches have in common: the device, and arguments in the form that kernels take."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from megatron_adacc.codecs.counter_random import keys_of
from megatron_adacc.codecs.options import Rounding, Scale
from megatron_adacc.codecs.symmetric import Symmetric

TILE = 2048  # elements a program of a grouped format does


def device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Makes x's GPU the current one while a kernel is launched; does nothing for a CPU tensor."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def raw(run: Tensor) -> tuple[Tensor, bool]:
    """(the tensor a kernel gets, whether it is bfloat16 given as int16)."""
    return (run.view(torch.int16), True) if run.dtype is torch.bfloat16 else (run, False)


def aligned(run: Tensor) -> Tensor:
    """`run`, or a copy of it if it starts at an address that 16 does not divide.

    Triton compiles a slower kernel for such an address; that would be a compilation in the middle of training.
    """
    return run if run.data_ptr() % 16 == 0 else run.clone()


def limit_of(run: Tensor) -> float:
    """The largest finite value of the tensor's dtype."""
    return torch.finfo(run.dtype).max


def signed_keys(seed: int) -> tuple[int, int]:
    """The two 32-bit keys of a seed as int32 values, so that their argument type never changes."""
    first, second = (key - (1 << 32) if key >= 1 << 31 else key for key in keys_of(seed))
    return first, second


def constants_of(form: Symmetric) -> dict[str, Any]:
    """The compile-time constants of a symmetric format's encode kernel."""
    return {
        "BITS": form.bits,
        "SIGNED": form.scale is Scale.SIGNED,
        "STOCHASTIC": form.rounding is Rounding.STOCHASTIC,
        "LARGE": form.large_factor,
        "SMALL": form.small_factor,
        "SPECIAL": form.special_factor,
    }
