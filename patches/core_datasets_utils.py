"""megatron/core/datasets/utils.py: the wheel's compiled index helpers are used as they are.

`compile_helpers` runs make in the package's folder. The wheel ships the compiled helper and no Makefile,
so a run from the wheel ended there.
"""

import functools
import importlib.util
from collections.abc import Callable

from megatron_adacc.patches.patching import Patch


def _make(original: Callable) -> Callable:
    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


def patches() -> list[Patch]:
    """`compile_helpers` that compiles only where the compiled helper is missing."""
    return [
        Patch(
            module="megatron.core.datasets.utils",
            symbol="compile_helpers",
            parameters=(),
            checked_with=("0.19.2",),
            make=_make,
            why="the wheel ships the compiled helper, not its Makefile",
        )
    ]
