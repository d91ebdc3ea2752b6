"""Pinned host memory as the place for optimizer state of a CUDA device.

Copies run on a stream of their own, in both directions, and the host waits for none of them:

    put_away     the side stream waits for the update, copies out, and then owns the memory
    fetch_ahead  memory is taken on the side stream, so behind the copies out, and filled
    get          the main stream waits for the event behind that copy

Memory that was taken on the side stream and is given back there can be taken again at once, in that stream's order;
nothing else may use it meanwhile. So one group's memory serves all groups. State that came from the main stream, as
new state does, is handed back by the allocator when the side stream has copied it (record_stream).
"""

from collections.abc import Hashable
from typing import Any

import torch

from megatron_adacc.errors import UserError
from megatron_adacc.optim.offload import Place, Tensors


class PinnedPlace(Place):
    """See the module and Place. Pinned memory for all state is held as long as this object.

    Args:
        cuda: torch.cuda, or what stands for it in a test.
    """

    where = "in pinned host memory"

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._host: dict[Hashable, Tensors] = {}

    def look(self, key: Hashable) -> Tensors:
        tensors = super().look(key)
        for tensor in tensors.values():  # the side stream will not wait for who looks at them
            tensor.record_stream(self._cuda.current_stream(self.device))
        return tensors

    def forget(self, key: Hashable) -> None:
        super().forget(key)
        self._host.pop(key, None)

    def _send(self, key: Hashable, tensors: Tensors) -> None:
        host = self._host_of(key, tensors)
        self._stream.wait_stream(self._cuda.current_stream(self.device))
        with self._cuda.stream(self._stream):
            for name, tensor in tensors.items():
                host[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)

    def _fetch(self, key: Hashable) -> tuple[Tensors, Any]:
        with self._cuda.stream(self._stream):
            tensors = {
                name: torch.empty_like(kept, device=self.device).copy_(kept, non_blocking=True)
                for name, kept in self._host[key].items()
            }
            return tensors, self._stream.record_event()

    def _arrived(self, fetched: tuple[Tensors, Any]) -> Tensors:
        tensors, copied = fetched
        self._cuda.current_stream(self.device).wait_event(copied)
        return tensors

    def _host_of(self, key: Hashable, tensors: Tensors) -> Tensors:
        """Pinned memory of the same shapes; that of last time where they have not changed."""
        host = self._host.get(key)
        kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        if host is None or kinds != {name: (kept.dtype, kept.shape) for name, kept in host.items()}:
            try:
                host = {name: self._pinned(tensor) for name, tensor in tensors.items()}
            except RuntimeError as error:
                raise UserError(
                    f"The host has no pinned memory left for {sum(t.nbytes for t in tensors.values()):,} bytes of "
                    "optimizer state: train without offload, or with fewer bits of state."
                ) from error
            self._host[key] = host
        return host

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
