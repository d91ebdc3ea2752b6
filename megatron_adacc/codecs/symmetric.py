"""Symmetric quantization of blocks: the arithmetic that group, outlier and channel formats share.

For codes of b bits let half = 2**(b-1); codes go from -half to half - 1. In a block, over its finite elements,

    high = max(0, max x)      low = max(0, max -x)
    paper:    S = max(high, low) / half
    signed:   S = max(low / half, high / reach)      if low >= high, else   -max(high / half, low / reach)
    q = clip(round(x / S), -half, half - 1)          decoded: q S

*signed* turns the sign of S so that the element of largest magnitude falls on code -half. `reach` is the
largest x / S that the other side can hold without an error above |S| / 2: half - 1/2 with nearest rounding,
half - 1 with stochastic rounding, which must never clip or it would be biased. For 2 bits with nearest
rounding it is half, which clips, because that has the smaller squared error there (docs/codecs.md).

|S| is at least 2**-126, the smallest normal float32: a block of zeros then needs no special case, and S with
exponent bits zero is free for a *special* block, one that holds inf or NaN. Its codes -half, 1 - half and
half - 1 stand for NaN, -inf and +inf, the finite elements use the levels between them, and

    S = max(high, low) / (half - 2 + 1/2)     rounded up to 14 bits of mantissa
    stored: (bits of S) >> 9, 22 bits in the mantissa of a float32 whose exponent bits are zero

Example, b = 4, signed: x = 3 -8 7 1  ->  low 8, high 7, S = 1, q = 3 -8 7 1.
Example, b = 4, paper:  x = 8 -4 1    ->  S = 1, q = 7 (clipped) -4 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_adacc.codecs.blocks import unpack
from megatron_adacc.codecs.counter_random import uniform
from megatron_adacc.codecs.options import Rounding, Scale

SMALLEST_SCALE = 2.0**-126
LARGEST_SPECIAL_SCALE = 2.0**127
EXPONENT_BITS = 0x7F800000
SPECIAL_SHIFT = 9
SPECIAL_MASK = 0x3FFFFF


@dataclass(frozen=True)
class Symmetric:
    """The constants of one symmetric format.

    Attributes:
        bits: of a code: 2, 4 or 8.
        scale, rounding: see the module docstring.
    """

    bits: int
    scale: Scale
    rounding: Rounding

    @property
    def half(self) -> int:
        """The lowest code is -half, the highest half - 1."""
        return 1 << (self.bits - 1)

    @property
    def per(self) -> int:
        """Codes in a byte."""
        return 8 // self.bits

    @property
    def large_factor(self) -> float:
        """S is at least the larger side times this."""
        return 1.0 / self.half

    @property
    def small_factor(self) -> float:
        """S is at least the smaller side times this; rounded up to a float32, so that x / S <= reach."""
        if self.scale is Scale.PAPER:
            return self.large_factor
        if self.rounding is Rounding.STOCHASTIC:
            return float32_above(1.0 / (self.half - 1))
        return self.large_factor if self.bits == 2 else float32_above(1.0 / (self.half - 0.5))

    @property
    def special_levels(self) -> int:
        """A special block's finite codes go from -special_levels to special_levels."""
        return self.half - 2

    @property
    def special_factor(self) -> float:
        """S of a special block is its largest magnitude times this."""
        if self.rounding is Rounding.STOCHASTIC and self.special_levels:
            return float32_above(1.0 / self.special_levels)
        return float32_above(1.0 / (self.special_levels + 0.5))


def float32_above(value: float) -> float:
    """The float32 next to `value` on the side away from zero, as a Python float; value > 0."""
    exact = torch.tensor(value, dtype=torch.float64)
    near = exact.to(torch.float32)
    if near.to(torch.float64) < exact:
        near = torch.nextafter(near, torch.tensor(torch.inf))
    return float(near)


def encode_blocks(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    excluded: Tensor | None,
    draw: Tensor | None,
    *,
    lead: int = 1,
    bits: int,
    signed: bool,
    stochastic: bool,
    factors: tuple[float, float, float],
) -> tuple[Tensor, ...]:
    """Reference encode.

    Args:
        x: float [*blocks, per, part, *inner]; one scale for each (per, part).
        codes: uint8 [*blocks, part, *inner], written.
        scales: float32 [*blocks, *inner], written.
        excluded: broadcast to x; where it is not zero, elements count and are stored as zero. None: nowhere.
            float32 is the fast dtype for compiled code.
        draw: int64 [3], see counter_random; for stochastic rounding, else None.
        lead: number of dimensions before `per`.
        bits, signed, stochastic: the format.
        factors: its (large, small, special) factors.

    Returns:
        What the blocks' codes were made with. Nobody needs it: torch.compile keeps in memory what it has to
        return, and would else compute it again for every element.
    """
    half = 1 << (bits - 1)
    block_dims = (lead, lead + 1)
    large_factor, small_factor, special_factor = factors
    value = _value(x, excluded)
    finite = value.abs() < torch.inf
    counted = torch.where(finite, value, 0.0)
    high = counted.amax(block_dims, keepdim=True).clamp_min(0.0)
    low = -counted.amin(block_dims, keepdim=True).clamp_max(0.0)
    special = torch.where(finite, 0.0, 1.0).amax(block_dims, keepdim=True) > 0.0
    largest = torch.maximum(high, low)
    scale = largest * large_factor
    if signed:
        scale = torch.maximum(scale, torch.minimum(high, low) * small_factor)
    scale = scale.clamp_min(SMALLEST_SCALE)
    if signed:
        scale = torch.where(high > low, -scale, scale)
    special_scale = (largest * special_factor).clamp(SMALLEST_SCALE, LARGEST_SPECIAL_SCALE)
    payload = (special_scale.view(torch.int32) + ((1 << SPECIAL_SHIFT) - 1)) >> SPECIAL_SHIFT
    step = torch.where(special, (payload << SPECIAL_SHIFT).view(torch.float32), scale).squeeze(lead)
    lowest = torch.where(special, 2.0 - half, -1.0 * half).squeeze(lead)
    highest = torch.where(special, half - 2.0, half - 1.0).squeeze(lead)
    stored = torch.where(special, payload.view(torch.float32), scale)
    scales.copy_(stored.squeeze(lead + 1).squeeze(lead))
    draws = None if draw is None else uniform(draw, x.shape)
    packed: Tensor | None = None
    for position in range(8 // bits):
        # One part at a time, so that compiled code holds codes in registers and not in a tensor.
        part = _value(x.select(lead, position), None if excluded is None else excluded.select(lead, position))
        finite = part.abs() < torch.inf
        quotient = torch.where(finite, part, 0.0) / step
        up = None if draws is None else draws.select(lead, position)
        rounded = torch.round(quotient) if up is None else torch.floor(quotient + up)
        code = torch.minimum(torch.maximum(rounded, lowest), highest)
        infinite = torch.where(part > 0.0, half - 1.0, 1.0 - half)
        code = torch.where(finite, code, torch.where(part.abs() == torch.inf, infinite, -1.0 * half))
        bits_of_code = (code.to(torch.int32) & ((1 << bits) - 1)) << (bits * position)
        packed = bits_of_code if packed is None else packed | bits_of_code
    assert packed is not None
    codes.copy_(packed.to(torch.uint8))
    return step, lowest, highest


def _value(x: Tensor, excluded: Tensor | None) -> Tensor:
    x = x.to(torch.float32)
    return x if excluded is None else torch.where(excluded != 0, 0.0, x)


def decode_blocks(codes: Tensor, scales: Tensor, x: Tensor, *, lead: int = 1, bits: int) -> tuple[Tensor, ...]:
    """Reference decode: the reverse of encode_blocks; writes x [*blocks, per, part, *inner] of any float dtype.

    Values beyond the range of x's dtype become its largest finite values.
    """
    half = 1 << (bits - 1)
    code = (unpack(codes, bits, 8 // bits, lead) ^ half) - half
    stored = scales.unsqueeze(lead).unsqueeze(lead)
    pattern = stored.view(torch.int32)
    special = (pattern & EXPONENT_BITS) == 0
    step = torch.where(special, ((pattern & SPECIAL_MASK) << SPECIAL_SHIFT).view(torch.float32), stored)
    limit = torch.finfo(x.dtype).max
    value = (code.to(torch.float32) * step).clamp(-limit, limit)
    value = torch.where(special & (code == -half), torch.nan, value)
    value = torch.where(special & (code == 1 - half), -torch.inf, value)
    value = torch.where(special & (code == half - 1), torch.inf, value)
    x.copy_(value.to(x.dtype))
    return ()
