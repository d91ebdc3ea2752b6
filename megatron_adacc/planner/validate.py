"""What a problem must be before it is solved. Each mistake is a sentence that names the place."""

from __future__ import annotations

import itertools
import math
from collections import Counter

from megatron_adacc.errors import UserError
from megatron_adacc.planner.problem import BufferItem, LayerClass, OpItem, Problem

# Sums stay within 64 bits, and microseconds and errors within what a float tells apart.
LARGEST_BYTES = 2**60
LARGEST_NUMBER = 1e15


def validate(problem: Problem) -> None:
    """Raises UserError for a problem that contradicts itself: a site or op name used twice, an op that writes an
    unknown or already written buffer or depends on its own output, a buffer that must and cannot be held, and
    numbers that are negative, infinite or not numbers."""
    for name in ("fixed_bytes", "transient_bytes"):
        _check_number(getattr(problem, name), f"The problem's {name}")
    if problem.error_budget is not None:
        _check_number(problem.error_budget, "The problem's error_budget")
    chunks = [layer.chunk for layer in problem.classes]
    for earlier, later in itertools.pairwise(chunks):
        if later != earlier and chunks.index(later) < chunks.index(earlier):
            raise UserError(f"Layer classes of one chunk must stand together, but chunk {later} comes twice.")
    for layer in problem.classes:
        _validate_layer(layer)
    _validate_schedule(problem)
    alive = [max([c.in_flight, *(m.alive[i] for m in problem.moments)]) for i, c in enumerate(problem.classes)]
    most = sum(
        c.count * times * sum(_most_bytes(buffer) for buffer in c.buffers)
        for c, times in zip(problem.classes, alive, strict=True)
    )
    if most > LARGEST_BYTES:
        raise UserError(
            f"All that could be held, {most} bytes over all layers, is above what the planner counts, {LARGEST_BYTES}."
        )


def _validate_schedule(problem: Problem) -> None:
    counted = Counter(problem.order)
    if problem.order and counted != {i: layer.count for i, layer in enumerate(problem.classes)}:
        raise UserError("The problem's order must name each layer class as often as it has layers.")
    for moment in problem.moments:
        if len(moment.alive) != len(problem.classes):
            raise UserError("A moment must say of each layer class how many of its micro-batches are alive.")
        for i, layer in enumerate(problem.classes):
            if moment.alive[i] < (layer.chunk == moment.chunk):
                raise UserError(f"While chunk {moment.chunk} runs, a micro-batch of it must be alive.")


def _most_bytes(buffer: BufferItem) -> int:
    return max(buffer.bytes, *(codec.bytes for codec in buffer.codecs), 0)


def _validate_layer(layer: LayerClass) -> None:
    where = f" of layer class {layer.name}" if layer.name else ""
    _check_number(layer.left_bytes, f"The left_bytes{where}")
    for name in ("count", "in_flight"):
        if getattr(layer, name) < 1:
            raise UserError(f"The {name}{where} must be at least 1, not {getattr(layer, name)}.")
    _check_unique([buffer.site for buffer in layer.buffers], "buffer", where)
    _check_unique([op.name for op in layer.ops], "op", where)
    for buffer in layer.buffers:
        place = f"Buffer {buffer.site}{where}"
        _check_number(buffer.bytes, f"{place}: bytes")
        if buffer.must_hold and not buffer.storable:
            raise UserError(f"{place} must be held and cannot be: must_hold and storable: false exclude each other.")
        _check_unique([codec.name for codec in buffer.codecs], f"codec of {buffer.site}", where)
        for codec in buffer.codecs:
            for name in ("bytes", "us", "error", "again_us"):
                _check_number(getattr(codec, name), f"{place}, codec {codec.name}: {name}")
    writers: dict[str, str] = {}
    sites = {buffer.site for buffer in layer.buffers}
    for op in layer.ops:
        _check_number(op.us, f"Op {op.name}{where}: us")
        for site in op.writes:
            if site not in sites:
                raise UserError(f"Op {op.name}{where} writes {site}, which is not among the buffers.")
            if site in writers:
                raise UserError(
                    f"Buffer {site}{where} is written by {writers[site]} and by {op.name}; each state of a storage "
                    "needs a buffer of its own."
                )
            writers[site] = op.name
    in_order(layer)


def in_order(layer: LayerClass) -> tuple[OpItem, ...]:
    """The layer's ops so that each comes after the writers of what it reads; as near to the given order as that
    allows. Raises UserError for a ring."""
    writers = {site: op.name for op in layer.ops for site in op.writes}
    waiting = {op.name: {writers[site] for site in op.reads if site in writers} for op in layer.ops}
    order: list[OpItem] = []
    left = list(layer.ops)
    done: set[str] = set()
    while left:
        ready = [op for op in left if waiting[op.name] <= done]
        if not ready:
            raise UserError(
                "An op must not depend on its own output; in a ring, or behind one: "
                f"{', '.join(op.name for op in left)}."
            )
        for op in list(left):
            if waiting[op.name] <= done:
                order.append(op)
                left.remove(op)
                done.add(op.name)
    return tuple(order)


def _check_number(value: float, what: str) -> None:
    if not math.isfinite(value) or value < 0:
        raise UserError(f"{what} must be a number that is not negative, not {value}.")
    if isinstance(value, float) and value > LARGEST_NUMBER:
        raise UserError(f"{what} must be at most {LARGEST_NUMBER:g}, not {value:g}.")


def _check_unique(names: list[str], what: str, where: str) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise UserError(f"Each {what}{where} needs a name of its own, but {name} comes {times} times.")
