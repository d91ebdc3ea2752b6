"""How many micro-batches a pipeline stage holds at once, by running Megatron's schedule on paper.

A stage holds one or more *chunks* of consecutive layers. A chunk's forward of a micro-batch leaves activations that
live until that chunk's backward of the same micro-batch. What a stage does in a step is a fixed list of forwards and
backwards; counting through it says how many of each chunk's forwards are alive, at every moment, exactly.

The order is that of megatron.core.pipeline_parallel.schedules (0.19):

    stages 1             F0 B0 F1 B1 ...                                    one micro-batch at a time
    chunks 1             stages - 1 - stage forwards, then one forward and one backward in turn, then the rest
    chunks > 1           forwards go by groups of micro-batches: a group through chunk 0, through chunk 1, ...;
                         (stages - 1 - stage) * 2 + (chunks - 1) * group forwards first; backwards in the same
                         order with the chunks reversed

Example, 4 stages, 8 micro-batches: the stages hold [4, 3, 2, 1] of them, and with 2 chunks [11, 9, 7, 5] forwards
of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_adacc.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """A pipeline's step. ``chunks``: virtual stages on each stage (1: not interleaved). ``group_size``: Megatron's
    --microbatch-group-size-per-virtual-pipeline-stage, the micro-batches that go through one chunk before the next
    chunk starts; None is Megatron's default, the number of stages.

    Raises UserError for what Megatron's schedule refuses."""

    stages: int = 1
    micro_batches: int = 1
    chunks: int = 1
    group_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("stages", "micro_batches", "chunks"):
            if getattr(self, name) < 1:
                raise UserError(f"A schedule needs at least one of its {name}, but {getattr(self, name)} is given.")
        if self.chunks == 1:
            return
        if self.stages == 1:
            raise UserError(f"{self.chunks} chunks need a pipeline of at least 2 stages, but there is one stage.")
        if self.micro_batches < self.stages:
            raise UserError(
                f"An interleaved schedule of {self.stages} stages needs at least as many micro-batches in a step, but "
                f"it has {self.micro_batches}: raise the global batch."
            )
        group = self.group
        if not self.stages <= group <= self.micro_batches:
            raise UserError(
                f"An interleaved schedule takes from {self.stages} (the pipeline's stages) to {self.micro_batches} "
                f"(the micro-batches of a step) micro-batches at once through a chunk, but {group} is given."
            )
        if 0 < (rest := self.micro_batches % group) < self.stages:
            raise UserError(
                f"{self.micro_batches} micro-batches in groups of {group} leave a last group of {rest}, which must "
                f"have at least as many as the pipeline has stages, {self.stages}."
            )

    @property
    def group(self) -> int:
        """Micro-batches that go through a chunk before the next chunk starts."""
        return self.stages if self.group_size is None else self.group_size


@dataclass(frozen=True)
class Step:
    """One forward or backward of a stage: which chunk, of which micro-batch."""

    forward: bool
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Moment:
    """While a forward or backward of ``chunk`` runs, ``alive[c]`` forwards of chunk c are alive, this one included."""

    forward: bool
    chunk: int
    alive: tuple[int, ...]


def order(schedule: Schedule, stage: int) -> tuple[Step, ...]:
    """What `stage` (0 is the first) does in a step, in order. Raises UserError for a stage that does not exist."""
    if not 0 <= stage < schedule.stages:
        raise UserError(f"Stage {stage} does not exist: the pipeline has stages 0 to {schedule.stages - 1}.")
    passes = _passes(schedule)
    forwards = [Step(True, chunk, micro_batch) for chunk, micro_batch in passes]
    backwards = [Step(False, schedule.chunks - 1 - chunk, micro_batch) for chunk, micro_batch in passes]
    ahead = schedule.stages - 1 - stage
    if schedule.chunks > 1:
        ahead = 2 * ahead + (schedule.chunks - 1) * schedule.group
    ahead = min(ahead, len(forwards))
    steps = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        steps += [forward, backward]
    return (*steps, *backwards[len(forwards) - ahead :])


def _passes(schedule: Schedule) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of every forward, in order: group by group, within a group chunk by chunk."""
    group = schedule.group if schedule.chunks > 1 else schedule.micro_batches
    return [
        (chunk, micro_batch)
        for first in range(0, schedule.micro_batches, group)
        for chunk in range(schedule.chunks)
        for micro_batch in range(first, min(first + group, schedule.micro_batches))
    ]


def moments(schedule: Schedule, stage: int) -> tuple[Moment, ...]:
    """Every kind of moment that can be the peak: of the moments with the same running step, those whose counts no
    other one reaches in every chunk. The largest weighted sum of counts over a step is the largest over these."""
    alive = [0] * schedule.chunks
    found: dict[tuple[bool, int], dict[tuple[int, ...], None]] = {}
    for step in order(schedule, stage):
        alive[step.chunk] += step.forward
        found.setdefault((step.forward, step.chunk), {})[tuple(alive)] = None
        alive[step.chunk] -= not step.forward
    return tuple(
        Moment(forward, chunk, counts) for (forward, chunk), all_ in found.items() for counts in _maximal(all_)
    )


def _maximal(all_: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    vectors = list(all_)
    return [
        vector
        for vector in vectors
        if not any(other != vector and all(a >= b for a, b in zip(other, vector, strict=True)) for other in vectors)
    ]


def heaviest(schedule: Schedule, stage: int, weights: Sequence[int] | None = None) -> tuple[int, ...]:
    """Forwards alive of each chunk at the moment when their weighted sum is largest. ``weights[c]``: bytes that one
    forward of chunk c holds; None counts forwards. Of equally heavy moments it is the one with the most forwards of
    the last chunk.

    Raises UserError where there is not one weight a chunk."""
    weighed = [1] * schedule.chunks if weights is None else list(weights)
    if len(weighed) != schedule.chunks:
        raise UserError(f"{len(weighed)} weights are given for {schedule.chunks} chunks: one a chunk is needed.")

    def weight(alive: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        return sum(count * size for count, size in zip(alive, weighed, strict=True)), alive[::-1]

    return max((moment.alive for moment in moments(schedule, stage)), key=weight)


def held_bytes(schedule: Schedule, stage: int, chunk_bytes: Sequence[int]) -> int:
    """The most bytes that the stage's activations need at once; ``chunk_bytes[c]`` is what one forward of chunk c
    holds."""
    alive = heaviest(schedule, stage, chunk_bytes)
    return sum(count * size for count, size in zip(alive, chunk_bytes, strict=True))


def in_flight(schedule: Schedule, stage: int) -> int:
    """The most forwards (of a chunk, of a micro-batch) that are alive at once on `stage`."""
    return sum(heaviest(schedule, stage))
