"""The flags --adacc-state-plan, --adacc-state-limit and --adacc-state-price."""

import math
from argparse import Namespace

from megatron_adacc.cost.limits import Limit
from megatron_adacc.errors import UserError

UNIFORM = {"16": 16, "8": 8, "4": 4}
DEFAULT_PRICE = 0.05  # of a step, for a unit of error: the update's squared error relative to the update
GUARDS = ("clip", "recipe")
PRESETS = ("delayed",)
NAMES = ("full", *UNIFORM, "auto")

_REFUSED = {
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "optimizer_cuda_graph": "--optimizer-cuda-graph",
    "ckpt_convert_update_legacy_dist_opt_format": "--ckpt-convert-update-legacy-dist-opt-format",
}


def check(args: Namespace) -> None:
    """Raises UserError for a plan that is not known, and for what it does not work with."""
    plan, limit = args.adacc_state_plan, args.adacc_state_limit
    if args.adacc_dgr_group_size < 1:
        raise UserError(
            f"--adacc-dgr-group-size is {args.adacc_dgr_group_size}, but the layers are in one group at least."
        )
    if plan not in NAMES:
        raise UserError(f"--adacc-state-plan is {plan!r}, but the known ones are {', '.join(NAMES)}.")
    if limit is not None and plan != "auto":
        raise UserError(
            f"--adacc-state-limit is for --adacc-state-plan auto; the state plan {plan} does not look at it: leave it "
            "out."
        )
    joint = plan == "auto" and limit is None
    if joint:
        _check_joint(args)
    elif args.adacc_state_price != DEFAULT_PRICE:
        raise UserError(
            "--adacc-state-price is for --adacc-state-plan auto without --adacc-state-limit, where the state's bytes "
            "are chosen with the activations': leave it out."
        )
    if limit is not None:
        state_limit(limit)
    _check_offload(args, joint)
    if not own_optimizer(args):
        return
    given = f"--adacc-state-plan {plan}"
    if plan == "full":
        given = "--adacc-gradient-guard" if args.adacc_dgr_group_size == 1 else "--adacc-dgr-group-size"
    for name, flag in _REFUSED.items():
        if getattr(args, name, False):
            raise UserError(
                f"{given} keeps the optimizer's state in a form of its own, which {flag} does not know: leave out one "
                "of the two."
            )
    if args.optimizer != "adam" or not getattr(args, "decoupled_weight_decay", True):
        raise UserError(
            f"{given} is for AdamW: use --optimizer adam with decoupled weight decay, which is its default."
        )
    _check_delayed(args)


def _check_delayed(args: Namespace) -> None:
    """Raises UserError for what cannot be meant, and for what the two do not work with."""
    groups, rule = args.adacc_dgr_group_size, args.adacc_gradient_guard
    if groups == 1 and rule is None:
        return
    name = "--adacc-gradient-guard" if groups == 1 else "--adacc-dgr-group-size"
    if getattr(args, "use_distributed_optimizer", False):
        raise UserError(
            f"{name} keeps what it knows of each parameter whole on a rank, and --use-distributed-optimizer divides "
            "it: leave out one of the two."
        )
    if getattr(args, "ckpt_format", "torch") != "torch" and (args.save or args.load):
        raise UserError(
            f"{name} saves its state with each rank's optimizer, for which --ckpt-format {args.ckpt_format} has no "
            "place: give --ckpt-format torch."
        )
    if args.adacc_lora_rank is not None:
        raise UserError(f"{name} cannot go with --adacc-lora-rank, whose gradients are few: leave one of them out.")
    if getattr(args, "num_experts", None):
        raise UserError(f"{name} is for models with one optimizer a rank; experts have one of their own.")


def _check_offload(args: Namespace, joint: bool) -> None:
    """Raises UserError where nothing is delayed, or the state's bytes are to be chosen with the activations'."""
    if not args.adacc_dgr_offload:
        if args.adacc_dgr_offload_dir is not None:
            raise UserError(
                "--adacc-dgr-offload-dir is the folder for --adacc-dgr-offload: give that as well, or leave it out."
            )
        return
    if args.adacc_dgr_group_size == 1:
        raise UserError(
            "--adacc-dgr-offload leaves the moments of one of several groups on the device, but all layers are in one: "
            "give --adacc-dgr-group-size 2 or more as well, or leave it out."
        )
    if joint:
        raise UserError(
            "--adacc-state-plan auto without --adacc-state-limit shares the device between state and activations, but "
            "with --adacc-dgr-offload little of the state is there: give --adacc-state-limit, or the bits, such as "
            "--adacc-state-plan 8."
        )


BUCKET_UNIT = 8 * 2**20
"""Bytes of which the preset makes a bucket a multiple."""


def apply_preset(args: Namespace) -> str | None:
    """Write what --adacc-lr-preset means into validated arguments; the sentence that says so, None without one.

    Raises UserError where there are no delayed groups that it is for."""
    if args.adacc_lr_preset is None:
        return None
    groups = args.adacc_dgr_group_size
    if groups == 1:
        raise UserError("--adacc-lr-preset delayed is for delayed groups: give --adacc-dgr-group-size as well.")
    factor = min(1.5, 1.2 + 0.075 * (groups - 2))
    changed = [f"lr {args.lr:g} -> {factor * args.lr:g} (times {factor:g})"]
    args.lr *= factor
    for name in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"):
        value = getattr(args, name, None)
        if value:
            longer = 1.3 * value if name == "lr_warmup_fraction" else round(1.3 * value)
            setattr(args, name, longer)
            changed.append(f"{name} {value:g} -> {longer:g}")
    if args.overlap_grad_reduce and args.ddp_num_buckets is None:
        old = bucket_elements(args)
        unit = BUCKET_UNIT // (4 if args.accumulate_allreduce_grads_in_fp32 or not (args.fp16 or args.bf16) else 2)
        args.ddp_bucket_size = -(-old // unit) * unit
        changed.append(f"ddp_bucket_size {old:,} -> {args.ddp_bucket_size:,} (a multiple of 8 MiB)")
    return f"--adacc-lr-preset delayed: {', '.join(changed)}"


def bucket_elements(args: Namespace) -> int:
    """The elements of a bucket of gradients that Megatron reduces at a time, as its _ddp_wrap chooses them where
    --ddp-num-buckets does not."""
    if args.ddp_bucket_size is not None:
        return int(args.ddp_bucket_size)
    return max(40_000_000, 1_000_000 * args.data_parallel_size * args.context_parallel_size)


def own_optimizer(args: Namespace) -> bool:
    """Whether Adam is ours: its state in blocks, updated in delayed groups, or watched by the guard."""
    return args.adacc_state_plan != "full" or args.adacc_dgr_group_size != 1 or args.adacc_gradient_guard is not None


def _check_joint(args: Namespace) -> None:
    """The bytes of the state are to be chosen together with the activations' plan."""
    if args.adacc_plan != "auto":
        raise UserError(
            "--adacc-state-plan auto needs --adacc-state-limit, such as 60%, or --adacc-plan auto, with which it "
            "shares one limit in bytes."
        )
    if args.adacc_limit is not None and Limit.parse(args.adacc_limit).total_bytes is None:
        raise UserError(
            f"--adacc-limit {args.adacc_limit} is a share of the activations, of which the optimizer's state is no "
            "part: give it in bytes, such as 30GiB, or give --adacc-state-limit for the state."
        )
    if not 0 <= args.adacc_state_price < math.inf:
        raise UserError(f"--adacc-state-price is {args.adacc_state_price}, but a price is a number from 0 up.")


def state_limit(text: str) -> Limit:
    """What --adacc-state-limit says. Raises UserError where it says nothing."""
    try:
        return Limit.parse(text)
    except UserError:
        raise UserError(
            f"--adacc-state-limit is {text!r}, but it is a share of the static bytes (parameters, gradients, optimizer "
            "state) such as 60%, or bytes with a unit such as 10GiB."
        ) from None
