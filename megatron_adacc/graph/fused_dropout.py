"""The result of a compiled bias-dropout-add (Megatron's fused one) as plain ops on the mask that it drew.

Such a region draws random numbers and can never run again. But it returns its mask, and from that

    out = residual + ((x + bias) * mask) * scale          scale = 1 / (1 - p);  bias: there or not

follows, if that is what the region computes. What a region computes is not known; so the formula is tried on the
data of a call, in the few ways in which a compiler may round it:

- 16-bit tensors: all in float32 and one rounding at the end, as kernels do, or a rounding after each operation;
- the last product and sum rounded together (a fused multiply-add), or each by itself.

The order of the products cannot be seen, because the mask is 0 or 1. p is estimated from the data and
rounded to few decimals. One way that gives every bit of ``out`` is taken; where none does, the region stays
what it was. All floating-point inputs of the region must occur in the formula, so that no accident of the data
(a bias of zeros) decides whether one of them does: layers and ranks that run the same region find the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_adacc.graph.bits import bits_equal

SAMPLE_ELEMENTS = 1 << 17  # elements tried at a time: bounds the memory of a trial, and says enough of p
LEAST_ELEMENTS = 32  # kept by dropout and not zero before it: fewer do not say what p is
MOST_DECIMALS = 6  # of p
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
FLOATS = HALF_DTYPES | {torch.float32, torch.float64}


@dataclass(frozen=True)
class Result:
    """Stands for what the call at this place of a list of calls returned."""

    call: int


@dataclass(frozen=True)
class OpCall:
    """An aten op, by the name that graphs use, on tensors and earlier results."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float32  # of its result, which has the region's shape


@dataclass(frozen=True)
class Region:
    """The tensors of a bias-dropout-add. ``x``, ``residual``, ``mask`` (bool) and ``out`` have one shape and are
    contiguous; ``bias`` is broadcast to it."""

    x: Tensor
    bias: Tensor | None
    residual: Tensor
    mask: Tensor
    out: Tensor

    def parts(self) -> Iterator[Region]:
        """The same region in slices of the first dimension of about SAMPLE_ELEMENTS elements."""
        rows = self.out.size(0)
        step = max(1, SAMPLE_ELEMENTS * rows // max(1, self.out.numel()))
        for first in range(0, rows, step):
            number = min(step, rows - first)

            def part(tensor: Tensor, first: int = first, number: int = number) -> Tensor:
                if tensor.dim() < self.out.dim() or tensor.size(0) != rows:
                    return tensor  # a bias that is the same for all rows
                return tensor.narrow(0, first, number)

            bias = None if self.bias is None else part(self.bias)
            yield Region(part(self.x), bias, part(self.residual), part(self.mask), part(self.out))


@dataclass(frozen=True)
class Rounding:
    """A way to compute the formula. ``dtype``: that of all results but the last; ``together``: the last product
    and sum are one operation."""

    dtype: torch.dtype
    together: bool


def find_formula(inputs: Sequence[Any], mask: Tensor, out: Tensor) -> tuple[OpCall, ...] | None:
    """The ops that give ``out`` (any float dtype) from ``mask`` (bool, same shape) and ``inputs``, a compiled
    region's arguments, bit for bit; None where the region is no bias-dropout-add or cannot be tried."""
    regions = list(_regions(inputs, mask, out))
    with _unobserved():
        for region in regions:
            for probability in _probabilities(region):
                scale = 1.0 / (1.0 - probability)
                for rounding in _roundings(out.dtype):
                    if all(bits_equal(run(formula(part, scale, rounding)), part.out) for part in region.parts()):
                        return formula(region, scale, rounding)
    return None


def formula(region: Region, scale: float, rounding: Rounding) -> tuple[OpCall, ...]:
    """The calls that compute the region's ``out``, the last one's result, as ``rounding`` says."""
    calls: list[OpCall] = []

    def call(target: str, *args: Any, **kwargs: Any) -> Result:
        calls.append(OpCall(target, args, tuple(kwargs.items()), kwargs.get("dtype", rounding.dtype)))
        return Result(len(calls) - 1)

    def converted(tensor: Tensor) -> Tensor | Result:
        """On the CPU a conversion is an op of its own, because an op on two dtypes takes memory for one which no
        account of buffers sees. On a GPU it costs nothing inside the op that reads the tensor."""
        if tensor.dtype == rounding.dtype or (tensor is not region.x and tensor.device.type != "cpu"):
            return tensor
        return call("aten._to_copy.default", tensor, dtype=rounding.dtype)

    value = converted(region.x)
    if region.bias is not None:
        value = call("aten.add.Tensor", value, converted(region.bias))
    value = call("aten.mul.Tensor", value, converted(region.mask))
    if rounding.together:
        value = call("aten.add.Tensor", converted(region.residual), value, alpha=scale)
    else:
        value = call("aten.mul.Tensor", value, scale)
        value = call("aten.add.Tensor", value, converted(region.residual))
    if rounding.dtype != region.out.dtype:
        call("aten._to_copy.default", value, dtype=region.out.dtype)
    return tuple(calls)


def run(calls: Sequence[OpCall]) -> Tensor:
    """What the last of the calls gives."""
    results: list[Tensor] = []

    def value(argument: Any) -> Any:
        return results[argument.call] if isinstance(argument, Result) else argument

    for call in calls:
        namespace, name, overload = call.target.split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        results.append(function(*(value(a) for a in call.args), **dict(call.kwargs)))
    return results[-1]


@contextlib.contextmanager
def _unobserved() -> Iterator[None]:
    """No mode, no autograd and no autocast see what runs inside."""
    with (  # these guards act from the moment that they are made, so each is made here
        torch.no_grad(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),
    ):
        yield


def _regions(inputs: Sequence[Any], mask: Tensor, out: Tensor) -> Iterator[Region]:
    """The ways to tell x, residual and bias among the inputs: two of them in the shape of ``out``, perhaps a third
    that is broadcast to it, and no other tensor."""
    tensors = [t for t in inputs if isinstance(t, Tensor)]
    if any(isinstance(t, FakeTensor) or t.device != out.device or not t.is_contiguous() for t in (*tensors, mask, out)):
        return
    if out.dtype not in FLOATS or mask.dtype != torch.bool or mask.size() != out.size() or out.device.type == "meta":
        return
    if out.dim() == 0 or out.numel() == 0 or out.untyped_storage().nbytes() != out.numel() * out.element_size():
        return
    wide = [t for t in tensors if t.size() == out.size()]
    others = [t for t in tensors if t.size() != out.size()]
    if len(wide) != 2 or len(others) > 1 or any(t.dtype not in FLOATS for t in tensors):
        return
    if out.dtype != torch.float64 and any(t.dtype == torch.float64 for t in tensors):
        return
    bias = others[0] if others else None
    if bias is not None and not _broadcasts(bias, out):
        return
    for x, residual in (wide, reversed(wide)):
        yield Region(x, bias, residual, mask, out)


def _broadcasts(bias: Tensor, out: Tensor) -> bool:
    sizes = zip(reversed(bias.size()), reversed(out.size()), strict=False)
    return bias.dim() <= out.dim() and all(a in (1, b) for a, b in sizes)


def _probabilities(region: Region) -> list[float]:
    """Candidates for p, of few decimals first: least squares of out - residual over x + bias, where the mask is
    set, is the scale."""
    part = next(region.parts())
    before = part.x.double() if part.bias is None else part.x.double() + part.bias.double()
    before = before * part.mask
    after = (part.out.double() - part.residual.double()) * part.mask
    if int(torch.count_nonzero(before)) < LEAST_ELEMENTS:
        return []
    scale = float((before * after).sum() / (before * before).sum())
    if not 1.0 < scale < 1e4:  # NaN and infinity neither
        return []
    probability = 1.0 - 1.0 / scale
    rounded = (round(probability, decimals) for decimals in range(1, MOST_DECIMALS + 1))
    return [p for p in dict.fromkeys(rounded) if 0.0 < p < 1.0]


def _roundings(dtype: torch.dtype) -> list[Rounding]:
    dtypes = [torch.float32, dtype] if dtype in HALF_DTYPES else [dtype]
    return [Rounding(d, together) for d in dtypes for together in (False, True)]
