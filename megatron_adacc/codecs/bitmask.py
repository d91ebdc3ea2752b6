"""bitmask: any two-valued tensor, one bit an element, lossless.

A run is cut into blocks of 16384 elements. In each block

    first = x_0        other = the value of the elements that differ from first, bit for bit
    bit_i = x_i != first                                  x_i = other if bit_i else first

so a block describes itself and encoding needs one pass and no wait for a value found elsewhere. Values are
compared as integers of the same width: -0.0 and 0.0 are two values, and NaN is a value like another.
A bool tensor can hold nothing but False and True; it stores its bits alone.

Stored: bits uint8 [ceil(n / 8)], values [blocks, 2] in the tensor's width (0.1 to 0.4 % of the bits' bytes).

A tensor that is not two-valued raises NotTwoValuedError. On the CPU encode itself raises. On CUDA, encode
without a state waits for the answer; with a `BitmaskState` it does not wait: a block that is not two-valued
sets the state's flag on the device and decodes to NaN, and `state.raise_if_violated()`, called once a step
where the host waits anyway, raises.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from megatron_adacc.codecs.base import FLOATS, Codec, Packed, State
from megatron_adacc.codecs.blocks import Blocks, pack, unpack
from megatron_adacc.codecs.execute import LEAST_BLOCKS, EncodeOutputs, decode_run, empty_run, encode_run
from megatron_adacc.codecs.layout import Layout
from megatron_adacc.codecs.options import Implementation
from megatron_adacc.errors import UserError
from megatron_adacc.kernels import load as load_kernel

BLOCK = 16384
BITS_PER_BYTE = 8

# The integer dtype in which the values of a dtype are compared, and its NaN's bits (None: it has no NaN).
_INTEGERS: dict[torch.dtype, tuple[torch.dtype, int | None]] = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.float16: (torch.int16, 0x7E00),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.uint8: (torch.int8, None),
    torch.int8: (torch.int8, None),
    torch.bool: (torch.int8, None),
}


class NotTwoValuedError(UserError):
    """bitmask met a tensor with more than two different values."""


@dataclass(frozen=True)
class BitmaskState(State):
    """The deferred check of tensors on a CUDA device.

    Attributes:
        violations: int32 [1] on the device; not zero once a tensor was not two-valued.
    """

    violations: Tensor

    @staticmethod
    def on(device: torch.device | str) -> "BitmaskState":
        """A state with nothing found yet."""
        return BitmaskState(torch.zeros(1, dtype=torch.int32, device=device))

    def raise_if_violated(self) -> None:
        """Wait for the device and raise NotTwoValuedError if any tensor encoded so far was not two-valued."""
        if int(self.violations.item()):
            raise NotTwoValuedError(
                "A tensor that the plan stores as a bit mask held more than two different values; keep it, "
                "recompute it or use a lossy codec."
            )


@dataclass(frozen=True)
class BitmaskPacked(Packed):
    """bits uint8 [ceil(n / 8)]; values [blocks, 2] (first, other), [0, 2] for bool."""

    bits: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class Bitmask(Codec):
    """The codec; see the module docstring."""

    name: str = "bitmask"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (*FLOATS, torch.bool, torch.uint8, torch.int8)

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype, state: State | None = None) -> int:
        """ceil(n / 8), and for other dtypes than bool two values for each 16384 elements."""
        cut = Blocks(torch.Size(shape).numel(), BLOCK, BITS_PER_BYTE)
        return cut.code_bytes + (0 if dtype is torch.bool else 2 * cut.count * dtype.itemsize)

    def _encode(self, run: Tensor, layout: Layout, state: State | None, seed: int | None) -> BitmaskPacked:
        if state is not None and not isinstance(state, BitmaskState):
            raise UserError(f"Codec 'bitmask' takes a BitmaskState; it got {type(state).__name__}.")
        cut = Blocks(run.numel(), BLOCK, BITS_PER_BYTE)
        integer, nan_bits = _INTEGERS[layout.dtype]
        is_bool = layout.dtype is torch.bool
        bits = torch.empty(cut.code_bytes, dtype=torch.uint8, device=run.device)
        values = torch.empty((0 if is_bool else cut.count, 2), dtype=integer, device=run.device)
        integers = run.view(integer)
        implementation = self.implementation.resolve(run.device)
        deferred = state is not None and run.device.type == "cuda"
        check = state if state is not None and deferred else BitmaskState.on(run.device)
        if implementation.is_kernel:
            kernel = load_kernel("bitmask", interpret=implementation is Implementation.INTERPRET)
            kernel.encode(integers, bits, values, check.violations, cut, nan_bits, is_bool)
        else:
            function = partial(encode_blocks, nan_bits=nan_bits, is_bool=is_bool)
            violated = torch.zeros(values.shape[0], dtype=torch.int32, device=run.device)
            outputs = EncodeOutputs(bits, (values, violated))
            encode_run(function, implementation, cut, integers, outputs, repeat=not is_bool)
            check.violations.logical_or_(violated.any())
        packed = BitmaskPacked(self.name, layout, bits, values.view(layout.dtype))
        if not deferred and not is_bool:
            _raise_unless_two_valued(packed, values, check)
        return packed

    def _decode(self, packed: Packed) -> Tensor:
        assert isinstance(packed, BitmaskPacked)
        layout = packed.layout
        cut = Blocks(layout.numel, BLOCK, BITS_PER_BYTE)
        integer, _ = _INTEGERS[layout.dtype]
        is_bool = layout.dtype is torch.bool
        run = empty_run(layout.numel, integer, packed.bits.device)
        values = packed.values.view(integer)
        implementation = self.implementation.resolve(run.device)
        if implementation.is_kernel:
            kernel = load_kernel("bitmask", interpret=implementation is Implementation.INTERPRET)
            kernel.decode(packed.bits, values, run, cut, is_bool)
        else:
            function = partial(decode_blocks, is_bool=is_bool)
            decode_run(function, implementation, cut, packed.bits, (values,), run)
        return run.view(layout.dtype)

    def _warm_up_shape(self, state: State | None) -> tuple[int, ...]:
        return (LEAST_BLOCKS * BLOCK + 1,)


def encode_blocks(
    x: Tensor, bits: Tensor, values: Tensor, violated: Tensor, *, nan_bits: int | None, is_bool: bool
) -> tuple[Tensor, ...]:
    """Reference: x integers [blocks, 8, part] -> bits uint8 [blocks, part], values [blocks, 2].

    `violated` int32 [blocks] becomes 1 for a block with three different values or more; its values then are NaN
    where the dtype has one. For bool only the bits are written.
    """
    wide = x.to(torch.int32)
    first = wide[:, :1, :1]
    differs = wide != (0 if is_bool else first)
    bits.copy_(pack(differs.to(torch.int32), 1, 1))
    if is_bool:
        return ()
    limits = torch.iinfo(torch.int32)
    lowest = torch.where(differs, wide, limits.max).amin((1, 2))
    highest = torch.where(differs, wide, limits.min).amax((1, 2))
    first = first[:, 0, 0]
    other = torch.where(lowest > highest, first, highest)
    if nan_bits is not None:
        first = torch.where(lowest < highest, nan_bits, first)
        other = torch.where(lowest < highest, nan_bits, other)
    values.copy_(torch.stack([first, other], 1).to(values.dtype))
    violated.copy_((lowest < highest).to(torch.int32))
    return ()


def decode_blocks(bits: Tensor, values: Tensor, x: Tensor, *, is_bool: bool) -> tuple[Tensor, ...]:
    """Reference: bits uint8 [blocks, part], values [blocks, 2] -> x integers [blocks, 8, part]."""
    bit = unpack(bits, 1, BITS_PER_BYTE, 1)
    if is_bool:
        x.copy_(bit.to(x.dtype))
    else:
        x.copy_(torch.where(bit != 0, values[:, 1, None, None], values[:, 0, None, None]))
    return ()


def _raise_unless_two_valued(packed: BitmaskPacked, values: Tensor, check: BitmaskState) -> None:
    """Raise if a block, or the blocks together, hold more than two values; waits for the device."""
    different = values.unique() if values.numel() else values
    if different.numel() > 2 or int(check.violations.item()):
        raise NotTwoValuedError(
            f"Codec 'bitmask' stores tensors with two different values; this {packed.layout.dtype} tensor of "
            f"shape {packed.layout.shape} has more. Keep it, recompute it or use a lossy codec."
        )
