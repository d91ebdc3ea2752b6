"""Bytes of mixed-precision Adam, to the byte, without building it.

Bytes a parameter, 16-bit parameter and gradient:

    torch's Adam with float32 master weights     2 + 2 + 4 + 4 + 4                      = 16
    remainder master, m and v in 8 bits          2 + 2 + 2 + 1 + 1  + 2 / 256 exponents = 8 + 1/128
    remainder master, m and v in 4 bits          2 + 2 + 2 + 1/2 + 1/2 + 2 / 256        = 7 + 1/128
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_adacc.optim.blocks import Layout, block_count, class_sizes
from megatron_adacc.optim.formats import BLOCK, STATE_BITS, block_bytes


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes of one or more parameters and what training holds for them.

    Attributes:
        parameters, gradients: in their dtypes.
        master: remainders, or float32 master weights.
        moments: m and v with their exponents.
        layouts: one byte a block where a parameter's blocks differ.
    """

    parameters: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    layouts: int = 0

    @property
    def state(self) -> int:
        """What BlockAdamW.state_bytes() says once every parameter has been updated."""
        return self.master + self.moments + self.layouts

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.state

    def __add__(self, other: "TrainingBytes") -> "TrainingBytes":
        return TrainingBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.master + other.master,
            self.moments + other.moments,
            self.layouts + other.layouts,
        )


def training_bytes(
    numel: int, dtype: torch.dtype, layout: Layout, *, master: str = "auto", grad_dtype: torch.dtype | None = None
) -> TrainingBytes:
    """Bytes of a parameter of `numel` elements under BlockAdamW.

    Args:
        layout: as BlockAdamW.layout gives it.
        master: BlockAdamW's option.
        grad_dtype: the parameter's if None.
    """
    moments = sum(
        full * block_bytes(BLOCK, bits) + (block_bytes(tail, bits) if tail else 0)
        for bits, (full, tail) in class_sizes(layout, numel).items()
    )
    if dtype is torch.float32:
        master_bytes = 0
    else:
        master_bytes = numel * (2 if dtype is torch.bfloat16 and master != "float32" else 4)
    return TrainingBytes(
        parameters=numel * dtype.itemsize,
        gradients=numel * (grad_dtype or dtype).itemsize,
        master=master_bytes,
        moments=moments,
        layouts=block_count(numel) if isinstance(layout, Tensor) else 0,
    )


def adam_bytes(numel: int, dtype: torch.dtype) -> TrainingBytes:
    """Bytes under Adam with float32 m and v, and float32 master weights for 16-bit parameters: 16 a parameter."""
    master = 0 if dtype is torch.float32 else 4 * numel
    return TrainingBytes(numel * dtype.itemsize, numel * dtype.itemsize, master, 8 * numel)


def choice_bytes(numels: Iterable[int]) -> Tensor:
    """int64 [blocks, 4]: bytes of each block of these parameters, one after the other, at 32, 16, 8 and 4 bits."""
    rows = []
    full_row = [block_bytes(BLOCK, bits) for bits in STATE_BITS]
    for numel in numels:
        full, tail = divmod(numel, BLOCK)
        rows.append(torch.tensor(full_row, dtype=torch.int64).expand(full, len(STATE_BITS)))
        if tail:
            rows.append(torch.tensor([[block_bytes(tail, bits) for bits in STATE_BITS]], dtype=torch.int64))
    return torch.cat(rows) if rows else torch.empty(0, len(STATE_BITS), dtype=torch.int64)
