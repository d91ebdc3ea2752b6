"""Which layers a model has, and which policy the settings ask for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import nn
from torch.distributed import ProcessGroup

from megatron_adacc.adaptive.config import Config
from megatron_adacc.adaptive.staged import Staged, codec_of_role
from megatron_adacc.cost.limits import Limit
from megatron_adacc.planner import Plan
from megatron_adacc.runtime.attach import MIN_BYTES, room_on
from megatron_adacc.runtime.auto import Auto
from megatron_adacc.runtime.key import class_key
from megatron_adacc.runtime.policy import CompressAll, FromPlan, KeepAll, Policy, RecomputeAll, policy_for
from megatron_adacc.runtime.setting import Setting


def layers_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The layers in a model; what is given as a list or ModuleList is taken as it is."""
    if not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList):
        return list(model)
    stacks: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList) and not inside:
            stacks[path] = module
    return [layer for stack in stacks.values() for layer in stack] or [model]


def staged_policy(
    config: Config, layers: Sequence[nn.Module], setting: Setting | None = None, groups: Sequence[ProcessGroup] = (),
    plan: Plan | None = None,
) -> Staged:  # fmt: skip
    """The policy that the settings ask for. ``setting``: more about the run, for "auto"; ``groups``: process groups
    whose ranks follow one plan, for the others; ``plan``: what a plan file holds for these layers."""
    if config.plan == "auto":
        if setting is None:
            limit = None if config.limit is None else Limit.parse(config.limit)
            setting = Setting(limit, room_on, error_budget=config.error_budget, min_bytes=MIN_BYTES)
        places: dict[Hashable, list[int]] = {}
        for place, layer in enumerate(layers):
            places.setdefault(class_key(layer), []).append(place)
        classes = tuple(map(tuple, places.values()))
        waits = bool(setting.error_budget and config.warmup_steps)
        first = Auto(replace(setting, error_budget=0.0), classes) if waits else None
        return Staged(first, Auto(setting, classes))
    policy: Policy
    if config.plan == "compress":
        policy = CompressAll(MIN_BYTES, codec_of_role=codec_of_role(config.compression_levels))
    else:
        policy = policy_for(config.plan if plan is None else plan, MIN_BYTES)
    lossless = isinstance(policy, KeepAll | RecomputeAll) or (isinstance(policy, FromPlan) and policy.plan.lossless)
    waits = bool(config.warmup_steps) and not lossless
    return Staged(RecomputeAll(MIN_BYTES) if waits else None, policy, groups)
