"""Encode and decode of a tile of groups, with or without outlier channels: shared by group.py and outlier.py.

A tile is GROUPS groups of GROUP elements; part k of a group is the k-th of its PER = 8 / BITS runs of `part`
elements, whose codes share bytes. FULL says that no group of the tile reaches past the end, which frees the
loads and stores of masks and keeps their addresses provably contiguous.

Outlier channels: the element at run position i lies in row i // channels and channel i % channels;
slots[channel] is the channel's column in the outlier block, or -1. Its value goes to
outliers[row, column] in 16 bits and counts as zero in its group.
"""

import triton
import triton.language as tl

from .symmetric import (
    dequantize,
    finite_or_zero,
    from_float,
    magnitude_of,
    quantize,
    scale_of,
    step_of,
    to_bf16,
    to_float,
)


@triton.jit
def places(k, left, GROUP: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr, FULL: tl.constexpr):
    """(element, its validity, byte's validity) of part k, as offsets into the tile; [GROUPS, PART]."""
    PART: tl.constexpr = GROUP // PER
    group = tl.arange(0, GROUPS)[:, None]
    place = tl.arange(0, PART)[None, :]
    if FULL:
        element = group * GROUP + k * PART + place
        return element, element >= 0, element >= 0
    else:
        length = tl.minimum(tl.maximum(left - group * GROUP, 0), GROUP)
        part = (length + PER - 1) // PER
        element = group * GROUP + k * part + place
        return element, (place < part) & (k * part + place < length), (place < part) & (group >= 0)


@triton.jit
def _slot_of(
    slots, element, valid, base, channels, k, GROUP: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr,
    FULL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """(slot, row within the tile's first row) of each element; `base` is the tile's first channel."""
    if ALIGNED and FULL:
        # A group lies within one row: one division a group.
        start = base + tl.arange(0, GROUPS)[:, None] * GROUP
        row = start // channels
        channel = start - row * channels + (k * (GROUP // PER) + tl.arange(0, GROUP // PER)[None, :])
        return tl.load(slots + channel).to(tl.int32), row + tl.full([1, GROUP // PER], 0, tl.int32)
    else:
        position = base + element
        row = position // channels
        return tl.load(slots + (position - row * channels), valid, other=-1).to(tl.int32), row


@triton.jit
def load_tile(pointer, element, valid, FULL: tl.constexpr):
    """Elements of a tile; 0 past the end."""
    if FULL:
        return tl.load(pointer + element)
    else:
        return tl.load(pointer + element, valid, other=0)


@triton.jit
def store_tile(pointer, element, value, valid, FULL: tl.constexpr):
    """Store elements of a tile; nothing past the end."""
    if FULL:
        tl.store(pointer + element, value)
    else:
        tl.store(pointer + element, value, valid)


@triton.jit
def encode_tile(
    x, codes, scales, slots, outliers, tile, left, channels, columns, key_0, key_1,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr, BF16: tl.constexpr, LARGE: tl.constexpr, SMALL: tl.constexpr,
    SPECIAL: tl.constexpr, OUTLIERS: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Encode tile number `tile` (int64); `left` elements (int32) remain from its start when not FULL."""
    PER: tl.constexpr = 8 // BITS
    PART: tl.constexpr = GROUP // PER
    start = tile * (GROUP * GROUPS)
    x += start
    codes += tile * (PART * GROUPS)
    scales += tile * GROUPS
    if OUTLIERS:
        first_row = start // channels
        base = (start - first_row * channels).to(tl.int32)
        outliers += first_row * columns
    else:
        base = 0
    high = tl.full([GROUPS, PART], 0.0, tl.float32)
    low = tl.full([GROUPS, PART], 0.0, tl.float32)
    largest = tl.full([GROUPS, PART], 0, tl.int32)
    for k in tl.static_range(PER):
        element, valid, _ = places(k, left, GROUP, GROUPS, PER, FULL)
        raw = load_tile(x, element, valid, FULL)
        value = to_float(raw, BF16)
        if OUTLIERS:
            slot, row = _slot_of(slots, element, valid, base, channels, k, GROUP, GROUPS, PER, FULL, ALIGNED)
            kept = raw
            if x.dtype.element_ty == tl.float32:
                kept = to_bf16(value)
            tl.store(outliers + row * columns + slot, kept, slot >= 0)
            value = tl.where(slot >= 0, 0.0, value)
        largest = tl.maximum(largest, magnitude_of(value))
        value = finite_or_zero(value)
        high = tl.maximum(high, value)
        low = tl.maximum(low, -value)
    step, stored, special = scale_of(
        tl.reduce(high, 1, tl.standard._elementwise_max),
        tl.reduce(low, 1, tl.standard._elementwise_max),
        tl.reduce(largest, 1, tl.standard._elementwise_max),
        SIGNED, LARGE, SMALL, SPECIAL,
    )  # fmt: skip
    step = step[:, None]
    special = special[:, None]
    packed = tl.full([GROUPS, PART], 0, tl.int32)
    for k in tl.static_range(PER):
        element, valid, _ = places(k, left, GROUP, GROUPS, PER, FULL)
        value = to_float(load_tile(x, element, valid, FULL), BF16)
        if OUTLIERS:
            slot, row = _slot_of(slots, element, valid, base, channels, k, GROUP, GROUPS, PER, FULL, ALIGNED)
            value = tl.where(slot >= 0, 0.0, value)
        code = quantize(value, step, special, start + element, key_0, key_1, BITS, STOCHASTIC)
        if not FULL:
            code = tl.where(valid, code, 0)
        packed |= (code & ((1 << BITS) - 1)) << (BITS * k)
    _, _, holds = places(0, left, GROUP, GROUPS, PER, FULL)
    byte = tl.arange(0, GROUPS)[:, None] * PART + tl.arange(0, PART)[None, :]
    store_tile(codes, byte, packed.to(tl.uint8), holds, FULL)
    # Stored last: a store between the two passes would keep their loads from being merged into one.
    group = tl.arange(0, GROUPS)
    store_tile(scales, group, stored, group * GROUP < left, FULL)


@triton.jit
def decode_tile(
    codes, scales, slots, outliers, x, tile, left, channels, columns,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BF16: tl.constexpr, LIMIT: tl.constexpr,
    OUTLIERS: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Decode tile number `tile` (int64); `left` elements (int32) remain from its start when not FULL."""
    PER: tl.constexpr = 8 // BITS
    PART: tl.constexpr = GROUP // PER
    start = tile * (GROUP * GROUPS)
    x += start
    codes += tile * (PART * GROUPS)
    scales += tile * GROUPS
    if OUTLIERS:
        first_row = start // channels
        base = (start - first_row * channels).to(tl.int32)
        outliers += first_row * columns
    else:
        base = 0
    _, _, holds = places(0, left, GROUP, GROUPS, PER, FULL)
    byte = tl.arange(0, GROUPS)[:, None] * PART + tl.arange(0, PART)[None, :]
    packed = load_tile(codes, byte, holds, FULL).to(tl.int32)
    group = tl.arange(0, GROUPS)
    step, special = step_of(load_tile(scales, group, group * GROUP < left, FULL))
    step = step[:, None]
    special = special[:, None]
    for k in tl.static_range(PER):
        element, valid, _ = places(k, left, GROUP, GROUPS, PER, FULL)
        value = dequantize((packed >> (BITS * k)) & ((1 << BITS) - 1), step, special, BITS, LIMIT)
        value = from_float(value, x, BF16)
        if OUTLIERS:
            slot, row = _slot_of(slots, element, valid, base, channels, k, GROUP, GROUPS, PER, FULL, ALIGNED)
            kept = tl.load(outliers + row * columns + slot, slot >= 0, other=0)
            if x.dtype.element_ty == tl.float32:
                kept = to_float(kept, True)
            value = tl.where(slot >= 0, kept, value)
        store_tile(x, element, value, valid, FULL)
