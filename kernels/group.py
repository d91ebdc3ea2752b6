"""group: one scale for each GROUP neighbours.

    S from the group's extremes,   q = clip(round(x / S), -half, half - 1),   x' = q S
    byte j of a group of m = sum_k code_(j + k part) << (BITS k),   part = ceil(m / PER),   PER = 8 / BITS

| pointer | type                    | shape            |                                          |
|---------|-------------------------|------------------|------------------------------------------|
| x       | float32, float16, int16 | [n]              | int16 holds the bits of bfloat16         |
| codes   | uint8                   | [ceil(n / PER)]  |                                          |
| scales  | float32                 | [ceil(n / GROUP)]| sign and special values: symmetric.py    |

One program does a tile of 2048 elements, 16 a thread: the tile stays in registers between the search for the
scale and the coding (70 to 92 registers; with 32 a thread it takes 128), so x is read once.

Example, BITS 4, one group of 4, signed scale: x = 1 -8 7 3
    low 8, high 7 -> S = 1, codes 1 -8 7 3 = 1 8 7 3 unsigned, part 2
    byte 0 = 1 | 7 << 4 = 113       byte 1 = 8 | 3 << 4 = 56
"""

import triton
import triton.language as tl

from .grouped import decode_tile, encode_tile
from .launch import TILE, aligned, constants_of, device_of, limit_of, raw, signed_keys


@triton.jit(do_not_specialize=["numel", "key_0", "key_1"])
def encode_kernel(
    x, codes, scales, numel, key_0, key_1,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr, BF16: tl.constexpr, LARGE: tl.constexpr, SMALL: tl.constexpr,
    SPECIAL: tl.constexpr,
):  # fmt: skip
    """One tile of GROUPS groups a program; see the module docstring."""
    tile = tl.program_id(0).to(tl.int64)
    left = numel - tile * (GROUP * GROUPS)
    if left >= GROUP * GROUPS:
        encode_tile(
            x, codes, scales, x, x, tile, GROUP * GROUPS, 1, 0, key_0, key_1,
            BITS, GROUP, GROUPS, SIGNED, STOCHASTIC, BF16, LARGE, SMALL, SPECIAL,
            OUTLIERS=False, ALIGNED=False, FULL=True,
        )  # fmt: skip
    else:
        encode_tile(
            x, codes, scales, x, x, tile, left.to(tl.int32), 1, 0, key_0, key_1,
            BITS, GROUP, GROUPS, SIGNED, STOCHASTIC, BF16, LARGE, SMALL, SPECIAL,
            OUTLIERS=False, ALIGNED=False, FULL=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["numel"])
def decode_kernel(
    codes, scales, x, numel,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BF16: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One tile of GROUPS groups a program; see the module docstring."""
    tile = tl.program_id(0).to(tl.int64)
    left = numel - tile * (GROUP * GROUPS)
    if left >= GROUP * GROUPS:
        decode_tile(
            codes, scales, x, x, x, tile, GROUP * GROUPS, 1, 0,
            BITS, GROUP, GROUPS, BF16, LIMIT, OUTLIERS=False, ALIGNED=False, FULL=True,
        )  # fmt: skip
    else:
        decode_tile(
            codes, scales, x, x, x, tile, left.to(tl.int32), 1, 0,
            BITS, GROUP, GROUPS, BF16, LIMIT, OUTLIERS=False, ALIGNED=False, FULL=False,
        )  # fmt: skip


def encode(run, codes, scales, cut, form, seed: int) -> None:
    """Fill codes and scales from the floats run [n]; one launch."""
    if cut.numel == 0:
        return
    groups = max(1, TILE // cut.block)
    values, is_bf16 = raw(aligned(run))
    with device_of(run):
        encode_kernel[(triton.cdiv(cut.count, groups),)](
            values, codes, scales, cut.numel, *signed_keys(seed),
            GROUP=cut.block, GROUPS=groups, BF16=is_bf16, **constants_of(form),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def decode(codes, scales, run, cut, form) -> None:
    """Fill the floats run [n] from codes and scales; one launch."""
    if cut.numel == 0:
        return
    groups = max(1, TILE // cut.block)
    values, is_bf16 = raw(run)
    with device_of(run):
        decode_kernel[(triton.cdiv(cut.count, groups),)](
            codes, scales, values, cut.numel,
            BITS=form.bits, GROUP=cut.block, GROUPS=groups, BF16=is_bf16, LIMIT=limit_of(run),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
