"""megatron/core/transformer/torch_norm.py: torch's norms under sequence parallelism.

`WrappedTorchNorm` refuses sequence parallelism, which leaves a machine without apex and Transformer
Engine (a CPU, a plain V100 installation) without it. The norm itself needs nothing: it works along the
hidden dimension, which sequence parallelism does not split. What is missing is the mark on its parameters
that makes Megatron all-reduce their gradients over the tensor-parallel group, since each rank sees a part
of the sequence; apex's and Transformer Engine's wrappers set the same mark.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

from megatron_adacc.patches.patching import Patch


def _make(original: Callable) -> Callable:
    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        norm = original(cls, unsplit, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new


def patches() -> list[Patch]:
    """`WrappedTorchNorm.__new__` that accepts config.sequence_parallel."""
    return [
        Patch(
            module="megatron.core.transformer.torch_norm",
            symbol="WrappedTorchNorm.__new__",
            parameters=(
                "cls",
                "config",
                "hidden_size",
                "eps",
                "persist_layer_norm",
                "zero_centered_gamma",
                "normalization",
            ),
            checked_with=("0.19.2",),
            make=_make,
            why="sequence parallelism without apex or Transformer Engine",
        )
    ]
