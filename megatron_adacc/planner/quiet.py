"""HiGHS writes a line of its own to standard output now and then, which no option turns off."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def solver_prints_to_stderr() -> Iterator[None]:
    """Inside, what C++ writes to standard output goes to standard error. For commands whose output is read by
    programs: it moves the file descriptor of the whole process."""
    sys.stdout.flush()
    shown = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C++ has not written yet
        os.dup2(shown, 1)
        os.close(shown)
