"""How a change to upstream code is declared and applied.

A `Patch` names the symbol it replaces, the signature it knows and the megatron-core versions it was
checked with. `apply` refuses, naming symbol and version, when the installed signature is another one: a
patch that no longer fits must stop the run, not bend it.
"""

import contextlib
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_adacc.errors import UserError


@dataclass(frozen=True)
class Patch:
    """One replaced function or method of upstream.

    module, symbol: where it is defined, for example 'megatron.training.arguments', 'parse_args'.
    parameters: names of its parameters, in order, as they were when the patch was written.
    checked_with: megatron-core versions the patch was tried with.
    make: takes the original and returns the replacement.
    why: one sentence.
    """

    module: str
    symbol: str
    parameters: tuple[str, ...]
    checked_with: tuple[str, ...]
    make: Callable[[Callable], Callable]
    why: str

    @property
    def name(self) -> str:
        """The symbol's full name."""
        return f"{self.module}.{self.symbol}"


def _installed_version() -> str:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed as a package)"


def _resolve(patch: Patch) -> tuple[Any, str, Callable]:
    """(owner, attribute, function) of the symbol to replace; UserError where it is not what the patch knows."""
    known = (
        f"megatron-adacc knows it as {patch.symbol}({', '.join(patch.parameters)}), checked with megatron-core "
        f"{', '.join(patch.checked_with)}: install one of these versions."
    )
    *path, attribute = patch.symbol.split(".")
    try:
        owner: Any = importlib.import_module(patch.module)
        for part in path:
            owner = getattr(owner, part)
        function = getattr(owner, attribute)
    except (AttributeError, ModuleNotFoundError):
        raise UserError(
            f"{patch.name} does not exist in the installed megatron-core {_installed_version()}; {known}"
        ) from None
    found = tuple(inspect.signature(function).parameters)
    if found != patch.parameters:
        raise UserError(
            f"{patch.name} of the installed megatron-core {_installed_version()} takes ({', '.join(found)}); {known}"
        )
    return owner, attribute, function


def _exchange(symbol: str, old: Callable, new: Callable) -> None:
    """`new` instead of `old` in every module of upstream that holds it: where it is defined, and where it was
    imported by value. That is looked up at the time of each exchange: a module that was imported in between has
    the replacement, and has to give it back.
    """
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "megatron" and vars(module).get(symbol) is old:
            setattr(module, symbol, new)


def apply(patches: Iterable[Patch]) -> contextlib.ExitStack:
    """Apply all of `patches`, or none; closing the returned stack takes them back."""
    with contextlib.ExitStack() as stack:
        for patch in patches:
            owner, attribute, function = _resolve(patch)
            replacement = patch.make(function)
            if isinstance(owner, type):
                original = owner.__dict__[attribute]
                stack.callback(setattr, owner, attribute, original)
                # A static method (__new__ among them) must stay one.
                setattr(
                    owner,
                    attribute,
                    staticmethod(replacement) if isinstance(original, staticmethod) else replacement,
                )
                continue
            stack.callback(_exchange, attribute, replacement, function)
            _exchange(attribute, function, replacement)
        return stack.pop_all()
