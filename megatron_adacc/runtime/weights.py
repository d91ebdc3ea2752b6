"""The weight that a backward function finds in its saved tensors.

Autograd hands out what an unpack hook returns as a new plain tensor. Python attributes are lost on the way,
and Megatron's fused weight gradient looks for some: ``main_grad`` to accumulate into, and
``grad_added_to_main_grad``, without which the parameter's hooks never fire. So the hook returns a
:class:`_Carrier`: a subclass whose ``detach``, which is how autograd makes its new tensor, gives a
:class:`WorkingWeight` that reads and writes every foreign attribute on the working parameter itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WorkingWeight(Tensor):
    """An alias of a parameter whose attributes are the parameter's. Results of ops on it are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _is_param = True  # isinstance(weight, torch.nn.Parameter) holds, as it does without the engine
    _working: Tensor

    def __getattr__(self, name: str) -> Any:
        if name == "_working":
            raise AttributeError(name)
        return getattr(self._working, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._working, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._working, name)


class _Carrier(Tensor):
    """Lives from the unpack hook to the tensor that autograd makes of its result."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _working: Tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return _alias(WorkingWeight, args[0]._working)
        plain = [a._working.detach() if isinstance(a, _Carrier) else a for a in args]
        return func(*plain, **(kwargs or {}))


def _alias(kind: type[Tensor], working: Tensor) -> Tensor:
    alias = torch.Tensor._make_subclass(kind, working.detach(), False)
    # Not setattr: a WorkingWeight passes that on to the parameter.
    object.__setattr__(alias, "_working", working)
    return alias


def working_weight(parameter: Tensor) -> Tensor:
    """What an unpack hook is to return for a parameter, so that backward sees its attributes. A parameter
    without attributes of its own needs no help and comes as a plain alias; a frozen one is handed on as it is returned,
    without a detach, so that a carrier would reach the backward function, and change what torch.compile makes of it."""
    if not parameter.__dict__:
        return parameter.detach()
    if not parameter.requires_grad:
        return _alias(WorkingWeight, parameter)
    return _alias(_Carrier, parameter)
