"""bitmask: two-valued tensors as one bit an element.

    first = x_0,   other = the value of the elements of the block that are not first
    bit_i = x_i != first          byte j of a block = sum_k bit_(j + k part) << k,   part = ceil(m / 8)

| pointer    | type            | shape         |                                                    |
|------------|-----------------|---------------|----------------------------------------------------|
| x          | int8/int16/int32| [n]           | the tensor's bits as integers                      |
| bits       | uint8           | [ceil(n / 8)] |                                                    |
| values     | as x            | [blocks, 2]   | first and other of each block; unused for bool     |
| violations | int32           | [1]           | set to 1 by a block with three values or more      |

One program does one block of m = 16384 elements, the last one fewer.

Example, one block of m = 10 elements, values 7 and 9, part = 2:
    x = 7 9 | 9 9 | 7 7 | 7 9 | 7 7      first 7, other 9
    byte 0 = elements 0 2 4 6 8 = 0 1 0 0 0 -> 2     byte 1 = elements 1 3 5 7 9 = 1 1 0 1 0 -> 11
"""

import torch
import triton
import triton.language as tl

from .launch import aligned, device_of

BLOCK = 16384
WARPS = 16
_INT32_MAX = tl.constexpr(2147483647)
_INT32_MIN = tl.constexpr(-2147483648)


@triton.jit
def _encode_block(x, bits, values, violations, block, length, NAN_BITS, HAS_NAN, IS_BOOL, PART, FULL):
    part_length = PART if FULL else (length + 7) // 8
    place = tl.arange(0, PART)
    x += block * (8 * PART)
    first = tl.load(x).to(tl.int32)
    packed = tl.full([PART], 0, tl.int32)
    lowest = tl.full([PART], _INT32_MAX, tl.int32)
    highest = tl.full([PART], _INT32_MIN, tl.int32)
    for k in tl.static_range(8):
        element = k * part_length + place
        if FULL:
            value = tl.load(x + element).to(tl.int32)
        else:
            value = tl.load(x + element, (place < part_length) & (element < length), other=0).to(tl.int32)
            # Past the end stands a copy of first for values, and False for bool.
            if not IS_BOOL:
                value = tl.where((place < part_length) & (element < length), value, first)
        if IS_BOOL:
            differs = value != 0
        else:
            differs = value != first
            lowest = tl.minimum(lowest, tl.where(differs, value, _INT32_MAX))
            highest = tl.maximum(highest, tl.where(differs, value, _INT32_MIN))
        packed |= differs.to(tl.int32) << k
    tl.store(bits + block * PART + place, packed.to(tl.uint8), place < part_length)
    if not IS_BOOL:
        low = tl.reduce(lowest, 0, tl.standard._elementwise_min)
        high = tl.reduce(highest, 0, tl.standard._elementwise_max)
        other = tl.where(low > high, first, high)
        if HAS_NAN:
            first = tl.where(low < high, NAN_BITS, first)
            other = tl.where(low < high, NAN_BITS, other)
        tl.store(values + 2 * block, first.to(values.dtype.element_ty))
        tl.store(values + 2 * block + 1, other.to(values.dtype.element_ty))
        # Every writer writes the same 1, so no order is needed.
        tl.store(violations, 1, low < high)


@triton.jit(do_not_specialize=["numel"])
def encode_kernel(
    x,
    bits,
    values,
    violations,
    numel,
    NAN_BITS: tl.constexpr,
    HAS_NAN: tl.constexpr,
    IS_BOOL: tl.constexpr,
    PART: tl.constexpr,
):
    """One block a program; see the module docstring."""
    block = tl.program_id(0).to(tl.int64)
    left = numel - block * (8 * PART)
    if left >= 8 * PART:
        _encode_block(x, bits, values, violations, block, 8 * PART, NAN_BITS, HAS_NAN, IS_BOOL, PART, FULL=True)
    else:
        _encode_block(
            x, bits, values, violations, block, left.to(tl.int32), NAN_BITS, HAS_NAN, IS_BOOL, PART, FULL=False
        )


@triton.jit
def _decode_block(bits, values, x, block, length, IS_BOOL, PART, FULL):
    part_length = PART if FULL else (length + 7) // 8
    place = tl.arange(0, PART)
    x += block * (8 * PART)
    packed = tl.load(bits + block * PART + place, place < part_length, other=0).to(tl.int32)
    if not IS_BOOL:
        first = tl.load(values + 2 * block)
        other = tl.load(values + 2 * block + 1)
    for k in tl.static_range(8):
        element = k * part_length + place
        bit = (packed >> k) & 1
        value = bit.to(x.dtype.element_ty) if IS_BOOL else tl.where(bit != 0, other, first)
        if FULL:
            tl.store(x + element, value)
        else:
            tl.store(x + element, value, (place < part_length) & (element < length))


@triton.jit(do_not_specialize=["numel"])
def decode_kernel(bits, values, x, numel, IS_BOOL: tl.constexpr, PART: tl.constexpr):
    """One block a program; see the module docstring."""
    block = tl.program_id(0).to(tl.int64)
    left = numel - block * (8 * PART)
    if left >= 8 * PART:
        _decode_block(bits, values, x, block, 8 * PART, IS_BOOL, PART, FULL=True)
    else:
        _decode_block(bits, values, x, block, left.to(tl.int32), IS_BOOL, PART, FULL=False)


def encode(x, bits, values, violations, cut, nan_bits: int | None, is_bool: bool) -> None:
    """Fill bits and values from the integers x [n]; one launch."""
    if cut.numel == 0:
        return
    with device_of(x):
        encode_kernel[(cut.count,)](
            aligned(x),
            bits,
            values,
            violations,
            cut.numel,
            NAN_BITS=nan_bits or 0,
            HAS_NAN=nan_bits is not None,
            IS_BOOL=is_bool,
            PART=cut.block // 8,
            num_warps=WARPS,
        )


def decode(bits, values, x: torch.Tensor, cut, is_bool: bool) -> None:
    """Fill the integers x [n] from bits and values; one launch."""
    if cut.numel == 0:
        return
    with device_of(x):
        decode_kernel[(cut.count,)](bits, values, x, cut.numel, IS_BOOL=is_bool, PART=cut.block // 8, num_warps=WARPS)
