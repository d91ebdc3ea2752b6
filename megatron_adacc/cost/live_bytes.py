"""A dispatch mode that counts the bytes of live storages, on any device, fake tensors included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_adacc.graph.storages import flatten_tensors, has_plain_storage


class LiveBytes(TorchDispatchMode):
    """Counts storages that ops inside the mode give or read, from when they are first seen until they are freed.

    ``known``: tensors that were there before and are not counted. What a kernel allocates and frees inside one op
    is not seen."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = [StorageWeakRef(t.untyped_storage()) for t in known if has_plain_storage(t)]
        self._known_keys = {reference.cdata for reference in self._known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._peak = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # regions of torch.compile run as they are; their results are met as arguments of later ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see((args, kwargs, result))
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
        self._peak = max(self._peak, self.current())

    def current(self) -> int:
        """Bytes that are live now."""
        for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
            del self._live[key]
        return sum(size for _, size in self._live.values())

    def mark(self) -> tuple[int, int]:
        """Bytes that are live now, and the most that were since the last mark."""
        now = self.current()
        peak = max(self._peak, now)
        self._peak = now
        return now, peak


def fake(tensor: Tensor) -> bool:
    """Whether the tensor has no contents."""
    return isinstance(tensor, torch._subclasses.FakeTensor)
