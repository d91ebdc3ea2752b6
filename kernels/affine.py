"""affine: scale and zero point for each GROUP neighbours, 4 bits.

    low = min x, high = max x       S' = (high / 2 - low / 2) / 15
    q = min(round((x / 2 - low / 2) / S'), 15)        x' = 2 (low / 2 + q S'), within [low, high]

| pointer | type                    | shape                |                                          |
|---------|-------------------------|----------------------|------------------------------------------|
| x       | float32, float16, int16 | [n]                  | int16 holds the bits of bfloat16         |
| codes   | uint8                   | [ceil(n / 2)]        | order as in group.py                     |
| bounds  | float32                 | [ceil(n / GROUP), 2] | (low, high); (high or inf, low): special |

One program does a tile of 2048 elements (see group.py). Groups with inf or NaN use codes 0 to 12 for finite
elements and 13, 14, 15 for +inf, -inf, NaN.

Example, one group of 4: x = 0 3 15 7  ->  low 0, high 15, S = 1, codes 0 3 15 7
    byte 0 = 0 | 15 << 4 = 240       byte 1 = 3 | 7 << 4 = 115
"""

import triton
import triton.language as tl

from megatron_adacc.codecs.affine import FACTOR, LEVELS, SPECIAL_FACTOR, SPECIAL_LEVELS

from .grouped import load_tile, places, store_tile
from .launch import TILE, aligned, device_of, raw, signed_keys
from .symmetric import from_float, magnitude_of, nearest, to_float, uniform

_LEVELS = tl.constexpr(LEVELS)
_SPECIAL_LEVELS = tl.constexpr(SPECIAL_LEVELS)
_FACTOR = tl.constexpr(FACTOR)
_SPECIAL_FACTOR = tl.constexpr(SPECIAL_FACTOR)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def _step_of(low, high, special):
    """S' of groups, at least the smallest normal float32."""
    factor = tl.where(special, _SPECIAL_FACTOR, _FACTOR)
    return tl.maximum((high * 0.5 - low * 0.5) * factor, _SMALLEST_SCALE)


@triton.jit
def _encode_tile(
    x, codes, bounds, tile, left, key_0, key_1,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, STOCHASTIC: tl.constexpr, BF16: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = GROUP // 2
    start = tile * (GROUP * GROUPS)
    x += start
    codes += tile * (PART * GROUPS)
    bounds += tile * (2 * GROUPS)
    low = tl.full([GROUPS, PART], float("inf"), tl.float32)
    high = tl.full([GROUPS, PART], float("-inf"), tl.float32)
    largest = tl.full([GROUPS, PART], 0, tl.int32)
    for k in tl.static_range(2):
        element, valid, _ = places(k, left, GROUP, GROUPS, 2, FULL)
        value = to_float(load_tile(x, element, valid, FULL), BF16)
        magnitude = magnitude_of(value)
        counts = magnitude < _EXPONENT
        if not FULL:
            counts = counts & valid
        largest = tl.maximum(largest, magnitude)
        low = tl.minimum(low, tl.where(counts, value, float("inf")))
        high = tl.maximum(high, tl.where(counts, value, float("-inf")))
    low = tl.reduce(low, 1, tl.standard._elementwise_min)
    high = tl.reduce(high, 1, tl.standard._elementwise_max)
    special = tl.reduce(largest, 1, tl.standard._elementwise_max) >= _EXPONENT
    nothing = low > high
    low = tl.where(nothing, 0.0, low)
    high = tl.where(nothing, 0.0, high)
    step = _step_of(low, high, special)[:, None]
    half_low = (low * 0.5)[:, None]
    levels = tl.where(special, _SPECIAL_LEVELS, _LEVELS)[:, None]
    packed = tl.full([GROUPS, PART], 0, tl.int32)
    for k in tl.static_range(2):
        element, valid, _ = places(k, left, GROUP, GROUPS, 2, FULL)
        value = to_float(load_tile(x, element, valid, FULL), BF16)
        magnitude = magnitude_of(value)
        finite = tl.where(magnitude < _EXPONENT, value, low[:, None])
        quotient = tl.div_rn(finite * 0.5 - half_low, step)
        if STOCHASTIC:
            code = tl.floor(quotient + uniform(start + element, key_0, key_1)).to(tl.int32)
        else:
            code = nearest(quotient)
        code = tl.minimum(code, levels)
        infinite = tl.where(value > 0, _SPECIAL_LEVELS + 1, _SPECIAL_LEVELS + 2)
        code = tl.where(magnitude == _EXPONENT, infinite, code)
        code = tl.where(magnitude > _EXPONENT, _SPECIAL_LEVELS + 3, code)
        if not FULL:
            code = tl.where(valid, code, 0)
        packed |= code << (4 * k)
    _, _, holds = places(0, left, GROUP, GROUPS, 2, FULL)
    byte = tl.arange(0, GROUPS)[:, None] * PART + tl.arange(0, PART)[None, :]
    store_tile(codes, byte, packed.to(tl.uint8), holds, FULL)
    # Stored last, so that the loads of the two passes are merged.
    group = tl.arange(0, GROUPS)
    first = tl.where(special, tl.where(high > low, high, float("inf")), low)
    store_tile(bounds, 2 * group, first, group * GROUP < left, FULL)
    store_tile(bounds, 2 * group + 1, tl.where(special, low, high), group * GROUP < left, FULL)


@triton.jit
def _decode_tile(
    codes, bounds, x, tile, left,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BF16: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = GROUP // 2
    x += tile * (GROUP * GROUPS)
    codes += tile * (PART * GROUPS)
    bounds += tile * (2 * GROUPS)
    _, _, holds = places(0, left, GROUP, GROUPS, 2, FULL)
    byte = tl.arange(0, GROUPS)[:, None] * PART + tl.arange(0, PART)[None, :]
    packed = load_tile(codes, byte, holds, FULL).to(tl.int32)
    group = tl.arange(0, GROUPS)
    first = load_tile(bounds, 2 * group, group * GROUP < left, FULL)
    second = load_tile(bounds, 2 * group + 1, group * GROUP < left, FULL)
    special = first > second
    low = tl.where(special, second, first)
    high = tl.where(special, tl.where(first < float("inf"), first, second), second)
    step = _step_of(low, high, special)[:, None]
    half_low = (low * 0.5)[:, None]
    low = low[:, None]
    high = high[:, None]
    special = special[:, None]
    for k in tl.static_range(2):
        element, valid, _ = places(k, left, GROUP, GROUPS, 2, FULL)
        code = (packed >> (4 * k)) & 15
        value = (half_low + code.to(tl.float32) * step) * 2.0
        value = tl.maximum(tl.minimum(value, high), low)
        value = tl.where(special & (code == _SPECIAL_LEVELS + 1), float("inf"), value)
        value = tl.where(special & (code == _SPECIAL_LEVELS + 2), float("-inf"), value)
        value = tl.where(special & (code == _SPECIAL_LEVELS + 3), float("nan"), value)
        store_tile(x, element, from_float(value, x, BF16), valid, FULL)


@triton.jit(do_not_specialize=["numel", "key_0", "key_1"])
def encode_kernel(
    x, codes, bounds, numel, key_0, key_1,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, STOCHASTIC: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """One tile of GROUPS groups a program; see the module docstring."""
    tile = tl.program_id(0).to(tl.int64)
    left = numel - tile * (GROUP * GROUPS)
    if left >= GROUP * GROUPS:
        _encode_tile(x, codes, bounds, tile, GROUP * GROUPS, key_0, key_1, GROUP, GROUPS, STOCHASTIC, BF16, FULL=True)
    else:
        _encode_tile(
            x, codes, bounds, tile, left.to(tl.int32), key_0, key_1, GROUP, GROUPS, STOCHASTIC, BF16, FULL=False
        )


@triton.jit(do_not_specialize=["numel"])
def decode_kernel(
    codes, bounds, x, numel, GROUP: tl.constexpr, GROUPS: tl.constexpr, BF16: tl.constexpr
):  # fmt: skip
    """One tile of GROUPS groups a program; see the module docstring."""
    tile = tl.program_id(0).to(tl.int64)
    left = numel - tile * (GROUP * GROUPS)
    if left >= GROUP * GROUPS:
        _decode_tile(codes, bounds, x, tile, GROUP * GROUPS, GROUP, GROUPS, BF16, FULL=True)
    else:
        _decode_tile(codes, bounds, x, tile, left.to(tl.int32), GROUP, GROUPS, BF16, FULL=False)


def encode(run, codes, bounds, cut, stochastic: bool, seed: int) -> None:
    """Fill codes and bounds from the floats run [n]; one launch."""
    if cut.numel == 0:
        return
    groups = max(1, TILE // cut.block)
    values, is_bf16 = raw(aligned(run))
    with device_of(run):
        encode_kernel[(triton.cdiv(cut.count, groups),)](
            values, codes, bounds, cut.numel, *signed_keys(seed),
            GROUP=cut.block, GROUPS=groups, STOCHASTIC=stochastic, BF16=is_bf16,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def decode(codes, bounds, run, cut) -> None:
    """Fill the floats run [n] from codes and bounds; one launch."""
    if cut.numel == 0:
        return
    groups = max(1, TILE // cut.block)
    values, is_bf16 = raw(run)
    with device_of(run):
        decode_kernel[(triton.cdiv(cut.count, groups),)](
            codes, bounds, values, cut.numel, GROUP=cut.block, GROUPS=groups, BF16=is_bf16,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
