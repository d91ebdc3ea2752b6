"""A file as the place for optimizer state of a CPU, where the host's memory is the device's.

One thread writes and reads, in the order in which it is asked: what comes back gets its memory when what was put away
before has given its own up. The file has no name, so a process that is killed leaves nothing behind. Its room is
reserved when state is put away for the first time, so a full disk is found before the training starts.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch import Tensor

from megatron_adacc.errors import UserError
from megatron_adacc.optim.offload import Place, Tensors

_PAGE = 4096
_LOOK_SECONDS = 0.5  # between two looks at whether the thread lives

_DEAD = (
    "The thread that copies the optimizer's state has ended, so the state cannot come back: start the run again from "
    "its last checkpoint, in one process that does not fork after the optimizer was built."
)


class FilePlace(Place):
    """See the module and Place.

    Args:
        folder: of the file; the system's folder for temporary files if None. In one that is memory (tmpfs) nothing is
            gained.

    Raises:
        UserError: no file can be made there.
    """

    def __init__(self, folder: str | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self._folder = tempfile.gettempdir() if folder is None else folder
        self.where = f"in a file in {self._folder}"
        try:
            file = tempfile.TemporaryFile(prefix="adacc-state-", dir=self._folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UserError(
                f"No file for the optimizer's state can be made in {self._folder}: {error.strerror}; name a folder "
                "that exists and can be written."
            ) from error
        self._descriptor = file.fileno()
        self._end = 0
        self._pieces: dict[Hashable, _Piece] = {}
        self._free: list[tuple[int, int]] = []  # (offset, room) of pieces that were outgrown or forgotten
        self._thread = _Thread(file)
        # The thread knows the file and not this object, so that both end with it.
        weakref.finalize(self, self._thread.close)

    def forget(self, key: Hashable) -> None:
        super().forget(key)
        piece = self._pieces.pop(key, None)
        if piece is not None:
            self._give_back(piece)

    def _send(self, key: Hashable, tensors: Tensors) -> None:
        piece = self._piece(key, sum(tensor.nbytes for tensor in tensors.values()))
        descriptor, folder = self._descriptor, self._folder
        piece.kinds = {name: (tensor.dtype, tensor.numel()) for name, tensor in tensors.items()}

        def write() -> None:
            offset = piece.offset
            for tensor in tensors.values():
                _all_bytes(lambda left, at: os.pwrite(descriptor, left, at), tensor, offset, folder)
                offset += tensor.nbytes

        piece.written = self._thread.do(write)

    def _fetch(self, key: Hashable) -> _Task:
        piece, descriptor, folder = self._pieces[key], self._descriptor, self._folder
        kinds, written = piece.kinds, piece.written
        assert written is not None

        def read() -> Tensors:
            if written.error is not None:
                raise written.error
            tensors, offset = {}, piece.offset
            for name, (dtype, count) in kinds.items():
                tensor = torch.empty(count, dtype=dtype)
                _all_bytes(lambda left, at: os.preadv(descriptor, [left], at), tensor, offset, folder)
                tensors[name] = tensor
                offset += tensor.nbytes
            return tensors

        return self._thread.do(read)

    def _arrived(self, fetched: _Task) -> Tensors:
        self._thread.wait_for(fetched)
        tensors: Tensors = fetched.result
        return tensors

    def _piece(self, key: Hashable, nbytes: int) -> _Piece:
        """The key's part of the file, with room for so many bytes; where there is none, it keeps the part it has."""
        piece = self._pieces.get(key)
        if piece is not None and piece.room >= nbytes:
            return piece
        room = -(-nbytes // _PAGE) * _PAGE
        fitting = min((one for one in self._free if one[1] >= room), key=lambda one: one[1], default=None)
        if fitting is None:
            self._reserve(self._end, room)
            offset, self._end = self._end, self._end + room
        else:
            self._free.remove(fitting)
            offset, found = fitting
            if found > room:
                self._free.append((offset + room, found - room))
        if piece is not None:
            self._give_back(piece)
        self._pieces[key] = _Piece(offset, room)
        return self._pieces[key]

    def _give_back(self, piece: _Piece) -> None:
        """Its part of the file is free, in one piece with free neighbours."""
        parts: list[tuple[int, int]] = []
        for offset, room in sorted([*self._free, (piece.offset, piece.room)]):
            if parts and sum(parts[-1]) == offset:
                parts[-1] = (parts[-1][0], parts[-1][1] + room)
            else:
                parts.append((offset, room))
        self._free = parts

    def _reserve(self, offset: int, room: int) -> None:
        try:
            if room and hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(self._descriptor, offset, room)
        except OSError as error:
            raise _refusal(self._folder, offset + room, error) from error


@dataclass
class _Piece:
    """A part of the file: ``kinds``: dtype and elements of the tensors in it, by name, in their order."""

    offset: int
    room: int
    kinds: dict[str, tuple[torch.dtype, int]] = field(default_factory=dict)
    written: _Task | None = None


class _Task:
    """Something for the thread to do. ``result`` and ``error`` are there when it is ``done``."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        assert self._work is not None
        try:
            self.result = self._work()
        except Exception as error:  # it is raised where the result is asked for
            self.error = error
        finally:
            self._work = None  # and with it the tensors that were written
        self.done.set()


class _Thread:
    """Does tasks in their order, until close() or its own end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._failed: list[Exception] = []
        self._thread = threading.Thread(
            target=_run, args=(self._tasks, self._failed, file), name="adacc-state", daemon=True
        )
        self._thread.start()

    def do(self, work: Callable[[], Any]) -> _Task:
        """Raises UserError where an earlier task failed, or nobody is there to do it."""
        self._check()
        task = _Task(work)
        self._tasks.put(task)
        return task

    def wait_for(self, task: _Task) -> None:
        """Until it is done. Raises UserError where it failed or never will be."""
        while not task.done.wait(_LOOK_SECONDS):
            self._check()
        if task.error is not None:
            self._raise(task.error)

    def close(self) -> None:
        """End when all that was asked for is done."""
        self._tasks.put(None)

    def _check(self) -> None:
        if self._failed:
            self._raise(self._failed[0])
        if not self._thread.is_alive():
            raise UserError(_DEAD)

    @staticmethod
    def _raise(error: Exception) -> None:
        if isinstance(error, UserError):
            raise UserError(str(error)) from error
        raise error


def _run(tasks: queue.SimpleQueue[_Task | None], failed: list[Exception], file: IO[bytes]) -> None:
    with file:
        while (task := tasks.get()) is not None:
            task.run()
            if task.error is not None:
                failed.append(task.error)
            del task  # its result is the asker's alone


def _all_bytes(copy: Callable[[memoryview, int], int], tensor: Tensor, offset: int, folder: str) -> None:
    """Write or read all bytes of a tensor: a call may copy a part only, 2 GiB at most."""
    left = memoryview(tensor.view(torch.uint8).numpy())
    while len(left):
        try:
            count = copy(left, offset)
        except OSError as error:
            raise _refusal(folder, offset + len(left), error) from error
        if not count:
            raise UserError(f"The file of the optimizer's state in {folder} has lost its end: start from a checkpoint.")
        left, offset = left[count:], offset + count


def _refusal(folder: str, nbytes: int, error: OSError) -> UserError:
    return UserError(
        f"The optimizer's state does not get into its file in {folder}, of {nbytes:,} bytes or more, or back: "
        f"{error.strerror}; name a folder with more room."
    )
