"""Peak of live tensor bytes on the CPU, to the byte, from the events of torch's own allocator.

With A(t) the bytes of the blocks in the allocator's table at time t, and L the bytes of the live tensors:

    offset     = L - A                      at the first step: blocks older than the table         (1)
    peak(step) = offset + max A(t)          over the allocator's events of the step                (2)

A(t) is `total_allocated` of the profiler's [memory] events. The profiler runs during steps only and is
told to record no operator, so that an allocation costs one event and an operator nothing. Between steps
c10's own flag `caffe2_report_cpu_memory_usage` keeps the table complete. A block older than the table
gives no event when it is freed; a weak reference notices afterwards. The figure of that step is then an
upper bound, too high by at most the bytes that died, and (1) is taken again before the next step.
"""

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler, _profiler_enabled
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
    _ExtraFields_Allocation,
)
from torch.autograd.profiler import KinetoStepTracker
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler.profiler import PROFILER_STEP_NAME

from megatron_adacc.runtime.graph_walk import storages_of

_MARKER_BYTES = 1


class PeakUnavailable(Exception):
    """The peak cannot be measured; the message says why."""


class CpuPeak:
    """Measures the peak of live CPU tensor bytes between `start` and `stop`, both in one thread.

    Raises:
        PeakUnavailable: torch's allocator does not give an account of itself here.
    """

    method = "live tensor bytes, from the events of torch's CPU allocator"

    def __init__(self) -> None:
        self._table = _AllocatorTable()
        self._profiler = _MemoryProfiler()
        self._live_bytes: int | None = None  # L, while (1) waits for the A of the same moment
        self._offset_bytes = 0
        self._older: list[tuple[StorageWeakRef, int]] | None = None

    def start(self) -> None:
        """Begin a step. One that was begun and not stopped is given up.

        Raises:
            PeakUnavailable: a torch profiler is in use.
        """
        self._profiler.cancel()
        self._profiler.check_free()
        if self._older is None or any(weak.expired() for weak, _ in self._older):
            live = _live_storages()
            self._live_bytes = sum(live.values())
            if self._older is None:
                self._older = list(live.items())
            else:
                self._older = [(weak, size) for weak, size in self._older if not weak.expired()]
        self._table.open()
        self._profiler.start()

    def stop(self) -> tuple[int, int]:
        """End a step.

        Returns:
            The peak of live bytes, and by how many bytes it may be too high.

        Raises:
            PeakUnavailable: the profiler was stopped by somebody else.
        """
        before_bytes, totals = self._profiler.stop()
        if self._live_bytes is not None:
            self._offset_bytes = self._live_bytes - before_bytes  # (1)
            self._live_bytes = None
        died_bytes = sum(size for weak, size in self._older or () if weak.expired())
        return self._offset_bytes + max([before_bytes, *totals]), died_bytes  # (2)

    def close(self) -> None:
        """Stop what runs and restore c10's flag. A second call does nothing."""
        self._profiler.cancel()
        self._table.close()


class _MemoryProfiler:
    """torch's profiler, told to record the CPU allocator's events and nothing else."""

    _activities = frozenset({ProfilerActivity.CPU})
    # Operators are recorded in the scopes named here, allocations always. No operator has this scope.
    _scopes = frozenset({RecordScope.STATIC_RUNTIME_MODEL})

    def __init__(self) -> None:
        self._running = False
        self._silenced = False
        self._config = ProfilerConfig(
            ProfilerState.KINETO,
            False,  # no shapes
            True,  # memory
            False,  # no stacks
            False,  # no flops
            False,  # no modules
            _ExperimentalConfig(),
        )

    def check_free(self) -> None:
        """Raises PeakUnavailable while the user's profiler exists.

        Also in its warm-up or between two cycles, when it is not enabled: it would lose its trace.
        """
        if _profiler_enabled() or PROFILER_STEP_NAME in KinetoStepTracker._step_dict:
            raise PeakUnavailable("a torch profiler is in use, and there can be one at a time")

    def start(self) -> None:
        self._running = True
        # Kineto reads its log level once; by default it writes two lines to stderr for every session.
        with contextlib.nullcontext() if self._silenced else _environment("KINETO_LOG_LEVEL", "99"):
            _prepare_profiler(self._config, set(self._activities))
            # The stub of torch does not know the third argument.
            _enable_profiler(self._config, set(self._activities), set(self._scopes))  # type: ignore[call-arg]
        self._silenced = True
        # A block that comes and goes: its two events tell the total before the step.
        torch.empty(_MARKER_BYTES, dtype=torch.uint8, device="cpu")

    def stop(self) -> tuple[int, list[int]]:
        """The allocator's total bytes before the step, and after each of its events."""
        if not self._running:
            raise PeakUnavailable("no step was started")
        self._running = False
        if not _profiler_enabled():
            raise PeakUnavailable("the profiler was stopped during the step")
        totals: list[int] = []
        for event in _disable_profiler().experimental_event_tree():
            fields = event.extra_fields
            if isinstance(fields, _ExtraFields_Allocation) and fields.device.type == "cpu":
                totals.append(fields.total_allocated)
        return totals[0] - _MARKER_BYTES, totals[2:]

    def cancel(self) -> None:
        if self._running:
            self._running = False
            if _profiler_enabled():
                _disable_profiler()


class _AllocatorTable:
    """c10's table of the CPU allocator's blocks, kept complete while this is open."""

    _INFO, _ERROR = 0, 2  # c10's log levels

    def __init__(self) -> None:
        library = Path(torch.__file__).parent / "lib" / "libc10.so"
        try:
            c10 = ctypes.CDLL(str(library))
            self._report = ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage")
            self._log_level = ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level")
        except (OSError, ValueError) as error:
            raise PeakUnavailable(f"torch's c10 library does not give access to its flags: {error}") from error
        self._before: bool | None = None

    def open(self) -> None:
        if self._before is not None:
            return
        if self._log_level.value <= self._INFO:
            raise PeakUnavailable("with TORCH_CPP_LOG_LEVEL=INFO c10 would print a line for every allocation")
        # c10 warns of the first block it did not know when it is freed, and of every thousandth. It is
        # expected here (CpuPeak counts them), so let it be this one.
        unknown = torch.empty(_MARKER_BYTES, dtype=torch.uint8, device="cpu")
        self._before, self._report.value = self._report.value, True
        level, self._log_level.value = self._log_level.value, self._ERROR
        del unknown
        self._log_level.value = level

    def close(self) -> None:
        if self._before is not None:
            self._report.value, self._before = self._before, None


def _live_storages() -> dict[StorageWeakRef, int]:
    """The storages of all live CPU tensors that Python knows, with their bytes."""
    live: dict[StorageWeakRef, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for candidate in gc.get_objects():
            # Not isinstance: it asks the object for its class, and a lazy module or a proxy would act.
            kind = type(candidate)
            if issubclass(kind, torch.UntypedStorage):
                _add_storage(candidate, live)
            elif issubclass(kind, torch.Tensor) and candidate.device.type == "cpu":
                _add_tensor(candidate, live)
                # A gradient that nobody has looked at is not a Python object yet.
                gradient = _gradient_of(candidate)
                if gradient is not None:
                    _add_tensor(gradient, live)
    return live


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:
        # A view made under no_grad whose base was then written outside it: torch refuses to say. It has none.
        return None


def _add_tensor(tensor: torch.Tensor, live: dict[StorageWeakRef, int]) -> None:
    for storage in storages_of(tensor):
        _add_storage(storage, live)


def _add_storage(storage: torch.UntypedStorage, live: dict[StorageWeakRef, int]) -> None:
    if storage.device.type == "cpu":  # the storage of a fake tensor is on meta
        live[StorageWeakRef(storage)] = storage.nbytes()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable that is not set, for the time of the context."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
