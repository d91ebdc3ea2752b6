"""What one layer call leaves behind for its backward.

The pack hook gets tensors in the order of the trace and answers each with a *handle*, which autograd holds in
the tensor's place; the unpack hook asks the handle. Handles own everything, so that memory goes exactly when
autograd lets go: node by node in backward, or all at once when a graph is dropped.

    Held      the tensor, detached
    Weight    a parameter, module buffer or constant: nothing held but its version
    Encoded   the buffer as a codec packed it, shared by the buffer's handles
    Dropped   nothing but the version; its Rebuild (a group of recipes) makes the buffer again

A rebuilt or decoded buffer lives until each of its handles has been asked, or has died.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage, nn

from megatron_adacc.codecs import Codec, Packed
from megatron_adacc.errors import UserError
from megatron_adacc.graph.replay import Loader, Replayer
from megatron_adacc.runtime.errors import ModifiedTensorError, TraceMismatchError, modified
from megatron_adacc.runtime.graph_walk import storages_of
from megatron_adacc.runtime.weights import working_weight

if TYPE_CHECKING:
    from megatron_adacc.runtime.program import Program

__all__ = ["Dropped", "Encoded", "Held", "Packing", "Rebuild", "Source", "Stash", "Weight", "unpack"]


class Held:
    """A handle: the tensor itself."""

    __slots__ = ("__weakref__", "site", "stash", "tensor", "version")

    def __init__(self, stash: Stash, tensor: Tensor, site: str) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.site = site
        self.stash = stash
        stash.owned.append(weakref.ref(self))

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise modified(self.site, self.tensor._version, self.version)
        return self.tensor

    def stored_storages(self) -> tuple[UntypedStorage, ...]:
        return storages_of(self.tensor)


class Weight:
    """A handle: a tensor that lives anyway. ``loader`` is None for the tensor as it is, which backward gets
    with its attributes."""

    __slots__ = ("loader", "site", "stash", "tensor", "version")

    def __init__(self, stash: Stash, tensor: Tensor, loader: Loader | None, site: str) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.loader = loader
        self.site = site
        self.stash = stash

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise modified(self.site, self.tensor._version, self.version)
        if self.loader is None:
            return working_weight(self.tensor)
        return self.loader.of_tensor(self.tensor.detach())

    def stored_storages(self) -> tuple[UntypedStorage, ...]:
        return storages_of(self.tensor)


class Packing:
    """One buffer as a codec packed it. Several handles of one buffer share what the first of them decoded;
    recipes decode for themselves, since a mask is small while it waits for its reader and large once decoded."""

    __slots__ = ("__weakref__", "codec", "decoded", "packed", "readers", "stash", "waiting")

    def __init__(self, stash: Stash, codec: Codec, packed: Packed) -> None:
        self.codec = codec
        self.packed = packed
        self.decoded: Tensor | None = None
        self.readers: set[int] = set()  # handles that live
        self.waiting: set[int] = set()  # handles that will share what is decoded now
        self.stash = stash
        stash.owned.append(weakref.ref(self))

    def base(self) -> Tensor:
        """The buffer, decoded for the caller alone, who may write over it."""
        return self.codec.decode(self.packed)

    def ask(self, entry: int) -> Tensor:
        base = self.base() if self.decoded is None else self.decoded
        if self.decoded is None:
            self.waiting = set(self.readers)
        self.waiting.discard(entry)
        self.decoded = base if self.waiting else None
        return base

    def forget(self, entry: int) -> None:
        self.readers.discard(entry)
        self.waiting.discard(entry)
        if not self.waiting:
            self.decoded = None

    def stored_storages(self) -> tuple[UntypedStorage, ...]:
        extra = () if self.decoded is None else (self.decoded,)
        return tuple(t.untyped_storage() for t in (*self.packed.tensors.values(), *extra))


class Encoded:
    """A handle: a view of a packed buffer."""

    __slots__ = ("entry", "loader", "packing", "site", "version", "watch")

    def __init__(self, packing: Packing, watch: Tensor, entry: int, loader: Loader, site: str) -> None:
        self.packing = packing
        self.watch = watch
        self.version = watch._version
        self.entry = entry
        self.loader = loader
        self.site = site
        packing.readers.add(entry)

    def unpack(self) -> Tensor:
        if self.watch._version != self.version:
            raise modified(self.site, self.watch._version, self.version)
        stash = self.packing.stash
        _refuse_lossy_double_backward(stash, self.site)
        with stash.lock:
            return self.loader.of_tensor(self.packing.ask(self.entry))

    def __del__(self) -> None:
        self.packing.forget(self.entry)

    def stored_storages(self) -> tuple[UntypedStorage, ...]:
        return self.packing.stored_storages()


class Dropped:
    """A handle: nothing is held, ``rebuild`` makes the buffer when it is asked for."""

    __slots__ = ("entry", "loader", "rebuild", "site", "version", "watch")

    def __init__(self, rebuild: Rebuild, watch: Tensor, entry: int, loader: Loader, site: str) -> None:
        self.rebuild = rebuild
        self.watch = watch
        self.version = watch._version
        self.entry = entry
        self.loader = loader
        self.site = site
        rebuild.readers.setdefault(loader.buffer, set()).add(entry)

    def unpack(self) -> Tensor:
        if self.watch._version != self.version:
            raise modified(self.site, self.watch._version, self.version)
        stash = self.rebuild.stash
        _refuse_lossy_double_backward(stash, self.site)
        with stash.lock:
            return self.loader.of_tensor(self.rebuild.ask(self.loader.buffer, self.entry))

    def __del__(self) -> None:
        self.rebuild.forget(self.loader.buffer, self.entry)

    def stored_storages(self) -> tuple[UntypedStorage, ...]:
        return self.rebuild.stored_storages()


class Source:
    """A tensor from which recipes start, with the version that the forward saw."""

    __slots__ = ("counted", "site", "tensor", "version")

    def __init__(self, tensor: Tensor, site: str, counted: bool = True) -> None:
        self.counted = counted  # whether holding it costs memory: not for parameters
        self.tensor = tensor
        self.version = tensor._version
        self.site = site

    def base(self) -> Tensor:
        if self.tensor._version != self.version:
            raise ModifiedTensorError(
                f"{self.site} was modified in place after the forward (version {self.tensor._version}, was "
                f"{self.version}); the plan recomputes activations from it. Modify a copy, or keep what is "
                "recomputed from it."
            )
        return self.tensor.detach()

    def stored_storages(self) -> tuple[UntypedStorage, ...]:
        return storages_of(self.tensor) if self.counted else ()


class _Environment(dict[int, Tensor]):
    """Tensors of a replay by buffer; a source is loaded, and decoded, by the step that first reads it."""

    def __init__(self, rebuild: Rebuild, live: dict[int, Tensor]) -> None:
        super().__init__(live)
        self._rebuild = rebuild

    def __missing__(self, buffer: int) -> Tensor:
        loaded = self[buffer] = self._rebuild.load(buffer)
        return loaded


class Rebuild:
    """A group of recipes of one layer call."""

    __slots__ = ("__weakref__", "live", "module", "pending", "program", "readers", "replayer", "sources", "stash")

    def __init__(self, stash: Stash, replayer: Replayer) -> None:
        self.stash = stash
        self.program = stash.program
        self.module = stash.module
        self.replayer = replayer
        self.sources: dict[int, Source | Packing] | None = None  # bound when the forward has returned
        self.readers: dict[int, set[int]] = {}  # by buffer, handles that live
        self.pending: dict[int, set[int]] = {}  # by buffer, handles to be asked in this pass
        self.live: dict[int, Tensor] = {}
        stash.owned.append(weakref.ref(self))

    def ask(self, buffer: int, entry: int) -> Tensor:
        base = self.live.get(buffer)
        if base is None:
            if not any(self.pending.values()):
                # The first reader of this pass: every recipe runs once, for all readers to come.
                rebuilt = self.replayer.run(_Environment(self, {}), self.module)
                self.pending = {b: set(entries) for b, entries in self.readers.items() if entries}
                self.live = {b: t for b, t in rebuilt.items() if b in self.pending}
                base = rebuilt[buffer]
            else:
                # Asked again, after its readers had it and while others wait: it alone is made again.
                base = self._again(buffer)
        waiting = self.pending.get(buffer)
        if waiting is not None:
            waiting.discard(entry)
            if not waiting:
                self.live.pop(buffer, None)
        return base

    def forget(self, buffer: int, entry: int) -> None:
        """A handle died; what only it waited for goes too."""
        for table in (self.readers, self.pending):
            entries = table.get(buffer)
            if entries is not None:
                entries.discard(entry)
        if not self.pending.get(buffer):
            self.live.pop(buffer, None)

    def _again(self, buffer: int) -> Tensor:
        replayer = self.program.replayer_for(buffer, frozenset(self.live))
        return replayer.run(_Environment(self, self.live), self.module)[buffer]

    def load(self, buffer: int) -> Tensor:
        """The base tensor of a source."""
        if self.sources is None:
            raise RuntimeError(
                "a backward pass asked for a recomputed activation before the layer's forward had returned; "
                "layers that call autograd inside their forward need the plan 'keep'"
            )
        source = self.sources.get(buffer)
        return self.program.literal(buffer) if source is None else source.base()

    def stored_storages(self) -> tuple[UntypedStorage, ...]:
        found = [t.untyped_storage() for t in self.live.values()]
        for source in (self.sources or {}).values():
            found.extend(source.stored_storages())
        return tuple(found)


class Stash:
    """One layer call: the pack hook, and the sources that recipes will start from."""

    __slots__ = (
        "__weakref__", "lock", "module", "name", "owned", "packings", "position", "program", "rebuilds", "sources",
        "weights",
    )  # fmt: skip

    def __init__(self, program: Program, module: nn.Module, name: str) -> None:
        self.program = program
        self.module = module
        self.name = name
        self.position = 0
        self.owned: list[weakref.ref[Any]] = []
        self.weights: dict[int, Tensor] = program.bind_weights(module)
        self.sources: dict[int, Source | Packing] = {}
        self.packings: dict[int, Packing] = {}
        self.rebuilds: dict[int, Rebuild] = {}
        self.lock = threading.RLock()

    def begin(self, inputs: list[Tensor]) -> None:
        """Hold the layer's inputs and note the weights that recipes start from."""
        program = self.program
        for buffer, position in program.input_sources:
            self.sources[buffer] = Source(inputs[position].detach(), program.site(buffer))
        for buffer in program.weight_sources:
            self.sources[buffer] = Source(self.weights[buffer], program.site(buffer), counted=False)

    def pack(self, tensor: Tensor) -> Any:
        """The pack hook: the n-th call is the n-th entry of the trace."""
        position = self.position
        self.position = position + 1
        try:
            entry = self.program.entries[position]
        except IndexError:
            raise TraceMismatchError(
                f"{self.name} saved more than the {len(self.program.entries)} tensors of its trace; the next is "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}."
            ) from None
        return entry.pack(self, tensor)

    def rebuild(self, group: int) -> Rebuild:
        found = self.rebuilds.get(group)
        if found is None:
            found = self.rebuilds[group] = Rebuild(self, self.program.replayers[group])
        return found

    def finish(self) -> None:
        """The forward has returned: hand sources to the recipes that need them and hold nothing else."""
        if self.position != len(self.program.entries):
            site = self.program.entries[self.position].site
            raise TraceMismatchError(
                f"{self.name} saved {self.position} tensors, its trace {len(self.program.entries)}; the first "
                f"that is missing is {site}."
            )
        for rebuild in self.rebuilds.values():
            wanted = rebuild.replayer.group.sources
            rebuild.sources = {b: self.sources[b] for b in wanted if b in self.sources}

    def release(self) -> None:
        """Let go of everything that only the forward needed, also after an exception."""
        self.sources, self.packings, self.rebuilds, self.weights = {}, {}, {}, {}

    def stored_storages(self) -> list[UntypedStorage]:
        """Storages that this call's handles hold now; some may occur twice."""
        owners = (reference() for reference in self.owned)
        return [storage for owner in owners if owner is not None for storage in owner.stored_storages()]


def unpack(handle: Any) -> Tensor:
    """The unpack hook."""
    result = handle.unpack()
    assert isinstance(result, Tensor)
    return result


def _refuse_lossy_double_backward(stash: Stash, site: str) -> None:
    if torch.is_grad_enabled() and not stash.program.lossless:
        raise UserError(
            f"create_graph=True differentiates through {site}, which the plan holds inexactly; use a lossless plan "
            "(keep or recompute) where gradients of gradients are taken."
        )
