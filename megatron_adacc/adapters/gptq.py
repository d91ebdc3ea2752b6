"""GPTQ (arXiv 2210.17323): four bits whose rounding errors make up for each other on calibration inputs.

    least |W X - W' X|^2 = tr((W - W') H (W - W')^T),   H = sum of x x^T over the calibration inputs x

Columns are rounded from the first to the last. With U^T U = H^-1, U upper triangular, column j's error divided by U_jj
is taken off the columns k > j, times U_jk. A block's grid is chosen when its first column is reached.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_adacc.adapters.quantizers import Grid, PerBlock, grid_of, round_to_nearest
from megatron_adacc.errors import UserError

BITS = 4
# The share of H's mean diagonal that is added to it, as in the published code; more where H is no good then.
DAMPING = (0.01, 0.1, 1.0)


@dataclass(frozen=True)
class Rounded:
    """A matrix in four bits: ``codes`` uint8 and ``grid`` in PerBlock's arrangement, and the calibrated output error
    of these codes and of those by round-to-nearest: tr(D H D^T) / tr(W H W^T)."""

    codes: Tensor
    grid: Grid
    error: float
    nearest_error: float


def block_of(columns: int) -> int:
    """Columns that share a scale, an even number: the largest such divisor of `columns` from 16 to 128; where there is
    none, 128, or all columns of fewer, and the last block is partly empty."""
    divisors = (size for size in range(128, 15, -2) if columns % size == 0)
    return next(divisors, min(128, columns + columns % 2))


def output_error(weight: Tensor, values: Tensor, hessian: Tensor) -> float:
    """tr((W - W') H (W - W')^T) / tr(W H W^T), 0 where the latter is; [out, in], [out, in], [in, in], float32."""
    difference = weight - values
    whole = ((weight @ hessian) * weight).sum().item()
    return ((difference @ hessian) * difference).sum().item() / whole if whole > 0 else 0.0


def quantize(weight: Tensor, hessian: Tensor) -> Rounded:
    """``weight``: [out, in], finite, any float dtype; ``hessian``: [in, in] float32, on its device.

    Where round-to-nearest has the lower error, as it may where inputs are few, its codes are taken.

    Raises UserError for a hessian that is not finite."""
    weight = weight.detach().float()
    columns = weight.shape[1]
    blocks = PerBlock(block_of(columns))
    nearest, nearest_grid = round_to_nearest(weight, BITS, blocks, symmetric=False)
    nearest_error = output_error(weight, blocks.restored(nearest_grid.values(nearest), columns), hessian)
    codes, grid = _round(weight, _factor(hessian), blocks)
    error = output_error(weight, blocks.restored(grid.values(codes), columns), hessian)
    if error > nearest_error:
        return Rounded(nearest, nearest_grid, nearest_error, nearest_error)
    return Rounded(codes, grid, error, nearest_error)


def _factor(hessian: Tensor) -> Tensor:
    """U with U^T U = (H + damping)^-1."""
    if not hessian.isfinite().all():
        raise UserError("The calibration text gives inputs of linear layers that are not finite: give another text.")
    diagonal = hessian.diagonal()
    mean = diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    for damping in DAMPING:
        damped = hessian + torch.diag(torch.where(diagonal > 0, damping * mean, mean))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed.item():
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed.item() and upper.isfinite().all():
            return upper
    raise UserError("The calibration text is too little to quantize with: give a longer one.")


def _round(weight: Tensor, factor: Tensor, blocks: PerBlock) -> tuple[Tensor, Grid]:
    left = weight.clone()
    columns = weight.shape[1]
    found, grids = [], []
    for start in range(0, columns, blocks.size):
        end = min(start + blocks.size, columns)
        part, own = left[:, start:end].clone(), factor[start:end, start:end]
        grid = grid_of(part, (1,), BITS, symmetric=False)
        codes = torch.zeros(weight.shape[0], blocks.size, dtype=torch.uint8, device=weight.device)
        errors = torch.empty_like(part)
        for j in range(end - start):
            column = part[:, j : j + 1]
            code = grid.codes(column)
            codes[:, j : j + 1] = code
            errors[:, j : j + 1] = (column - grid.values(code)) / own[j, j]
            part[:, j:] -= errors[:, j : j + 1] * own[j, j:]
        left[:, end:] -= errors @ factor[start:end, end:]
        found.append(codes)
        grids.append(grid)
    zeros = torch.stack([grid.zero for grid in grids if grid.zero is not None], dim=1)
    return torch.stack(found, dim=1), Grid(BITS, torch.stack([grid.scale for grid in grids], dim=1), zeros)
