"""megatron/training/training.py: something may watch each training step."""

import functools
from collections.abc import Callable
from typing import Any

from megatron_adacc.patches.patching import Patch

# step(forward_step_func) -> what Megatron's train_step returns
Step = Callable[[Callable], tuple]


def patches(around_step: Callable[[Step, Callable, list, int], tuple]) -> list[Patch]:
    """`around_step(step, forward_step_func, model, iteration)` must return step(some forward_step_func).

    model: the list of this rank's model chunks. iteration: of the step that begins, counted from 1.
    """

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def train_step(
            forward_step_func: Callable, data_iterator: Any, model: list, *args: Any, **kwargs: Any
        ) -> tuple:
            def step(forward: Callable) -> tuple:
                return original(forward, data_iterator, model, *args, **kwargs)

            # `iteration` follows optimizer, opt_param_scheduler, config and forward_backward_func.
            iteration = kwargs["iteration"] if "iteration" in kwargs else args[4]
            return around_step(step, forward_step_func, model, int(iteration) + 1)

        return train_step

    return [
        Patch(
            module="megatron.training.training",
            symbol="train_step",
            parameters=(
                "forward_step_func",
                "data_iterator",
                "model",
                "optimizer",
                "opt_param_scheduler",
                "config",
                "forward_backward_func",
                "iteration",
                "pg_collection",
                "p2p_communicator",
            ),
            checked_with=("0.19.2",),
            make=make,
            why="activation memory and step time are measured per step, for every strategy alike",
        )
    ]
