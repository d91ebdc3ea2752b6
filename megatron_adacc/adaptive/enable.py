"""enable_memory_optim(): attach with adaptation, for any training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_adacc.adaptive.config import Config
from megatron_adacc.adaptive.controller import AdaptiveHandle
from megatron_adacc.adaptive.policies import layers_of, staged_policy
from megatron_adacc.cost.limits import Limit
from megatron_adacc.runtime.attach import MIN_BYTES, attach, room_on
from megatron_adacc.runtime.setting import Setting


def enable_memory_optim(
    model: nn.Module | Sequence[nn.Module],
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
) -> AdaptiveHandle:
    """Attach with adaptation, for any training loop.

        handle = enable_memory_optim(model, {"max_interval": 32})
        for batch in batches:
            loss = train_step(model, batch)          # forward, backward, optimizer
            handle.step(loss)

    Args:
        model: the layers, as for attach(); or a model that contains them in a ModuleList (each outermost ModuleList is
            a stack of layers; a model without one is one layer).
        config: settings as a Config, a dict, or the path of a YAML file; None for the defaults.
        groups: process groups whose ranks hold the same layers and channels, such as data-parallel ones (not
            tensor-parallel: their ranks hold different channels). All ranks of a group call step() equally often.

    Returns:
        a handle; ``handle.detach()`` leaves the layers as they were. It is a context manager. Where step() is never
        called the first plan stays as it is.

    Raises:
        UserError: settings or layers that are not right, as Config and attach() say.
    """
    if config is None or isinstance(config, Mapping):
        config = Config.from_mapping(config or {})
    elif not isinstance(config, Config):
        config = Config.load(config)
    layers = layers_of(model)
    setting = None
    if config.plan == "auto":
        limit = None if config.limit is None else Limit.parse(config.limit)
        setting = Setting(limit, room_on, groups=groups, error_budget=config.error_budget, min_bytes=MIN_BYTES)
    return AdaptiveHandle(attach(layers, staged_policy(config, layers, setting, groups)), config, groups)
