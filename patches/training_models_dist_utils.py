"""megatron/training/models/dist_utils.py: something may change a model that is built from a configuration before
precision wrapper, DDP and optimizer see it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_adacc.patches.patching import Patch


def patches(prepare: Callable[[list], None]) -> list[Patch]:
    """`prepare(chunks)` may change this rank's model chunks; it runs after the configuration's own hook."""

    def make(original: Callable) -> Callable:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def unimodal_build_distributed_models(*args: Any, **kwargs: Any) -> list:
            call = signature.bind(*args, **kwargs)
            own = call.arguments.get("pre_wrap_hook")

            def hook(chunks: list) -> list:
                found = own(chunks) if own is not None else None
                chunks = chunks if found is None else found
                prepare(chunks)
                return chunks

            call.arguments["pre_wrap_hook"] = hook
            return original(*call.args, **call.kwargs)

        return unimodal_build_distributed_models

    return [
        Patch(
            module="megatron.training.models.dist_utils",
            symbol="unimodal_build_distributed_models",
            parameters=(
                "build_model_func",
                "transformer_config",
                "pg_collection",
                "ddp_config",
                "overlap_param_gather_with_optimizer_step",
                "use_megatron_fsdp",
                "use_torch_fsdp2",
                "wrap_with_ddp",
                "data_parallel_random_init",
                "mixed_precision_wrapper",
                "pre_wrap_hook",
                "model_type",
            ),
            checked_with=("0.19.2",),
            make=make,
            why="adapters join the model, and its base is frozen, before DDP and the optimizer are made",
        )
    ]
