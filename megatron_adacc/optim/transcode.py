"""Between the blocks of a state and float32 m and v in the order of the parameter's memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_adacc.optim.blocks import (
    Chunk,
    Layout,
    State,
    block_count,
    chunks,
    class_sizes,
    empty_state,
    put,
    state_names,
    state_views,
    take,
)
from megatron_adacc.optim.formats import BLOCK, codes_per_block, decode, encode, exponent_bytes


def decode_chunk(views: tuple[Tensor, ...], chunk: Chunk) -> tuple[Tensor, Tensor]:
    """m and v of a chunk, float32 [count, width]."""
    exponents = views[2:] or (None, None)
    return decode(chunk.bits, views[0], views[1], exponents[0], exponents[1], chunk.width)


def encode_chunk(m: Tensor, v: Tensor, views: tuple[Tensor, ...], chunk: Chunk) -> None:
    """Write float32 m and v [count, width] into a chunk's state, to the nearest."""
    exponents = views[2:] or (None, None)
    encode(chunk.bits, m, v, views[0], views[1], exponents[0], exponents[1], None)


def read(state: State, layout: Layout, m: Tensor, v: Tensor, chunk_blocks: int) -> None:
    """Decode all blocks into float32 m and v [numel]."""
    for chunk in chunks(layout, m.numel(), chunk_blocks):
        for flat, values in zip((m, v), decode_chunk(state_views(state, chunk), chunk), strict=True):
            if isinstance(chunk.rows, Tensor):
                put(flat, chunk, values)
            else:
                take(flat, chunk).copy_(values)


def write(m: Tensor, v: Tensor, state: State, layout: Layout, chunk_blocks: int) -> None:
    """Encode float32 m and v [numel] into all blocks, to the nearest."""
    for chunk in chunks(layout, m.numel(), chunk_blocks):
        encode_chunk(take(m, chunk), take(v, chunk), state_views(state, chunk), chunk)


def transcode(state: State, old: Layout, new: Layout, numel: int, chunk_blocks: int, device: torch.device) -> State:
    """The same m and v in another layout. The old state lives on until the caller drops it; float32 is held for
    `chunk_blocks` blocks at a time."""
    result = empty_state(new, numel, device)
    for source, target in zip(
        _parts(state, old, numel, chunk_blocks), _parts(result, new, numel, chunk_blocks), strict=True
    ):
        length, part_layout, part = source
        m, v = (torch.empty(length, dtype=torch.float32, device=device) for _ in range(2))
        read(part, part_layout, m, v, chunk_blocks)
        write(m, v, target[2], target[1], chunk_blocks)
    _keep_codes(state, old, result, new, numel)
    return result


def _keep_codes(state: State, old: Layout, result: State, new: Layout, numel: int) -> None:
    """Copy the codes of blocks whose bits stay: rounding again could move them."""
    if not isinstance(old, Tensor) and not isinstance(new, Tensor):
        if old == new:
            for name, value in result.items():
                value.copy_(state[name])
        return
    device = next(iter(state.values())).device
    old_bits, new_bits = (
        layout if isinstance(layout, Tensor) else torch.full((block_count(numel),), layout, device=device)
        for layout in (old, new)
    )
    full, tail = divmod(numel, BLOCK)
    for bits in set(class_sizes(old, numel)) & set(class_sizes(new, numel)):
        in_old, in_new = old_bits == bits, new_bits == bits
        kept = (in_old & in_new)[:full]
        source, target = ((member[:full].cumsum(0) - 1)[kept] for member in (in_old, in_new))
        tail_kept = bool(tail) and bool(in_old[-1] & in_new[-1])
        for name in state_names(bits):
            exponents = name.endswith("exponent")
            per_full, per_tail = (1 if exponents else codes_per_block(bits, width) for width in (BLOCK, tail))
            rows, new_rows = (
                tensor[: int(member[:full].sum()) * per_full].view(-1, per_full)
                for tensor, member in ((state[name], in_old), (result[name], in_new))
            )
            new_rows.index_copy_(0, target, rows.index_select(0, source))
            if tail_kept:
                result[name][-per_tail:] = state[name][-per_tail:]


def _parts(state: State, layout: Layout, numel: int, chunk_blocks: int) -> Iterator[tuple[int, Layout, State]]:
    """Runs of neighbouring blocks as parameters of their own: elements, layout, and views of the state."""
    before: dict[int, int] = dict.fromkeys(class_sizes(layout, numel), 0)
    for start in range(0, block_count(numel), chunk_blocks):
        length = min(numel, (start + chunk_blocks) * BLOCK) - start * BLOCK
        part_layout = layout[start : start + chunk_blocks] if isinstance(layout, Tensor) else layout
        views: State = {}
        for bits, (full, tail) in class_sizes(part_layout, length).items():
            first = before[bits]
            codes_from = first * codes_per_block(bits, BLOCK)
            codes_to = codes_from + full * codes_per_block(bits, BLOCK) + codes_per_block(bits, tail)
            for name in (f"m{bits}", f"v{bits}"):
                views[name] = state[name][codes_from:codes_to]
                if exponent_bytes(bits):
                    views[f"{name}_exponent"] = state[f"{name}_exponent"][first : first + full + bool(tail)]
            before[bits] += full
        yield length, part_layout, views
