"""Random small problems for the planner, and every plan of a layer, found without it."""

import itertools
from collections.abc import Iterable

from hypothesis import strategies as st

from megatron_adacc.planner.problem import BufferItem, CodecChoice, LayerClass, OpItem, Problem

# Costs and errors are multiples of a power of two, so that float sums are exact and equal means equal.
US = st.sampled_from([0.0, 0.25, 1.0, 2.0, 2.5, 5.0, 7.0])
ERRORS = st.sampled_from([0.0, 0.0, 0.125, 0.25, 0.0625])
SMALL = st.integers(0, 40)
LARGE = st.integers(0, 2**37)  # beyond what a float's tolerance tells apart

Point = tuple[int, float, float]  # bytes, us, error


@st.composite
def layer_classes(draw: st.DrawFn, name: str, sizes: st.SearchStrategy[int]) -> LayerClass:
    count = draw(st.integers(1, 4))
    sites = [f"b{i}" for i in range(count)]
    buffers = []
    for site in sites:
        size = draw(sizes)
        codecs = tuple(
            CodecChoice(f"q{k}", draw(st.integers(0, size)), draw(US), draw(ERRORS), draw(US))
            for k in range(draw(st.integers(0, 2)))
        )
        storable = draw(st.integers(0, 4)) > 0
        must_hold = storable and draw(st.integers(0, 6)) == 0
        buffers.append(BufferItem(site, size, draw(st.integers(0, 3)) > 0, codecs, must_hold, storable))
    ops: list[OpItem] = []
    start = 0
    while start < count:
        end = min(count, start + draw(st.sampled_from([1, 1, 1, 2])))
        if draw(st.integers(0, 6)) > 0:  # otherwise nothing writes them: inputs
            reads = tuple(site for site in sites[:start] if draw(st.booleans()))
            reads += ("weight",) if draw(st.booleans()) else ()
            ops.append(OpItem(f"o{start}", draw(US), reads, tuple(sites[start:end]), draw(st.integers(0, 6)) > 0))
        start = end
    layers = draw(st.integers(1, 3))
    return LayerClass(name, tuple(buffers), tuple(draw(st.permutations(ops))), layers, draw(st.integers(1, 3)))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    sizes = draw(st.sampled_from([SMALL, SMALL, LARGE]))
    classes = tuple(draw(layer_classes(f"class{i}", sizes)) for i in range(draw(st.integers(1, 2))))
    most = sum(c.count * c.in_flight * sum(b.bytes for b in c.buffers) for c in classes)
    return Problem(
        classes, draw(st.integers(0, most)), draw(st.sampled_from([0, 0, most // 8])),
        draw(st.sampled_from([None, None, 0.0, 0.125, 0.3125, 0.5])), draw(st.sampled_from([0, 0, 3])),
    )  # fmt: skip


def undominated(points: Iterable[Point]) -> list[Point]:
    kept: list[Point] = []
    for point in sorted(set(points)):
        if not any(all(a <= b for a, b in zip(other, point, strict=True)) for other in kept):
            kept.append(point)
    return kept


def layer_points(layer: LayerClass) -> list[Point]:
    """Every choice of what is held, and every set of ops that run, checked against (1), (2) and (3) one by one."""
    writer = {site: op.name for op in layer.ops for site in op.writes}
    sites = {buffer.site for buffer in layer.buffers}
    options = [[None, *([(b.bytes, None)] if b.storable else []), *((c.bytes, c) for c in b.codecs if b.storable)]
               for b in layer.buffers]  # fmt: skip
    points = []
    for choice in itertools.product(*options):
        held = {b.site: c for b, c in zip(layer.buffers, choice, strict=True) if c is not None}
        if any(b.must_hold and b.site not in held for b in layer.buffers):
            continue
        codecs = {site: c[1] for site, c in held.items() if c[1] is not None}
        for size in range(len(layer.ops) + 1):
            for runs in itertools.combinations(layer.ops, size):
                names = {op.name for op in runs}
                there = held.keys() | {site for site in sites if writer.get(site) in names}
                if any(b.saved and b.site not in there for b in layer.buffers):
                    continue
                if any(not op.replayable or not set(op.reads) & sites <= there for op in runs):
                    continue
                read = {site for op in runs for site in op.reads}
                us = sum(op.us for op in runs) + sum(c.us + c.again_us * (s in read) for s, c in codecs.items())
                points.append((sum(c[0] for c in held.values()), us, sum(c.error for c in codecs.values())))
    return undominated(points)
