"""channel: one scale for each channel and run of BLOCK rows.

    S of rows BLOCK t .. of channel c from their extremes,   q = clip(round(x / S), -half, half - 1),   x' = q S
    byte [t BLOCK / PER + j, c] = sum_k code of row (BLOCK t + j + k part) << (BITS k)
    part = ceil(rows of the run / PER),   PER = 8 / BITS

| pointer | type                    | shape                           |                                  |
|---------|-------------------------|---------------------------------|----------------------------------|
| x       | float32, float16, int16 | [rows, channels]                | int16 holds the bits of bfloat16 |
| codes   | uint8                   | [ceil(rows / PER), channels]    |                                  |
| scales  | float32                 | [ceil(rows / BLOCK), channels]  | see symmetric.py                 |

One program does one run of rows and CHANNELS channels, ROWS rows of each part at a time. With ROWS = BLOCK / PER
(runs of up to 128 rows) the tile stays in registers and x is read once; longer runs are read twice. `channels`
is specialized: where 16 divides it, loads and stores are vectors.

Example, BITS 4, BLOCK 4, one channel, signed scale: rows 1 -8 7 3
    low 8, high 7 -> S = 1, codes 1 -8 7 3, part 2: bytes 1 | 7 << 4 = 113, 8 | 3 << 4 = 56
"""

import triton
import triton.language as tl

from .launch import aligned, constants_of, device_of, limit_of, raw, signed_keys
from .symmetric import (
    dequantize,
    finite_or_zero,
    from_float,
    magnitude_of,
    quantize,
    scale_of,
    step_of,
    to_float,
)

CHANNELS = 32
MOST_ROWS = 64
WARPS = 8


@triton.jit
def _rows(offset, k, part, length, ROWS: tl.constexpr):
    """(row within the run, its validity, row of bytes' validity) for ROWS rows of part k; [ROWS, 1]."""
    place = offset + tl.arange(0, ROWS)[:, None]
    row = k * part + place
    return row, (place < part) & (row < length), place < part


@triton.jit
def _extremes(
    x, offset, part, length, wide, channel, inside,
    PER: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """(max x, max -x, largest magnitude bits) over ROWS rows of each part; [1, CHANNELS]."""
    high = tl.full([ROWS, CHANNELS], 0.0, tl.float32)
    low = tl.full([ROWS, CHANNELS], 0.0, tl.float32)
    largest = tl.full([ROWS, CHANNELS], 0, tl.int32)
    for k in tl.static_range(PER):
        row, valid, _ = _rows(offset, k, part, length, ROWS)
        value = to_float(tl.load(x + row * wide + channel, valid & inside, other=0), BF16)
        largest = tl.maximum(largest, magnitude_of(value))
        value = finite_or_zero(value)
        high = tl.maximum(high, value)
        low = tl.maximum(low, -value)
    return (
        tl.reduce(high, 0, tl.standard._elementwise_max)[None, :],
        tl.reduce(low, 0, tl.standard._elementwise_max)[None, :],
        tl.reduce(largest, 0, tl.standard._elementwise_max)[None, :],
    )


@triton.jit
def _code(
    x, codes, start, offset, part, length, wide, channel, inside, step, special, key_0, key_1,
    BITS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STOCHASTIC: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    """Code and store ROWS rows of bytes."""
    packed = tl.full([ROWS, CHANNELS], 0, tl.int32)
    for k in tl.static_range(8 // BITS):
        row, valid, _ = _rows(offset, k, part, length, ROWS)
        value = to_float(tl.load(x + row * wide + channel, valid & inside, other=0), BF16)
        position = start + row * wide + channel
        code = quantize(value, step, special, position, key_0, key_1, BITS, STOCHASTIC)
        packed |= (tl.where(valid, code, 0) & ((1 << BITS) - 1)) << (BITS * k)
    byte_row, _, holds = _rows(offset, 0, part, length, ROWS)
    tl.store(codes + byte_row * wide + channel, packed.to(tl.uint8), holds & inside)


@triton.jit(do_not_specialize=["rows", "key_0", "key_1"])
def encode_kernel(
    x, codes, scales, rows, channels, key_0, key_1,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, BF16: tl.constexpr, LARGE: tl.constexpr,
    SMALL: tl.constexpr, SPECIAL: tl.constexpr,
):  # fmt: skip
    """One run of rows and CHANNELS channels a program; see the module docstring."""
    PER: tl.constexpr = 8 // BITS
    PART: tl.constexpr = BLOCK // PER
    run = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = channel < channels
    length = tl.minimum(rows - run * BLOCK, BLOCK).to(tl.int32)
    part = (length + PER - 1) // PER
    start = run * BLOCK * channels
    x += start
    codes += run * PART * channels
    # Offsets within a run of rows fit 32 bits unless the run is the whole tensor. (Written so that it also
    # holds where channels is the constant 1.)
    wide = channels if PART == ROWS else run * 0 + channels
    if PART == ROWS:
        high, low, largest = _extremes(x, 0, part, length, wide, channel, inside, PER, ROWS, CHANNELS, BF16)
    else:
        high = tl.full([1, CHANNELS], 0.0, tl.float32)
        low = tl.full([1, CHANNELS], 0.0, tl.float32)
        largest = tl.full([1, CHANNELS], 0, tl.int32)
        for offset in range(0, part, ROWS):
            more_high, more_low, more_largest = _extremes(
                x, offset, part, length, wide, channel, inside, PER, ROWS, CHANNELS, BF16
            )
            high = tl.maximum(high, more_high)
            low = tl.maximum(low, more_low)
            largest = tl.maximum(largest, more_largest)
    step, stored, special = scale_of(high, low, largest, SIGNED, LARGE, SMALL, SPECIAL)
    if PART == ROWS:
        _code(
            x, codes, start, 0, part, length, wide, channel, inside, step, special, key_0, key_1,
            BITS, ROWS, CHANNELS, STOCHASTIC, BF16,
        )  # fmt: skip
    else:
        for offset in range(0, part, ROWS):
            _code(
                x, codes, start, offset, part, length, wide, channel, inside, step, special, key_0, key_1,
                BITS, ROWS, CHANNELS, STOCHASTIC, BF16,
            )  # fmt: skip
    # Stored last, so that the loads of the two passes are merged where the tile is held.
    tl.store(scales + run * channels + channel, stored, inside)


@triton.jit(do_not_specialize=["rows"])
def decode_kernel(
    codes, scales, x, rows, channels,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BF16: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """ROWS byte rows of one run and CHANNELS channels a program; see the module docstring."""
    PER: tl.constexpr = 8 // BITS
    PART: tl.constexpr = BLOCK // PER
    run = tl.program_id(0).to(tl.int64) // (PART // ROWS)
    offset = (tl.program_id(0) % (PART // ROWS)) * ROWS
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = channel < channels
    length = tl.minimum(rows - run * BLOCK, BLOCK).to(tl.int32)
    part = (length + PER - 1) // PER
    x += run * BLOCK * channels
    codes += run * PART * channels
    wide = channels if PART == ROWS else run * 0 + channels
    step, special = step_of(tl.load(scales + run * channels + channel, inside, other=1.0))
    byte_row, _, holds = _rows(offset, 0, part, length, ROWS)
    packed = tl.load(codes + byte_row * wide + channel, holds & inside, other=0).to(tl.int32)
    for k in tl.static_range(PER):
        row, valid, _ = _rows(offset, k, part, length, ROWS)
        value = dequantize((packed >> (BITS * k)) & ((1 << BITS) - 1), step, special, BITS, LIMIT)
        tl.store(x + row * wide + channel, from_float(value, x, BF16), valid & inside)


def _tile(cut) -> dict[str, int]:
    part = cut.block // cut.per
    return {"BLOCK": cut.block, "ROWS": min(part, MOST_ROWS), "CHANNELS": CHANNELS, "num_warps": WARPS}


def encode(x, codes, scales, cut, form, seed: int) -> None:
    """Fill codes and scales from the floats x [rows, channels]; one launch."""
    rows, channels = x.shape
    if x.numel() == 0:
        return
    values, is_bf16 = raw(aligned(x))
    with device_of(x):
        encode_kernel[(cut.count, triton.cdiv(channels, CHANNELS))](
            values, codes, scales, rows, channels, *signed_keys(seed),
            BF16=is_bf16, **constants_of(form), **_tile(cut), enable_fp_fusion=False,
        )  # fmt: skip


def decode(codes, scales, x, cut, form) -> None:
    """Fill the floats x [rows, channels] from codes and scales; one launch."""
    rows, channels = x.shape
    if x.numel() == 0:
        return
    values, is_bf16 = raw(x)
    tile = _tile(cut)
    # Programs for the rows there are: the last run may be much shorter than BLOCK.
    last_part = cut.tail_shape[2] if cut.tail else cut.block // cut.per
    pieces = (cut.count - 1) * (cut.block // cut.per // tile["ROWS"]) + triton.cdiv(last_part, tile["ROWS"])
    with device_of(x):
        decode_kernel[(pieces, triton.cdiv(channels, CHANNELS))](
            codes, scales, values, rows, channels,
            BITS=form.bits, BF16=is_bf16, LIMIT=limit_of(x), **tile, enable_fp_fusion=False,
        )  # fmt: skip
