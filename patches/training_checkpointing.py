"""megatron/training/checkpointing.py: a checkpoint carries an entry of ours, and gives it back.

The entry is made of builtins and stands beside Megatron's own, which ignores keys that it does not know: a checkpoint
with it loads without us.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_adacc.patches.patching import Patch

KEY = "adacc"

_GENERATE_PARAMETERS = (
    "args",
    "model",
    "optimizer",
    "opt_param_scheduler",
    "rng_state",
    "iteration",
    "optim_sd_kwargs",
    "model_sd_kwargs",
    "rerun_state",
)
_BASE_PARAMETERS = (
    "load_dir",
    "args",
    "rank0",
    "sharded_state_dict",
    "checkpointing_context",
    "dp_cp_group",
    "expt_dp_group",
    "gpt_compat_layer_maps",
)


def patches(saved: Callable[[Any], Any], loaded: Callable[[Any], None]) -> list[Patch]:
    """`saved(args)` gives the entry of a checkpoint that is written, or None for none; it is called on the ranks that
    write or take part in writing. `loaded(entry)` gets the entry of one that is read, None where it has none."""

    def make_generate(original: Callable) -> Callable:
        @functools.wraps(original)
        def generate_state_dict(args: Any, *others: Any, **kwargs: Any) -> dict[str, Any]:
            state_dict = original(args, *others, **kwargs)
            entry = saved(args)
            if entry is not None:
                state_dict[KEY] = entry
            return state_dict

        return generate_state_dict

    def make_load(original: Callable) -> Callable:
        @functools.wraps(original)
        def _load_base_checkpoint(*args: Any, **kwargs: Any) -> tuple:
            found = original(*args, **kwargs)
            # A first look at rank 0's part comes before, to read the arguments; what counts comes last.
            if isinstance(found[0], dict) and found[0]:
                loaded(found[0].get(KEY))
            return found

        return _load_base_checkpoint

    return [
        Patch(
            module="megatron.training.checkpointing",
            symbol="generate_state_dict",
            parameters=_GENERATE_PARAMETERS,
            checked_with=("0.19.2",),
            make=make_generate,
            why="plan, monitor and outlier channels go into the checkpoint",
        ),
        Patch(
            module="megatron.training.checkpointing",
            symbol="_load_base_checkpoint",
            parameters=_BASE_PARAMETERS,
            checked_with=("0.19.2",),
            make=make_load,
            why="a resumed run goes on with the plan and the outlier channels it had",
        ),
    ]


def load_patches(
    load: Callable[[Callable, tuple, dict[str, Any]], Any],
    generated: Callable[[Any, dict[str, Any]], None],
) -> list[Patch]:
    """`load(original, args, kwargs)` stands in for load_checkpoint. `generated(args, state_dict)` may change a state
    that is to be written or filled."""

    def make_load(original: Callable) -> Callable:
        @functools.wraps(original)
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            return load(original, args, kwargs)

        return load_checkpoint

    def make_generate(original: Callable) -> Callable:
        @functools.wraps(original)
        def generate_state_dict(args: Any, *others: Any, **kwargs: Any) -> dict[str, Any]:
            state_dict: dict[str, Any] = original(args, *others, **kwargs)
            generated(args, state_dict)
            return state_dict

        return generate_state_dict

    return [
        Patch(
            module="megatron.training.checkpointing",
            symbol="load_checkpoint",
            parameters=(
                "ddp_model",
                "optimizer",
                "opt_param_scheduler",
                "load_arg",
                "strict",
                "checkpointing_context",
                "skip_load_to_model_and_opt",
                "tp_group",
                "pp_group",
                "dp_cp_group",
                "dp_group",
                "expt_dp_group",
                "rng_state_key_prefix",
            ),
            checked_with=("0.19.2",),
            make=make_load,
            why="a base and its adapters are two checkpoints, loaded one after the other",
        ),
        Patch(
            module="megatron.training.checkpointing",
            symbol="generate_state_dict",
            parameters=_GENERATE_PARAMETERS,
            checked_with=("0.19.2",),
            make=make_generate,
            why="a checkpoint of adapters does not hold their base",
        ),
    ]


def read_patches(read: Callable[[Any, Any, dict[str, Any], bool], None]) -> list[Patch]:
    """`read(load_dir, args, state_dict, look)` may change a checkpoint that was read; `look` is True for an early look
    at rank 0's part, which every rank takes."""

    def make_base(original: Callable) -> Callable:
        @functools.wraps(original)
        def _load_base_checkpoint(load_dir: Any, args: Any, rank0: bool = False, *others: Any, **kwargs: Any) -> tuple:
            found: tuple = original(load_dir, args, rank0, *others, **kwargs)
            if isinstance(found[0], dict) and found[0]:
                read(load_dir, args, found[0], rank0)
            return found

        return _load_base_checkpoint

    return [
        Patch(
            module="megatron.training.checkpointing",
            symbol="_load_base_checkpoint",
            parameters=_BASE_PARAMETERS,
            checked_with=("0.19.2",),
            make=make_base,
            why="a checkpoint of adapters alone is not taken for a whole model, nor one of other adapters",
        ),
    ]
