"""The question that the solver answers. Pure data: ints, floats and strings.

A *layer class* is a set of layers with equal graphs. Its buffers and ops are those of one layer; ``count`` layers
of it lie on this pipeline stage. For a buffer b the solver chooses to keep it, to compress it with one of its
codecs, or to hold nothing; for an op o, whether it runs again in the backward pass:

    avail_b = k_b + sum_q c_bq + x_{writer(b)}          1 for what is in no buffer's list: parameters, constants
    (1) avail_b >= 1 for each saved b;  k_b + sum_q c_bq <= 1, and = 1 where b must be held, = 0 where it cannot be
    (2) x_o <= avail_a for each a that o reads
    (3) x_o = 0 for an op that may not be replayed
    (4) fixed + transient + sum over layers of in_flight * held_layer <= limit
    (5) sum of err_bq c_bq over all layers <= error budget
    minimise  sum over layers ( sum_o us_o x_o + sum_bq us_bq c_bq + sum_bq again_us_bq c_bq [an op that reads b runs] )

The formulation is that of Adacc (arXiv 2508.00806) with dependencies (2) and a choice for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class CodecChoice:
    """One way to hold a buffer packed, in ``bytes``. ``us``: microseconds to encode it once and decode it for
    the backward pass. ``again_us``: to decode it once more for the ops that are run again from it. ``error``:
    relative gradient error of the layer with only this buffer packed; 0 for a lossless codec."""

    name: str
    bytes: int
    us: float
    error: float = 0.0
    again_us: float = 0.0


@dataclass(frozen=True)
class BufferItem:
    """A buffer of the layer. ``saved``: autograd needs it. ``must_hold``: running its writer again is no
    substitute (no proven recipe, or too small to be worth it). ``storable``: it can be held at all; autograd
    shows the engine only what it saves, and a state that was overwritten is gone."""

    site: str
    bytes: int
    saved: bool
    codecs: tuple[CodecChoice, ...] = ()
    must_hold: bool = False
    storable: bool = True


@dataclass(frozen=True)
class OpItem:
    """An op of the layer: ``us`` microseconds to run it again. A site in ``reads`` that is no buffer of the layer
    is always available."""

    name: str
    us: float
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    replayable: bool = True


@dataclass(frozen=True)
class LayerClass:
    """``count`` layers with equal graphs; of each, ``in_flight`` micro-batches are held at the peak. Classes stand in
    the order of execution; those of one ``chunk`` (a virtual pipeline stage) run in one go. ``left_bytes``: what a
    layer's backward leaves behind (gradients), alive while the layers before it run theirs."""

    name: str
    buffers: tuple[BufferItem, ...]
    ops: tuple[OpItem, ...]
    count: int = 1
    in_flight: int = 1
    chunk: int = 0
    left_bytes: int = 0


@dataclass(frozen=True)
class Moment:
    """While ``chunk`` runs, ``alive[c]`` micro-batches of class c are alive, and ``beside_bytes`` that no plan
    changes. ``head``: the loss head may run then, with the transient bytes."""

    chunk: int
    alive: tuple[int, ...]
    beside_bytes: int = 0
    head: bool = True

    def reaches(self, other: Moment) -> bool:
        """Whether never less is alive than at the other one, of the same chunk."""
        more = all(a >= b for a, b in zip(self.alive, other.alive, strict=True))
        return (
            more and self.chunk == other.chunk and self.beside_bytes >= other.beside_bytes and self.head >= other.head
        )


@dataclass(frozen=True)
class Problem:
    """One pipeline stage. ``fixed_bytes``: what no plan changes, parameters and the like. ``transient_bytes``: what
    is alive beside all held activations at the end of the forward pass (the loss head's). ``error_budget``: None
    for no bound. ``moments``: those of the schedule that may be the peak; without any, each chunk runs once while of
    every class ``in_flight`` are alive. ``order``: the class of each layer in the order of execution; empty where each
    class's layers lie together."""

    classes: tuple[LayerClass, ...]
    limit_bytes: int
    fixed_bytes: int = 0
    error_budget: float | None = None
    transient_bytes: int = 0
    moments: tuple[Moment, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def sequence(self) -> tuple[int, ...]:
        """The class of each layer in the order of execution."""
        return self.order or tuple(i for i, layer in enumerate(self.classes) for _ in range(layer.count))

    @property
    def possible_peaks(self) -> tuple[Moment, ...]:
        """The moments that may be the peak, without those that another one of the same chunk reaches."""
        alive = tuple(layer.in_flight for layer in self.classes)
        chunks = sorted({layer.chunk for layer in self.classes})
        moments = tuple(dict.fromkeys(self.moments)) or tuple(Moment(chunk, alive) for chunk in chunks)
        return tuple(m for m in moments if not any(other != m and other.reaches(m) for other in moments))


def of_one_moment(problem: Problem) -> Problem:
    """The same without moments, order and what backwards leave: these bytes are counted as if they were always
    there. For formulations with one row of bytes."""
    left = [layer.left_bytes for layer in problem.classes for _ in range(layer.count)]
    beside = max((moment.beside_bytes for moment in problem.moments), default=0)
    return replace(
        problem, classes=tuple(replace(layer, left_bytes=0) for layer in problem.classes), moments=(), order=(),
        fixed_bytes=problem.fixed_bytes + sum(left) - min(left, default=0) + beside,
    )  # fmt: skip
