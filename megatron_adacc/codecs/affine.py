"""affine_int4: scale and zero point for each group, for softmax output.

In a group, over its finite elements, with low = min x and high = max x:

    S = (high - low) / 15        q = clip(round((x - low) / S), 0, 15)        decoded: low + q S, within [low, high]

A group with zeros and nothing negative has low = 0, so its zeros (masked positions) come back exactly zero, and
what softmax gave comes back within [0, 1]. Differences are taken between halves, because high - low can exceed
float32's range: S' = (high / 2 - low / 2) / 15, decoded 2 (low / 2 + q S').

A *special* group holds inf or NaN: codes 13, 14, 15 stand for +inf, -inf, NaN, the finite elements use 0 to 12.
It is stored as (high, low), the wrong way round, or as (inf, low) where high = low.

Stored: codes uint8 [ceil(n / 2)], bounds float32 [groups, 2].

Example, one group: x = 0 3 15 7  ->  low 0, high 15, S = 1, codes 0 3 15 7.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_adacc.codecs.base import Packed, State
from megatron_adacc.codecs.blocks import unpack
from megatron_adacc.codecs.counter_random import uniform
from megatron_adacc.codecs.execute import LEAST_BLOCKS, EncodeOutputs, decode_run, empty_run, encode_run
from megatron_adacc.codecs.group import GroupedCodec
from megatron_adacc.codecs.layout import Layout
from megatron_adacc.codecs.options import Implementation, Rounding
from megatron_adacc.codecs.symmetric import SMALLEST_SCALE, float32_above
from megatron_adacc.errors import UserError
from megatron_adacc.kernels import load as load_kernel

LEVELS = 15
SPECIAL_LEVELS = 12
FACTOR = float32_above(1 / LEVELS)
SPECIAL_FACTOR = float32_above(1 / SPECIAL_LEVELS)


@dataclass(frozen=True)
class AffinePacked(Packed):
    """codes uint8 [ceil(n / 2)], in the order of blocks.py; bounds float32 [groups, 2], (low, high)."""

    codes: Tensor
    bounds: Tensor


@dataclass(frozen=True, kw_only=True)
class Affine(GroupedCodec):
    """The codec; see the module docstring."""

    bits: int = 4

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype, state: State | None = None) -> int:
        """ceil(n / 2) bytes of codes and 8 bytes for each group."""
        cut = self.cut(torch.Size(shape).numel())
        return cut.code_bytes + 8 * cut.count

    def _encode(self, run: Tensor, layout: Layout, state: State | None, seed: int | None) -> AffinePacked:
        if state is not None:
            raise UserError(f"Codec '{self.name}' takes no state; it got {type(state).__name__}.")
        cut = self.cut(run.numel())
        codes = torch.empty(cut.code_bytes, dtype=torch.uint8, device=run.device)
        bounds = torch.empty((cut.count, 2), dtype=torch.float32, device=run.device)
        implementation = self.implementation.resolve(run.device)
        if implementation.is_kernel:
            kernel = load_kernel("affine", interpret=implementation is Implementation.INTERPRET)
            stochastic = self.rounding is Rounding.STOCHASTIC
            kernel.encode(run, codes, bounds, cut, stochastic, self.seed if seed is None else seed)
        else:
            function = partial(encode_blocks, stochastic=self.rounding is Rounding.STOCHASTIC)
            draws = [(self.draw(seed, start, run.device),) for start in (0, cut.full * cut.block)]
            outputs = EncodeOutputs(codes, (bounds,), shared=draws[0], tail_shared=draws[1])
            encode_run(function, implementation, cut, run, outputs, repeat=True)
            if cut.tail % 2:
                codes[-1] &= 0x0F  # the place past the end
        return AffinePacked(self.name, layout, codes, bounds)

    def _decode(self, packed: Packed) -> Tensor:
        assert isinstance(packed, AffinePacked)
        layout = packed.layout
        cut = self.cut(layout.numel)
        run = empty_run(layout.numel, layout.dtype, packed.codes.device)
        implementation = self.implementation.resolve(run.device)
        if implementation.is_kernel:
            kernel = load_kernel("affine", interpret=implementation is Implementation.INTERPRET)
            kernel.decode(packed.codes, packed.bounds, run, cut)
        else:
            decode_run(partial(decode_blocks), implementation, cut, packed.codes, (packed.bounds,), run)
        return run

    def _warm_up_shape(self, state: State | None) -> tuple[int, ...]:
        return (LEAST_BLOCKS * self.group_size + 1,)


def encode_blocks(
    x: Tensor, codes: Tensor, bounds: Tensor, draw: Tensor | None, *, stochastic: bool
) -> tuple[Tensor, ...]:
    """Reference: x float [blocks, 2, part] -> codes uint8 [blocks, part], bounds float32 [blocks, 2].

    `draw`: int64 [3], see counter_random; for stochastic rounding, else None. What is returned serves as in
    symmetric.py.
    """
    value = x.to(torch.float32)
    finite = value.abs() < torch.inf
    low = torch.where(finite, value, torch.inf).amin((1, 2), keepdim=True)
    high = torch.where(finite, value, -torch.inf).amax((1, 2), keepdim=True)
    special = torch.where(finite, 0.0, 1.0).amax((1, 2), keepdim=True) > 0.0
    nothing = low > high
    low = torch.where(nothing, 0.0, low)
    high = torch.where(nothing, 0.0, high)
    first = torch.where(special, torch.where(high > low, high, torch.inf), low)
    second = torch.where(special, low, high)
    bounds.copy_(torch.cat([first, second], 1).squeeze(2))
    half_low = low * 0.5
    step = (high * 0.5 - half_low) * torch.where(special, SPECIAL_FACTOR, FACTOR)
    step = step.clamp_min(SMALLEST_SCALE).squeeze(1)
    levels = torch.where(special, 1.0 * SPECIAL_LEVELS, 1.0 * LEVELS).squeeze(1)
    low, half_low = low.squeeze(1), half_low.squeeze(1)
    draws = None if draw is None else uniform(draw, x.shape)
    packed: Tensor | None = None
    for position in range(2):
        # One part at a time, as in symmetric.py.
        part = value.select(1, position)
        finite = part.abs() < torch.inf
        quotient = (torch.where(finite, part, low) * 0.5 - half_low) / step
        up = None if draws is None else draws.select(1, position)
        code = torch.round(quotient) if up is None else torch.floor(quotient + up)
        infinite = torch.where(part > 0.0, SPECIAL_LEVELS + 1.0, SPECIAL_LEVELS + 2.0)
        beyond = torch.where(part.abs() == torch.inf, infinite, SPECIAL_LEVELS + 3.0)
        code = torch.where(finite, torch.minimum(code, levels), beyond)
        bits_of_code = code.to(torch.int32) << (4 * position)
        packed = bits_of_code if packed is None else packed | bits_of_code
    assert packed is not None
    codes.copy_(packed.to(torch.uint8))
    return low, half_low, step, levels


def decode_blocks(codes: Tensor, bounds: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Reference: the reverse of encode_blocks; writes x [blocks, 2, part] of any float dtype."""
    first, second = bounds[:, 0, None, None], bounds[:, 1, None, None]
    special = first > second
    low = torch.where(special, second, first)
    high = torch.where(special, torch.where(first < torch.inf, first, second), second)
    half_low = low * 0.5
    step = ((high * 0.5 - half_low) * torch.where(special, SPECIAL_FACTOR, FACTOR)).clamp_min(SMALLEST_SCALE)
    code = unpack(codes, 4, 2, 1)
    value = (half_low + code.to(torch.float32) * step) * 2.0
    value = torch.maximum(torch.minimum(value, high), low)
    value = torch.where(special & (code == SPECIAL_LEVELS + 1), torch.inf, value)
    value = torch.where(special & (code == SPECIAL_LEVELS + 2), -torch.inf, value)
    value = torch.where(special & (code == SPECIAL_LEVELS + 3), torch.nan, value)
    x.copy_(value.to(x.dtype))
    return ()
