"""The arguments of a layer call, remembered and copied, so that the call can be run again and changes nothing.

Copied are tensors in tuples, lists, dicts, dataclasses and other plain objects, such as a cache that a layer appends
its keys to. Tensors that share memory share it in the copy. Modules, functions, process groups and what cannot be
copied are passed on as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_adacc.graph.storages import has_plain_storage, storage_key

ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.Generator)
PASSED_ON = (nn.Module, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
DEEPEST = 8  # levels of objects in objects


def snapshot(value: Any) -> Any:
    """The value with its lists, dicts and objects copied and its tensors shared: what a call adds to a list or a cache
    afterwards is not in it."""
    return _rebuilt(value, lambda tensor: tensor)


class ArgumentCopies:
    """Copies of several values that go together."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the original is held, so that the id stays its own
        self._first: dict[int, tuple[Tensor, Tensor]] = {}  # by storage

    def of(self, value: Any) -> Any:
        """The value with tensors copied, those that require grad as leaves."""
        return _rebuilt(value, self._tensor)

    def _tensor(self, tensor: Tensor) -> Tensor:
        known = self._known.get(id(tensor))
        if known is None:
            made = self._copy(tensor).requires_grad_(tensor.requires_grad)
            known = self._known[id(tensor)] = (tensor, made)
        return known[1]

    def _copy(self, tensor: Tensor) -> Tensor:
        if not has_plain_storage(tensor):
            return tensor.detach().clone()
        first = self._first.get(storage_key(tensor))
        if first is not None and first[0].dtype == tensor.dtype:
            shift = tensor.storage_offset() - first[0].storage_offset() + first[1].storage_offset()
            last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
            if shift >= 0 and (shift + last + 1) * tensor.element_size() <= first[1].untyped_storage().nbytes():
                return first[1].detach().as_strided(tensor.size(), tensor.stride(), shift)
        if _overlaps(tensor):
            return tensor.detach().clone()
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        made = made.copy_(tensor.detach())
        self._first.setdefault(storage_key(tensor), (tensor, made))
        return made


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def _rebuilt(value: Any, of_tensor: Callable[[Tensor], Tensor]) -> Any:
    """The value copied as deep as copy.deepcopy does, but for its tensors and what is passed on."""
    memo: dict[int, Any] = {}
    held: list[Any] = []  # what the memo's ids stand for
    for found in _leaves(value, DEEPEST, set()):
        memo[id(found)] = of_tensor(found) if isinstance(found, Tensor) else found
        held.append(found)
    return _copied(value, memo)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, ATOMS) or id(value) in memo:
        return memo.get(id(value), value)
    if type(value) in (tuple, list):
        made: Any = type(value)(_copied(v, memo) for v in value)
    elif type(value) is dict:
        made = {k: _copied(v, memo) for k, v in value.items()}
    else:
        try:
            return copy.deepcopy(value, memo)
        except Exception:  # whatever an object's own copying raises; it is then passed on
            return value
    memo[id(value)] = made
    return made


def _leaves(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """The tensors in a value, and the objects in it that are passed on."""
    if isinstance(value, ATOMS) or id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if isinstance(value, (Tensor, *PASSED_ON)):
        yield value
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from _leaves(item, depth, seen)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item, depth, seen)
    if not isinstance(value, Tensor | nn.Module) and not isinstance(value, PASSED_ON):
        for item in _attributes(value):
            yield from _leaves(item, depth - 1, seen)


def _attributes(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    if dataclasses.is_dataclass(value) and not hasattr(value, "__dict__"):
        yield from (getattr(value, f.name, None) for f in dataclasses.fields(value))
