"""Peak bytes of a training step: of live tensors on the device, and of the process beside it.

On CUDA the caching allocator's own peak; on the CPU the same quantity from the events of torch's CPU
allocator (cpu_peak.py). Both only read. docs/accounting.md compares them and gives their price.
"""

import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import torch

from megatron_adacc.errors import UserError
from megatron_adacc.runtime.cpu_peak import CpuPeak, PeakUnavailable
from megatron_adacc.runtime.rss_peak import RssPeak

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeakBytes:
    """Peak bytes of one step.

    Attributes:
        peak_bytes: the peak of live tensor bytes on the device; None where it could not be measured.
        method: how it was measured, or why it was not.
        uncertain_bytes: the true peak is at most this much lower; zero where the figure is exact.
        rss_peak_bytes: the peak of the process's resident memory on the host.
        rss_is_of_step: whether that peak is of this step; else it is of the process so far.
    """

    peak_bytes: int | None
    method: str
    uncertain_bytes: int
    rss_peak_bytes: int
    rss_is_of_step: bool


class _Source(Protocol):
    method: str

    def start(self) -> None: ...

    def stop(self) -> tuple[int, int]: ...

    def close(self) -> None: ...


class _CudaPeak:
    """The caching allocator's peak of allocated bytes; each step sets torch's peak statistics back."""

    method = "peak of torch's CUDA allocator"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(self._device), 0

    def close(self) -> None: ...


class PeakMeter:
    """Measures the peak bytes of each step.

        with PeakMeter(device) as meter:
            for batch in batches:
                meter.start_step()
                ...
                peak = meter.end_step()

    A step whose code raised is given up by the next `start_step` or by `close`, which the `with` calls:
    the profiler that the CPU figure needs does not stay on. Both calls come from one thread, and no
    torch profiler is started between them.

    Args:
        device: the device that trains, of type cuda or cpu.

    Raises:
        UserError: a device of another type.
    """

    def __init__(self, device: torch.device) -> None:
        self._rss = RssPeak()
        self._source: _Source | None = None
        self._why_not: str | None = None
        self._said: set[str] = set()
        if device.type == "cuda":
            self._source = _CudaPeak(device)
        elif device.type == "cpu":
            try:
                self._source = CpuPeak()
            except PeakUnavailable as reason:
                self._why_not = str(reason)
        else:
            raise UserError(f"Peak bytes are measured on cuda and cpu devices, not on '{device}'.")

    def start_step(self) -> None:
        """Begin a step."""
        if self._source is not None:
            self._why_not = None
            try:
                self._source.start()
            except PeakUnavailable as reason:
                self._why_not = str(reason)
        self._rss.start()

    def end_step(self) -> PeakBytes:
        """End the step that `start_step` began; the reason for a missing figure is logged once."""
        rss_peak_bytes, rss_is_of_step = self._rss.stop()  # first: reading the events takes memory
        peak_bytes, uncertain_bytes, method = None, 0, ""
        if self._source is not None and self._why_not is None:
            try:
                peak_bytes, uncertain_bytes = self._source.stop()
                method = self._source.method
            except PeakUnavailable as reason:
                self._why_not = str(reason)
        if self._why_not is not None:
            method = f"not measured: {self._why_not}"
            if self._why_not not in self._said:
                self._said.add(self._why_not)
                _logger.warning("The peak bytes of a step are %s.", method)
        return PeakBytes(peak_bytes, method, uncertain_bytes, rss_peak_bytes, rss_is_of_step)

    def close(self) -> None:
        """Give up a step that was begun, and leave torch as it was. A second call does nothing."""
        if self._source is not None:
            self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
