"""What a second trace, of a call with other inputs, proves about the first.

- A tensor that no visible op wrote is a constant if both calls saw the same storage at the same version.
- Ops after a value was read by the host (``.item()``) may run again if the host read different values in the
  two calls and yet the graphs are equal: then the program does not depend on what it read.
- Graphs that differ, in a number say, prove the opposite: the program depends on something not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_adacc.graph.model import LayerGraph, Origin, Tagged
from megatron_adacc.graph.roles import with_roles
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.graph.tracer import Traced


def same_program(a: LayerGraph, b: LayerGraph) -> bool:
    """Whether two traces ran the same ops with the same numbers on tensors that lie equally."""
    return fingerprint(a) == fingerprint(b)


HOST_READ = "follows a value"
VARYING = "takes a number that differs from call to call"


@dataclass(frozen=True)
class Varying:
    """What is known to differ between calls of one key: ops by index, literals by buffer."""

    ops: frozenset[int] = frozenset()
    literals: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.ops or self.literals)

    def __or__(self, other: Varying) -> Varying:
        return Varying(self.ops | other.ops, self.literals | other.literals)

    def mark(self, graph: LayerGraph) -> LayerGraph:
        """The graph with the ops barred and the literals opaque."""
        if not self:
            return graph
        ops = tuple(replace(op, barrier=VARYING) if op.index in self.ops else op for op in graph.ops)
        buffers = tuple(
            replace(b, origin=Origin.OPAQUE, value=None, note="made from numbers that differ from call to call")
            if b.index in self.literals
            else b
            for b in graph.buffers
        )
        return replace(graph, ops=ops, buffers=buffers)

    def same_program(self, a: LayerGraph, b: LayerGraph) -> bool:
        """Whether two marked graphs are equal once the arguments of varying ops are left out."""

        def stripped(graph: LayerGraph) -> LayerGraph:
            return replace(
                graph, ops=tuple(replace(op, args=(), kwargs=()) if op.index in self.ops else op for op in graph.ops)
            )

        return same_program(stripped(a), stripped(b))


def prove(first: Traced, second: Traced, depends_on_host: bool) -> Traced:
    """The second trace, strengthened by the first. Both must be of equal programs, but for numbers where
    ``depends_on_host``: then nothing that follows a host read is trusted."""
    graph = second.graph
    buffers = list(graph.buffers)
    for index, later in second.externals.items():
        earlier = first.externals.get(index)
        if earlier is not None and earlier.same_constant(later):
            buffers[index] = replace(buffers[index], origin=Origin.CONSTANT, note="")
    ops = graph.ops
    if not depends_on_host and _host_values_differ(first, second):
        ops = tuple(replace(op, barrier=None) if (op.barrier or "").startswith(HOST_READ) else op for op in ops)
    return replace(second, graph=with_roles(replace(graph, buffers=tuple(buffers), ops=ops)))


def _host_values_differ(first: Traced, second: Traced) -> bool:
    pairs = list(zip(first.host_values, second.host_values, strict=True))
    return bool(pairs) and all(a is not None and b is not None and a != b for a, b in pairs)


def differences(a: LayerGraph, b: LayerGraph) -> Varying:
    """Ops and literals whose numbers differ between two traces that are equal in everything else. Nothing when
    the traces differ in more than that."""
    if len(a.ops) != len(b.ops) or len(a.buffers) != len(b.buffers) or a.packs != b.packs:
        return Varying()
    ops = set()
    for x, y in zip(a.ops, b.ops, strict=True):
        if _text(x.args, x.kwargs) == _text(y.args, y.kwargs):
            continue
        if x.target != y.target or x.reads != y.reads or x.writes != y.writes:
            return Varying()
        ops.add(x.index)
    literals = {x.index for x, y in zip(a.buffers, b.buffers, strict=True) if _text(x.value) != _text(y.value)}
    return Varying(frozenset(ops), frozenset(literals))


def _text(*arguments: object) -> str:
    """Equal for equal arguments; NaN equals itself."""
    return repr([_without_identity(a) for a in arguments])


def _without_identity(value: object) -> object:
    if isinstance(value, tuple):
        return [_without_identity(v) for v in value]
    if isinstance(value, Tagged) and value.kind == "object":
        return value.note
    return value
