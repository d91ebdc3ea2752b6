"""A dispatch mode that counts the bytes of live storages, on any device, fake tensors included."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_adacc.graph.storages import flatten_tensors, has_plain_storage, storage_key


@dataclass(frozen=True)
class Mark:
    """Bytes now, the most since the last mark, and the same without the watched storages."""

    now: int
    peak: int
    base_now: int
    base_peak: int
    alive: frozenset[int]  # names of the watched storages that are alive


class LiveBytes(TorchDispatchMode):
    """Counts storages that ops inside the mode give or read, from when they are first seen until they are freed.

    ``known``: tensors that were there before and are not counted; ``lasting``: so are these storages. What a kernel
    allocates and frees inside one op is not seen. ``at_op`` is called before and after each op."""

    def __init__(self, known: Iterable[Tensor], lasting: Iterable[StorageWeakRef] = ()) -> None:
        super().__init__()
        self.at_op: Callable[[], None] | None = None
        self._known = [StorageWeakRef(t.untyped_storage()) for t in known if has_plain_storage(t)]
        self._known += lasting
        self._known_keys = {reference.cdata for reference in self._known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._watched: dict[int, int] = {}  # key of a storage -> its name
        self._peak = self._base_peak = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # regions of torch.compile run as they are; their results are met as arguments of later ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.at_op is not None:
            self.at_op()  # what was freed since the last op is not alive beside what this one makes
        result = func(*args, **(kwargs or {}))
        self.see((args, kwargs, result))
        inside = inside_bytes(func, args)
        if inside:
            now, base = self._note()
            self._peak, self._base_peak = max(self._peak, now + inside), max(self._base_peak, base + inside)
        if self.at_op is not None:
            self.at_op()
        return result

    def see(self, value: Any) -> None:
        """Count the tensors in a nested value that were not seen yet."""
        for _, tensor in flatten_tensors(value, ""):
            if not has_plain_storage(tensor):
                continue
            storage = tensor.untyped_storage()
            key = int(storage._cdata)
            if key not in self._live and key not in self._known_keys:
                self._live[key] = (StorageWeakRef(storage), storage.nbytes())
        self._note()

    def watch(self, tensor: Tensor, name: int) -> None:
        """From now on, count the tensor's storage apart; it goes by ``name``."""
        if has_plain_storage(tensor) and storage_key(tensor) in self._live:
            self._watched[storage_key(tensor)] = name

    def lasting(self) -> list[StorageWeakRef]:
        """The counted storages that are alive now. When all that was made in between is gone, they are memory that
        stays from call to call, such as Megatron's global buffer."""
        self._note()
        return [reference for reference, _ in self._live.values()]

    def _note(self) -> tuple[int, int]:
        for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
            del self._live[key]
            self._watched.pop(key, None)
        now = sum(size for _, size in self._live.values())
        base = now - sum(self._live[key][1] for key in self._watched)
        self._peak, self._base_peak = max(self._peak, now), max(self._base_peak, base)
        return now, base

    def mark(self) -> Mark:
        """What is live now, and the most that was since the last mark."""
        now, base = self._note()
        found = Mark(now, self._peak, base, self._base_peak, frozenset(self._watched.values()))
        self._peak, self._base_peak = now, base
        return found


def inside_bytes(func: Any, args: Any) -> int:
    """What an op allocates and frees inside, where that is known: gloo reduces a copy of the whole input before it
    scatters the result."""
    if not str(func).startswith(("c10d._reduce_scatter_base_", "c10d.reduce_scatter_")):
        return 0
    inputs = [t for _, t in flatten_tensors(args[1], "") if t.device.type == "cpu"]
    return sum(t.numel() * t.element_size() for t in inputs)
