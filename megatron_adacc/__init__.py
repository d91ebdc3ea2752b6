"""Adaptive activation memory for Megatron-LM.

    from megatron_adacc import attach
    handle = attach(model.layers, plan="recompute")

Importing this package imports neither CUDA, Triton, OR-Tools nor Megatron; the sub-packages that need
one of them import it when they are used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_adacc.runtime.attach import attach

__version__ = "0.1.0"
__all__ = ["__version__", "attach"]


def __getattr__(name: str) -> Any:
    """``attach`` on first use: it needs torch, and importing the package must stay light."""
    if name == "attach":
        from megatron_adacc.runtime.attach import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
