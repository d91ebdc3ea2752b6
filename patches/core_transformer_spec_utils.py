"""megatron/core/transformer/spec_utils.py: specs that name a transformer layer build ours.

Every layer of every model goes through `build_module`; replaced there, a layer is ours whichever spec named
it: local or Transformer Engine, GPT, hybrid or multi-token prediction.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_adacc.patches.patching import Patch


def patches(replace: Callable[[type], type]) -> list[Patch]:
    """`replace(layer class)` gives the class to build instead, or the class itself."""

    def make(original: Callable) -> Callable:
        from megatron.core.transformer.spec_utils import ModuleSpec, get_module

        @functools.wraps(original)
        def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
            module = get_module(spec_or_module)
            replacement = replace(module) if isinstance(module, type) else module
            if replacement is module:
                return original(spec_or_module, *args, **kwargs)
            if isinstance(spec_or_module, ModuleSpec):
                replacement = ModuleSpec(replacement, spec_or_module.params, spec_or_module.submodules)
            return original(replacement, *args, **kwargs)

        return build_module

    return [
        Patch(
            module="megatron.core.transformer.spec_utils",
            symbol="build_module",
            parameters=("spec_or_module", "args", "kwargs"),
            checked_with=("0.19.2",),
            make=make,
            why="a plan is attached to AdaccTransformerLayer",
        )
    ]
