"""Run layers beside the training, as measuring them needs (cost/rehearsal.py), where Megatron would notice."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_adacc.megatron.redo import TrackerStates

# Megatron-FSDP gathers for each submodule by hooks, which know the parameters themselves and not what stands in for
# them.
_LEFT_OUT = "megatron_fsdp.megatron_fsdp"


def beside_training(layers: Sequence[torch.nn.Module]) -> Callable[[], AbstractContextManager[None]]:
    """A context for such runs of the layers: they may draw from Megatron's tracker of random states, which is
    afterwards as it was, and no parameter is gathered."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        states = TrackerStates()
        try:
            with _without_gathers(layers):
                yield
        finally:
            states.put_back()

    return context


@contextlib.contextmanager
def _without_gathers(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    before: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for layer in layers:
        for module in layer.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                if any(_gathers(hook) for hook in hooks.values()):
                    before.append((hooks, dict(hooks)))
    try:
        for hooks, all_of_them in before:
            for key, hook in all_of_them.items():
                if _gathers(hook):
                    del hooks[key]
        yield
    finally:
        for hooks, all_of_them in before:
            hooks.clear()
            hooks.update(all_of_them)  # in their order


def _gathers(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).endswith(_LEFT_OUT)
