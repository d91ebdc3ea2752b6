"""megatron/training/initialize.py: start without a GPU (only installed on the CPU)."""

import functools
from collections.abc import Callable
from typing import Any

from megatron_adacc.patches.patching import Patch


def _make(original: Callable) -> Callable:
    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    return initialize_megatron


def patches() -> list[Patch]:
    """`initialize_megatron` with its own switch for machines without CUDA set."""
    return [
        Patch(
            module="megatron.training.initialize",
            symbol="initialize_megatron",
            parameters=(
                "allow_no_cuda",
                "skip_mpu_initialization",
                "get_embedding_ranks",
                "get_position_embedding_ranks",
                "store",
                "skip_model_parallel_init",
                "seed_pp_group",
                "seed_dp_group",
                "seed_tp_group",
                "seed_ep_group",
                "seed_etp_group",
                "skip_random_seed",
            ),
            checked_with=("0.19.2",),
            make=_make,
            why="pretrain() calls it without allow_no_cuda, and it refuses to start where CUDA is not available",
        )
    ]
