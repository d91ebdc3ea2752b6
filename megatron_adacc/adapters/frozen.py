"""The weight of a frozen linear layer in fewer bits, by format.

    format        bits a parameter               what it holds
    nf4           4.5                            adapters/nf4.py
    nf4-double    4.127                          the same, its scales in 8 bits
    int8          8 + 32 / in + outlier columns  symmetric, a scale a row; columns of outlier features as they were
    gptq4         4 + 40 / block                 adapters/gptq.py; asymmetric, a scale and a zero point a block of a row

Each class turns a weight into its parts (buffers), and the parts into the weight again. The latter is one operation of
torch's, so that a trace sees it: it can be run again wherever a plan says so, and what it needs inside is gone when it
returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_adacc.adapters import gptq, nf4
from megatron_adacc.adapters.quantizers import PerRow, pack_pairs, round_to_nearest, unpack_pairs

# Elements that are decoded at a time.
PIECE = nf4.PIECE


class FrozenWeight(nn.Module):
    """In the place of a linear layer's weight [out, in]. ``dtype``: of the weight, and of what it is decoded to."""

    format: ClassVar[str]

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype

    # What code that was written for a frozen parameter looks at.
    requires_grad = False
    is_meta = False

    @property
    def device(self) -> torch.device:
        return self.parts()[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that its parts take."""
        return sum(part.untyped_storage().nbytes() for part in self.parts())

    def parts(self) -> tuple[Tensor, ...]:
        """Its tensors, in the order of decode()'s arguments."""
        return tuple(part for part in self._buffers.values() if part is not None)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The weight, [out, in] of `dtype`, from its parts: new memory, without a gradient."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """The weight as it is used, in its own dtype."""
        return self.decode(self.parts(), self.dtype)

    def _take(self, **parts: Tensor) -> None:
        for name, part in parts.items():
            # A part of larger memory would keep all of that.
            whole = part.untyped_storage().nbytes() == part.nbytes
            self.register_buffer(name, part.detach() if whole else part.detach().clone())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenWeight:
        """Move with the model; a cast (half(), bfloat16()) is one of what comes out, not of scales and codes."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        self.dtype = probe.dtype
        for name, part in list(self._buffers.items()):
            assert part is not None
            self._buffers[name] = part.to(probe.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.format}, {self.shape[0]} x {self.shape[1]}, {self.nbytes} bytes"


def _allocate(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device=device)


def _row_pieces(rows: int, columns: int) -> list[slice]:
    step = max(1, PIECE // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


@torch.library.custom_op("adacc::decode_nf4", mutates_args=())
def _decode_nf4(codes: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return nf4.decode(codes, scales, _allocate(rows, columns, dtype, codes.device))


@_decode_nf4.register_fake
def _(codes: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((rows, columns), dtype=dtype)


class Nf4Weight(FrozenWeight):
    """NF4 with a float32 scale for each 64 elements."""

    format = "nf4"

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape, weight.dtype)
        codes, scales = nf4.encode(weight)
        self._take(codes=codes, scales=scales)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        found: Tensor = torch.ops.adacc.decode_nf4(*parts, *self.shape, dtype)
        return found


@torch.library.custom_op("adacc::decode_nf4_double", mutates_args=())
def _decode_nf4_double(
    codes: Tensor, scales: Tensor, most: Tensor, mean: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    whole = nf4.decode_scales(scales, most, mean)
    return nf4.decode(codes, whole, _allocate(rows, columns, dtype, codes.device))


@_decode_nf4_double.register_fake
def _(codes: Tensor, scales: Tensor, most: Tensor, mean: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((rows, columns), dtype=dtype)


class DoubleNf4Weight(FrozenWeight):
    """NF4 whose scales have 8 bits, with a float32 scale for each 256 of them, and one float32 mean."""

    format = "nf4-double"

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape, weight.dtype)
        codes, scales = nf4.encode(weight)
        eight, most, mean = nf4.encode_scales(scales)
        self._take(codes=codes, scales=eight, most=most, mean=mean)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        found: Tensor = torch.ops.adacc.decode_nf4_double(*parts, *self.shape, dtype)
        return found


@torch.library.custom_op("adacc::decode_int8", mutates_args=())
def _decode_int8(codes: Tensor, scales: Tensor, indices: Tensor, outliers: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = codes.shape
    out = _allocate(rows, columns, dtype, codes.device)
    for piece in _row_pieces(rows, columns):
        out[piece] = codes[piece].float().mul_(scales[piece])
    return out.index_copy_(1, indices, outliers.to(dtype))


@_decode_int8.register_fake
def _(codes: Tensor, scales: Tensor, indices: Tensor, outliers: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


class Int8Weight(FrozenWeight):
    """8 bits, symmetric, one float32 scale a row (LLM.int8(), arXiv 2208.07339); the columns of outlier input features
    keep their own bits, and do not widen the rows' scales.

    ``outlier_columns``: int64 indices, each once, perhaps none."""

    format = "int8"

    def __init__(self, weight: Tensor, outlier_columns: Tensor) -> None:
        super().__init__(weight.shape, weight.dtype)
        indices = outlier_columns.to(weight.device).sort().values
        outliers = weight.detach().index_select(1, indices)
        rest = weight.detach().float().index_fill(1, indices, 0.0)
        codes, grid = round_to_nearest(rest, 8, PerRow(), symmetric=True)
        self._take(codes=codes, scales=grid.scale, indices=indices, outliers=outliers)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        found: Tensor = torch.ops.adacc.decode_int8(*parts, dtype)
        return found


@torch.library.custom_op("adacc::decode_int4_blocks", mutates_args=())
def _decode_int4_blocks(codes: Tensor, scales: Tensor, zeros: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    rows = codes.shape[0]
    out = _allocate(rows, columns, dtype, codes.device)
    for piece in _row_pieces(rows, columns):
        values = unpack_pairs(codes[piece]).float()
        values.sub_(zeros[piece, :, None]).mul_(scales[piece, :, None])
        out[piece] = values.flatten(1)[:, :columns]
    return out


@_decode_int4_blocks.register_fake
def _(codes: Tensor, scales: Tensor, zeros: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((codes.shape[0], columns), dtype=dtype)


class GptqWeight(FrozenWeight):
    """4 bits, asymmetric, a float32 scale and a zero point of 8 bits for each block of a row, by GPTQ.

    ``hessian``: as for gptq.quantize(). ``rounded_errors``: the calibrated output errors of these codes and of
    round-to-nearest's."""

    format = "gptq4"

    def __init__(self, weight: Tensor, hessian: Tensor) -> None:
        super().__init__(weight.shape, weight.dtype)
        found = gptq.quantize(weight, hessian)
        self.rounded_errors = found.error, found.nearest_error
        codes, zeros = found.codes, found.grid.zero
        assert zeros is not None
        self._take(codes=pack_pairs(codes), scales=found.grid.scale[..., 0], zeros=zeros[..., 0].to(torch.uint8))

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        found: Tensor = torch.ops.adacc.decode_int4_blocks(*parts, self.shape[1], dtype)
        return found


FORMATS: dict[str, Callable[..., FrozenWeight]] = {
    kind.format: kind for kind in (Nf4Weight, DoubleNf4Weight, Int8Weight, GptqWeight)
}


class _Linear(torch.autograd.Function):
    """x W^T + b, for a W that is decoded here, and again in the backward pass: autograd holds its parts alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight, bias: Tensor | None, group: Any) -> Tensor:
        parts = weight.parts()
        ctx.save_for_backward(*parts)
        ctx.weight, ctx.group = weight, group
        return nn.functional.linear(x, weight.decode(parts, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        weight = ctx.weight.decode(ctx.saved_tensors, gradient.dtype)
        # Two dimensions, because a product of more may not be folded into one.
        found = (gradient.reshape(-1, gradient.shape[-1]) @ weight).view(*gradient.shape[:-1], weight.shape[1])
        if ctx.group is not None:
            torch.distributed.all_reduce(found, group=ctx.group)
        return found, None, None, None


def linear(x: Tensor, weight: FrozenWeight, bias: Tensor | None, group: Any = None) -> Tensor:
    """What nn.functional.linear(x, weight.dense(), bias) gives, bit for bit, and its gradient for x, summed over
    `group` if that is a process group. x: [..., in]; the weight is decoded to x's dtype, or autocast's."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    found: Tensor = _Linear.apply(x, weight, bias, group)
    return found
