"""What a second trace, of a call with other inputs, proves about the first.

- A tensor that no visible op wrote is a constant if both calls saw the same storage at the same version.
- Ops after a value was read by the host (``.item()``) may run again if the host read different values in the
  two calls and yet the graphs are equal: then the program does not depend on what it read.
- Graphs that differ, in a number say, prove the opposite: the program depends on something not recorded.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_adacc.graph.model import LayerGraph, Origin, Tagged
from megatron_adacc.graph.roles import with_roles
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.graph.tracer import Traced


def same_program(a: LayerGraph, b: LayerGraph) -> bool:
    """Whether two traces ran the same ops with the same numbers on tensors that lie equally."""
    return fingerprint(a) == fingerprint(b)


def prove(first: Traced, second: Traced) -> Traced:
    """The second trace, strengthened by the first. Both must be of equal programs."""
    graph = second.graph
    buffers = list(graph.buffers)
    for index, later in second.externals.items():
        earlier = first.externals.get(index)
        if earlier is not None and earlier.same_constant(later):
            buffers[index] = replace(buffers[index], origin=Origin.CONSTANT, note="")
    ops = graph.ops
    if _host_values_differ(first, second):
        ops = tuple(replace(op, barrier=None) if (op.barrier or "").startswith("follows a value") else op for op in ops)
    return replace(second, graph=with_roles(replace(graph, buffers=tuple(buffers), ops=ops)))


def _host_values_differ(first: Traced, second: Traced) -> bool:
    pairs = list(zip(first.host_values, second.host_values, strict=True))
    return bool(pairs) and all(a is not None and b is not None and a != b for a, b in pairs)


def differing_ops(a: LayerGraph, b: LayerGraph) -> dict[int, str]:
    """Ops whose numbers differ between two traces that are equal in everything else. Empty when the traces
    differ in more than that, or in nothing."""
    if len(a.ops) != len(b.ops) or a.packs != b.packs:
        return {}
    found = {}
    for x, y in zip(a.ops, b.ops, strict=True):
        if fingerprint_args(x.args, x.kwargs) == fingerprint_args(y.args, y.kwargs):
            continue
        if x.target != y.target or x.reads != y.reads or x.writes != y.writes:
            return {}
        found[x.index] = "takes a number that differs from call to call"
    return found


def fingerprint_args(*arguments: object) -> str:
    """Text that is equal for equal arguments; NaN equals itself."""
    return repr([_without_identity(a) for a in arguments])


def _without_identity(value: object) -> object:
    if isinstance(value, tuple):
        return [_without_identity(v) for v in value]
    if isinstance(value, Tagged) and value.kind == "object":
        return value.note
    return value
