"""Bits for each block under a limit in bytes, at the least error.

    minimise  sum_b error[b, c(b)]      so that  sum_b bytes[b, c(b)] <= limit,   c(b) not below the floor of b

a multiple-choice knapsack with four choices a block. Each block's choices are reduced to the lower convex hull of
(bytes, error); the hull's steps of all blocks are taken in the order of error saved per byte while they fit. The
continuous relaxation takes the same steps and a fraction of the first that does not fit (Sinha and Zoltners,
Operations Research 27, 1979), so with it there is a lower bound, and

    error - bound <= the error that this one step would have saved.

Where all steps fit that come before, and none is cut, the choice is optimal: bound = error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_adacc.errors import UserError
from megatron_adacc.optim.formats import STATE_BITS


@dataclass(frozen=True)
class Choice:
    """What `choose` found.

    Attributes:
        bits: uint8 [blocks].
        state_bytes: of m and v of all blocks together.
        error: the sum of the chosen errors.
        bound: no choice within the limit has less than this.
        error_per_byte: what the next byte would save; 0 where no byte would. The price at which a planner that has
            other uses for memory should give up bytes here, or ask for more.
    """

    bits: Tensor
    state_bytes: int
    error: float
    bound: float
    error_per_byte: float


def choose(errors: Tensor, block_bytes: Tensor, floors: Tensor, limit_bytes: int) -> Choice:
    """The layout of least error within the limit, up to the stated gap.

    Args:
        errors: float64 [blocks, 4], >= 0, of each block at 32, 16, 8 and 4 bits.
        block_bytes: int64 [blocks, 4], descending along the second dimension.
        floors: integers [blocks]: the fewest bits that a block may have.
        limit_bytes: for m and v of these blocks.

    Raises:
        UserError: the floors alone need more than the limit, or an error is not a number >= 0.
    """
    if not bool(((errors >= 0) & (errors < torch.inf)).all()):
        raise UserError("Errors of blocks must be finite and not negative; were there inf or NaN in the gradients?")
    errors = errors.to(torch.float64)
    allowed = torch.tensor(STATE_BITS, device=floors.device) >= floors.to(torch.int64).unsqueeze(1)
    # The cheapest allowed choice is the last one; of equals in bytes or error the hull finds the better.
    current = allowed.sum(1) - 1
    least = int(_at(block_bytes, current).sum())
    if least > limit_bytes:
        raise UserError(
            f"The state needs at least {least} bytes at the lowest allowed precisions, but the limit is {limit_bytes}; "
            "raise the limit or allow fewer bits."
        )
    steps = _hull_steps(errors, block_bytes, allowed, current)
    order = torch.argsort(steps.slope, descending=True, stable=True)
    taken, stop, left = _take(steps, order, limit_bytes - least)
    chosen = current.clone()
    # Steps of a block are taken first to last, so the last target of a block is the one of the most bytes.
    chosen.scatter_reduce_(0, steps.block[taken], steps.target[taken], "amin")
    error = float(_at(errors, chosen).sum())
    bound, price = error, 0.0
    if stop is not None:
        prefix = order[:stop]
        at_stop = current.scatter_reduce(0, steps.block[prefix], steps.target[prefix], "amin")
        price = float(steps.slope[order[stop]])
        bound = min(error, float(_at(errors, at_stop).sum()) - price * left)
    bits = torch.tensor(STATE_BITS, dtype=torch.uint8, device=chosen.device)[chosen]
    return Choice(bits, int(_at(block_bytes, chosen).sum()), error, max(0.0, bound), price)


@dataclass(frozen=True)
class _Steps:
    """Steps along the hulls, all first steps, then all second, then all third: each after its predecessor.

    Attributes:
        block, target: int64 [steps]: the block, and the choice that the step leads to.
        size: int64 [steps], bytes.
        slope: float64 [steps], error saved per byte, > 0 and not rising along a block's steps.
    """

    block: Tensor
    target: Tensor
    size: Tensor
    slope: Tensor


def _hull_steps(errors: Tensor, block_bytes: Tensor, allowed: Tensor, current: Tensor) -> _Steps:
    blocks = torch.arange(errors.shape[0], device=errors.device)
    found = []
    for _ in range(len(STATE_BITS) - 1):
        more = block_bytes - _at(block_bytes, current).unsqueeze(1)
        saved = _at(errors, current).unsqueeze(1) - errors
        slopes = torch.where(allowed & (more > 0) & (saved > 0), saved / more.clamp_min(1), -1.0)
        # argmax takes the first of equals, the one of the most bytes: collinear steps become one.
        slope, target = slopes.max(1)
        target = torch.where(slope > 0, target, current)
        moves = slope > 0
        size = _at(block_bytes, target) - _at(block_bytes, current)
        found.append(_Steps(blocks[moves], target[moves], size[moves], slope[moves]))
        current = target
    return _Steps(*(torch.cat([getattr(steps, name) for steps in found]) for name in _Steps.__annotations__))


def _take(steps: _Steps, order: Tensor, budget: int) -> tuple[Tensor, int | None, int]:
    """(indices of the steps taken, the position in `order` of the first that did not fit, bytes left there)."""
    sizes = steps.size[order]
    sums = sizes.cumsum(0)
    over = (sums > budget).nonzero()
    if not over.numel():
        return order, None, budget - int(sums[-1]) if order.numel() else budget
    stop = int(over[0])
    left = budget - (int(sums[stop - 1]) if stop else 0)
    taken = [order[:stop]]
    # Smaller steps further on may still fit, each only after its block's earlier ones.
    barred = torch.zeros(int(steps.block.max()) + 1, dtype=torch.bool, device=order.device)
    rest, remaining = order[stop:], left
    while rest.numel():
        fits = (steps.size[rest] <= remaining) & ~barred[steps.block[rest]]
        misfits = steps.size[rest] > remaining
        first_misfit = _first_of_block(steps.block[rest], misfits, barred.numel())
        place = torch.arange(rest.numel(), device=rest.device)
        fits &= place < first_misfit[steps.block[rest]]
        where = fits.nonzero()
        if not where.numel():
            break
        here = int(where[0])
        barred[steps.block[rest[:here]]] = True
        taken.append(rest[here : here + 1])
        remaining -= int(steps.size[rest[here]])
        rest = rest[here + 1 :]
    return torch.cat(taken), stop, left


def _first_of_block(block: Tensor, marked: Tensor, blocks: int) -> Tensor:
    """For each block the first position where it is marked, or the length."""
    positions = torch.arange(block.numel(), device=block.device)
    first = torch.full((blocks,), block.numel(), dtype=torch.int64, device=block.device)
    return first.scatter_reduce(0, block[marked], positions[marked], "amin")


def _at(table: Tensor, column: Tensor) -> Tensor:
    return table.gather(1, column.unsqueeze(1)).squeeze(1)
