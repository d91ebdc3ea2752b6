"""AdaccTransformerLayer: Megatron's TransformerLayer, marked so that a plan is attached to it.

It computes what its parent computes, with the same parameters under the same names, so that checkpoints go
both ways. A spec of one's own can name it; with --adacc-plan PLAN every spec that names TransformerLayer, or
a class made from it (MoE layers among them), builds it instead (patches/core_transformer_spec_utils.py).
"""

import functools

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer


class AdaccMark:
    """What a layer inherits that a plan is to be attached to."""


class AdaccTransformerLayer(AdaccMark, TransformerLayer):
    """Drop-in replacement for TransformerLayer in Megatron's layer specs."""


@functools.cache
def marked(layer_class: type) -> type:
    """`layer_class` itself where it is marked or no TransformerLayer; else the subclass that is marked."""
    if not issubclass(layer_class, TransformerLayer) or issubclass(layer_class, AdaccMark):
        return layer_class
    if layer_class is TransformerLayer:
        return AdaccTransformerLayer
    return type(f"Adacc{layer_class.__name__}", (AdaccMark, layer_class), {"__module__": __name__})


def marked_layers(model: list[torch.nn.Module]) -> list[tuple[int, torch.nn.Module]]:
    """The layers of this rank's model chunks that a plan is attached to, each with its chunk's number."""
    return [(i, module) for i, chunk in enumerate(model) for module in chunk.modules() if isinstance(module, AdaccMark)]
