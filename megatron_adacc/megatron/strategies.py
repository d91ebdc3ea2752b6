"""What --adacc-plan names: one class a strategy, with what it does to Megatron's arguments and layers."""

import os
from argparse import Namespace
from dataclasses import dataclass
from typing import ClassVar, Protocol

from megatron_adacc.errors import UserError
from megatron_adacc.planner import Plan

_RECOMPUTE_FLAGS = {
    "recompute_activations": "--recompute-activations",
    "recompute_granularity": "--recompute-granularity",
    "recompute_method": "--recompute-method",
    "recompute_num_layers": "--recompute-num-layers",
    "recompute_modules": "--recompute-modules",
    "distribute_saved_activations": "--distribute-saved-activations",
    "moe_layer_recompute": "--moe-layer-recompute",
}


# What else would decide about the tensors that a plan decides about, or hide them from it.
_OTHERS = {
    "cpu_offloading_num_layers": "--cpu-offloading-num-layers",
    "fine_grained_activation_offloading": "--fine-grained-activation-offloading",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
}


class Strategy(Protocol):
    """Something that --adacc-plan can name."""

    @property
    def name(self) -> str:
        """As it is written behind --adacc-plan."""

    @property
    def plan(self) -> str | None:
        """What is attached to the transformer layers (attach()'s plan), None where nothing is."""

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
    plan: ClassVar[None] = None

    def apply(self, args: Namespace) -> None:
        """Nothing: Megatron's own recompute flags, if given, keep their meaning."""


class Full:
    """Megatron's full recompute: each layer keeps its input and is run again in the backward pass."""

    name: ClassVar[str] = "full"
    plan: ClassVar[None] = None

    def apply(self, args: Namespace) -> None:
        """Recompute every layer on its own."""
        _refuse_own_recompute(self.name, args)
        args.recompute_granularity = "full"
        args.recompute_method = "uniform"
        args.recompute_num_layers = 1


class Selective:
    """Megatron's selective recompute: scores, softmax and dropout of the attention are run again."""

    name: ClassVar[str] = "selective"
    plan: ClassVar[None] = None

    def apply(self, args: Namespace) -> None:
        """Recompute the core attention of every layer."""
        _refuse_own_recompute(self.name, args)
        args.recompute_granularity = "selective"
        args.recompute_modules = ["core_attn"]


@dataclass(frozen=True)
class Attached:
    """A plan of our own, attached to every transformer layer: by its name, or from a plan file."""

    name: str

    @property
    def plan(self) -> str:
        """The name or path, as attach() takes it."""
        return self.name

    def apply(self, args: Namespace) -> None:
        """Nothing is changed; UserError for what decides about the same tensors."""
        _refuse_own_recompute(self.name, args)
        for name, flag in _OTHERS.items():
            if getattr(args, name, None):
                raise UserError(
                    f"--adacc-plan {self.name} decides what becomes of the activations, and so does {flag}: leave out "
                    "one of the two."
                )
        if getattr(args, "megatron_fsdp_enable_fine_grained_param_gather", False):
            raise UserError(
                f"--adacc-plan {self.name} recomputes a layer as a whole, and with --megatron-fsdp-enable-fine-grained-"
                "param-gather a layer never has all its parameters at once: leave out one of the two."
            )
        if getattr(args, "cuda_graph_impl", "none") not in ("none", None):
            raise UserError(
                f"--adacc-plan {self.name} works on the operations of a layer, and --cuda-graph-impl "
                f"{args.cuda_graph_impl} replaces them by one graph: leave out one of the two."
            )


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Off(),
        Full(),
        Selective(),
        Attached("keep"),
        Attached("recompute"),
        Attached("compress"),
        Attached("quantize"),
        Attached("auto"),
    )
}


def get(name: str) -> Strategy:
    """The strategy of that name, or of a plan file; UserError, naming the known ones, otherwise."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    if os.path.isfile(name):
        Plan.load(name)  # a file that is no plan is refused here, not at the first step
        return Attached(name)
    raise UserError(
        f"--adacc-plan is {name!r}, but the known plans are {', '.join(STRATEGIES)}, or the path of a plan file."
    )
