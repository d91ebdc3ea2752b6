"""Which layer made which node of the graph, from autograd's own numbering.

Autograd numbers the nodes a thread creates, in order and without a reset. A call of layer l that runs
while the next number goes from start to end made exactly the nodes

    start <= sequence_nr < end                                                              (1)

A layer that runs without grad inside an autograd.Function (full recompute) makes no node. The Function
does: it is numbered before it runs the layer, and everything between its number and the layer's start
ran without grad, so is in no graph. It is therefore

    the last node of the graph before start, if a Python Function made after the previous layer  (2)

A Function that wraps several layers is counted for the first of them.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from megatron_adacc.errors import UserError
from megatron_adacc.runtime.graph_walk import NodeHoldings


@dataclass(frozen=True)
class LayerCall:
    """One run of a layer's forward: its name, and autograd's next sequence number before and after."""

    layer: str
    start: int
    end: int
    with_grad: bool


def layers_of_nodes(nodes: Sequence[NodeHoldings], calls: Sequence[LayerCall]) -> list[str | None]:
    """The layer of each node, None for a node that no layer made.

    Args:
        nodes: the nodes of one graph, sorted by sequence number.
        calls: the calls of that forward, sorted by start; they do not overlap.
    """
    starts = [call.start for call in calls]
    layers: list[str | None] = []
    for node in nodes:
        position = bisect_right(starts, node.sequence_nr) - 1
        inside = position >= 0 and node.sequence_nr < calls[position].end
        layers.append(calls[position].layer if inside else None)  # (1)
    numbers = [node.sequence_nr for node in nodes]
    previous_end = 0
    for call in calls:
        if not call.with_grad:
            before = bisect_right(numbers, call.start - 1) - 1
            if before >= 0 and numbers[before] >= previous_end and nodes[before].is_python:
                layers[before] = call.layer  # (2)
        previous_end = call.end
    return layers


class LayerBoundaries:
    """Records the calls of some layers during one forward of the module that contains them.

    Forward hooks on the layers read autograd's next sequence number, and nothing else; a hook on `root`
    forgets the previous forward. Inside a compiled region nothing is recorded: the region is one node.

    Args:
        layers: the layers by name; none contains another.
        root: the module whose forward calls the layers.

    Raises:
        UserError: a layer is given twice, is not part of `root`, or contains another layer.
    """

    def __init__(self, layers: Mapping[str, nn.Module], root: nn.Module) -> None:
        _check_layers(layers, root)
        self._open: list[tuple[str, int, bool]] = []
        self._calls: list[LayerCall] = []
        self._handles = []
        for name, layer in layers.items():
            self._handles.append(layer.register_forward_pre_hook(self._enter_hook(name), prepend=True))
            self._handles.append(layer.register_forward_hook(self._leave_hook(name)))
        # Last and prepended: where the root is itself a layer, it is forgotten before it is entered.
        self._handles.append(root.register_forward_pre_hook(self._root_hook, prepend=True))

    @property
    def calls(self) -> tuple[LayerCall, ...]:
        """The finished calls since the forward of `root` began, in order."""
        return tuple(self._calls)

    def clear(self) -> None:
        """Forget the calls recorded so far."""
        self._open.clear()
        self._calls.clear()

    def close(self) -> None:
        """Remove the hooks. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _root_hook(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.clear()

    def _enter_hook(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling():
                number = torch._C._autograd._get_sequence_nr()
                self._open.append((name, number, torch.is_grad_enabled()))

        return enter

    def _leave_hook(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            # A call that raised was never left: what lies above ours on the stack is such a call.
            while self._open:
                layer, start, with_grad = self._open.pop()
                if layer == name:
                    end = torch._C._autograd._get_sequence_nr()
                    self._calls.append(LayerCall(name, start, end, with_grad))
                    return

        return leave


def _check_layers(layers: Mapping[str, nn.Module], root: nn.Module) -> None:
    inside = {id(module) for module in root.modules()}
    names = {id(layer): name for name, layer in layers.items()}
    for name, layer in layers.items():
        if names[id(layer)] != name:
            raise UserError(f"The layers '{name}' and '{names[id(layer)]}' are the same module: name each layer once.")
        if id(layer) not in inside:
            raise UserError(
                f"The layer '{name}' is not part of the model whose memory is measured: "
                "give the module that contains all layers."
            )
        for part in layer.modules():
            if part is not layer and id(part) in names:
                raise UserError(
                    f"The layer '{name}' contains the layer '{names[id(part)]}': "
                    "give either the outer or the inner ones."
                )
