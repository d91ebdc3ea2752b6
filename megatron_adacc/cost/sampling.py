"""A sample of a layer without a training around it: one call, traced and verified."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_adacc.cost.timing import Sample
from megatron_adacc.graph.model import Origin
from megatron_adacc.graph.replay import Context, base_of
from megatron_adacc.graph.storages import call_tensors, named_tensors
from megatron_adacc.graph.tracer import Tracer
from megatron_adacc.graph.verify import verify


def sample_of(module: nn.Module, *args: Any, **kwargs: Any) -> Sample:
    """Run the layer once on these arguments and keep what its forward left behind.

    As for :func:`megatron_adacc.graph.trace`, the forward draws from the random generators. With one call no
    constant is proven: what is made from an unregistered tensor counts as not replayable."""
    tracer = Tracer(module, args, kwargs)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        tracer.pack(tensor)
        packed.append(tensor.detach())
        return packed[-1]

    inputs = [tensor.detach() for _, tensor in call_tensors(args, kwargs)]
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor), tracer:
        output = module(*args, **kwargs)
    traced = tracer.finish(output)
    graph = traced.graph
    saved: dict[int, Tensor] = {}
    for entry, tensor in zip(graph.packs, packed, strict=True):
        buffer = graph.buffers[entry.view.buffer]
        if buffer.storage >= 0 and buffer.index not in saved:
            saved[buffer.index] = base_of(tensor, entry.view, buffer)
    by_name = {(n.origin, n.name): n.tensor.detach() for n in named_tensors(module)}
    sources = {
        b.index: by_name[b.origin, b.name]
        for b in graph.buffers
        if (b.origin, b.name) in by_name and b.previous is None
    }
    for spec, tensor in reversed(list(zip(graph.inputs, inputs, strict=True))):
        if graph.buffers[spec.buffer].origin == Origin.INPUT:
            sources[spec.buffer] = tensor
    device = traced.device or torch.device("cpu")
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    context = Context(traced.objects, device, autocast)
    with torch.no_grad():
        evidence = verify(graph, saved, sources, context, module)
    return Sample(graph, evidence, saved, sources, context, module)
