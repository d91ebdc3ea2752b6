"""Adaptive activation memory for Megatron-LM.

    from megatron_adacc import attach
    handle = attach(model.layers, plan="recompute")

    from megatron_adacc import enable_memory_optim
    handle = enable_memory_optim(model, {"max_interval": 32})       # attach with adaptation

Importing this package imports neither CUDA, Triton, OR-Tools nor Megatron; the sub-packages that need
one of them import it when they are used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_adacc.adaptive.enable import enable_memory_optim
    from megatron_adacc.runtime.attach import attach

__version__ = "0.1.0"
__all__ = ["__version__", "attach", "enable_memory_optim"]


def __getattr__(name: str) -> Any:
    """The public functions on first use: they need torch, and importing the package must stay light."""
    if name == "attach":
        from megatron_adacc.runtime.attach import attach

        return attach
    if name == "enable_memory_optim":
        from megatron_adacc.adaptive.enable import enable_memory_optim

        return enable_memory_optim
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
