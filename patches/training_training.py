"""megatron/training/training.py: something may watch each training step, or change a model before it is wrapped."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_adacc.patches.patching import Patch


@dataclass(frozen=True)
class Step:
    """One training step that is about to run. iteration: counted from 1; model: this rank's model chunks."""

    forward_step: Callable
    forward_backward: Callable
    model: list
    optimizer: Any
    iteration: int
    _run: Callable[[Callable, Callable], tuple]

    def run(self, forward_step: Callable, forward_backward: Callable) -> tuple:
        """What Megatron's train_step returns, with these in place of its own."""
        return self._run(forward_step, forward_backward)

    def as_it_is(self) -> tuple:
        """The step as Megatron runs it."""
        return self.run(self.forward_step, self.forward_backward)


def patches(around_step: Callable[[Step], tuple]) -> list[Patch]:
    """`around_step(step)` must return step.run(some forward_step, some forward_backward)."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def train_step(
            forward_step_func: Callable,
            data_iterator: Any,
            model: list,
            optimizer: Any,
            opt_param_scheduler: Any,
            config: Any,
            forward_backward_func: Callable,
            iteration: int | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> tuple:
            def run(forward_step: Callable, forward_backward: Callable) -> tuple:
                return original(
                    forward_step, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward,
                    iteration, *args, **kwargs,
                )  # fmt: skip

            number = int(iteration or 0) + 1
            return around_step(Step(forward_step_func, forward_backward_func, model, optimizer, number, run))

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


def model_patches(prepare: Callable[[list], None]) -> list[Patch]:
    """`prepare(chunks)` may change the model chunks that a model provider made, before precision wrapper, DDP and
    optimizer see them; training_models_dist_utils.py is the same for models that are built from a configuration."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def get_model(model_provider_func: Callable, *args: Any, **kwargs: Any) -> list:
            def provider(*provider_args: Any, **provider_kwargs: Any) -> Any:
                chunk = model_provider_func(*provider_args, **provider_kwargs)
                prepare([chunk])
                return chunk

            return original(provider, *args, **kwargs)

        return get_model

    return [
        Patch(
            module="megatron.training.training",
            symbol="get_model",
            parameters=("model_provider_func", "model_type", "wrap_with_ddp", "config", "pg_collection"),
            checked_with=("0.19.2",),
            make=make,
            why="adapters join the model, and its base is frozen, before DDP and the optimizer are made",
        )
    ]


def set_up_patches(ready: Callable[[list], None]) -> list[Patch]:
    """`ready(model)` gets this rank's model chunks when they, their wrappers and the optimizer are made and what is to
    be loaded is loaded."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> tuple:
            found: tuple = original(*args, **kwargs)
            ready(found[0])
            return found

        return setup_model_and_optimizer

    return [
        Patch(
            module="megatron.training.training",
            symbol="setup_model_and_optimizer",
            parameters=("model_type", "model_provider_func", "checkpointing_context", "cfg_container", "pg_collection"),
            checked_with=("0.19.2",),
            make=make,
            why="a frozen base gets fewer bits after it was loaded",
        )
    ]
