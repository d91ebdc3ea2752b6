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

from dataclasses import dataclass


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
    """``count`` layers with equal graphs, one after another; of each, ``in_flight`` micro-batches are held at the
    peak. Classes stand in the order of execution; those of one ``chunk`` (a virtual pipeline stage) run in one go."""

    name: str
    buffers: tuple[BufferItem, ...]
    ops: tuple[OpItem, ...]
    count: int = 1
    in_flight: int = 1
    chunk: int = 0


@dataclass(frozen=True)
class Problem:
    """One pipeline stage. ``fixed_bytes``: what no plan changes, parameters and the like. ``transient_bytes``: what
    is alive beside all held activations at the end of the forward pass (the loss head's). ``error_budget``: None
    for no bound."""

    classes: tuple[LayerClass, ...]
    limit_bytes: int
    fixed_bytes: int = 0
    error_budget: float | None = None
    transient_bytes: int = 0
