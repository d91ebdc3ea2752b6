"""Peak of the process's resident memory, of one step where the kernel allows it."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets the peak resident set size to the current one


class RssPeak:
    """Measures the peak resident bytes of this process between `start` and `stop`."""

    def __init__(self) -> None:
        self._is_of_step = False

    def start(self) -> None:
        """Begin a step: set the kernel's peak back, where it allows that."""
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
            self._is_of_step = True
        except OSError:
            self._is_of_step = False

    def stop(self) -> tuple[int, bool]:
        """End a step.

        Returns:
            The peak resident bytes, and whether since `start`; else since the process began.
        """
        if _STATUS.exists():
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024, self._is_of_step
        # getrusage counts in kilobytes, on macOS in bytes.
        unit_bytes = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes, False
