"""Which submodule is running: a stack of module paths kept by forward hooks while a trace is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class ModulePaths:
    """``current`` is the path of the innermost submodule that is running, "" for the layer itself.

    ``called(args, kwargs)`` runs at each submodule's entry, ``returned(path, submodule, token, output)`` at
    its return with what ``called`` returned."""

    def __init__(
        self,
        module: nn.Module,
        called: Callable[[Any, Any], Any],
        returned: Callable[[str, nn.Module, Any, Any], None],
    ) -> None:
        self._module = module
        self._called = called
        self._returned = returned
        self._stack: list[tuple[str, Any]] = []
        self._handles: list[RemovableHandle] = []

    @property
    def current(self) -> str:
        return self._stack[-1][0] if self._stack else ""

    def install(self) -> None:
        for path, submodule in self._module.named_modules():
            if submodule is self._module:
                continue
            self._handles.append(submodule.register_forward_pre_hook(self._entry(path), with_kwargs=True))
            self._handles.append(submodule.register_forward_hook(self._exit(path), with_kwargs=True, prepend=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()  # entries hold the arguments of calls that an exception cut short

    def _entry(self, path: str) -> Callable[..., None]:
        def hook(submodule: nn.Module, args: Any, kwargs: Any) -> None:
            token = self._called(args, kwargs)
            self._stack.append((path, token))

        return hook

    def _exit(self, path: str) -> Callable[..., None]:
        def hook(submodule: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._stack or self._stack[-1][0] != path:
                return  # the submodule was entered before the trace began
            _, token = self._stack.pop()
            self._returned(path, submodule, token, output)

        return hook
