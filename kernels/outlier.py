"""outlier: the group format with the elements of outlier channels in a 16-bit block of their own.

    slot = slots[channel]       x of a slot >= 0 goes to outliers[row, slot] and counts as 0 in its group

| pointer  | type                    | shape              |                                              |
|----------|-------------------------|--------------------|----------------------------------------------|
| x        | float32, float16, int16 | [rows, channels]   | int16 holds the bits of bfloat16             |
| codes    | uint8                   | [ceil(n / PER)]    | as in group.py                               |
| scales   | float32                 | [ceil(n / GROUP)]  | as in group.py                               |
| slots    | int16                   | [channels]         | column of an outlier channel, else -1        |
| outliers | float16, int16          | [rows, columns]    | int16 holds bfloat16, also for float32       |

ALIGNED says that GROUP divides channels: then a group lies within one row and needs one division, not one for
each element.

Example, BITS 4, a group of 4, channel 3 an outlier, signed scale: x = 1 -8 7 500
    outliers[0, 0] = 500      the group is 1 -8 7 0:  S = 1, codes 1 8 7 0, bytes 1 | 7 << 4, 8 | 0 << 4
"""

import triton
import triton.language as tl

from . import group
from .grouped import decode_tile, encode_tile
from .launch import TILE, aligned, constants_of, device_of, limit_of, raw, signed_keys

WARPS = 8  # twice group.py's: places in the outlier block take registers


@triton.jit(do_not_specialize=["numel", "channels", "columns", "key_0", "key_1"])
def encode_kernel(
    x, codes, scales, slots, outliers, numel, channels, columns, key_0, key_1,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr, BF16: tl.constexpr, LARGE: tl.constexpr, SMALL: tl.constexpr,
    SPECIAL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One tile of GROUPS groups a program; see the module docstring."""
    tile = tl.program_id(0).to(tl.int64)
    left = numel - tile * (GROUP * GROUPS)
    if left >= GROUP * GROUPS:
        encode_tile(
            x, codes, scales, slots, outliers, tile, GROUP * GROUPS, channels, columns, key_0, key_1,
            BITS, GROUP, GROUPS, SIGNED, STOCHASTIC, BF16, LARGE, SMALL, SPECIAL,
            OUTLIERS=True, ALIGNED=ALIGNED, FULL=True,
        )  # fmt: skip
    else:
        encode_tile(
            x, codes, scales, slots, outliers, tile, left.to(tl.int32), channels, columns, key_0, key_1,
            BITS, GROUP, GROUPS, SIGNED, STOCHASTIC, BF16, LARGE, SMALL, SPECIAL,
            OUTLIERS=True, ALIGNED=ALIGNED, FULL=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["numel", "channels", "columns"])
def decode_kernel(
    codes, scales, slots, outliers, x, numel, channels, columns,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BF16: tl.constexpr, LIMIT: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """One tile of GROUPS groups a program; see the module docstring."""
    tile = tl.program_id(0).to(tl.int64)
    left = numel - tile * (GROUP * GROUPS)
    if left >= GROUP * GROUPS:
        decode_tile(
            codes, scales, slots, outliers, x, tile, GROUP * GROUPS, channels, columns,
            BITS, GROUP, GROUPS, BF16, LIMIT, OUTLIERS=True, ALIGNED=ALIGNED, FULL=True,
        )  # fmt: skip
    else:
        decode_tile(
            codes, scales, slots, outliers, x, tile, left.to(tl.int32), channels, columns,
            BITS, GROUP, GROUPS, BF16, LIMIT, OUTLIERS=True, ALIGNED=ALIGNED, FULL=False,
        )  # fmt: skip


def encode(run, codes, scales, slots, block, channels: int, cut, form, seed: int) -> None:
    """Fill codes, scales and the outlier block from the floats run [rows * channels]; one launch.

    Without slots there are no outliers and group.py's kernel runs.
    """
    if slots is None:
        group.encode(run, codes, scales, cut, form, seed)
        return
    if cut.numel == 0:
        return
    groups = max(1, TILE // cut.block)
    values, is_bf16 = raw(aligned(run))
    with device_of(run):
        encode_kernel[(triton.cdiv(cut.count, groups),)](
            values, codes, scales, slots, raw(block)[0], cut.numel, channels, block.shape[1],
            *signed_keys(seed), GROUP=cut.block, GROUPS=groups, BF16=is_bf16, **constants_of(form),
            ALIGNED=channels % cut.block == 0, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def decode(codes, scales, slots, block, run, channels: int, cut, form) -> None:
    """Fill the floats run [rows * channels] from codes, scales and the outlier block; one launch."""
    if slots is None:
        group.decode(codes, scales, run, cut, form)
        return
    if cut.numel == 0:
        return
    groups = max(1, TILE // cut.block)
    values, is_bf16 = raw(run)
    with device_of(run):
        decode_kernel[(triton.cdiv(cut.count, groups),)](
            codes, scales, slots, raw(block)[0], values, cut.numel, channels, block.shape[1],
            BITS=form.bits, GROUP=cut.block, GROUPS=groups, BF16=is_bf16, LIMIT=limit_of(run),
            ALIGNED=channels % cut.block == 0, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
