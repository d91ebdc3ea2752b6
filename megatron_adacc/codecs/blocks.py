"""Cutting a run of elements into blocks, and the order of codes inside a block.

A run of n elements is cut into blocks of `block` elements; the last one, the *tail*, may be shorter. A code
byte holds `per` codes. In a block of m elements, with part = ceil(m / per), byte j holds the codes of
elements j, j + part, j + 2 part, ..., lowest bits first: then all reads and writes are of neighbours, which
vector units like and pairs of neighbours in one byte would not allow.

    per 2, block 8, 11 elements   ->   bytes (0,4) (1,5) (2,6) (3,7) | (8,10) (9,-)

A full block takes block / per bytes and a tail of m takes ceil(m / per), so n elements take ceil(n / per).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """The cut of a run.

    Attributes:
        numel: elements in the run.
        block: elements in a full block, a multiple of `per`.
        per: codes in a byte.
    """

    numel: int
    block: int
    per: int

    @property
    def count(self) -> int:
        """Number of blocks, the tail counted."""
        return -(-self.numel // self.block)

    @property
    def full(self) -> int:
        """Number of full blocks."""
        return self.numel // self.block

    @property
    def tail(self) -> int:
        """Elements in the tail, 0 where the blocks come out even."""
        return self.numel - self.full * self.block

    @property
    def code_bytes(self) -> int:
        """Bytes of all codes."""
        return -(-self.numel // self.per)

    @property
    def full_shape(self) -> tuple[int, int, int]:
        """[full blocks, per, part]: the full blocks, with the codes of one byte along dimension 1."""
        return self.full, self.per, self.block // self.per

    @property
    def tail_shape(self) -> tuple[int, int, int]:
        """[1, per, part] of the tail."""
        return 1, self.per, -(-self.tail // self.per)

    def full_of(self, run: Tensor) -> Tensor:
        """The full blocks of the run, a view [full, per, part]."""
        return run[: self.full * self.block].view(self.full_shape)

    def tail_of(self, run: Tensor, *, repeat: bool) -> Tensor:
        """The tail of the run, a copy [1, per, part].

        Places past the end hold the tail's first element if `repeat`, else zero.
        """
        tail = run[self.full * self.block :]
        _, per, part = self.tail_shape
        padding = tail[:1] if repeat else torch.zeros_like(tail[:1])
        return torch.cat([tail, padding.expand(per * part - self.tail)]).view(1, per, part)

    def full_codes(self, codes: Tensor) -> Tensor:
        """The code bytes of the full blocks, a view [full, part]."""
        part = self.block // self.per
        return codes[: self.full * part].view(self.full, part)

    def tail_codes(self, codes: Tensor) -> Tensor:
        """The code bytes of the tail, a view [1, part]."""
        return codes[self.full * (self.block // self.per) :].view(1, -1)

    def write_tail(self, run: Tensor, blocks: Tensor) -> None:
        """Write a decoded tail [1, per, part] into the run, without its padding."""
        run[self.full * self.block :] = blocks.view(-1)[: self.tail]


def pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Join `per` small codes along `dim` into bytes: int32 [.., per, ..] -> uint8 [.., ..]."""
    mask = (1 << bits) - 1
    packed = codes.select(dim, 0) & mask
    for position in range(1, codes.shape[dim]):
        packed = packed | ((codes.select(dim, position) & mask) << (bits * position))
    return packed.to(torch.uint8)


def unpack(packed: Tensor, bits: int, per: int, dim: int) -> Tensor:
    """The codes of bytes, unsigned: uint8 [.., ..] -> int32 [.., per, ..], with `per` inserted at `dim` >= 0."""
    spread = [1] * (packed.dim() + 1)
    spread[dim] = per
    shifts = (torch.arange(per, dtype=torch.int32, device=packed.device) * bits).view(spread)
    return (packed.unsqueeze(dim).to(torch.int32) >> shifts) & ((1 << bits) - 1)
