"""Recipes: which traced ops rebuild dropped buffers from what is available. Pure functions on the graph.

    avail(b)  =  b is stored and nothing in the layer wrote over it              (kept or compressed by the plan)
              or b is a parameter, input, constant or literal in the state the layer left it in
              or may_run(writer(b))
    may_run(o) = o has no barrier, and avail(a) for each a that o reads          (1)

A recipe is the backward slice from the buffer to what is available: the shortest list of traced ops that
rebuilds it, since every buffer has one writer. Recipes that share an op form a *group*: the first reader of
any of them runs the group once, so that no op runs twice in one backward (2), and a buffer of the group that
no later step or reader needs is freed by the step that read it last (3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

from megatron_adacc.graph.model import Buffer, LayerGraph, Origin

UNCHANGING = frozenset({Origin.PARAMETER, Origin.MODULE_BUFFER, Origin.ATTRIBUTE, Origin.CONSTANT})


@dataclass(frozen=True)
class Step:
    """Run op ``op`` again. ``copies``: buffers whose contents others still need, so that an in-place op
    writes into a copy. ``frees``: buffers that nobody needs after this step."""

    op: int
    copies: tuple[int, ...]
    frees: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Dropped buffers that are rebuilt together, from ``sources``, by ``steps``."""

    targets: tuple[int, ...]
    steps: tuple[Step, ...]
    sources: tuple[int, ...]


@lru_cache(maxsize=256)
def _mutated_storages(graph: LayerGraph) -> frozenset[int]:
    return frozenset(b.storage for b in graph.buffers if b.previous is not None)


def source_problem(graph: LayerGraph, buffer: Buffer) -> str | None:
    """Why a buffer that no op of the layer wrote cannot be read at replay; None where it can."""
    if buffer.origin == Origin.LITERAL:
        return None
    if buffer.origin == Origin.INPUT:
        return None if graph.last_state(buffer.index) else f"the layer writes over its input {buffer.name}"
    if buffer.origin in UNCHANGING:
        if buffer.storage in _mutated_storages(graph):
            return f"the layer changes {buffer.origin} {buffer.name}"
        return None
    return f"needs {buffer.site}: {buffer.note or 'opaque'}"


class Availability:
    """What can be rebuilt when the buffers ``stored`` are held; see the module's formula."""

    def __init__(self, graph: LayerGraph, stored: Collection[int]) -> None:
        self._graph = graph
        self._stored = frozenset(b for b in stored if graph.last_state(b))
        self._problem: dict[int, str | None] = {}

    def is_source(self, buffer: int) -> bool:
        """Held, or there without the engine's doing: replay starts from it."""
        return buffer in self._stored or self._graph.buffers[buffer].writer is None

    def problem(self, buffer: int) -> str | None:
        """Why the buffer is not available, None when it is."""
        if buffer in self._stored:
            return None
        found = self._graph.buffers[buffer]
        if found.writer is None:
            return source_problem(self._graph, found)
        return self.op_problem(found.writer)

    def op_problem(self, index: int) -> str | None:
        """Why the op may not run again, None when it may (1)."""
        # Iterative, because a layer's chain of ops may be longer than Python's stack is deep.
        pending = [index]
        while pending:
            current = pending[-1]
            if current in self._problem:
                pending.pop()
                continue
            op = self._graph.ops[current]
            if op.barrier is not None:
                self._problem[current] = f"{op.module or 'the layer'}: {op.target} {op.barrier}"
                continue
            writers = [
                w for b in op.reads if b not in self._stored and (w := self._graph.buffers[b].writer) is not None
            ]
            unknown = [w for w in writers if w not in self._problem]
            if unknown:
                pending.extend(unknown)
                continue
            problems = (self.problem(b) for b in op.reads)
            self._problem[current] = next((p for p in problems if p is not None), None)
        return self._problem[index]

    def slice(self, buffer: int) -> frozenset[int]:
        """Ops that rebuild an available buffer; empty for one that is itself a source."""
        found: set[int] = set()
        pending = [buffer]
        while pending:
            current = pending.pop()
            writer = self._graph.buffers[current].writer
            if current in self._stored or writer is None or writer in found:
                continue
            found.add(writer)
            pending.extend(self._graph.ops[writer].reads)
        return frozenset(found)


def group_recipes(graph: LayerGraph, stored: Collection[int], dropped: Iterable[int]) -> tuple[Group, ...]:
    """Groups that rebuild the buffers ``dropped`` when ``stored`` are held, in order of first op.

    Raises ValueError, naming the site and the reason, for a buffer that has no recipe."""
    availability = Availability(graph, stored)
    parts: list[tuple[set[int], set[int]]] = []  # ops, targets
    for target in dropped:
        problem = availability.problem(target)
        if problem is not None:
            raise ValueError(f"{graph.buffers[target].site} cannot be recomputed: {problem}")
        ops, targets = set(availability.slice(target)), {target}
        apart = []
        for other_ops, other_targets in parts:
            if ops & other_ops:
                ops |= other_ops
                targets |= other_targets
            else:
                apart.append((other_ops, other_targets))
        parts = [*apart, (ops, targets)]
    groups = [_schedule(graph, availability, sorted(ops), targets) for ops, targets in parts if ops]
    return tuple(sorted(groups, key=lambda g: g.steps[0].op))


def _schedule(graph: LayerGraph, availability: Availability, ops: list[int], targets: Collection[int]) -> Group:
    written = {b for o in ops for b in graph.ops[o].writes}
    last_use: dict[int, int] = {}
    for o in ops:
        for b in (*graph.ops[o].reads, *graph.ops[o].writes):
            last_use[b] = o
    sources = {b for o in ops for b in graph.ops[o].reads if b not in written or availability.is_source(b)}
    steps = []
    for o in ops:
        op = graph.ops[o]
        copies = tuple(
            before.buffer
            for before, after in op.mutates
            if after not in op.overwrites
            and (before.buffer in sources or before.buffer in targets or last_use[before.buffer] > o)
        )
        touched = dict.fromkeys((*op.reads, *op.writes))
        frees = tuple(b for b in touched if last_use[b] == o and b not in targets)
        steps.append(Step(o, copies, frees))
    return Group(tuple(sorted(targets)), tuple(steps), tuple(sorted(sources)))
