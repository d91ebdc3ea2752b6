"""Uniform quantizers of a matrix: symmetric and asymmetric, with one scale a tensor, row, column or block of a row.

    symmetric     s = max|x| / (2^(b-1) - 1)     q = round(x / s)                   -(2^(b-1) - 1) <= q <= 2^(b-1) - 1
    asymmetric    s = (hi - lo) / (2^b - 1)      q = round(x / s) + z,  z = round(-lo / s)     0 <= q <= 2^b - 1

with lo <= 0 <= hi, so that zero comes back as zero. Rounding is to nearest, ties to even. All in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Granularity(Protocol):
    """What shares a scale."""

    def arranged(self, matrix: Tensor) -> Tensor:
        """The matrix so that `reduced` dimensions are those of one scale; [rows, columns] -> this one's own shape."""
        ...

    def restored(self, arranged: Tensor, columns: int) -> Tensor:
        """The reverse of arranged(): [rows, columns]."""
        ...

    @property
    def reduced(self) -> tuple[int, ...]:
        """Dimensions of arranged() that share a scale; scales have length 1 there."""
        ...


@dataclass(frozen=True)
class PerTensor:
    """One scale: [rows, columns] -> [1, 1]."""

    reduced: tuple[int, ...] = (0, 1)

    def arranged(self, matrix: Tensor) -> Tensor:
        return matrix

    def restored(self, arranged: Tensor, columns: int) -> Tensor:
        return arranged


@dataclass(frozen=True)
class PerRow(PerTensor):
    """A scale for each row: [rows, columns] -> [rows, 1]."""

    reduced: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class PerColumn(PerTensor):
    """A scale for each column: [rows, columns] -> [1, columns]."""

    reduced: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class PerBlock:
    """A scale for each `size` neighbours of a row: [rows, columns] -> [rows, ceil(columns / size), 1]."""

    size: int
    reduced: tuple[int, ...] = (2,)

    def arranged(self, matrix: Tensor) -> Tensor:
        # Zeros change no scale: every range contains zero.
        return F.pad(matrix, (0, -matrix.shape[1] % self.size)).unflatten(1, (-1, self.size))

    def restored(self, arranged: Tensor, columns: int) -> Tensor:
        return arranged.flatten(1)[:, :columns]


@dataclass(frozen=True)
class Grid:
    """Scales, and zero points where they are asymmetric, of a matrix: float32, as the granularity says."""

    bits: int
    scale: Tensor
    zero: Tensor | None

    def codes(self, arranged: Tensor) -> Tensor:
        """The nearest codes of `arranged`: int8 if symmetric, else uint8; bits <= 8."""
        if self.zero is None:
            most = 2 ** (self.bits - 1) - 1
            return torch.round(arranged / self.scale).clamp_(-most, most).to(torch.int8)
        return (torch.round(arranged / self.scale) + self.zero).clamp_(0, 2**self.bits - 1).to(torch.uint8)

    def values(self, codes: Tensor) -> Tensor:
        """What the codes stand for, float32."""
        found = codes.float()
        return (found if self.zero is None else found - self.zero) * self.scale


def grid_of(arranged: Tensor, reduced: tuple[int, ...], bits: int, symmetric: bool) -> Grid:
    """The grid that just holds `arranged` (float32); where all is zero its scale is 1."""
    if symmetric:
        most = arranged.abs().amax(reduced, keepdim=True)
        scale = most / (2 ** (bits - 1) - 1)
        return Grid(bits, torch.where(scale > 0, scale, 1.0), None)
    low, high = arranged.amin(reduced, keepdim=True).clamp(max=0), arranged.amax(reduced, keepdim=True).clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    scale = torch.where(scale > 0, scale, 1.0)
    return Grid(bits, scale, torch.round(-low / scale))


def round_to_nearest(
    matrix: Tensor, bits: int, granularity: Granularity, symmetric: bool
) -> tuple[Tensor, Grid]:  # fmt: skip
    """Codes in the granularity's arrangement, and their grid. ``matrix``: [rows, columns], any float dtype; finite."""
    arranged = granularity.arranged(matrix.float())
    grid = grid_of(arranged, granularity.reduced, bits, symmetric)
    return grid.codes(arranged), grid


def pack_pairs(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte, the first in the high half: uint8 [..., n] -> uint8 [..., n / 2], n even."""
    return codes[..., 0::2] << 4 | codes[..., 1::2]


def unpack_pairs(packed: Tensor) -> Tensor:
    """The reverse of pack_pairs()."""
    return torch.stack((packed >> 4, packed & 15), dim=-1).flatten(-2)
