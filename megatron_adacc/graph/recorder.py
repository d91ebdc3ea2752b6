"""The tables that a trace fills: buffers, their storages, and arguments in a form that can be written down."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_adacc.graph.external import External
from megatron_adacc.graph.fused_dropout import OpCall, Result
from megatron_adacc.graph.groups import by_name
from megatron_adacc.graph.model import Argument, Buffer, InputSpec, Op, Origin, Pack, Tagged, View
from megatron_adacc.graph.storages import (
    Named,
    Region,
    Storages,
    call_tensors,
    dtype_name,
    extent_bytes,
    has_plain_storage,
    named_tensors,
)

LITERAL_ELEMENTS = 64  # a tensor of more numbers than this is not stored in the graph by value


class Recorder:
    """State of a trace, and the ways in which a tensor enters it. ``_path`` is the running submodule's."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._storages = Storages()
        self._ops: list[Op] = []
        self._buffers: list[Buffer] = []
        self._packs: list[Pack] = []
        self._objects: list[Any] = []
        self._externals: dict[int, External] = {}
        self._sites: Counter[tuple[str, str]] = Counter()
        self._device: torch.device | None = None
        for named in named_tensors(module):
            self._storages.name(named)
        inputs = call_tensors(args, kwargs)
        for name, tensor in inputs:
            if has_plain_storage(tensor):
                self._device = self._device or tensor.device
                self._storages.name(Named(Origin.INPUT, name, tensor))
        self._input_specs = tuple(self._input_spec(name, t) for name, t in inputs)

    @property
    def _path(self) -> str:
        return ""

    def _let_go(self) -> None:
        """Hold no tensor any more: the arguments carry the graph of everything before this layer."""
        self._storages = Storages()
        self._externals = {}
        self._objects = []

    def pack(self, tensor: Tensor) -> int:
        """Note that autograd saved this tensor; returns its place in the order of saves."""
        index = len(self._packs)
        self._packs.append(Pack(index, self._view_or_opaque(tensor)))
        return index

    def _site(self, name: str) -> str:
        leaf = name.split("::", 1)[-1]
        path = self._path
        count = self._sites[path, leaf]
        self._sites[path, leaf] += 1
        return f"{path}/{leaf}" + (f"#{count}" if count else "")

    def _input_spec(self, name: str, tensor: Tensor) -> InputSpec:
        buffer = self._view_or_opaque(tensor).buffer
        return InputSpec(name, buffer, tuple(tensor.size()), dtype_name(tensor.dtype), tensor.requires_grad)

    def _region(self, tensor: Tensor) -> Region:
        """The region of a tensor that some op reads or writes; one not seen before gets its first buffer."""
        region = self._storages.region(tensor)
        if region is not None:
            return region
        named = self._storages.named(tensor)
        region = self._storages.add(tensor, len(self._buffers), named, foreign=named is None)
        if named is not None:
            base = self._storages.view(named.tensor, region)
            nbytes = tensor.untyped_storage().nbytes() if named.origin == Origin.INPUT else base.nbytes
            site = f"{named.origin}:{named.name}"
            self._new_buffer(region, base, site, named.origin, name=named.name, nbytes=nbytes)
        else:
            base = self._storages.view(tensor, region)
            site = f"{self._path}/unseen#{self._sites[self._path, 'unseen']}"
            self._sites[self._path, "unseen"] += 1
            self._externals[len(self._buffers)] = External(tensor)
            self._new_buffer(
                region, base, site, Origin.OPAQUE, nbytes=tensor.untyped_storage().nbytes(),
                note="no visible op wrote it",
            )  # fmt: skip
        return region

    def _is_from_before(self, tensor: Tensor) -> bool:
        """Whether the tensor is as it was before the call, and none of its arguments."""
        region = self._storages.region(tensor)
        if region is None:
            return True
        buffer = self._buffers[region.state]
        return buffer.writer is None and buffer.origin != Origin.INPUT

    def _carve_scratch(self, tensor: Tensor) -> None:
        """The tensor is about to be written whole. Where it is a part of memory that many layers use in turn
        (Megatron's global buffer), what is written is a buffer of its own: nothing of it was there before."""
        if not self._storages.foreign(tensor) or tensor.numel() * tensor.element_size() != extent_bytes(tensor):
            return
        region, others = self._storages.carve(tensor, len(self._buffers))
        if region is not None:
            base = self._storages.view(tensor, region)
            self._new_buffer(
                region, base, self._site("scratch"), Origin.OPAQUE, nbytes=base.nbytes, note="memory used in turn"
            )
        for other in others:
            old = self._buffers[other.state]
            self._new_buffer(
                other, old.base, f"{old.site} overwritten", Origin.OPAQUE, nbytes=old.nbytes, previous=old.index,
                note="written over by way of another view",
            )  # fmt: skip

    def _new_buffer(self, region: Region, base: View, site: str, origin: Origin, **fields: Any) -> int:
        index = len(self._buffers)
        region.state = index
        base = replace(base, buffer=index)
        fields.setdefault("name", "")
        self._buffers.append(Buffer(index, region.storage, site, origin, base=base, **fields))
        return index

    def _add_calls(self, calls: tuple[OpCall, ...], output: int, barrier: str | None) -> None:
        """Add ops that the forward did not run by themselves; the last one's result is the buffer ``output``."""
        base, site = self._buffers[output].base, self._buffers[output].site
        written: list[int] = []

        def argument(value: Any) -> Argument:
            return self._buffers[written[value.call]].base if isinstance(value, Result) else self._encode(value)

        for n, call in enumerate(calls):
            args = tuple(argument(a) for a in call.args)
            kwargs = tuple((k, argument(v)) for k, v in call.kwargs)
            index = len(self._ops)
            if n == len(calls) - 1:
                written.append(output)
                self._buffers[output] = replace(self._buffers[output], writer=index)
            else:
                buffer = len(self._buffers)
                view = replace(base, buffer=buffer, dtype=dtype_name(call.dtype))
                self._buffers.append(
                    Buffer(
                        buffer, self._storages.number(), f"{site} from its mask, step {n + 1}", Origin.OP, "",
                        view.nbytes, view, writer=index,
                    )
                )  # fmt: skip
                written.append(buffer)
            self._ops.append(Op(index, call.target, self._path, args, kwargs, (written[-1],), barrier=barrier))

    def _unread(self, tensor: Tensor) -> View:
        """In place of an argument whose contents the call does not read: one element of new memory, expanded."""
        index, buffer = len(self._ops), len(self._buffers)
        view = View(buffer, tuple(tensor.size()), (0,) * tensor.dim(), 0, dtype_name(tensor.dtype))
        self._buffers.append(
            Buffer(
                buffer, self._storages.number(), self._site("unread"), Origin.OP, "", tensor.element_size(), view,
                writer=index,
            )
        )  # fmt: skip
        kwargs = (("dtype", self._encode(tensor.dtype)), ("device", self._encode(tensor.device)))
        target = "aten.empty_strided.default"
        self._ops.append(Op(index, target, self._path, (view.size, view.stride), kwargs, (buffer,)))
        return view

    def _view(self, tensor: Tensor) -> View:
        return self._storages.view(tensor, self._region(tensor))

    def _view_or_opaque(self, tensor: Tensor) -> View:
        if has_plain_storage(tensor):
            return self._view(tensor)
        index = len(self._buffers)
        numel = tensor.numel()
        size, dtype = tuple(tensor.size()), dtype_name(tensor.dtype)
        view = View(index, size, (), 0, dtype)
        note = "not a plain strided tensor"
        site = f"{self._path}/special#{index}"
        nbytes = numel * tensor.element_size()
        self._buffers.append(Buffer(index, -1 - index, site, Origin.OPAQUE, "", nbytes, view, note=note))
        return view

    def _literal(self, tensor: Tensor) -> None:
        """A tensor made from numbers in the program: small ones enter the graph by value."""
        if not has_plain_storage(tensor) or tensor.numel() > LITERAL_ELEMENTS:
            return
        if self._storages.region(tensor) is not None or self._storages.named(tensor) is not None:
            return
        with torch._C._DisableTorchDispatch():
            value = tuple(tensor.detach().flatten().tolist())
        if any(isinstance(v, complex) for v in value):
            return
        region = self._storages.add(tensor, len(self._buffers), None)
        base = self._storages.view(tensor, region)
        site = f"{self._path}/literal#{self._sites[self._path, 'literal']}"
        self._sites[self._path, "literal"] += 1
        nbytes = tensor.untyped_storage().nbytes()
        self._new_buffer(region, base, site, Origin.LITERAL, nbytes=nbytes, value=value, note=tensor.device.type)

    def _known(self, tensor: Tensor) -> bool:
        return self._storages.region(tensor) is not None or self._storages.named(tensor) is not None

    def _encode(self, value: Any) -> Argument:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Tensor):
            return self._view(value) if has_plain_storage(value) else Tagged("tensor", type(value).__name__)
        if isinstance(value, (tuple, list)):
            return tuple(self._encode(v) for v in value)
        if isinstance(value, torch.dtype):
            return Tagged("dtype", dtype_name(value))
        if isinstance(value, torch.device):
            same = self._device is not None and value == self._device
            return Tagged("device", value.type if same or value.index is None else str(value))
        if isinstance(value, torch.layout):
            return Tagged("layout", str(value).removeprefix("torch."))
        if isinstance(value, torch.memory_format):
            return Tagged("memory_format", str(value).removeprefix("torch."))
        if isinstance(value, complex):
            return Tagged("complex", repr(value))
        return self._object(value)

    def _object(self, value: Any) -> Tagged:
        value = by_name(value)
        self._objects.append(value)
        return Tagged("object", len(self._objects) - 1, type(value).__name__)
