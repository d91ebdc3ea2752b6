"""When a trace is valid: the key of a call, and the class of a layer.

    class key   types of all submodules, names, shapes and dtypes of parameters and module buffers
    call key    shapes, dtypes, strides and requires_grad of the arguments, how they share storages, numbers
                and strings among the arguments and the modules' attributes, autocast, attention back ends

Layers with equal class keys share traces. An integer attribute that only numbers the layers (Megatron's
layer_number, Hugging Face's layer_idx) is no part of the key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

SCALARS = (int, float, bool, str)


def class_key(module: nn.Module) -> Hashable:
    """Equal for layers that run the same program on parameters of the same kind."""
    rows: list[Hashable] = []
    for path, submodule in module.named_modules():
        kind = type(submodule)
        rows.append((path, kind.__module__, kind.__qualname__))
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    shape = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
                    rows.append((path, name, shape))
    rows.append(_shared_parameters(module))
    return tuple(rows)


def _shared_parameters(module: nn.Module) -> Hashable:
    """Which names stand for one parameter, as positions of first occurrence."""
    first: dict[int, int] = {}
    pairs = module.named_parameters(remove_duplicate=False)
    return tuple(first.setdefault(id(p), i) for i, (_, p) in enumerate(pairs))


def numbering_attributes(layers: Mapping[int, nn.Module]) -> frozenset[tuple[str, str]]:
    """(path, name) of integer attributes that only number the layers: the layers of one class, by their place
    among all, have values that lie as far apart as their places do."""
    if len(layers) < 2:
        return frozenset()
    tables = {place: dict(module.named_modules()) for place, module in layers.items()}
    first = min(tables)
    found = set()
    for path, submodule in tables[first].items():
        for name, value in submodule.__dict__.items():
            if type(value) is int and all(
                vars(table[path]).get(name) == value + place - first for place, table in tables.items()
            ):
                found.add((path, name))
    return frozenset(found)


class LiveState:
    """The part of a layer's state that decides what its forward runs and may change between calls."""

    def __init__(self, module: nn.Module, numbering: frozenset[tuple[str, str]]) -> None:
        self._modules = [
            (path, m.__dict__, frozenset(n for p, n in numbering if p == path)) for path, m in module.named_modules()
        ]
        self._module = module

    def key(self) -> tuple[Hashable, ...]:
        """Numbers, strings and flags among the attributes, in order, and requires_grad of the parameters."""
        values: list[Hashable] = []
        for _, table, skipped in self._modules:
            for name, value in table.items():
                if type(value) in SCALARS and name not in skipped:
                    values.append((name, value))
            for parameter in table["_parameters"].values():
                values.append(parameter is not None and parameter.requires_grad)
        return tuple(values)


def environment_key() -> tuple[Hashable, ...]:
    """Autocast and attention settings of this thread."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def arguments_key(args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]) -> Hashable:
    """What the arguments look like; appends their tensors to ``tensors``, in the tracer's order."""
    rows = [_describe(a, tensors) for a in args]
    rows += [(name, _describe(value, tensors)) for name, value in kwargs.items()]
    first: dict[int, int] = {}
    sharing: list[Hashable] = []
    for i, tensor in enumerate(tensors):
        if tensor.layout != torch.strided:
            continue
        key = tensor.untyped_storage()._cdata
        leader = first.setdefault(key, i)
        if leader != i:
            byte = tensor.storage_offset() * tensor.element_size()
            other = tensors[leader]
            sharing.append((i, leader, byte - other.storage_offset() * other.element_size()))
    return (tuple(rows), tuple(sharing))


def _describe(value: Any, tensors: list[Tensor]) -> Hashable:
    if value is None or type(value) in SCALARS:
        return (type(value).__name__, value)
    if isinstance(value, Tensor):
        tensors.append(value)
        stride = value.stride() if value.layout == torch.strided else None
        return (tuple(value.shape), stride, value.dtype, value.device, value.requires_grad)
    if isinstance(value, (tuple, list)):
        return tuple(_describe(v, tensors) for v in value)
    if isinstance(value, dict):
        return tuple((str(k), _describe(v, tensors)) for k, v in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(_describe(getattr(value, f.name, None), tensors) for f in dataclasses.fields(value))
    return type(value).__qualname__
