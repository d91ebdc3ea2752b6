"""What the solver answers, and the exact evaluation of an answer. Pure data and Python integers.

An answer gives each buffer of each layer one of

    keep            the buffer is held as it is
    compress:NAME   it is held as the codec NAME packs it
    recompute       autograd needs it, it is not held: its writer runs again in the backward pass
    drop            nobody asks for it, and it is not held

What runs again follows from what is held: the writer of a needed buffer that is not held runs, and needs in turn
what it reads. So bytes, microseconds and error of a layer are a function of its actions, and every answer of a solver
is evaluated again by :func:`evaluate_layer`, in exact bytes, before it is handed out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_adacc.planner.problem import BufferItem, CodecChoice, LayerClass, Problem

KEEP, RECOMPUTE, DROP, COMPRESS = "keep", "recompute", "drop", "compress:"

# extra(class_index, actions) -> bytes alive beyond the held ones while this layer's backward (or forward) runs.
Extra = Callable[[int, Mapping[str, str]], int]


class Violation(ValueError):
    """An answer that the problem does not allow: a defect of the solver, never of the user."""


@dataclass(frozen=True)
class Outcome:
    """What one layer's actions come to: ``held_bytes`` for one micro-batch, ``cost_us`` microseconds added to a
    micro-batch's time, ``error`` the sum of the codecs' errors, ``runs`` the names of the ops that run again."""

    held_bytes: int
    cost_us: float
    error: float
    runs: tuple[str, ...]


@dataclass(frozen=True)
class LayerAnswer:
    """One layer: its class (index into ``Problem.classes``), its actions by site, what they come to, and the bytes
    alive beyond the held ones while its backward runs."""

    class_index: int
    actions: Mapping[str, str]
    outcome: Outcome
    extra_bytes: int = 0


@dataclass(frozen=True)
class Solution:
    """The answer to a Problem.

    status          "optimal": proven; "feasible": a solver that stopped early, or a plan of least memory when it
                    found none; "infeasible": no plan fits; "unknown": stopped before it found anything
    layers          in the order of execution; empty when there is no plan
    cost_us         sum over the layers, microseconds of a micro-batch
    held_bytes      sum over the layers of in_flight * held bytes
    peak_bytes      largest left side of (4) over all positions, fixed bytes included
    peak_by_class   the same over the positions of each class
    gap             cost over the proven bound, less one; None when optimal
    least_bytes     infeasible: a limit for which a plan was found; None when no limit has one
    least_proven    whether no limit below least_bytes has a plan
    note            one sentence where something has to be said
    """

    status: str
    layers: tuple[LayerAnswer, ...] = ()
    cost_us: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0
    peak_by_class: tuple[int, ...] = ()
    error: float = 0.0
    gap: float | None = None
    solver_seconds: float = 0.0
    least_bytes: int | None = None
    note: str = ""
    least_proven: bool = True

    def layers_of(self, class_index: int) -> tuple[LayerAnswer, ...]:
        """The layers of one class, in the order of execution."""
        return tuple(layer for layer in self.layers if layer.class_index == class_index)


def held_as(buffer: BufferItem, action: str) -> CodecChoice | int | None:
    """The codec or the bytes with which the action holds the buffer, None when it does not hold it."""
    if action == KEEP:
        return buffer.bytes
    if action.startswith(COMPRESS):
        for codec in buffer.codecs:
            if codec.name == action.removeprefix(COMPRESS):
                return codec
        raise Violation(f"{buffer.site} has no codec {action.removeprefix(COMPRESS)}")
    if action in (RECOMPUTE, DROP):
        return None
    raise Violation(f"{buffer.site}: {action!r} is no action")


def evaluate_layer(layer: LayerClass, actions: Mapping[str, str]) -> Outcome:
    """Bytes (exact), microseconds and error of one layer under ``actions``, which name every buffer.

    Raises Violation when (1), (2) or (3) of the problem do not hold."""
    writers = {site: op for op in layer.ops for site in op.writes}
    buffers = {buffer.site: buffer for buffer in layer.buffers}
    held_bytes, costs, errors = 0, [0.0], [0.0]
    held: dict[str, CodecChoice | int] = {}
    for buffer in layer.buffers:
        holding = held_as(buffer, actions[buffer.site])
        if holding is None:
            if buffer.must_hold:
                raise Violation(f"(1) {buffer.site} must be held")
            if buffer.saved != (actions[buffer.site] == RECOMPUTE):
                raise Violation(f"(1) {buffer.site}: {actions[buffer.site]} is not for this buffer")
            continue
        if not buffer.storable:
            raise Violation(f"(1) {buffer.site} cannot be held")
        held[buffer.site] = holding
        if isinstance(holding, CodecChoice):
            held_bytes += holding.bytes
            costs.append(holding.us)
            errors.append(holding.error)
        else:
            held_bytes += holding
    runs: dict[str, None] = {}
    pending = [b.site for b in layer.buffers if b.saved and b.site not in held]
    read = set()
    while pending:
        site = pending.pop()
        op = writers.get(site)
        if op is None:
            raise Violation(f"(1) {site} is not held and no op writes it")
        if op.name in runs:
            continue
        if not op.replayable:
            raise Violation(f"(3) {op.name} cannot run again, which {site} needs")
        runs[op.name] = None
        costs.append(op.us)
        inside = [name for name in op.reads if name in buffers]
        read.update(inside)
        pending.extend(name for name in inside if name not in held)  # (2)
    for site in read & held.keys():
        holding = held[site]
        if isinstance(holding, CodecChoice):
            costs.append(holding.again_us)
    return Outcome(held_bytes, math.fsum(costs), math.fsum(errors), tuple(runs))


def within_budget(problem: Problem, error: float) -> bool:
    """(5), with room for the last digits of a sum of floats."""
    return problem.error_budget is None or error <= problem.error_budget + 1e-9 * (abs(problem.error_budget) + 1e-3)


def peak_by_class(problem: Problem, layers: tuple[LayerAnswer, ...]) -> tuple[int, ...]:
    """(4) for layers in the order of execution: for each class the largest need over its positions, in bytes; see
    :func:`needs`."""
    peaks = [problem.fixed_bytes] * len(problem.classes)
    rows = [(layer.class_index, layer.outcome.held_bytes, layer.extra_bytes) for layer in layers]
    for position, need in needs(problem, rows):
        for i in range(len(peaks)) if position is None else [rows[position][0]]:
            peaks[i] = max(peaks[i], need)
    return tuple(peaks)


def peak_bytes(problem: Problem, rows: Sequence[tuple[int, int, int]]) -> int:
    """The largest of :func:`needs`."""
    nothing = problem.fixed_bytes + problem.transient_bytes
    return max((need for _, need in needs(problem, rows)), default=nothing)


def needs(problem: Problem, rows: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int | None, int]]:
    """(4) for layers in the order of execution, each (class index, held bytes, extra bytes): position and the bytes
    alive while the layer there runs; position None for what is alive when a forward ends.

    The backward pass takes the layers last to first; each frees what it held and leaves its gradients. So while layer l
    of a chunk runs backward, of the newest micro-batch only the layers of its chunk up to l are alive, and beside them
    the extra bytes of l; of the other micro-batches, and of other chunks, everything is. At each moment

        everything = fixed + beside + sum_c alive_c held_c
        need_l     = everything + extra_l + sum over j after l in the same chunk of (left_j - held_j)
    """
    held = [0] * len(problem.classes)
    for index, nbytes, _ in rows:
        held[index] += nbytes
    backwards: dict[int, list[tuple[int, int]]] = {}
    behind: dict[int, int] = {}
    for position in range(len(rows) - 1, -1, -1):
        index, nbytes, extra = rows[position]
        chunk = problem.classes[index].chunk
        after = behind.get(chunk, 0)
        backwards.setdefault(chunk, []).append((position, after + extra))
        behind[chunk] = after + problem.classes[index].left_bytes - nbytes
    for moment in problem.possible_peaks:
        everything = problem.fixed_bytes + moment.beside_bytes
        everything += sum(alive * nbytes for alive, nbytes in zip(moment.alive, held, strict=True))
        yield None, everything + (problem.transient_bytes if moment.head else 0)
        for position, more in backwards.get(moment.chunk, []):
            yield position, everything + more


def assemble(
    problem: Problem, layers: tuple[LayerAnswer, ...], status: str, solver_seconds: float,
    gap: float | None = None, note: str = "",
) -> Solution:  # fmt: skip
    """The Solution with these layers, its sums counted anew. Raises Violation when it is above the limit or the
    error budget: no caller hands out a plan that was not counted in exact bytes."""
    peaks = peak_by_class(problem, layers)
    peak = max(peaks, default=problem.fixed_bytes + problem.transient_bytes)
    error = math.fsum(layer.outcome.error for layer in layers)
    if peak > problem.limit_bytes:
        raise Violation(f"(4) {peak} bytes are above the limit of {problem.limit_bytes}")
    if not within_budget(problem, error):
        raise Violation(f"(5) an error of {error} is above the budget of {problem.error_budget}")
    return Solution(
        status,
        layers,
        math.fsum(layer.outcome.cost_us for layer in layers),
        sum(problem.classes[layer.class_index].in_flight * layer.outcome.held_bytes for layer in layers),
        peak,
        peaks,
        error,
        gap,
        solver_seconds,
        None,
        note,
    )
