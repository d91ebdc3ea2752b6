"""Tensors that no visible op wrote: held while their call runs, afterwards known by place and version only."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_adacc.graph.storages import storage_key, version_watch


class External:
    """One such tensor. ``tensor`` is None once :meth:`weaken` was called: a trace that waits for its second
    must not hold activations that an invisible kernel wrote."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self.version = tensor._version
        self._layout = (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        self._key = storage_key(tensor)
        self._weak = StorageWeakRef(tensor.untyped_storage())
        self._watch = version_watch(tensor)

    def weaken(self) -> None:
        self.tensor = None

    @property
    def unchanged(self) -> bool:
        """Whether the storage lives and was not written since the tensor was first seen."""
        return not self._weak.expired() and self._watch._version == self.version

    def same_constant(self, later: External) -> bool:
        """Whether a later call saw the same storage, laid out equally, not written in between or since."""
        return (
            self.unchanged
            and later.unchanged
            and self._key == later._key
            and self._layout == later._layout
            and self.version == later.version
        )
