"""megatron/core/optimizer/__init__.py: Adam's state in blocks of fewer bits.

Megatron wraps an optimizer of torch's or apex's, and asks of it what every torch optimizer has. So the inner one is
exchanged after the wrapper is built, when its groups hold the parameters that are updated: the model's, or their
float32 main copies.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_adacc.patches.patching import Patch


def patches(exchange: Callable[[Any, Any], None]) -> list[Patch]:
    """`exchange(optimizer, model_chunks)` gets each of Megatron's optimizers, wrapper and all, as soon as it is
    built."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def build(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            exchange(made, inspect.signature(original).bind(*args, **kwargs).arguments["model_chunks"])
            return made

        return build

    return [
        Patch(
            module="megatron.core.optimizer",
            symbol="_get_megatron_optimizer_based_on_param_groups",
            parameters=(
                "config",
                "model_chunks",
                "param_groups",
                "per_model_buffers",
                "model_parallel_group",
                "data_parallel_group",
                "data_parallel_group_gloo",
                "data_parallel_group_idx",
                "intra_dist_opt_group",
                "distributed_optimizer_instance_id",
                "pg_collection",
                "skip_megatron_wrapping",
            ),
            checked_with=("0.19.2",),
            make=make,
            why="the optimizer's state is kept in blocks of fewer bits",
        )
    ]
