"""outlier_int4, outlier_int8, outlier_int2: outlier channels in a 16-bit block, the rest in groups.

An `OutlierState` lists the outlier channels. Their elements are kept in a block [rows, outliers] of the
tensor's own 16-bit dtype (bfloat16 for float32, because it has float32's range). In the code array they stand
as zeros: nothing is rearranged, and the other elements of their groups get the scale they would have without
them. Without a state, or with an empty one, this is the group format.

With `columns` the block has that many columns whatever the tensor: the channels of highest z, outliers or not. So the
bytes follow from the shape, for all layers and after each refresh of the list.

    row 0.1 -0.2 0.3 -0.4 0.5 -0.6 0.7 1000, channel 7 in the list, 4 bits
        block 1000;  group 0.1 .. 0.7 0:  S = -0.7 / 8,  errors at most 0.0438
    without the list: S = -125, and all seven become 0

Stored: codes uint8 [ceil(n b / 8)], scales float32 [groups], outliers 16-bit [rows, outliers].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_adacc.codecs.base import Packed, State
from megatron_adacc.codecs.blocks import Blocks
from megatron_adacc.codecs.execute import LEAST_BLOCKS, EncodeOutputs, call, compiled, decode_run, empty_run, encode_run
from megatron_adacc.codecs.group import GroupPacked, SymmetricCodec
from megatron_adacc.codecs.layout import Layout
from megatron_adacc.codecs.options import Implementation
from megatron_adacc.codecs.statistics import LARGEST_BLOCK, ChannelStatistics, OutlierState
from megatron_adacc.errors import UserError
from megatron_adacc.kernels import load as load_kernel


@dataclass(frozen=True)
class OutlierPacked(GroupPacked):
    """A GroupPacked and outliers, 16-bit [rows, outlier channels]; `state` is shared, its bytes do not count."""

    outliers: Tensor
    state: OutlierState | None


@dataclass(frozen=True, kw_only=True)
class Outlier(SymmetricCodec):
    """The codec; see the module docstring.

    Attributes:
        channel_dim: the dimension whose index is the channel.
        columns: of the outlier block, at most the tensor's channels. None: as many as the state lists.
    """

    channel_dim: int = -1
    columns: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.columns is None or (type(self.columns) is int and 0 <= self.columns <= LARGEST_BLOCK)
        if not fits:
            raise UserError(
                f"Codec '{self.name}' has columns={self.columns!r}; it has to be a number from 0 to {LARGEST_BLOCK}."
            )

    @property
    def channel_axis(self) -> int | None:
        """The dimension of the channels."""
        return self.channel_dim

    def observe(self, x: Tensor) -> OutlierState | None:
        """With `columns`, that many channels of x, those of highest z. Waits for the device."""
        if self.columns is None:
            return None
        layout, run = Layout.of(x.detach(), self.channel_dim)
        return self._highest(self.columns, run, layout.channels)

    def _highest(self, columns: int, run: Tensor, channels: int) -> OutlierState:
        statistics = ChannelStatistics(channels, run.device, implementation=self.implementation)
        statistics.update(run.view(run.numel() // channels if channels else 0, channels))
        return statistics.highest(min(columns, channels))

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype, state: State | None = None) -> int:
        """ceil(n b / 8) bytes of codes, 4 bytes for each group and 2 for each element of an outlier channel."""
        shape = torch.Size(shape)
        channels = shape[self.channel_dim] if shape else 1
        outliers = self._outliers_of(state, channels)
        cut = self.cut(shape.numel())
        rows = shape.numel() // channels if channels else 0
        listed = len(outliers.channels) if outliers else 0
        columns = listed if self.columns is None else min(self.columns, channels)
        return cut.code_bytes + 4 * cut.count + 2 * rows * columns

    def _outliers_of(self, state: State | None, channels: int) -> OutlierState | None:
        if state is None:
            return None
        if not isinstance(state, OutlierState):
            raise UserError(f"Codec '{self.name}' takes an OutlierState; it got {type(state).__name__}.")
        if state.num_channels != channels:
            raise UserError(
                f"The outlier state is for {state.num_channels} channels, but dimension {self.channel_dim} of "
                f"the tensor has {channels}; use the state made from this tensor's statistics."
            )
        if self.columns is not None and len(state.channels) != min(self.columns, channels):
            raise UserError(
                f"The outlier state lists {len(state.channels)} channels, but the codec has columns={self.columns} "
                f"for the tensor's {channels}; use the state that its observe() makes."
            )
        return state if state.channels else None

    def _encode(self, run: Tensor, layout: Layout, state: State | None, seed: int | None) -> OutlierPacked:
        if state is None and self.columns:
            state = self._highest(self.columns, run, layout.channels)
        outliers = self._outliers_of(state, layout.channels)
        cut = self.cut(run.numel())
        codes = torch.empty(cut.code_bytes, dtype=torch.uint8, device=run.device)
        scales = torch.empty(cut.count, dtype=torch.float32, device=run.device)
        rows = run.numel() // layout.channels if run.numel() else 0
        columns = len(outliers.channels) if outliers else 0
        kept_dtype = torch.bfloat16 if run.dtype is torch.float32 else run.dtype
        implementation = self.implementation.resolve(run.device)
        if implementation.is_kernel:
            block = torch.empty((rows, columns), dtype=kept_dtype, device=run.device)
            kernel = load_kernel("outlier", interpret=implementation is Implementation.INTERPRET)
            slots = outliers.slots if outliers else None
            seed = self.seed if seed is None else seed
            kernel.encode(run, codes, scales, slots, block, layout.channels, cut, self.format, seed)
        elif outliers is None:
            block = torch.empty((rows, 0), dtype=kept_dtype, device=run.device)
            draws = [(None, self.draw(seed, start, run.device)) for start in (0, cut.full * cut.block)]
            outputs = EncodeOutputs(codes, (scales,), shared=draws[0], tail_shared=draws[1])
            encode_run(self.encode_function(), implementation, cut, run, outputs)
        else:
            block = torch.empty((rows, columns), dtype=kept_dtype, device=run.device)
            _keep(run.view(rows, layout.channels), outliers.columns, block, implementation)
            self._encode_excluding(run, codes, scales, outliers, cut, implementation, seed)
        return OutlierPacked(self.name, layout, codes, scales, block, outliers)

    def _encode_excluding(
        self,
        run: Tensor,
        codes: Tensor,
        scales: Tensor,
        outliers: OutlierState,
        cut: Blocks,
        implementation: Implementation,
        seed: int | None,
    ) -> None:
        excluded = outliers.slots >= 0
        channels = outliers.num_channels
        draw = self.draw(seed, 0, run.device)
        if channels % cut.block == 0:
            # Groups do not straddle rows: one mask [groups of a row, per, part] serves every row.
            rows, groups = run.numel() // channels, channels // cut.block
            _, per, part = cut.full_shape
            tensors = (
                run.view(rows, groups, per, part),
                codes.view(rows, groups, part),
                scales.view(rows, groups),
            )
            function = self.encode_function(lead=2)
            call(function, implementation, tensors, (excluded.view(1, groups, per, part).to(torch.float32), draw))
            return
        rows = run.numel() // channels
        outputs = EncodeOutputs(
            codes,
            (scales,),
            also=(excluded.expand(rows, channels).reshape(-1),),
            shared=(draw,),
            tail_shared=(self.draw(seed, cut.full * cut.block, run.device),),
        )
        encode_run(self.encode_function(), implementation, cut, run, outputs)

    def _decode(self, packed: Packed) -> Tensor:
        assert isinstance(packed, OutlierPacked)
        layout, outliers = packed.layout, packed.state
        cut = self.cut(layout.numel)
        run = empty_run(layout.numel, layout.dtype, packed.codes.device)
        implementation = self.implementation.resolve(run.device)
        if implementation.is_kernel:
            kernel = load_kernel("outlier", interpret=implementation is Implementation.INTERPRET)
            slots = outliers.slots if outliers else None
            block = packed.outliers
            kernel.decode(packed.codes, packed.scales, slots, block, run, layout.channels, cut, self.format)
            return run
        decode_run(self.decode_function(), implementation, cut, packed.codes, (packed.scales,), run)
        if outliers is not None and run.numel():
            matrix = run.view(-1, layout.channels)
            matrix.index_copy_(1, outliers.columns, packed.outliers.to(run.dtype))
        return run

    def _warm_up_shape(self, state: State | None) -> tuple[int, ...]:
        if isinstance(state, OutlierState):
            rows = -(-LEAST_BLOCKS * self.group_size // state.num_channels)
            return (max(LEAST_BLOCKS, rows) + 1, state.num_channels)
        return (1, LEAST_BLOCKS * self.group_size + 1)


def keep_columns(x: Tensor, columns: Tensor, block: Tensor) -> tuple[Tensor, ...]:
    """Reference: float32 x [rows, channels], int64 columns [k] -> bfloat16 block [rows, k]; finite stays finite."""
    taken = x[:, columns]
    limit = torch.finfo(block.dtype).max
    block.copy_(torch.where(taken.abs() < torch.inf, taken.clamp(-limit, limit), taken).to(block.dtype))
    return ()


def _keep(x: Tensor, columns: Tensor, block: Tensor, implementation: Implementation) -> None:
    """Fill the outlier block; compiled, it is one parallel loop in place of six."""
    if x.dtype is block.dtype:
        torch.index_select(x, 1, columns, out=block)
    elif implementation is Implementation.COMPILED and min(block.shape) >= LEAST_BLOCKS:
        for tensor, dim in ((x, 0), (columns, 0), (block, 0), (block, 1)):
            torch._dynamo.mark_dynamic(tensor, dim)
        with torch.autocast("cpu", enabled=False, dtype=torch.bfloat16):
            compiled(keep_columns, (x.shape[1],))(x, columns, block)
    else:
        keep_columns(x, columns, block)
