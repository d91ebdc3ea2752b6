"""Tracing a layer: its ops, its buffers, what autograd saves, and recipes that rebuild it.

    graph = trace(layer, hidden_states, mask=None)
    print(graph)

Works on any nn.Module, on real tensors and on fake ones (FakeTensorMode), for a device that is not there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_adacc.graph.model import (
    Buffer,
    InputSpec,
    LayerGraph,
    Op,
    Origin,
    Pack,
    Role,
    Tagged,
    View,
)
from megatron_adacc.graph.recipes import Availability, Group, Step, group_recipes
from megatron_adacc.graph.serialize import fingerprint, from_json, to_json
from megatron_adacc.graph.tracer import Traced, Tracer
from megatron_adacc.graph.verify import Evidence, unverified, verify

__all__ = [
    "Availability",
    "Buffer",
    "Evidence",
    "Group",
    "InputSpec",
    "LayerGraph",
    "Op",
    "Origin",
    "Pack",
    "Role",
    "Step",
    "Tagged",
    "Traced",
    "Tracer",
    "View",
    "fingerprint",
    "from_json",
    "group_recipes",
    "to_json",
    "trace",
    "unverified",
    "verify",
]


def trace(module: nn.Module, *args: Any, **kwargs: Any) -> LayerGraph:
    """The graph of one forward of ``module`` on these arguments, run here and now with gradients enabled.

    The forward draws from the random generators and updates module buffers as any forward does. Arguments
    that are to receive a gradient must say ``requires_grad``: what autograd saves depends on it. Under
    FakeTensorMode nothing is computed and no device is needed.
    """
    tracer = Tracer(module, args, kwargs)
    kept = []  # a storage that was freed could be mistaken for a later one by the forward itself

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tracer.pack(tensor)
        kept.append(tensor.detach())
        return kept[-1]

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), tracer:
        output = module(*args, **kwargs)
    return tracer.finish(output).graph
