"""As if on a GPU that is not there: fake 'cuda' tensors, which have sizes and no contents.

    with absent_cuda(capability=(7, 0), memory_bytes=32 * 2**30):
        layer = make_layer()                  # nothing is allocated
        graph = trace(layer, torch.randn(8, 16, requires_grad=True))

Inside, tensors are made on 'cuda' and are fake, torch.cuda answers for the absent device, the backward pass runs in
Python (devices/backward.py), and functions of torch.compile run unfused, since nothing can be compiled for a device
that is not there. torch.cuda.is_available() stays what it is. Afterwards the process is as it was.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_adacc.devices import cpu
from megatron_adacc.devices.backward import python_engine

_INDEX = 0


def _fixed(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _apply(self: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Module._apply, behind .half() and .cuda(), which upstream does not do for fake parameters: what is converted
    becomes a new parameter with the old one's attributes."""
    if recurse:
        for module in self.children():
            module._apply(function)
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            converted = function(parameter)
        if converted is not parameter:
            made = nn.Parameter(converted, parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            self._parameters[name] = made
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = function(buffer)
    return self


def _replacements(capability: tuple[int, int], memory_bytes: int) -> Iterator[tuple[Any, str, Any]]:
    """(object, attribute, stand-in) of every answer."""
    cuda = torch.cuda
    name = f"absent device of compute capability {capability[0]}.{capability[1]}"
    properties = types.SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=memory_bytes, multi_processor_count=1
    )
    state = torch.default_generator.get_state()
    yield cuda, "device_count", _fixed(1)
    yield cuda, "current_device", _fixed(_INDEX)
    yield cuda, "set_device", _fixed(None)
    yield cuda, "get_device_name", _fixed(name)
    yield cuda, "get_device_properties", _fixed(properties)
    yield cuda, "get_device_capability", _fixed(capability)
    yield cuda, "device", lambda device: contextlib.nullcontext()
    yield cuda, "synchronize", _fixed(None)
    yield cuda, "is_current_stream_capturing", _fixed(False)
    yield cuda, "Stream", cpu._Stream
    yield cuda, "Event", cpu._Event
    yield cuda, "stream", lambda stream: contextlib.nullcontext()
    yield cuda, "current_stream", _fixed(cpu._STREAM)
    yield cuda, "default_stream", _fixed(cpu._STREAM)
    yield cuda, "set_stream", _fixed(None)
    yield torch.Tensor, "record_stream", _fixed(None)
    # Nothing is drawn: generators are asked for states, and told them, for no effect.
    for module in (cuda, cuda.random):
        yield module, "get_rng_state", _fixed(state)
        yield module, "set_rng_state", _fixed(None)
        yield module, "manual_seed", _fixed(None)
        yield module, "manual_seed_all", _fixed(None)
    for module in (cuda, cuda.memory):
        yield module, "empty_cache", _fixed(None)
        for figure in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
            yield module, figure, _fixed(0)
    yield cuda.nvtx, "range_push", _fixed(0)
    yield cuda.nvtx, "range_pop", _fixed(0)
    yield nn.Module, "_apply", _apply


@contextlib.contextmanager
def absent_cuda(capability: tuple[int, int] = (7, 0), memory_bytes: int = 32 * 2**30) -> Iterator[FakeTensorMode]:
    """Be as on a CUDA device of this compute capability and memory, with fake tensors. The CPU bridge, which sends
    'cuda' to the CPU, is taken away meanwhile."""
    with contextlib.ExitStack() as stack:
        if cpu.is_installed():
            cpu.uninstall()
            stack.callback(cpu.install)
        for owner, name, stand_in in _replacements(capability, memory_bytes):
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)  # inherited
            setattr(owner, name, stand_in)
        stack.enter_context(python_engine())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.device("cuda"))
        yield mode
