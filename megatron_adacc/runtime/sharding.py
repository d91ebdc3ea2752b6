"""Layers whose parameters are sharded (FSDP): what the engine can work with, and what it cannot.

A sharded layer gathers its parameters before its forward and again before its backward, and lets go of them in
between. That is as good as parameters that stay, provided that all are there while a recipe runs: recipes hold the
parameter, not its bytes, and run in the layer's backward. Where parts of a layer gather theirs by themselves, each
has them for its own forward and backward only, and a recipe, which rebuilds the whole layer at once, would read
what is not there.
"""

from __future__ import annotations

import sys

from torch import Tensor, nn

from megatron_adacc.errors import UserError
from megatron_adacc.graph.storages import has_plain_storage


def refuse_parts(layer: nn.Module, name: str) -> None:
    """Raises UserError where a part of the layer is sharded by itself; ``name`` is what the user is told."""
    if _is_wrapper(layer):
        raise UserError(
            f"{name} gathers its parameters inside its own forward: attach the module that it wraps, which is its "
            "attribute .module."
        )
    for path, part in layer.named_modules():
        if part is not layer and (_is_unit(part) or _is_wrapper(part)):
            raise UserError(
                f"{name} contains {path}, whose parameters are sharded by themselves and are not there when the layer "
                f"is recomputed: shard the layer as a whole (fully_shard on the layer, not on {path}), or attach the "
                "parts that are sharded instead of the layer."
            )


def refuse_absent(layer: nn.Module, name: str) -> None:
    """Raises UserError where a parameter has no memory although the layer's forward is about to begin."""
    for path, parameter in layer.named_parameters():
        if _is_absent(parameter):
            raise UserError(
                f"{name} begins its forward without the contents of {path}: parameters have to be gathered for the "
                "whole layer before its forward, not for its parts within."
            )


def _is_absent(parameter: Tensor) -> bool:
    return parameter.numel() > 0 and has_plain_storage(parameter) and parameter.untyped_storage().nbytes() == 0


def _is_unit(module: nn.Module) -> bool:
    """Whether fully_shard() was called on the module, for parameters of its own or of modules inside."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule) and any(True for _ in module.parameters())


def _is_wrapper(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)
