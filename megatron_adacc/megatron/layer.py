"""AdaccTransformerLayer: Megatron's TransformerLayer, marked so that a plan is attached to it.

It computes what its parent computes, with the same parameters under the same names, so that checkpoints go
both ways. A spec of one's own can name it; with --adacc-plan PLAN every spec that names TransformerLayer, or
a class made from it (MoE layers among them), builds it instead (patches/core_transformer_spec_utils.py).
"""

import functools
import os
from argparse import Namespace

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_adacc.megatron.auto_setting import setting_of
from megatron_adacc.megatron.plan_notes import check_plan
from megatron_adacc.megatron.strategies import Strategy
from megatron_adacc.planner import Plan
from megatron_adacc.runtime.attach import Handle, attach


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


def attach_plan(strategy: Strategy, model: list[torch.nn.Module], args: Namespace) -> Handle | None:
    """Attach the strategy's plan to all marked layers of this rank's model chunks; None where there is nothing to."""
    if strategy.plan is None:
        return None
    found = [
        (i, module) for i, chunk in enumerate(model) for module in chunk.modules() if isinstance(module, AdaccMark)
    ]
    if not found:
        return None
    layers = [module for _, module in found]
    if os.path.isfile(strategy.plan):
        return attach(layers, plan_of_file(strategy.plan, args))
    setting = setting_of(args, [i for i, _ in found]) if strategy.plan == "auto" else None
    return attach(layers, strategy.plan, setting=setting)


def plan_of_file(path: str, args: Namespace) -> Plan:
    """This rank's part of a plan file. Raises UserError where it was made for another job."""
    plan = Plan.load(path)
    check_plan(plan, path, args)
    return plan.of_stage(parallel_state.get_pipeline_model_parallel_rank())
