"""A parameter's elements in blocks, and where each block's state lies.

A parameter of n elements, in the order of its memory, is cut into blocks of 256; the last may be shorter (the
*tail*). Each block has a precision. All blocks of one precision share flat tensors, in ascending order of the
blocks, so a parameter has at most two tensors of codes and two of exponents for each of the four precisions:

    m<bits>, v<bits>                      codes
    m<bits>_exponent, v<bits>_exponent    int8 [blocks of this precision], for 8 and 4 bits

A *layout* is an int where all blocks have the same precision, else uint8 [blocks] of bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_adacc.errors import UserError
from megatron_adacc.optim.formats import BLOCK, STATE_BITS, ZERO_BLOCK, codes_per_block, exponent_bytes, state_dtype

Layout = int | Tensor
State = dict[str, Tensor]


@dataclass(frozen=True)
class Chunk:
    """Blocks of one precision and one width that are worked on together.

    Attributes:
        bits: their precision.
        rows: the blocks: a slice, or int64 [count] of block numbers.
        first: position of the first among the blocks of this precision.
        count, width: blocks, and elements in each.
    """

    bits: int
    rows: slice | Tensor
    first: int
    count: int
    width: int


def block_count(numel: int) -> int:
    """Blocks of a parameter, the tail counted."""
    return -(-numel // BLOCK)


def flat_view(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The elements of a dense tensor in the order of its memory, or of that of `like`; a view if it can be one.

    Raises:
        UserError: the tensor (or `like`) has gaps or overlaps.
    """
    model = tensor if like is None else like
    order = sorted(range(model.dim()), key=lambda dim: (-model.stride()[dim], dim))
    if not model.permute(order).is_contiguous():
        raise UserError(
            f"BlockAdamW needs parameters without gaps in memory, but one of shape {tuple(model.shape)} has strides "
            f"{model.stride()}; make it contiguous before the optimizer is built."
        )
    return tensor.permute(order).reshape(-1)


def checked_layout(layout: Layout, numel: int) -> Layout:
    """The layout in its shortest form: an int where all blocks agree.

    Raises:
        UserError: unknown bits, or another number of blocks than the parameter has.
    """
    blocks = block_count(numel)
    if isinstance(layout, Tensor):
        if layout.shape != (blocks,):
            raise UserError(
                f"A layout of shape {tuple(layout.shape)} was given for a parameter of {numel} elements, which has "
                f"{blocks} blocks of {BLOCK}: it needs one number of bits for each block."
            )
        found = [int(bits) for bits in layout.unique()]
    else:
        found = [layout]
    wrong = [bits for bits in found if bits not in STATE_BITS]
    if wrong:
        raise UserError(f"State of {wrong[0]} bits was asked for; a block has 32, 16, 8 or 4.")
    if not isinstance(layout, Tensor):
        return layout
    return found[0] if len(found) == 1 else layout.to(torch.uint8)


def same_layout(one: Layout, other: Layout) -> bool:
    """Whether two layouts in their shortest form give every block the same bits."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return isinstance(one, int) and isinstance(other, int) and one == other


def chunks(layout: Layout, numel: int, chunk_blocks: int) -> Iterator[Chunk]:
    """All blocks, in chunks of at most `chunk_blocks`; the tail is a chunk of its own."""
    full, tail = divmod(numel, BLOCK)
    for bits in STATE_BITS if isinstance(layout, Tensor) else (layout,):
        chosen = (layout[:full] == bits).nonzero().squeeze(1) if isinstance(layout, Tensor) else None
        count = full if chosen is None else chosen.numel()
        for first in range(0, count, chunk_blocks):
            end = min(count, first + chunk_blocks)
            yield Chunk(bits, slice(first, end) if chosen is None else chosen[first:end], first, end - first, BLOCK)
        if tail and (not isinstance(layout, Tensor) or int(layout[-1]) == bits):
            yield Chunk(bits, slice(full, full + 1), count, 1, tail)


def take(flat: Tensor, chunk: Chunk) -> Tensor:
    """The chunk's elements of a flat tensor, [count, width]: a view for a slice, else a copy."""
    if chunk.width < BLOCK:
        return flat[-chunk.width :].view(1, chunk.width)
    if isinstance(chunk.rows, slice):
        return flat[chunk.rows.start * BLOCK : chunk.rows.stop * BLOCK].view(chunk.count, BLOCK)
    return _full_blocks(flat).index_select(0, chunk.rows)


def put(flat: Tensor, chunk: Chunk, values: Tensor) -> None:
    """Write back what `take` gave, unless it was a view."""
    if isinstance(chunk.rows, Tensor):
        _full_blocks(flat).index_copy_(0, chunk.rows, values)


def _full_blocks(flat: Tensor) -> Tensor:
    return flat[: flat.numel() // BLOCK * BLOCK].view(-1, BLOCK)


def state_names(bits: int) -> tuple[str, ...]:
    """The names of m, v, and, where there are exponents, m's and v's exponents."""
    names = (f"m{bits}", f"v{bits}")
    return (*names, *(f"{name}_exponent" for name in names)) if exponent_bytes(bits) else names


def is_moment(name: str) -> bool:
    """Whether a name in a state is of m, v or their exponents."""
    return name[0] in "mv" and name[1].isdigit()


def state_views(state: State, chunk: Chunk) -> tuple[Tensor, ...]:
    """Views of a chunk's state: codes [count, bytes or elements] twice, then exponents [count] twice if there are."""
    per_block = codes_per_block(chunk.bits, chunk.width)
    codes_from, codes = chunk.first * codes_per_block(chunk.bits, BLOCK), chunk.count * per_block
    tensors = [state[name] for name in state_names(chunk.bits)]
    return (
        *(tensor[codes_from : codes_from + codes].view(chunk.count, per_block) for tensor in tensors[:2]),
        *(tensor[chunk.first : chunk.first + chunk.count] for tensor in tensors[2:]),
    )


def empty_state(layout: Layout, numel: int, device: torch.device) -> State:
    """State of m = v = 0 for all blocks."""
    state: State = {}
    for bits, (full, tail) in class_sizes(layout, numel).items():
        codes = full * codes_per_block(bits, BLOCK) + codes_per_block(bits, tail)
        names = state_names(bits)
        for name in names[:2]:
            state[name] = torch.zeros(codes, dtype=state_dtype(bits), device=device)
        for name in names[2:]:
            # For 4 bits this marks a block of zeros; for 8 bits the codes say it.
            state[name] = torch.full((full + bool(tail),), ZERO_BLOCK, dtype=torch.int8, device=device)
    return state


def class_sizes(layout: Layout, numel: int) -> dict[int, tuple[int, int]]:
    """bits -> (full blocks, elements of the tail or 0), for the precisions that occur."""
    full, tail = divmod(numel, BLOCK)
    if not isinstance(layout, Tensor):
        return {layout: (full, tail)} if numel else {}
    sizes = {}
    for bits in STATE_BITS:
        count = int((layout[:full] == bits).sum())
        own_tail = tail if tail and int(layout[-1]) == bits else 0
        if count or own_tail:
            sizes[bits] = (count, own_tail)
    return sizes
