"""What every codec is: three verbs on frozen objects.

codec = codecs.get("group_int4")
packed = codec.encode(x)            # x [any shape, any strides]  ->  Packed
y = codec.decode(packed)            # the same shape, strides and dtype
packed.nbytes == codec.packed_bytes(x.shape, x.dtype)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from megatron_adacc.codecs.layout import Layout
from megatron_adacc.codecs.options import Implementation
from megatron_adacc.errors import UserError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Packed:
    """An encoded tensor; each codec has its own kind with the tensors it stores.

    Attributes:
        codec: name of the codec that wrote it.
        layout: shape, strides, dtype and device of the tensor that was encoded.
    """

    codec: str
    layout: Layout

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name, in the order of the fields. Shared state is not among them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that the stored tensors hold."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())


@dataclass(frozen=True)
class State:
    """What a codec knows about one tensor beforehand (outlier channels, a deferred check); shared, not packed."""


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """One format. Instances are frozen values: equal options make equal codecs.

    Attributes:
        name: the name it is registered under.
        implementation: which implementation runs; all give the same bits.
        lossless: decode gives back exactly what encode got.
    """

    name: str
    implementation: Implementation = Implementation.AUTO

    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS

    def encode(self, x: Tensor, state: State | None = None, *, seed: int | None = None) -> Packed:
        """Encode `x`.

        Args:
            x: any shape and strides, a dtype of `self.dtypes`, on the CPU or a CUDA device. Not modified, and
                not kept.
            state: what this codec's kind of state says about x, if there is any.
            seed: for stochastic rounding, the key of this call instead of the codec's own seed. Equal seeds
                give equal codes; no global random state is read or changed.

        Raises:
            UserError: a dtype, state or implementation that this codec cannot use.
        """
        if x.dtype not in self.dtypes:
            names = ", ".join(str(dtype) for dtype in self.dtypes)
            raise UserError(f"Codec '{self.name}' takes {names}; the tensor is {x.dtype}.")
        with torch.no_grad():
            layout, run = Layout.of(x.detach(), self.channel_axis)
            return self._encode(run, layout, state, seed)

    def decode(self, packed: Packed) -> Tensor:
        """The tensor that `packed` stands for, with the shape, strides, dtype and device of the original.

        Raises:
            UserError: `packed` was written by another codec.
        """
        if packed.codec != self.name:
            raise UserError(
                f"Codec '{self.name}' was asked to decode what '{packed.codec}' wrote; use the same codec for "
                "both directions."
            )
        with torch.no_grad():
            return packed.layout.restore(self._decode(packed))

    def observe(self, x: Tensor) -> State | None:
        """What encoding tensors like `x` should know beforehand; None for a codec that needs no such knowledge.

        May wait for the device: for start-up and for the monitor. The bytes do not depend on it: packed_bytes(x.shape,
        x.dtype) == encode(x, observe(x)).nbytes."""
        return None

    def warm_up(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        state: State | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        """Compile what encoding and decoding tensors like this needs, so that nothing compiles later.

        Args:
            dtype, device: of the tensors to come.
            state: as for encode.
            shape: of the tensors to come; matters only for formats with channels.
        """
        sample = torch.zeros(tuple(shape or self._warm_up_shape(state)), dtype=dtype, device=device)
        self.decode(self.encode(sample, state))

    @property
    def channel_axis(self) -> int | None:
        """The dimension whose index is the channel, or None for a format without channels."""
        return None

    @abstractmethod
    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype, state: State | None = None) -> int:
        """Exactly `encode(x, state).nbytes` for x of this shape and dtype, without encoding anything."""

    @abstractmethod
    def _encode(self, run: Tensor, layout: Layout, state: State | None, seed: int | None) -> Packed:
        """Encode the contiguous run [numel]."""

    @abstractmethod
    def _decode(self, packed: Packed) -> Tensor:
        """Decode to a contiguous run [numel]."""

    @abstractmethod
    def _warm_up_shape(self, state: State | None) -> tuple[int, ...]:
        """The shape of a small tensor that takes every path of the implementation."""
