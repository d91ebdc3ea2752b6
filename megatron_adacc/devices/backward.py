"""Autograd's backward pass in Python, for fake tensors of a device that is not there.

Torch's engine looks after the streams of every device of the graph before it begins. On a machine without a GPU a
build for CUDA stops there ("hasPrimaryContext expects a valid device index"), although nothing would be computed.
Here the same nodes run in the same order, one after the other, in this thread:

    ready node with the largest sequence number first, accumulation into leaves before all others
    the gradients that arrive at one input of a node are added in the order of their arrival
    a gradient is reduced to the shape, and cast to the dtype, of what it is the gradient of
    a node, and with it all that it saved, is freed as soon as it has run

Hooks of tensors and nodes do not run, but those on a leaf's accumulated gradient do.
"""

from __future__ import annotations

import contextlib
import heapq
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

Gradients = list[Tensor | None]

ACCUMULATION = "torch::autograd::AccumulateGrad"


def run_backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], keep_graph: bool, create_graph: bool,
    inputs: Sequence[Tensor] = (), allow_unreachable: bool = True, accumulate_grad: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """In place of the engine behind Tensor.backward(). The outputs leave the graph, unless it is kept: they are
    what holds its nodes.

    Raises NotImplementedError for gradients of chosen inputs (torch.autograd.grad) and of gradients."""
    if inputs or not accumulate_grad or create_graph:
        raise NotImplementedError(
            "The backward pass over fake tensors accumulates into all leaves, and is not itself differentiated: call "
            "backward() without inputs= and create_graph=."
        )
    pending = _Pending()
    with torch.no_grad():
        for output, gradient in zip(outputs, gradients, strict=True):
            given = torch.ones_like(output) if gradient is None else gradient
            pending.add(_edge(output), given)
        if not keep_graph:
            for output in outputs:
                if output.grad_fn is not None:
                    output.detach_()
        del outputs, output, gradients, gradient, given
        while pending:
            node, arrived = pending.pop()
            edges = following(node)
            found = _run(node, arrived)
            del node, arrived
            for i, metadata in enumerate([node._input_metadata[place] for node, place in edges]):
                found[i] = _as_expected(found[i], metadata)
            while edges:
                pending.add(edges.pop(0), found.pop(0))
    return ()


def following(node: Any) -> list[tuple[Any, int]]:
    """(node, place among its inputs) of each edge that leads somewhere."""
    return [edge for edge in node.next_functions if edge[0] is not None]


def _edge(output: Tensor) -> tuple[Any, int]:
    edge = torch.autograd.graph.get_gradient_edge(output)
    return edge.node, edge.output_nr


def _run(node: Any, arrived: Gradients) -> list[Tensor | None]:
    """Gradients for the node's edges that lead somewhere, in order."""
    if node.name() == ACCUMULATION:
        _accumulate(node.variable, arrived)
        return []
    if isinstance(node, BackwardCFunction):
        # A Function written in Python sees zeros where nothing arrived, and answers for each argument of forward.
        metadata = node._input_metadata  # type: ignore[attr-defined]
        whole = [
            torch.zeros(m.shape, dtype=m.dtype, device=m.device) if g is None else g
            for g, m in zip(arrived, metadata, strict=True)
        ]
        answer = node.apply(*whole)
        answers = answer if isinstance(answer, tuple) else (answer,)
        wanted = node.needs_input_grad
        answers += (None,) * (len(wanted) - len(answers))
        return [g for g, w in zip(answers, wanted, strict=False) if w]
    answer = node(*arrived)
    answers = answer if isinstance(answer, tuple) else (answer,)
    return [g for g, edge in zip(answers, node.next_functions, strict=False) if edge[0] is not None]


class _Pending:
    """Nodes that wait for gradients. A node is ready when each that leads to it, of those reached, has run."""

    def __init__(self) -> None:
        self._waiting: Counter[Any] = Counter()
        self._arrived: dict[Any, Gradients] = {}
        self._ready: list[tuple[int, int, Any]] = []
        self._pushed = 0
        self._roots: dict[Any, None] = {}

    def __bool__(self) -> bool:
        return bool(self._ready or self._roots)

    def add(self, edge: tuple[Any, int], gradient: Tensor | None) -> None:
        """A gradient, or None, has come along the edge."""
        node, place = edge
        if node not in self._waiting:
            self._roots[node] = None
        if gradient is not None:
            slots = self._arrived.setdefault(node, [None] * len(node._input_metadata))
            slots[place] = gradient if slots[place] is None else _sum(slots, place, gradient)
        if node in self._roots:
            return
        self._waiting[node] -= 1
        if not self._waiting[node]:
            self._push(node)

    def pop(self) -> tuple[Any, Gradients]:
        """The next node to run, and what arrived at it."""
        if self._roots:
            self._count()
        _, _, node = heapq.heappop(self._ready)
        del self._waiting[node]
        arrived = self._arrived.pop(node, None)
        return node, [None] * len(node._input_metadata) if arrived is None else arrived

    def _push(self, node: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._ready, (-node._sequence_nr(), self._pushed, node))

    def _count(self) -> None:
        """Count, for every node that the roots lead to, how often it is led to."""
        seen = dict(self._roots)
        stack = list(seen)
        while stack:
            for node, _ in following(stack.pop()):
                self._waiting[node] += 1
                if node not in seen:
                    seen[node] = None
                    stack.append(node)
        for root in self._roots:
            if not self._waiting[root]:
                self._waiting[root] = 0
                self._push(root)
        self._roots = {}


def _as_expected(gradient: Tensor | None, metadata: Any) -> Tensor | None:
    """The gradient summed to the shape, and cast to the dtype, of the tensor that it belongs to."""
    if gradient is None:
        return None
    if gradient.size() != torch.Size(metadata.shape):
        gradient = gradient.sum_to_size(metadata.shape)
    return gradient if gradient.dtype == metadata.dtype else gradient.to(metadata.dtype)


def _sum(slots: Gradients, place: int, gradient: Tensor) -> Tensor:
    """What is in the slot plus the gradient, in the former's memory where nobody else holds it, as in the engine."""
    before = slots[place]
    slots[place] = None
    assert before is not None
    # Counted are this frame's name and getrefcount's argument.
    if sys.getrefcount(before) == 2 and _held_once(before):
        return before.add_(gradient)
    return before + gradient


def _held_once(tensor: Tensor) -> bool:
    """Whether nothing but its Python object holds the tensor, and nothing but the tensor its storage."""
    storage = tensor.untyped_storage()
    # The storage is counted for the tensor and for the name here.
    return tensor._use_count() == 1 and torch._C._storage_Use_Count(storage._cdata) == 2  # type: ignore[attr-defined]


def _accumulate(leaf: Tensor, arrived: Gradients) -> None:
    """Add to the leaf's gradient, or become it without a copy where nobody else holds what arrived: the node itself
    would copy, since the caller in Python holds it too."""
    gradient = arrived.pop()
    if gradient is None:
        return
    if leaf.grad is not None:
        leaf.grad.add_(gradient)
    elif sys.getrefcount(gradient) == 2 and _held_once(gradient) and gradient.stride() == leaf.stride():
        leaf.grad = gradient
    else:
        leaf.grad = torch.empty_strided(leaf.size(), leaf.stride(), dtype=gradient.dtype, device=gradient.device).copy_(
            gradient
        )
    del gradient
    for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)


@contextlib.contextmanager
def python_engine() -> Iterator[None]:
    """Inside, Tensor.backward() runs :func:`run_backward`."""
    modules: tuple[Any, ...] = (torch.autograd, torch.autograd.graph)
    original = torch.autograd.graph._engine_run_backward
    for module in modules:
        module._engine_run_backward = run_backward
    try:
        yield
    finally:
        for module in modules:
            module._engine_run_backward = original
