"""m and v away from the device between a parameter's updates.

    optimizer = BlockAdamW(model.parameters(), bits=8, away=place_for(torch.device("cuda")))
    groups = DelayedGroups(optimizer, groups_by_connectivity(model.named_parameters(), 4))

They lie in a *place*: pinned host memory for a CUDA device (offload_cuda.py), a file for the CPU (offload_file.py).
With delayed groups a step needs one group, and it is known which one comes next:

    main      forward, backward | update g | forward, backward | update g+1
    copies            (g is in)            | g out, g+1 in               | g+1 out, g+2 in

A place makes its copies beside the training, one after the other in the order in which they are asked for. So memory
for g+1 is taken when g has left: the device holds m and v of one group at any time, the largest at most.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from megatron_adacc.errors import UserError

Tensors = dict[str, Tensor]


class Place(ABC):
    """Where flat tensors lie by key while their device does not need them.

    A key is away (put_away), away with a copy that is coming to the device (fetch_ahead), or not here (get).

    Args:
        device: that the tensors come from and go back to.

    Attributes:
        where: words for it, as in "the state lies ...".
        bytes_out, bytes_in: that were copied from the device and to it so far.
    """

    where: str

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_out = 0
        self.bytes_in = 0
        self._nbytes: dict[Hashable, int] = {}
        self._ahead: dict[Hashable, Any] = {}

    def put_away(self, key: Hashable, tensors: Tensors) -> None:
        """Take over contiguous tensors [n]; their memory is free when they are copied and the caller has dropped them.

        Raises:
            UserError: they lie on another device, the place is full, or an earlier copy failed.
        """
        wrong = next((t.device for t in tensors.values() if t.device.type != self.device.type), None)
        if wrong is not None:
            raise UserError(
                f"The optimizer's state is on {wrong}, but the place for it is made for {self.device}: make it with "
                "place_for(device) of the parameters."
            )
        self._ahead.pop(key, None)
        self._send(key, tensors)
        self._nbytes[key] = sum(tensor.nbytes for tensor in tensors.values())
        self.bytes_out += self._nbytes[key]

    def fetch_ahead(self, key: Hashable) -> None:
        """Begin to copy the tensors of a key to the device; returns at once.

        Raises:
            UserError: an earlier copy failed.
        """
        if key not in self._ahead:
            self._ahead[key] = self._fetch(key)
            self.bytes_in += self._nbytes[key]

    def get(self, key: Hashable) -> Tensors:
        """The tensors of a key on the device; they lie here no longer.

        Raises:
            UserError: they did not come back, or never got here.
        """
        self.fetch_ahead(key)
        tensors = self._arrived(self._ahead.pop(key))
        del self._nbytes[key]
        return tensors

    def look(self, key: Hashable) -> Tensors:
        """The tensors of a key on the device, to be read only: they still lie here. Raises as `get`."""
        if key in self._ahead:
            return self._arrived(self._ahead[key])
        self.bytes_in += self._nbytes[key]
        return self._arrived(self._fetch(key))

    def release(self, key: Hashable) -> None:
        """Give up the copy that was fetched ahead, if there is one."""
        self._ahead.pop(key, None)

    def forget(self, key: Hashable) -> None:
        """Nothing lies here by this key any more."""
        self.release(key)
        self._nbytes.pop(key, None)

    def holds(self, key: Hashable) -> bool:
        """Whether tensors lie here by a key."""
        return key in self._nbytes

    def ahead(self) -> frozenset[Hashable]:
        """Keys that were fetched ahead."""
        return frozenset(self._ahead)

    def nbytes(self, key: Hashable) -> int:
        """Bytes that lie here by a key, 0 where there are none."""
        return self._nbytes.get(key, 0)

    @abstractmethod
    def _send(self, key: Hashable, tensors: Tensors) -> None:
        """Begin to copy them here."""

    @abstractmethod
    def _fetch(self, key: Hashable) -> Any:
        """Begin to copy them to the device, after all that was begun before; the result is for `_arrived`."""

    @abstractmethod
    def _arrived(self, fetched: Any) -> Tensors:
        """What `_fetch` began, ready for what the caller does next."""


def place_for(device: torch.device, folder: str | None = None) -> Place:
    """The place for state of parameters on `device`.

    Args:
        folder: of the file, for the CPU; the system's folder for temporary files if None.

    Raises:
        UserError: a folder that cannot be written, one for CUDA, or another kind of device.
    """
    if device.type == "cuda":
        from megatron_adacc.optim.offload_cuda import PinnedPlace

        if folder is not None:
            raise UserError(
                f"The folder {folder} was given for the optimizer's state, which a GPU's host keeps in pinned memory: "
                "leave it out."
            )
        return PinnedPlace(device)
    if device.type == "cpu":
        from megatron_adacc.optim.offload_file import FilePlace

        return FilePlace(folder)
    raise UserError(f"Optimizer state can be put away from a CUDA device or from the CPU, but not from {device}.")
