"""Gradient errors for layers that cannot be run: assumed from layers that were measured.

    python benchmarks/layer_errors.py --table

For each role and codec, the largest error over the buffers of that role in two GPT and two Llama layers (hidden 512,
sequence 512, fp32, CPU; fresh weights, normal inputs). Errors are those of cost/errors.py. They hardly depend on
the layer's width and length (hidden 128 and sequence 64 gave the same within a third), but trained layers have
outlier channels: a plan made from these figures says that its errors are assumed, and a start on the device measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from megatron_adacc.cost.layer_problem import Offer
from megatron_adacc.graph.model import LayerGraph, Role

TYPICAL: Mapping[tuple[Role, str], float] = MappingProxyType(
    {
        (Role.NORM_OUTPUT, "outlier_int4"): 0.056,
        (Role.NORM_OUTPUT, "outlier_int8"): 0.0035,
        (Role.NORM_OUTPUT, "outlier_int2"): 0.23,
        (Role.QUERY_KEY_VALUE, "channel_int4"): 0.047,
        (Role.QUERY_KEY_VALUE, "group_int8"): 0.003,
        (Role.QUERY_KEY_VALUE, "group_int2"): 0.19,
        (Role.ATTENTION_PROBABILITIES, "affine_int4"): 0.019,
        (Role.ATTENTION_PROBABILITIES, "group_int8"): 0.0024,
        (Role.ATTENTION_PROBABILITIES, "group_int2"): 0.15,
        (Role.LINEAR_INPUT, "outlier_int4"): 0.058,
        (Role.LINEAR_INPUT, "outlier_int8"): 0.0039,
        (Role.LINEAR_INPUT, "affine_int4"): 0.054,
        (Role.LINEAR_INPUT, "outlier_int2"): 0.17,
        (Role.RESIDUAL, "outlier_int4"): 0.03,
        (Role.RESIDUAL, "outlier_int8"): 0.0018,
        (Role.RESIDUAL, "outlier_int2"): 0.12,
        (Role.OTHER, "group_int4"): 0.057,
        (Role.OTHER, "group_int8"): 0.0035,
        (Role.OTHER, "affine_int4"): 0.04,
        (Role.OTHER, "group_int2"): 0.21,
    }
)


def typical_errors(graph: LayerGraph, choices: Iterable[Offer]) -> dict[tuple[int, str], float]:
    """Assumed errors by the choice's buffer and label, as gradient_errors() gives measured ones. A choice whose role
    and codec are not in the table is left out."""
    found = {}
    for choice in choices:
        error = TYPICAL.get((graph.role(choice.buffer), choice.action.codec))
        if error is not None:
            found[choice.buffer, choice.label] = error
    return found
