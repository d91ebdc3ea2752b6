"""Run code written for `torch.cuda` on the CPU.

Megatron's training loop asks `torch.cuda` for devices, streams, events, RNG states and memory figures,
and puts its tensors on 'cuda'. `install()` answers those questions for a machine without a GPU and sends
every 'cuda' tensor to the CPU, so that upstream's unmodified code trains there. What it does not do is
claim that there is a GPU: `torch.cuda.is_available()` stays False, so `torch.compile` and everything
else that asks before it acts sees the truth.

Each bridge below says why it is needed. Nothing is installed where CUDA is used.

Random numbers
--------------
A CUDA machine has two generators a process: the host's and the device's. Dropout draws from the device's,
which Megatron's RNG tracker forks per tensor-parallel rank. Here the default CPU generator is both. That
is right as long as no rank draws host numbers that the others do not draw. One place does: a DataLoader,
which exists on tensor-parallel rank 0 only, draws a base seed from the host generator each time it is
iterated. Left alone this moves that rank's dropout away from its peers', and the replicated activations
of a tensor-parallel group silently differ. So data loaders get a host generator of their own.
"""

import contextlib
import functools
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.device_mesh
import torch.utils.data
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_installed: contextlib.ExitStack | None = None


def on_cpu(device: Any) -> Any:
    """The device that stands in for `device`: the CPU for 'cuda', 'cuda:1', 0, ...; others unchanged."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return _CPU
    if isinstance(device, str) and device.split(":")[0] == "cuda":
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


def _redirect_keyword(function: Callable) -> Callable:
    """`function` with its device= keyword redirected, and pin_memory= (there is nothing to pin for) dropped."""

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return redirected


def _redirect_to(function: Callable) -> Callable:
    """`Tensor.to` with a CUDA device among its arguments redirected."""

    @functools.wraps(function)
    def redirected(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], (torch.dtype, torch.Tensor)):
            args = (on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return function(self, *args, **kwargs)

    return redirected


class _Stream:
    """The one queue of a CPU: everything is done when it is issued."""

    device = _CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event()
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class _Event:
    """An event that has happened when it is recorded; `elapsed_time` in milliseconds."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = 0.0

    def record(self, _: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, _: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return (end._seconds - self._seconds) * 1e3


_STREAM = _Stream()


@contextlib.contextmanager
def _stream_context(_: Any) -> Iterator[None]:
    yield


def _device_count() -> int:
    """One stand-in device a local process, as a launcher with one GPU a rank would have it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _peak_resident_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_stats(_: Any = None) -> dict[str, int]:
    """The keys that Megatron's memory log reads, in bytes: the process stands for the device."""
    resident, peak = _resident_bytes(), _peak_resident_bytes()
    return {
        "allocated_bytes.all.current": resident,
        "allocated_bytes.all.peak": peak,
        "allocation.all.allocated": 0,
        "reserved_bytes.all.current": resident,
        "reserved_bytes.all.peak": peak,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _properties(_: Any = None) -> types.SimpleNamespace:
    """No compute capability: code that asks for one (fp8, CUDA graphs) must not believe in a GPU."""
    import psutil

    return types.SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=psutil.virtual_memory().total, multi_processor_count=0
    )


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _tensor_type(original: Callable) -> Callable:
    """`tensor.type()` in the names that Megatron's optimizers sort parameters by ('torch.cuda.HalfTensor')."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return type_


def _mesh_on_cpu(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, str(on_cpu(device_type)), *args, **kwargs)

    return init


def _loader_with_generator(original: Callable, generator: torch.Generator) -> Callable:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None:
            kwargs["generator"] = generator
        kwargs["pin_memory"] = False
        original(self, *args, **kwargs)

    return init


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """(object, attribute, stand-in) of every bridge."""
    cuda = torch.cuda

    # Which device, and how many: Megatron sizes its process groups only when there are devices.
    yield cuda, "device_count", _device_count
    yield cuda, "current_device", _local_rank
    yield cuda, "set_device", lambda device: None
    yield cuda, "get_device_name", lambda device=None: "cpu"
    yield cuda, "get_device_properties", _properties
    yield cuda, "get_device_capability", lambda device=None: (0, 0)
    yield cuda, "device", lambda device: contextlib.nullcontext()
    # Deferred calls (Megatron sets RNG states through them) wait for a CUDA start-up that never comes.
    yield cuda, "_lazy_call", lambda function, **_: function()
    yield cuda, "_lazy_init", lambda: None

    # Streams and events: work is done when it is issued, in order.
    yield cuda, "Stream", _Stream
    yield cuda, "Event", _Event
    yield cuda, "stream", _stream_context
    yield cuda, "current_stream", lambda device=None: _STREAM
    yield cuda, "default_stream", lambda device=None: _STREAM
    yield cuda, "set_stream", lambda stream: None
    yield cuda, "synchronize", lambda device=None: None
    yield cuda, "is_current_stream_capturing", lambda: False
    yield torch.Tensor, "record_stream", lambda self, stream: None

    # Random numbers: the default generator is the device's (see the module's docstring).
    for module in (cuda, cuda.random):
        yield module, "get_rng_state", _get_rng_state
        yield module, "set_rng_state", _set_rng_state
        yield module, "manual_seed", _manual_seed
        yield module, "manual_seed_all", _manual_seed
    yield cuda, "default_generators", (torch.default_generator,) * _device_count()
    host_generator = torch.Generator().manual_seed(torch.initial_seed() & 0x7FFF_FFFF)
    loader = torch.utils.data.DataLoader
    yield loader, "__init__", _loader_with_generator(loader.__init__, host_generator)

    # FSDP takes its device from the mesh, and refuses parameters that lie elsewhere.
    mesh = torch.distributed.device_mesh.DeviceMesh
    yield mesh, "__init__", _mesh_on_cpu(mesh.__init__)

    # Memory figures.
    for module in (cuda, cuda.memory):
        yield module, "empty_cache", lambda: None
        yield module, "memory_stats", _memory_stats
        yield module, "memory_allocated", lambda device=None: _resident_bytes()
        yield module, "memory_reserved", lambda device=None: _resident_bytes()
        yield module, "max_memory_allocated", lambda device=None: _peak_resident_bytes()
        yield module, "max_memory_reserved", lambda device=None: _peak_resident_bytes()
        yield module, "reset_peak_memory_stats", lambda device=None: None
    yield cuda, "device_memory_used", lambda device=None: _resident_bytes()

    # Profiler ranges would load NVIDIA's tools library.
    yield cuda.nvtx, "range_push", lambda message: 0
    yield cuda.nvtx, "range_pop", lambda: 0

    # Tensors that are asked for on 'cuda' are made on the CPU.
    for function in _device_constructors():
        owner = torch if getattr(torch, function.__name__, None) is function else None
        if owner is not None:
            yield owner, function.__name__, _redirect_keyword(function)
    for name in (
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
    ):
        yield torch, name, _redirect_keyword(getattr(torch, name))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        yield torch.Tensor, name, _redirect_keyword(getattr(torch.Tensor, name))
    yield torch.Tensor, "to", _redirect_to(torch.Tensor.to)
    yield torch.Tensor, "cuda", lambda self, *args, **kwargs: self
    yield torch.Tensor, "pin_memory", lambda self, *args: self
    yield torch.nn.Module, "cuda", lambda self, device=None: self
    yield torch.nn.Module, "to_empty", _redirect_keyword(torch.nn.Module.to_empty)
    yield torch.Tensor, "type", _tensor_type(torch.Tensor.type)


def install() -> None:
    """Install every bridge. Call it before Megatron is imported: it imports some of these names by value.

    Raises RuntimeError where a GPU is available: there, nothing must be bridged.
    """
    global _installed
    if _installed is not None:
        return
    if torch.cuda.is_available():
        raise RuntimeError("The CPU bridge must not be installed on a machine with a GPU.")
    stack = contextlib.ExitStack()
    for owner, name, stand_in in _replacements():
        original = getattr(owner, name)
        stack.callback(setattr, owner, name, original)
        setattr(owner, name, stand_in)
    _installed = stack


def is_installed() -> bool:
    """Whether the bridge is in place in this process."""
    return _installed is not None


def uninstall() -> None:
    """Put every replaced attribute back (names that Megatron imported by value stay bridged).

    Dynamo knows torch's functions by identity, from a table that it makes when it first compiles something. Made
    while the bridge was in place, the table has the stand-ins and would refuse the originals (torch.arange as a
    skipped function), so Dynamo is told to make it again.
    """
    global _installed
    if _installed is not None:
        _installed.close()
        _installed = None
        rules = sys.modules.get("torch._dynamo.trace_rules")
        if rules is not None:
            rules.clear_lru_cache()
