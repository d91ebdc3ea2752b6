"""A tensor as one run of elements, and back to its shape and strides.

A *dense* tensor fills one run of memory without holes or repetitions, in whatever order of dimensions
(contiguous, transposed, channels-last). Its elements are taken in memory order, so that no copy is made on
either side. Everything else (slices with holes, expanded or overlapping tensors) is copied on the way in
and scattered on the way out.

    x[2, 3], strides (1, 2)  ->  dense, elements in memory order x00 x10 x01 x11 x02 x12
    x[2, 3], strides (6, 2)  ->  not dense, elements copied in logical order x00 x01 x02 x10 x11 x12
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """What is needed to give a run of elements its tensor back.

    Attributes:
        shape, stride: of the tensor, in elements.
        dtype: of the tensor.
        device: of the tensor.
        dense: the run is in memory order (see the module docstring).
        channel_dim: for formats with channels, the dimension that varies fastest in the run; else None.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    dense: bool
    channel_dim: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def channels(self) -> int:
        """Length of the channel dimension; 1 where there is none."""
        if self.channel_dim is None or not self.shape:
            return 1
        return self.shape[self.channel_dim]

    @staticmethod
    def of(x: Tensor, channel_dim: int | None = None) -> tuple["Layout", Tensor]:
        """The layout of `x` and its elements as a contiguous run [numel]; a view of `x` where it is dense."""
        if channel_dim is not None:
            channel_dim = channel_dim % x.dim() if x.dim() else None
        dense = _is_dense(tuple(x.shape), x.stride())
        if dense and channel_dim is not None and x.numel():
            dense = x.shape[channel_dim] == 1 or x.stride(channel_dim) == 1
        layout = Layout(tuple(x.shape), tuple(x.stride()), x.dtype, x.device, dense, channel_dim)
        if dense:
            return layout, x.as_strided((x.numel(),), (1,))
        if channel_dim is not None:
            x = x.movedim(channel_dim, -1)
        return layout, x.contiguous().view(-1)

    def restore(self, run: Tensor) -> Tensor:
        """The tensor whose elements are `run` [numel], with this shape, dtype and strides."""
        if self.dense:
            return run.as_strided(self.shape, self.stride)
        shape = self.shape
        if self.channel_dim is not None:
            shape = (*shape[: self.channel_dim], *shape[self.channel_dim + 1 :], shape[self.channel_dim])
        ordered = run.view(shape)
        if self.channel_dim is not None:
            ordered = ordered.movedim(-1, self.channel_dim)
        if not _overlaps(self.shape, self.stride):
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).copy_(ordered)
        # Several elements share one place in memory: copy_ refuses that, an index does not.
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        places = torch.arange(span, device=self.device).as_strided(self.shape, self.stride)
        memory = torch.empty(span, dtype=self.dtype, device=self.device)
        memory[places.reshape(-1)] = ordered.reshape(-1)
        return memory.as_strided(self.shape, self.stride)


def _steps(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    return sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for step, size in _steps(shape, stride):
        if step != expected:
            return False
        expected *= size
    return True


def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two elements may share a place; errs to True, which costs time and no correctness."""
    if 0 in shape:
        return False
    reach = 0
    for step, size in _steps(shape, stride):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False
