"""The --adacc-* flags: one dataclass, turned into an argparse group by Megatron's own factory."""

import math
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field, fields

from megatron_adacc.adaptive.config import Config
from megatron_adacc.cost.limits import Limit
from megatron_adacc.devices import DEVICES
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import base_format, lora, optim_settings, state_flags, strategies


@dataclass
class AdaccFlags:
    """Adaptive activation memory (megatron-adacc)."""

    adacc_plan: str = field(default="off", metadata={"argparse_meta": {"metavar": "PLAN"}})
    """What becomes of the activations that backward needs: off (Megatron as it is), full (every layer is
    recomputed), selective (the core attention is recomputed); keep, recompute (all that can be made again bit
    for bit is, dropout masks are stored as bits), compress (each tensor by the codec of its role, lossy) or
    quantize (INT4 of everything without outlier separation, lossy, to compare with); auto (what the solver finds
    fastest within --adacc-limit, from costs measured on this device); or the path of a plan file."""

    adacc_limit: str | None = field(default=None, metadata={"argparse_meta": {"type": str, "metavar": "LIMIT"}})
    """For --adacc-plan auto: bytes such as 30GiB for everything on the device, or a share such as 25%% of the
    activations that the layers hold without a plan. Default: the device's memory less 5 %%."""

    adacc_error_budget: float = field(default=0.0, metadata={"argparse_meta": {"metavar": "ERROR"}})
    """For --adacc-plan auto: the relative gradient error that lossy actions may cost, as the root mean square over the
    layers, such as 0.02. Default: 0, nothing lossy."""

    adacc_config: str | None = field(default=None, metadata={"argparse_meta": {"type": str, "metavar": "FILE"}})
    """A YAML file with settings of adaptation by name (docs/adaptation.md); flags come before it. It may name the plan,
    too."""

    adacc_warmup_steps: int | None = field(default=None, metadata={"argparse_meta": {"type": int, "metavar": "N"}})
    """Steps under a lossless plan before a lossy one begins. Default: 100."""

    adacc_min_interval: int | None = field(default=None, metadata={"argparse_meta": {"type": int, "metavar": "N"}})
    """Steps from a check that changed something to the next. Default: 1."""

    adacc_max_interval: int | None = field(default=None, metadata={"argparse_meta": {"type": int, "metavar": "N"}})
    """Steps between checks while nothing changes. Default: 64."""

    adacc_outlier_threshold: float | None = field(
        default=None, metadata={"argparse_meta": {"type": float, "metavar": "Z"}}
    )
    """z of a channel's magnitude above which it is an outlier. Default: 3."""

    adacc_compression_levels: str | None = field(
        default=None, metadata={"argparse_meta": {"type": str, "metavar": "LEVELS"}}
    )
    """For --adacc-plan compress: Linear=LEVEL,Attention=LEVEL with the levels outlier_separated, channel_wise, direct
    or none. Default: Linear=outlier_separated,Attention=channel_wise."""

    adacc_check_gradients_every: int | None = field(
        default=None, metadata={"argparse_meta": {"type": int, "metavar": "N"}}
    )
    """Every N steps compare each layer's gradients with exact ones, and log it. Default: never."""

    adacc_max_gradient_error: float | None = field(
        default=None, metadata={"argparse_meta": {"type": float, "metavar": "ERROR"}}
    )
    """Relative error in such a comparison above which a layer's lossy actions end. Default: 0.3."""

    adacc_state_plan: str = field(default="full", metadata={"argparse_meta": {"metavar": "PLAN"}})
    """How many bits Adam's moments have: full (Megatron as it is), 16, 8 or 4 for all of them, or auto (by block, from
    its importance, within --adacc-state-limit). All but full change the training (docs/states.md)."""

    adacc_state_limit: str | None = field(default=None, metadata={"argparse_meta": {"type": str, "metavar": "LIMIT"}})
    """For --adacc-state-plan auto: parameters, gradients and optimizer state of a rank, as a share of what they take
    without a state plan, such as 60%%, or in bytes. Without it the state's bytes are chosen together with
    --adacc-plan auto, under its limit."""

    adacc_state_price: float = field(
        default=state_flags.DEFAULT_PRICE, metadata={"argparse_meta": {"metavar": "SHARE"}}
    )
    """Where state and activations share a limit: the part of a step's time that an update without error is worth,
    against one whose squared error is as large as itself. Default: 0.05."""

    adacc_dgr_group_size: int = field(default=1, metadata={"argparse_meta": {"metavar": "N"}})
    """Delayed updates: layers in N groups, of which each step updates one with the mean of its gradients since its last
    turn. Default: 1, as without (docs/states.md)."""

    adacc_dgr_offload: bool = False
    """With --adacc-dgr-group-size: Adam's moments are on the device for the group that is updated next, and all others
    in pinned host memory, without CUDA in a file. Changes no bit (docs/states.md)."""

    adacc_dgr_offload_dir: str | None = field(default=None, metadata={"argparse_meta": {"type": str, "metavar": "DIR"}})
    """The folder of that file. Default: the system's for temporary files."""

    adacc_gradient_guard: str | None = field(
        default=None, metadata={"argparse_meta": {"type": str, "choices": list(state_flags.GUARDS)}}
    )
    """What is done, and logged, where the gradient norm leaves its band: clip to the band's edge, or recipe, multiply
    by 2^5 over the largest norm of a parameter. Before --clip-grad."""

    adacc_lr_preset: str | None = field(
        default=None, metadata={"argparse_meta": {"type": str, "choices": list(state_flags.PRESETS)}}
    )
    """delayed: the learning rate times 1.2 for 2 delayed groups to 1.5 for 6 and more, and a warm-up 30 %% longer. What
    comes out is printed."""

    adacc_device: str | None = field(default=None, metadata={"argparse_meta": {"type": str, "choices": list(DEVICES)}})
    """Where to train: cpu or cuda. Default: cuda where a GPU answers, else cpu."""

    adacc_report: str | None = field(default=None, metadata={"argparse_meta": {"type": str, "metavar": "FILE"}})
    """Write losses, step times and activation memory of every iteration to FILE, as JSON."""

    adacc_lora_rank: int | None = field(default=None, metadata={"argparse_meta": {"type": int, "metavar": "R"}})
    """Train LoRA adapters of rank R beside a frozen base, which --pretrained-checkpoint names (docs/finetuning.md)."""

    adacc_lora_alpha: float | None = field(
        default=None, metadata={"argparse_meta": {"type": float, "metavar": "ALPHA"}}
    )
    """The adapters' part is scaled by ALPHA / R. Default: 2 R."""

    adacc_lora_targets: str | None = field(default=None, metadata={"argparse_meta": {"type": str, "metavar": "NAMES"}})
    """Linear layers that get an adapter. Default: linear_qkv,linear_proj,linear_fc1,linear_fc2."""

    adacc_base: str = field(
        default=base_format.PLAIN, metadata={"argparse_meta": {"type": str, "choices": list(base_format.FORMATS)}}
    )
    """Bits of the frozen base beside --adacc-lora-rank: as it is loaded (16bit), NF4 (4.5 bits a parameter, nf4-double
    4.13), LLM.int8() (8) or GPTQ (4.3); the weight is decoded where it is used (docs/finetuning.md)."""

    adacc_base_text: str | None = field(default=None, metadata={"argparse_meta": {"type": str, "metavar": "FILE"}})
    """For --adacc-base int8 and gptq4: text to calibrate with, as UTF-8 or as JSON lines with "text". 128 sequences of
    it are used."""


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add the group to one of Megatron's parsers."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory(AdaccFlags).build_group(parser, "adacc")
    return parser


def complete(args: Namespace, given: list[str]) -> None:
    """Check the flags of `given` (the command line) and write what the plan means into Megatron's namespace.

    Only builtins are written: a checkpoint pickles the namespace, and must load without us. Raises
    UserError for an unknown plan and for combinations that cannot work.
    """
    if not hasattr(args, "adacc_plan"):
        # --yaml-cfg makes a namespace of its own, without any flag of the command line.
        if any(
            token.startswith(("--adacc-plan", "--adacc-report", "--adacc-lora-", "--adacc-base")) for token in given
        ):
            raise UserError(
                "--adacc-plan, --adacc-report and --adacc-lora-rank do not reach a run that is configured by "
                "--yaml-cfg: give Megatron's settings as flags instead."
            )
        for flag in fields(AdaccFlags):
            setattr(args, flag.name, flag.default)
    _take_plan_of_file(args, given)
    strategies.get(args.adacc_plan).apply(args)
    _check_auto(args)
    _check_adaptation(args)
    optim_settings.complete(args, given)
    state_flags.check(args)
    lora.complete(args)
    base_format.complete(args)


# Settings of adaptation that have a flag of their own.
_SETTINGS = (
    "warmup_steps",
    "min_interval",
    "max_interval",
    "outlier_threshold",
    "compression_levels",
    "check_gradients_every",
    "max_gradient_error",
)


def config_of(args: Namespace) -> Config | None:
    """The settings of adaptation: flags, before the file, before the defaults; None for a plan that is not ours.

    Raises UserError for settings that are not right."""
    if strategies.get(args.adacc_plan).plan is None:
        return None
    settings = {} if args.adacc_config is None else Config.settings_in(args.adacc_config, (optim_settings.SECTION,))
    settings.pop(optim_settings.SECTION, None)
    settings["plan"] = args.adacc_plan
    if args.adacc_limit is not None:
        settings["limit"] = args.adacc_limit
    if args.adacc_error_budget:
        settings["error_budget"] = args.adacc_error_budget
    given = {name: getattr(args, f"adacc_{name}") for name in _SETTINGS}
    if given["compression_levels"] is not None:
        given["compression_levels"] = _levels(given["compression_levels"])
    return Config.from_mapping(settings | {name: value for name, value in given.items() if value is not None})


def _levels(text: str) -> dict[str, str]:
    pairs = [part.split("=") for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise UserError(
            f"--adacc-compression-levels is {text!r}, but it must be like "
            "Linear=outlier_separated,Attention=channel_wise."
        )
    return {target.strip(): level.strip() for target, level in pairs}


def _take_plan_of_file(args: Namespace, given: list[str]) -> None:
    """The file of settings may name the plan where the command line does not."""
    if args.adacc_config is None or any(token.split("=")[0] == "--adacc-plan" for token in given):
        return
    plan = Config.settings_in(args.adacc_config, (optim_settings.SECTION,)).get("plan")
    if not isinstance(plan, str):
        raise UserError(
            f"--adacc-config {args.adacc_config} does not name a plan, and neither does the command line: add "
            "--adacc-plan auto, or plan: auto to the file."
        )
    args.adacc_plan = plan


def _check_adaptation(args: Namespace) -> None:
    """Raises UserError for settings that are not right, or that the plan does not look at."""
    given = [name for name in ("config", *_SETTINGS) if getattr(args, f"adacc_{name}") is not None]
    if given and strategies.get(args.adacc_plan).plan is None:
        raise UserError(
            f"--adacc-{given[0].replace('_', '-')} is for plans of ours; --adacc-plan {args.adacc_plan} is Megatron's "
            "own and does not adapt: leave it out, or use --adacc-plan auto."
        )
    config_of(args)


def _check_auto(args: Namespace) -> None:
    """Raises UserError for a limit or error budget that cannot be meant."""
    if args.adacc_limit is not None:
        if args.adacc_plan != "auto":
            raise UserError(
                f"--adacc-limit is for --adacc-plan auto; --adacc-plan {args.adacc_plan} does not look at a limit: "
                "leave it out."
            )
        Limit.parse(args.adacc_limit)
    if not 0 <= args.adacc_error_budget < math.inf:
        raise UserError(f"--adacc-error-budget is {args.adacc_error_budget}, but an error is a number from 0 up.")
