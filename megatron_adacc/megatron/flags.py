"""The --adacc-* flags: one dataclass, turned into an argparse group by Megatron's own factory."""

import math
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field, fields

from megatron_adacc.cost.limits import Limit
from megatron_adacc.devices import DEVICES
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import strategies


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

    adacc_device: str | None = field(default=None, metadata={"argparse_meta": {"type": str, "choices": list(DEVICES)}})
    """Where to train: cpu or cuda. Default: cuda where a GPU answers, else cpu."""

    adacc_report: str | None = field(default=None, metadata={"argparse_meta": {"type": str, "metavar": "FILE"}})
    """Write losses, step times and activation memory of every iteration to FILE, as JSON."""


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
        if any(token.startswith(("--adacc-plan", "--adacc-report")) for token in given):
            raise UserError(
                "--adacc-plan and --adacc-report do not reach a run that is configured by --yaml-cfg: give Megatron's "
                "settings as flags instead."
            )
        for flag in fields(AdaccFlags):
            setattr(args, flag.name, flag.default)
    strategies.get(args.adacc_plan).apply(args)
    _check_auto(args)


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
