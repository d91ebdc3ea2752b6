"""group_int4, group_int8, group_int2: one scale for each group of `group_size` neighbours in memory.

    S, q as in symmetric.py         stored: codes uint8 [ceil(n b / 8)], scales float32 [ceil(n / group_size)]

group_int4 with scale="paper" is the paper's direct quantization. 128 elements a group and 4 bits make 4.25
bits an element: 3.765 times less than 16 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from megatron_adacc.codecs import symmetric
from megatron_adacc.codecs.base import Codec, Packed, State
from megatron_adacc.codecs.blocks import Blocks
from megatron_adacc.codecs.counter_random import draw_tensor
from megatron_adacc.codecs.execute import LEAST_BLOCKS, BlockFunction, EncodeOutputs, decode_run, empty_run, encode_run
from megatron_adacc.codecs.layout import Layout
from megatron_adacc.codecs.options import Implementation, Rounding, Scale
from megatron_adacc.codecs.symmetric import Symmetric
from megatron_adacc.errors import UserError
from megatron_adacc.kernels import load as load_kernel


@dataclass(frozen=True)
class GroupPacked(Packed):
    """codes uint8 [ceil(n b / 8)], in the order of blocks.py; scales float32 [ceil(n / group_size)]."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, kw_only=True)
class GroupedCodec(Codec):
    """The options of all formats whose groups share a scale.

    Attributes:
        bits: of a code: 2, 4 or 8; given by the name.
        group_size: elements that share a scale, a power of two from 16 to 4096.
        rounding: see options.py.
        seed: of stochastic rounding, where encode is given none.
    """

    bits: int
    group_size: int = 128
    rounding: Rounding = Rounding.NEAREST
    seed: int = 0

    group_sizes: ClassVar[tuple[int, ...]] = tuple(2**power for power in range(4, 13))

    def __post_init__(self) -> None:
        if self.group_size not in self.group_sizes:
            raise UserError(
                f"Codec '{self.name}' has group_size={self.group_size}; it has to be a power of two from "
                f"{self.group_sizes[0]} to {self.group_sizes[-1]}."
            )

    def cut(self, numel: int) -> Blocks:
        """The groups of a run of `numel` elements."""
        return Blocks(numel, self.group_size, 8 // self.bits)

    def draw(self, seed: int | None, start: int, device: torch.device) -> Tensor | None:
        """The draw of a call as block functions take it: None for nearest rounding."""
        if self.rounding is Rounding.NEAREST:
            return None
        return draw_tensor(self.seed if seed is None else seed, start, device)


@dataclass(frozen=True, kw_only=True)
class SymmetricCodec(GroupedCodec):
    """The options of the symmetric formats.

    Attributes:
        scale: see options.py and symmetric.py. Stochastic rounding is unbiased with the signed scale; the
            paper's scale clips.
    """

    scale: Scale = Scale.SIGNED

    @property
    def format(self) -> Symmetric:
        """The constants of this format."""
        return Symmetric(self.bits, self.scale, self.rounding)

    def encode_function(self, lead: int = 1) -> BlockFunction:
        """The reference's encode with this format's constants."""
        constants = self.format
        return partial(
            symmetric.encode_blocks,
            lead=lead,
            bits=self.bits,
            signed=self.scale is Scale.SIGNED,
            stochastic=self.rounding is Rounding.STOCHASTIC,
            factors=(constants.large_factor, constants.small_factor, constants.special_factor),
        )

    def decode_function(self) -> BlockFunction:
        """The reference's decode with this format's constants."""
        return partial(symmetric.decode_blocks, bits=self.bits)


@dataclass(frozen=True, kw_only=True)
class Group(SymmetricCodec):
    """The codec; see the module docstring."""

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype, state: State | None = None) -> int:
        """ceil(n b / 8) bytes of codes and 4 bytes for each group."""
        cut = self.cut(torch.Size(shape).numel())
        return cut.code_bytes + 4 * cut.count

    def _encode(self, run: Tensor, layout: Layout, state: State | None, seed: int | None) -> GroupPacked:
        if state is not None:
            raise UserError(f"Codec '{self.name}' takes no state; it got {type(state).__name__}.")
        cut = self.cut(run.numel())
        codes = torch.empty(cut.code_bytes, dtype=torch.uint8, device=run.device)
        scales = torch.empty(cut.count, dtype=torch.float32, device=run.device)
        implementation = self.implementation.resolve(run.device)
        if implementation.is_kernel:
            kernel = load_kernel("group", interpret=implementation is Implementation.INTERPRET)
            kernel.encode(run, codes, scales, cut, self.format, self.seed if seed is None else seed)
        else:
            shared = (None, self.draw(seed, 0, run.device))
            tail_shared = (None, self.draw(seed, cut.full * cut.block, run.device))
            outputs = EncodeOutputs(codes, (scales,), shared=shared, tail_shared=tail_shared)
            encode_run(self.encode_function(), implementation, cut, run, outputs)
        return GroupPacked(self.name, layout, codes, scales)

    def _decode(self, packed: Packed) -> Tensor:
        assert isinstance(packed, GroupPacked)
        layout = packed.layout
        cut = self.cut(layout.numel)
        run = empty_run(layout.numel, layout.dtype, packed.codes.device)
        implementation = self.implementation.resolve(run.device)
        if implementation.is_kernel:
            kernel = load_kernel("group", interpret=implementation is Implementation.INTERPRET)
            kernel.decode(packed.codes, packed.scales, run, cut, self.format)
        else:
            decode_run(self.decode_function(), implementation, cut, packed.codes, (packed.scales,), run)
        return run

    def _warm_up_shape(self, state: State | None) -> tuple[int, ...]:
        return (LEAST_BLOCKS * self.group_size + 1,)
