"""Which buffer a tensor lies on: storages by identity, parameters by storage and offset.

A storage is identified by the address of its implementation, held by a weak reference for as long as the
tracer lives: the weak reference keeps the address from being used again without keeping the bytes.
Parameters may share one storage (DDP buffers, the distributed optimizer), so they are found by byte range.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_adacc.graph.model import Origin, View


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def has_plain_storage(tensor: Tensor) -> bool:
    """Whether size, stride and offset on a storage say all about the tensor: not so for sparse tensors,
    tensor subclasses made of several tensors, and lazily conjugated or negated ones."""
    if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def version_watch(tensor: Tensor) -> Tensor:
    """An empty tensor whose ``_version`` is the given tensor's, now and later: it shares the counter and not
    the storage, so that a write is noticed after the bytes are gone."""
    watch = tensor.detach()
    watch.data = torch.empty(0, device=tensor.device)
    return watch


@dataclass(frozen=True)
class Named:
    """A tensor known by name before the forward: a parameter, a module buffer, an attribute or an input."""

    origin: Origin
    name: str
    tensor: Tensor

    @property
    def begin(self) -> int:
        return int(self.tensor.storage_offset()) * self.tensor.element_size()

    @property
    def end(self) -> int:
        return self.begin + extent_bytes(self.tensor)


def extent_bytes(tensor: Tensor) -> int:
    """Bytes from the tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (int(last) + 1) * tensor.element_size()


def named_tensors(module: nn.Module) -> Iterator[Named]:
    """Parameters, module buffers and unregistered tensors of the module tree, each under its module path.
    A tensor reached by two paths comes under the first."""
    seen: set[int] = set()
    for path, submodule in module.named_modules(remove_duplicate=True):
        prefix = f"{path}." if path else ""
        tables: tuple[tuple[Origin, dict[str, Any]], ...] = (
            (Origin.PARAMETER, submodule._parameters),
            (Origin.MODULE_BUFFER, submodule._buffers),
            (Origin.ATTRIBUTE, submodule.__dict__),
        )
        for origin, table in tables:
            for name, value in table.items():
                if isinstance(value, Tensor) and id(value) not in seen and has_plain_storage(value):
                    seen.add(id(value))
                    yield Named(origin, prefix + name, value)


def flatten_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested tuples, lists, dicts and dataclasses, with the path at which each stands."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from flatten_tensors(item, f"{name}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flatten_tensors(item, f"{name}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from flatten_tensors(getattr(value, f.name, None), f"{name}.{f.name}")


def shares_storages(results: Any, args: Any) -> bool:
    """Whether all tensors of ``results`` are plain and lie on storages of those in ``args``."""
    tensors = [t for _, t in flatten_tensors(results, "")]
    if not all(has_plain_storage(t) for t in tensors):
        return False
    storages = {storage_key(t) for _, t in flatten_tensors(args, "") if has_plain_storage(t)}
    return all(storage_key(t) in storages for t in tensors)


def call_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Tensor arguments of a call in a fixed order: ``0``, ``1[2]``, ``mask``."""
    found = [pair for i, a in enumerate(args) for pair in flatten_tensors(a, str(i))]
    return found + [pair for k in kwargs for pair in flatten_tensors(kwargs[k], k)]


@dataclass
class Region:
    """A storage, or the part of one that a named tensor takes, and the buffer that is its state now."""

    begin: int  # first byte that belongs to the region
    end: int  # byte after its last one
    origin: int  # byte from which view offsets count
    state: int  # index of the buffer
    storage: int  # running number of the region, shared by all its states
    foreign: bool = False  # memory that was there before the call and goes by no name


class Storages:
    """Table from storages to regions."""

    def __init__(self) -> None:
        self._weak: dict[int, StorageWeakRef] = {}
        self._regions: dict[int, list[Region]] = {}
        self._named: dict[int, list[Named]] = {}
        self._count = 0

    def name(self, named: Named) -> None:
        """Make a tensor known by name. Of two that overlap, the first named counts."""
        self._named.setdefault(self._hold(named.tensor), []).append(named)

    def _hold(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._weak:
            self._weak[key] = StorageWeakRef(storage)
        return key

    def foreign(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in memory from before the call that goes by no name."""
        regions = self._regions.get(storage_key(tensor))
        return regions[-1].foreign if regions else storage_key(tensor) not in self._named

    def holds_parameters(self, tensor: Tensor) -> bool:
        """Whether parameters lie in the tensor's storage."""
        return any(n.origin == Origin.PARAMETER for n in self._named.get(storage_key(tensor), ()))

    def carve(self, tensor: Tensor, state: int) -> tuple[Region | None, list[Region]]:
        """A region of its own for a part of foreign memory, and those whose bytes it shares. None where there is
        one with just these bytes."""
        begin = int(tensor.storage_offset()) * tensor.element_size()
        end = begin + extent_bytes(tensor)
        others = [r for r in self._regions.get(storage_key(tensor), ()) if r.begin < end and begin < r.end]
        same = [r for r in others if (r.begin, r.end, r.origin) == (begin, end, begin)]
        if same:
            return None, [r for r in others if r is not same[0]]
        region = Region(begin, end, begin, state, self._count, foreign=True)
        self._count += 1
        self._regions.setdefault(self._hold(tensor), []).insert(0, region)
        return region, others

    def region(self, tensor: Tensor) -> Region | None:
        """The region that the tensor lies in, or None when it was not seen yet."""
        byte = tensor.storage_offset() * tensor.element_size()
        for region in self._regions.get(storage_key(tensor), ()):
            if region.begin <= byte and byte + extent_bytes(tensor) <= region.end:
                return region
        return None

    def named(self, tensor: Tensor) -> Named | None:
        """The named tensor inside which this one lies. An input is taken as its whole storage, unless
        parameters lie there too: a view of it may reach beyond the argument itself."""
        byte = tensor.storage_offset() * tensor.element_size()
        candidates = self._named.get(storage_key(tensor), ())
        for named in candidates:
            if named.begin <= byte and byte + extent_bytes(tensor) <= named.end:
                return named
        if candidates and all(n.origin == Origin.INPUT for n in candidates):
            return candidates[0]
        return None

    def add(self, tensor: Tensor, state: int, named: Named | None, foreign: bool = False) -> Region:
        """A new region for the tensor's storage, or for the named tensor inside it."""
        key = self._hold(tensor)
        begin, end, origin = 0, tensor.untyped_storage().nbytes(), 0
        if named is not None:
            origin = named.begin
            if not all(n.origin == Origin.INPUT for n in self._named[key]):
                begin, end = named.begin, named.end
            named_first = self._named[key][0]
            if named.origin == Origin.INPUT and begin == 0 and named_first.origin == Origin.INPUT:
                origin = named_first.begin
        region = Region(begin, end, origin, state, self._count, foreign)
        self._count += 1
        self._regions.setdefault(key, []).append(region)
        return region

    def number(self) -> int:
        """A running number for a storage that the call itself does not have."""
        self._count += 1
        return self._count - 1

    @staticmethod
    def view(tensor: Tensor, region: Region) -> View:
        """How the tensor lies on the region's present state."""
        offset_bytes = tensor.storage_offset() * tensor.element_size() - region.origin
        return View(
            region.state,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(offset_bytes) // tensor.element_size(),
            dtype_name(tensor.dtype),
        )
