"""What autograd runs for a traced layer, estimated op by op from the forward's graph.

    matrix products      two of the same size, on the same bytes
    attention            five products where the forward has two, on twice the bytes
    a b                  for each operand with a gradient: the result's gradient and the other read, one written
    a + b, copies        nothing; for an operand that was broadcast a sum over rows, which reads the result's gradient
    other linear ops     the forward's bytes
    other ops            the forward's bytes and the result's: its gradient and what was saved are read

    a tensor that k ops read as it is        k - 1 sums of two gradients
    a tensor that ops read in parts          one copy that joins the parts' gradients

Only ops that a gradient goes through count: a dropout mask's do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from megatron_adacc.cost.counts import ATTENTION, FREE, Work, op_leaf, op_work, view_bytes
from megatron_adacc.graph.model import FLOAT_DTYPES, LayerGraph, Op, Origin, View
from megatron_adacc.graph.tracer import EMPTY_NAMES

PASSED_ON = frozenset({"add", "sub", "clone", "copy"})
# Results that do not depend on the values that are read.
SHAPED = EMPTY_NAMES | {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
LINEAR = frozenset({"div", "neg", "masked_fill", "_to_copy", "native_dropout_backward", "sum", "mean", "cat"})


def with_gradient(graph: LayerGraph) -> tuple[frozenset[int], frozenset[int]]:
    """Ops and buffers that a gradient goes through: float results that depend on a parameter or on an input that
    requires a gradient."""
    wanted = {spec.buffer for spec in graph.inputs if spec.requires_grad}
    carrying = {b.index for b in graph.buffers if b.origin == Origin.PARAMETER or b.index in wanted}
    ops = set()
    for op in graph.ops:
        if carrying.isdisjoint(op.reads) or op_leaf(op) in SHAPED:
            continue
        floats = [b for b in op.writes if graph.buffers[b].base.dtype in FLOAT_DTYPES]
        carrying.update(floats)
        if floats:
            ops.add(op.index)
    return frozenset(ops), frozenset(carrying)


def backward_work(graph: LayerGraph) -> list[Work]:
    """The kernels of the layer's backward, but for collectives."""
    ops, carrying = with_gradient(graph)
    found = [work for o in sorted(ops) for work in _of_op(graph, graph.ops[o], carrying)]
    return found + list(_sums(graph, ops, carrying))


def _of_op(graph: LayerGraph, op: Op, carrying: Collection[int]) -> Iterator[Work]:
    if op.collective or op_leaf(op) in FREE:
        return
    forward = op_work(graph, op)
    leaf = op_leaf(op).removesuffix("_")
    result = max((graph.buffers[b].base for b in op.writes), key=lambda base: base.nbytes)
    operands = [v for v in op.views() if v.buffer in carrying and v.dtype in FLOAT_DTYPES]
    if op_leaf(op) in ATTENTION:
        yield Work(forward.flops * 5 // 2, 2 * forward.bytes, forward.dtype)
    elif forward.flops:
        yield forward
        yield forward
    elif leaf == "mul":
        for position, view in enumerate(operands):
            others = [v for i, v in enumerate(operands) if i != position]
            others += [v for v in op.views() if v.buffer not in carrying]
            yield Work(0, result.nbytes + sum(map(view_bytes, others)) + view_bytes(view), forward.dtype)
    elif leaf in PASSED_ON:
        for view in operands:
            if view.numel < result.numel:
                yield Work(0, result.nbytes + view_bytes(view), forward.dtype)
    elif leaf in LINEAR:
        yield forward
    else:
        yield Work(0, forward.bytes + result.nbytes, forward.dtype)


def _sums(graph: LayerGraph, ops: Collection[int], carrying: Collection[int]) -> Iterator[Work]:
    """Where gradients of one tensor come together."""
    readers: dict[int, Counter[View]] = {}
    for o in sorted(ops):
        for view in dict.fromkeys(graph.ops[o].views()):
            activation = graph.buffers[view.buffer].origin != Origin.PARAMETER
            if view.buffer in carrying and activation and view.dtype in FLOAT_DTYPES:
                readers.setdefault(view.buffer, Counter())[view] += 1
    for buffer, views in readers.items():
        for view, count in views.items():
            for _ in range(count - 1):
                yield Work(0, 3 * view_bytes(view), view.dtype)
        numel = graph.buffers[buffer].base.numel
        if any(view.numel < numel for view in views):
            yield Work(0, 2 * graph.buffers[buffer].base.nbytes, graph.buffers[buffer].base.dtype)
