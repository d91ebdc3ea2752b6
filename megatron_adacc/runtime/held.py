"""Bytes that a forward keeps for its backward, for each layer and in all.

    held = sum of nbytes over the distinct storages that the autograd graph keeps alive,
           without those of parameters, module buffers and gradients

The same figure for every strategy, because it looks at the graph that the strategy left behind and not
at how it got there. docs/accounting.md says what is counted and what is not.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from megatron_adacc.runtime.boundaries import LayerBoundaries, layers_of_nodes
from megatron_adacc.runtime.graph_walk import GraphReader, Held, storages_of


@dataclass(frozen=True)
class HeldBytes:
    """Bytes held for backward after one forward.

    Attributes:
        total_bytes: in all, on the model's kind of device; the sum of `layer_bytes` and `outside_bytes`.
        layer_bytes: by layer name, zero for a layer that holds nothing. A storage that two layers hold
            is counted for the first.
        outside_bytes: held by what no layer made: embedding, final norm, output layer, loss.
        other_device_bytes: on other kinds of device, in all: host memory of a model on a GPU.
        unread_nodes: names of C++ autograd functions that expose nothing: what they hold is not counted.
    """

    total_bytes: int
    layer_bytes: Mapping[str, int]
    outside_bytes: int
    other_device_bytes: int
    unread_nodes: tuple[str, ...]


class HeldMeter:
    """Measures what a forward of `model` holds for its backward. It only reads.

    Each forward is measured right after it ran, before its backward and before the next forward of
    `model`; micro-batches and pipeline chunks still in flight are not part of the figure.

    Args:
        layers: the layers to report, by name.
        model: the module that contains them; its parameters, buffers and gradients are not counted.

    Raises:
        UserError: a layer is given twice, is not part of `model`, or contains another layer.
    """

    def __init__(self, layers: Mapping[str, nn.Module], model: nn.Module) -> None:
        self._layer_names = tuple(layers)
        self._model = model
        self._reader = GraphReader()
        self._boundaries = LayerBoundaries(layers, model)

    def measure(self, outputs: Any) -> HeldBytes:
        """What the graph behind `outputs` holds.

        Args:
            outputs: what the forward returned (tensors, or nested lists, tuples and dicts of them), or
                the loss computed from it. Without a graph, after an evaluation, every figure is zero.
        """
        graph = self._reader.read(outputs)
        layers = layers_of_nodes(graph.nodes, self._boundaries.calls)
        self._boundaries.clear()
        counted, device_type = self._not_counted()
        layer_bytes = dict.fromkeys(self._layer_names, 0)
        outside_bytes = other_device_bytes = 0
        for node, layer in zip(graph.nodes, layers, strict=True):
            on_device, elsewhere = _new_bytes(node.held, counted, device_type)
            other_device_bytes += elsewhere
            if layer is None:
                outside_bytes += on_device
            else:
                layer_bytes[layer] += on_device
        return HeldBytes(
            total_bytes=sum(layer_bytes.values()) + outside_bytes,
            layer_bytes=layer_bytes,
            outside_bytes=outside_bytes,
            other_device_bytes=other_device_bytes,
            unread_nodes=graph.unread_nodes,
        )

    def close(self) -> None:
        """Remove the hooks from the layers. A second call does nothing."""
        self._boundaries.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _not_counted(self) -> tuple[set[int], str]:
        """The storages of parameters, buffers and gradients as they are now, and the model's device type.

        Looked up at each forward: FSDP moves its parameters, gradients come and go. `main_grad` is the
        gradient that Megatron accumulates into; its Functions put it on ctx.
        """
        storages: set[int] = set()
        device_type: str | None = None
        for module in _modules(self._model):
            for parameter in module._parameters.values():
                if parameter is not None:
                    device_type = device_type or parameter.device.type
                    for tensor in (parameter, parameter.grad, getattr(parameter, "main_grad", None)):
                        if tensor is not None:
                            storages.update(storage._cdata for storage in storages_of(tensor))
            for buffer in module._buffers.values():
                if buffer is not None:
                    storages.update(storage._cdata for storage in storages_of(buffer))
        return storages, device_type or "cpu"


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """`model.modules()` at a fifth of its price, which is all in building names."""
    seen = {model}
    pending = [model]
    while pending:
        module = pending.pop()
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)


def _new_bytes(held: tuple[Held, ...], counted: set[int], device_type: str) -> tuple[int, int]:
    """Bytes of the storages of `held` that are not in `counted`, on the device and elsewhere; adds them."""
    on_device = elsewhere = 0
    for item in held:
        for storage in storages_of(item) if isinstance(item, torch.Tensor) else (item,):
            if storage._cdata in counted:
                continue
            counted.add(storage._cdata)
            # A fake tensor says which device it stands for, its storage says meta.
            if item.device.type == device_type:
                on_device += storage.nbytes()
            else:
                elsewhere += storage.nbytes()
    return on_device, elsewhere
