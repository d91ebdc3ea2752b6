"""HiGHS writes a line of its own to standard output now and then, which no option turns off."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# Such as "HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();", for its own developers.
_OF_HIGHS = re.compile(rb"^Highs\w*::.*\n?", re.MULTILINE)


@contextlib.contextmanager
def solver_prints_to_stderr() -> Iterator[None]:
    """What C++ writes to standard output inside goes to standard error afterwards, without HiGHS's lines. For commands
    whose output is read by programs: it moves the file descriptor of the whole process."""
    sys.stdout.flush()
    shown = os.dup(1)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 1)
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)  # what C++ has not written yet
            os.dup2(shown, 1)
            os.close(shown)
            written.seek(0)
            sys.stderr.flush()
            os.write(2, _OF_HIGHS.sub(b"", written.read()))
