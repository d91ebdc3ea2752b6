"""Regions inside a layer that torch.compile made, such as Megatron's fused bias-GELU: each call is one op.

A dispatch mode does not see compiled kernels, so while a trace runs the call of Inductor's compiled graph is
observed instead. Nothing about the call changes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

Observer = Callable[[Any, list[Any], Callable[[], Any]], Any]


@contextlib.contextmanager
def observed_calls(observer: Observer) -> Iterator[None]:
    """While inside, ``observer(compiled_graph, inputs, run)`` stands for each call of a compiled graph by this
    thread, and must return what ``run()`` returns. Does nothing where torch.compile was never used."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    from torch._inductor.output_code import CompiledFxGraph

    original = CompiledFxGraph.__call__
    thread = threading.get_ident()

    def call(self: Any, inputs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(self, inputs)
        return observer(self, list(inputs), lambda: original(self, inputs))

    CompiledFxGraph.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        CompiledFxGraph.__call__ = original  # type: ignore[method-assign]


def written_inputs(compiled_graph: Any) -> tuple[int, ...]:
    """Positions of inputs that the compiled graph writes."""
    return tuple(sorted(getattr(compiled_graph, "mutated_input_idxs", ()) or ()))
