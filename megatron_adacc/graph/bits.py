"""Equality of tensors, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal dtype, size and bits: NaN equals itself, 0.0 differs from -0.0."""
    if a.dtype != b.dtype or a.size() != b.size():
        return False
    if a.numel() == 0:
        return True
    a, b = a.reshape(-1), b.reshape(-1)
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
