"""A job that a command starts, in a process group of its own, and that does not outlive it.

    with Child(tokens, log=path) as job:
        for line in job.lines():
            ...
    job.code, job.tail

When the command is interrupted, told to end (SIGTERM, SIGHUP) or fails, the job and whatever it has started are told to
end as well, and killed if they do not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

PATIENCE_SECONDS = 10.0
TAIL = 400  # lines


class Child:
    """See the module. ``environment``: beside that of this process. ``log``: a file that gets all that the job prints.
    ``code``: its exit code, -n for signal n, after the block; ``tail``: its last lines."""

    def __init__(
        self, tokens: Sequence[str | Path], environment: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        self._tokens = [str(token) for token in tokens]
        self._environment = {**os.environ, **(environment or {})}
        self._log = log
        self._handlers: dict[int, Any] = {}
        self.tail: deque[str] = deque(maxlen=TAIL)
        self.code = 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:  # who has a handler, or ignores it, has a reason to
                    self._handlers[number] = signal.signal(number, _end)
        self._process = subprocess.Popen(
            self._tokens, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=self._environment, start_new_session=True,
        )  # fmt: skip
        return self

    def lines(self) -> Iterator[str]:
        """What the job prints, line by line, as it comes."""
        assert self._process.stdout is not None
        with contextlib.nullcontext() if self._log is None else self._log.open("w") as copy:
            for line in self._process.stdout:
                if copy is not None:
                    copy.write(line)
                self.tail.append(line)
                yield line

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._stop()
            self.code = self._process.wait()
        finally:
            if self._process.poll() is None:  # interrupted while it was waited for
                self._stop()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE_SECONDS)
                return


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
