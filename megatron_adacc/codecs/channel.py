"""channel_int4: one scale a channel, for query, key and value.

The tensor is a matrix [rows, channels]. Each channel has one scale for each run of `group_size` rows, found and
coded as in symmetric.py; codes stand where the elements stood, two rows to a byte.

    rows 128 t .. 128 t + 127 of channel c share scales[t, c]; byte [64 t + j, c] holds rows j and j + 64 of them

Runs of rows, and not the whole channel, because a kernel can then code a tile while it holds it: x is read once,
and the error is smaller (docs/codecs.md). A group_size of at least the number of rows gives the literal single
scale a channel; its kernel reads x twice.

Stored: codes uint8 [ceil(rows / 2), channels], scales float32 [ceil(rows / group_size), channels].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_adacc.codecs.base import Packed, State
from megatron_adacc.codecs.execute import LEAST_BLOCKS, call, empty_run
from megatron_adacc.codecs.group import GroupPacked, SymmetricCodec
from megatron_adacc.codecs.layout import Layout
from megatron_adacc.codecs.options import Implementation
from megatron_adacc.errors import UserError
from megatron_adacc.kernels import load as load_kernel


@dataclass(frozen=True, kw_only=True)
class Channel(SymmetricCodec):
    """The codec; see the module docstring.

    Attributes:
        group_size: rows that share a channel's scale, a power of two from 16 to 2**24.
        channel_dim: the dimension whose index is the channel.
    """

    channel_dim: int = -1

    group_sizes: ClassVar[tuple[int, ...]] = tuple(2**power for power in range(4, 25))

    @property
    def channel_axis(self) -> int | None:
        """The dimension of the channels."""
        return self.channel_dim

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype, state: State | None = None) -> int:
        """channels times ceil(rows / 2) bytes of codes and 4 bytes for each run of group_size rows."""
        shape = torch.Size(shape)
        channels = shape[self.channel_dim] if shape else 1
        cut = self.cut(shape.numel() // channels if channels else 0)
        return channels * (cut.code_bytes + 4 * cut.count)

    def _encode(self, run: Tensor, layout: Layout, state: State | None, seed: int | None) -> GroupPacked:
        if state is not None:
            raise UserError(f"Codec '{self.name}' takes no state; it got {type(state).__name__}.")
        channels = layout.channels
        rows = run.numel() // channels if run.numel() else 0
        cut = self.cut(rows)
        codes = torch.empty((cut.code_bytes, channels), dtype=torch.uint8, device=run.device)
        scales = torch.empty((cut.count, channels), dtype=torch.float32, device=run.device)
        x = run.view(rows, channels)
        implementation = self.implementation.resolve(run.device)
        if implementation.is_kernel:
            kernel = load_kernel("channel", interpret=implementation is Implementation.INTERPRET)
            kernel.encode(x, codes, scales, cut, self.format, self.seed if seed is None else seed)
            return GroupPacked(self.name, layout, codes, scales)
        _, per, part = cut.full_shape
        function = self.encode_function()
        coded_rows = cut.full * part
        if cut.full:
            tensors = (
                x[: cut.full * cut.block].view(cut.full, per, part, channels),
                codes[:coded_rows].view(cut.full, part, channels),
                scales[: cut.full],
            )
            call(function, implementation, tensors, (None, self.draw(seed, 0, run.device)))
        if cut.tail:
            _, per, part = cut.tail_shape
            tail = torch.zeros((per * part, channels), dtype=run.dtype, device=run.device)
            tail[: cut.tail] = x[cut.full * cut.block :]
            function(
                tail.view(1, per, part, channels),
                codes[coded_rows:].unsqueeze(0),
                scales[cut.full :],
                None,
                self.draw(seed, cut.full * cut.block * channels, run.device),
            )
        return GroupPacked(self.name, layout, codes, scales)

    def _decode(self, packed: Packed) -> Tensor:
        assert isinstance(packed, GroupPacked)
        layout, codes, scales = packed.layout, packed.codes, packed.scales
        channels = layout.channels
        run = empty_run(layout.numel, layout.dtype, codes.device)
        rows = run.numel() // channels if run.numel() else 0
        cut = self.cut(rows)
        x = run.view(rows, channels)
        implementation = self.implementation.resolve(run.device)
        if implementation.is_kernel:
            kernel = load_kernel("channel", interpret=implementation is Implementation.INTERPRET)
            kernel.decode(codes, scales, x, cut, self.format)
            return run
        _, per, part = cut.full_shape
        function = self.decode_function()
        coded_rows = cut.full * part
        if cut.full:
            tensors = (
                codes[:coded_rows].view(cut.full, part, channels),
                scales[: cut.full],
                x[: cut.full * cut.block].view(cut.full, per, part, channels),
            )
            call(function, implementation, tensors)
        if cut.tail:
            _, per, part = cut.tail_shape
            tail = torch.empty((1, per, part, channels), dtype=run.dtype, device=run.device)
            function(codes[coded_rows:].unsqueeze(0), scales[cut.full :], tail)
            x[cut.full * cut.block :] = tail.view(-1, channels)[: cut.tail]
        return run

    def _warm_up_shape(self, state: State | None) -> tuple[int, ...]:
        return (LEAST_BLOCKS * self.group_size + 1, 64)
