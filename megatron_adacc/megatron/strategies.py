"""What --adacc-plan NAME does to Megatron's arguments: one class a strategy, one verb."""

from argparse import Namespace
from typing import ClassVar, Protocol

from megatron_adacc.errors import UserError

_RECOMPUTE_FLAGS = {
    "recompute_activations": "--recompute-activations",
    "recompute_granularity": "--recompute-granularity",
    "recompute_method": "--recompute-method",
    "recompute_num_layers": "--recompute-num-layers",
    "recompute_modules": "--recompute-modules",
    "distribute_saved_activations": "--distribute-saved-activations",
    "moe_layer_recompute": "--moe-layer-recompute",
}


class Strategy(Protocol):
    """Something that --adacc-plan can name."""

    name: ClassVar[str]

    def apply(self, args: Namespace) -> None:
        """Write the strategy into `args`, before Megatron validates them; UserError where it cannot work."""


def _refuse_own_recompute(strategy: str, args: Namespace) -> None:
    given = [flag for name, flag in _RECOMPUTE_FLAGS.items() if getattr(args, name, None)]
    if given:
        raise UserError(
            f"--adacc-plan {strategy} decides what is recomputed, and so does {given[0]}: leave out one of the two."
        )


class Off:
    """Megatron as it is; nothing is installed."""

    name: ClassVar[str] = "off"

    def apply(self, args: Namespace) -> None:
        """Nothing: Megatron's own recompute flags, if given, keep their meaning."""


class Full:
    """Megatron's full recompute: each layer keeps its input and is run again in the backward pass."""

    name: ClassVar[str] = "full"

    def apply(self, args: Namespace) -> None:
        """Recompute every layer on its own."""
        _refuse_own_recompute(self.name, args)
        args.recompute_granularity = "full"
        args.recompute_method = "uniform"
        args.recompute_num_layers = 1


class Selective:
    """Megatron's selective recompute: scores, softmax and dropout of the attention are run again."""

    name: ClassVar[str] = "selective"

    def apply(self, args: Namespace) -> None:
        """Recompute the core attention of every layer."""
        _refuse_own_recompute(self.name, args)
        args.recompute_granularity = "selective"
        args.recompute_modules = ["core_attn"]


STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in (Off(), Full(), Selective())}


def get(name: str) -> Strategy:
    """The strategy of that name; UserError, naming the known ones, otherwise."""
    try:
        return STRATEGIES[name]
    except KeyError:
        raise UserError(f"--adacc-plan is {name!r}, but the known plans are {', '.join(STRATEGIES)}.") from None
