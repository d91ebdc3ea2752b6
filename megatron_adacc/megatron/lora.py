"""LoRA in a Megatron job: what the --adacc-lora-* flags mean, what is refused, and where adapters join the model.

Megatron is imported where adapters are made: the flags are read before it may be.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_adacc.errors import UserError
from megatron_adacc.megatron.console import say

if TYPE_CHECKING:
    from torch import nn

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

# attribute of Megatron's arguments -> (its flag, why adapters cannot go with it)
_REFUSED = {
    "use_megatron_fsdp": ("--use-megatron-fsdp", "it shards parameters in a way that frozen ones are not tested with"),
    "use_torch_fsdp2": ("--use-torch-fsdp2", "it shards parameters in a way that frozen ones are not tested with"),
    "num_experts": ("--num-experts", "experts have no adapters yet"),
    "defer_embedding_wgrad_compute": ("--defer-embedding-wgrad-compute", "the output layer is frozen and has none"),
    "init_model_with_meta_device": ("--init-model-with-meta-device", "the adapters' start would be lost"),
    "non_persistent_ckpt_type": ("--non-persistent-ckpt-type", "the base and the adapters are two checkpoints"),
    "auto_detect_ckpt_format": ("--auto-detect-ckpt-format", "--ckpt-format must say torch or torch_dist"),
    "freeze_all_layers": ("--freeze-all-layers", "adapters freeze everything but themselves already"),
    "perform_rl_step": ("--perform-rl-step", "it builds a second model"),
}


def complete(args: Namespace) -> None:
    """Write the defaults of --adacc-lora-* into the namespace. Raises UserError for numbers that cannot be meant and
    for flags without a rank."""
    from megatron_adacc.adapters.lora import check_numbers

    if args.adacc_lora_rank is None:
        for name in ("alpha", "targets"):
            if getattr(args, f"adacc_lora_{name}") is not None:
                raise UserError(f"--adacc-lora-{name} needs --adacc-lora-rank, which turns adapters on.")
        return
    if args.adacc_lora_alpha is None:
        args.adacc_lora_alpha = 2.0 * args.adacc_lora_rank
    if args.adacc_lora_targets is None:
        args.adacc_lora_targets = ",".join(TARGETS)
    check_numbers(args.adacc_lora_rank, args.adacc_lora_alpha)
    if not all(targets_of(args)):
        raise UserError(
            f"--adacc-lora-targets is {args.adacc_lora_targets!r}, but it must be names of layers with commas between "
            f"them, such as {','.join(TARGETS)}."
        )


def targets_of(args: Namespace) -> list[str]:
    """The names in --adacc-lora-targets."""
    return [name.strip() for name in args.adacc_lora_targets.split(",")]


def check(args: Namespace) -> None:
    """Look at validated arguments of a job with adapters. Raises UserError for what cannot go with them."""
    for name, (flag, reason) in _REFUSED.items():
        if getattr(args, name, None):
            raise UserError(f"{flag} cannot go with --adacc-lora-rank: {reason}. Leave one of them out.")
    if getattr(args, "adacc_state_plan", "full") != "full":
        raise UserError(
            "--adacc-state-plan cannot go with --adacc-lora-rank, whose state is small: leave one of them out."
        )
    if args.transformer_impl != "local":
        raise UserError(
            f"--adacc-lora-rank needs --transformer-impl local: the linear layers of {args.transformer_impl} cannot "
            "have adapters yet."
        )
    if args.ckpt_format not in ("torch", "torch_dist"):
        raise UserError(
            f"--adacc-lora-rank needs --ckpt-format torch or torch_dist, not {args.ckpt_format}, for its checkpoints."
        )
    base = args.pretrained_checkpoint if args.pretrained_checkpoint is not None else args.load
    if args.save is not None and base is None:
        raise UserError(
            "--save would write adapters of a base that is nowhere: name the base's checkpoint with "
            "--pretrained-checkpoint."
        )
    if args.save is not None and os.path.realpath(args.save) == os.path.realpath(base):
        raise UserError(
            f"--save {args.save} would write adapters among the checkpoints of their base: name another folder."
        )
    if base is None:
        say("no --pretrained-checkpoint: the adapters are trained beside random weights")


def inject(args: Namespace, chunks: Sequence[nn.Module]) -> None:
    """Give the chunks of this rank their adapters, freeze the rest, and say so. UserError as lora_layers.inject."""
    from megatron_adacc.adapters import adapter_state
    from megatron_adacc.megatron import lora_layers

    rank, alpha = args.adacc_lora_rank, args.adacc_lora_alpha
    found = [lora_layers.inject(chunk, targets_of(args), rank, alpha, args.seed) for chunk in chunks]
    trained = sum(tensor.numel() for chunk in chunks for tensor in adapter_state(chunk).values())
    everything = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    say(
        f"LoRA of rank {rank}, alpha {alpha:g}, beside {sum(map(len, found))} linear layers of rank 0: it trains "
        f"{trained:,} of {everything:,} parameters ({trained / everything:.2%})"
    )


def install(args: Namespace) -> None:
    """Patch what a job needs that trains adapters, or may meet a checkpoint of them. UserError as check()."""
    from megatron_adacc.megatron import base_format
    from megatron_adacc.megatron.lora_checkpoint import LoraCheckpoints, refuse_adapters
    from megatron_adacc.patches import patching, training_checkpointing, training_models_dist_utils, training_training

    if args.adacc_lora_rank is None:
        if args.load is not None or args.pretrained_checkpoint is not None:
            patching.apply(training_checkpointing.read_patches(refuse_adapters))
        return
    check(args)
    base_format.check(args)

    def prepare(chunks: list) -> None:
        inject(args, chunks)

    def load(original: Callable, positional: tuple, named: dict[str, Any]) -> Any:
        found = checkpoints.load(original, positional, named)
        base.apply(positional[0])
        return found

    def read(load_dir: str, args: Namespace, state_dict: dict[str, Any], look: bool) -> None:
        checkpoints.read(load_dir, args, state_dict, look)
        trained = state_dict.get("args")
        if trained is not None and getattr(trained, "adacc_lora_rank", None) is not None:
            base_format.refuse_other(load_dir, args, trained)

    checkpoints = LoraCheckpoints()
    base = base_format.BaseFormat(args)
    patching.apply(
        [
            *training_models_dist_utils.patches(prepare),
            *training_training.model_patches(prepare),
            *training_checkpointing.load_patches(load, checkpoints.generated),
            *training_checkpointing.read_patches(read),
            *training_training.set_up_patches(base.apply),
        ]
    )
