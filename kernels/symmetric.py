"""Device functions of the symmetric formats: scales, codes and their reverse, for one tile.

    q = clip(round(x / S), -half, half - 1)      half = 2**(BITS - 1)      x' = q S

The scale rules, the special blocks (inf and NaN) and the random numbers are those of
megatron_adacc/codecs/symmetric.py and counter_random.py, to the bit: division is IEEE division (div_rn), a
launch switches the contraction of a multiplication and an addition off, and bfloat16 is loaded and stored as
int16 and converted by integer arithmetic, which also runs where the hardware has no bfloat16 (sm_70).
"""

import triton
import triton.language as tl

_EXPONENT = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_LARGEST_SPECIAL_SCALE = tl.constexpr(2.0**127)
# 1.5 * 2**23: adding it to a float32 of magnitude below 2**22 rounds to an integer, ties to even, and leaves
# that integer in the low mantissa bits.
_ROUNDER = tl.constexpr(12582912.0)
_ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def to_float(value, BF16: tl.constexpr):
    """float32 of a loaded float32, float16, or bfloat16 given as int16."""
    if BF16:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def to_bf16(value):
    """The int16 bits of float32 values as bfloat16, to nearest even; finite values stay finite."""
    pattern = value.to(tl.int32, bitcast=True)
    magnitude = pattern & _MAGNITUDE
    rounded = magnitude + 0x7FFF + ((magnitude >> 16) & 1)
    # The largest finite bfloat16 for what would round to infinity.
    rounded = tl.where(magnitude < _EXPONENT, tl.minimum(rounded, 0x7F7FFFFF), rounded)
    rounded = tl.where(magnitude > _EXPONENT, 0x7FC00000, rounded)
    return ((rounded >> 16) | ((pattern >> 16) & -0x8000)).to(tl.int16)


@triton.jit
def from_float(value, pointer, BF16: tl.constexpr):
    """What is stored at `pointer` for float32 values."""
    if BF16:
        return to_bf16(value)
    else:
        return value.to(pointer.dtype.element_ty)


@triton.jit
def magnitude_of(value):
    """The bits of |value|; NaN and infinity are at or above _EXPONENT."""
    return value.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def finite_or_zero(value):
    """value where it is finite, else 0."""
    return tl.where(magnitude_of(value) < _EXPONENT, value, 0.0)


@triton.jit
def scale_of(
    high, low, magnitude, SIGNED: tl.constexpr, LARGE: tl.constexpr, SMALL: tl.constexpr, SPECIAL: tl.constexpr
):
    """(S, its stored float32, special) from max x, max -x and the largest magnitude bits of each block."""
    high = tl.maximum(high, 0.0)
    low = tl.maximum(low, 0.0)
    special = magnitude >= _EXPONENT
    largest = tl.maximum(high, low)
    scale = largest * LARGE
    if SIGNED:
        scale = tl.maximum(scale, tl.minimum(high, low) * SMALL)
    scale = tl.maximum(scale, _SMALLEST_SCALE)
    if SIGNED:
        scale = tl.where(high > low, -scale, scale)
    special_scale = tl.minimum(tl.maximum(largest * SPECIAL, _SMALLEST_SCALE), _LARGEST_SPECIAL_SCALE)
    payload = (special_scale.to(tl.int32, bitcast=True) + 511) >> 9
    step = tl.where(special, (payload << 9).to(tl.float32, bitcast=True), scale)
    stored = tl.where(special, payload.to(tl.float32, bitcast=True), scale)
    return step, stored, special


@triton.jit
def step_of(stored):
    """(S, special) from a stored scale."""
    pattern = stored.to(tl.int32, bitcast=True)
    special = (pattern & _EXPONENT) == 0
    return tl.where(special, ((pattern & 0x3FFFFF) << 9).to(tl.float32, bitcast=True), stored), special


@triton.jit
def _mix(word):
    word = word ^ (word >> 16)
    word = word * 0x21F0AAAD
    word = word ^ (word >> 15)
    word = word * 0x735A2D97
    return word ^ (word >> 15)


@triton.jit
def uniform(position, key_0, key_1):
    """u in (0, 1) for 64-bit positions and two 32-bit keys."""
    word = _mix(position.to(tl.uint32) ^ key_0.to(tl.uint32))
    word = _mix(word ^ (position >> 32).to(tl.uint32) ^ key_1.to(tl.uint32))
    return ((word >> 16).to(tl.int32).to(tl.float32) + 0.5) * 0.0000152587890625


@triton.jit
def nearest(quotient):
    """The nearest integer as int32, ties to even; |quotient| < 2**22."""
    return (quotient + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS


@triton.jit
def quantize(value, step, special, position, key_0, key_1, BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Signed int32 codes of float32 values."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    quotient = tl.div_rn(finite_or_zero(value), step)
    code = tl.floor(quotient + uniform(position, key_0, key_1)).to(tl.int32) if STOCHASTIC else nearest(quotient)
    code = tl.maximum(code, tl.where(special, 2 - HALF, -HALF))
    code = tl.minimum(code, tl.where(special, HALF - 2, HALF - 1))
    infinite = tl.where(value > 0, HALF - 1, 1 - HALF)
    magnitude = magnitude_of(value)
    code = tl.where(magnitude == _EXPONENT, infinite, code)
    return tl.where(magnitude > _EXPONENT, -HALF, code)


@triton.jit
def dequantize(code, step, special, BITS: tl.constexpr, LIMIT: tl.constexpr):
    """float32 values of unsigned codes (the low BITS bits), within the finite range of the output."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    code = (code ^ HALF) - HALF
    value = tl.minimum(tl.maximum(code.to(tl.float32) * step, -LIMIT), LIMIT)
    value = tl.where(special & (code == -HALF), float("nan"), value)
    value = tl.where(special & (code == 1 - HALF), float("-inf"), value)
    return tl.where(special & (code == HALF - 1), float("inf"), value)
