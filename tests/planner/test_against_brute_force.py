"""Both formulations against an enumeration that knows nothing of them: all ways to hold, all sets of ops that run."""

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_adacc.planner import milp, stage
from megatron_adacc.planner.frontier import LayerPaths, enumerate_plans
from megatron_adacc.planner.lexicographic import cost_grid, error_grid
from megatron_adacc.planner.problem import BufferItem, CodecChoice, LayerClass, OpItem, Problem
from megatron_adacc.planner.solution import evaluate_layer

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


def best(problem: Problem) -> tuple[float | None, int | None, int | None]:
    """(least cost, least bytes at that cost, least limit that works), None where there is none."""
    sums: list[Point] = [(problem.fixed_bytes + problem.transient_bytes, 0.0, 0.0)]
    for layer in problem.classes:
        points = layer_points(layer)
        for _ in range(layer.count):
            sums = undominated(
                (a + layer.in_flight * b, us + more, error + further)
                for a, us, error in sums
                for b, more, further in points
            )
    sums = [point for point in sums if problem.error_budget is None or point[2] <= problem.error_budget]
    fitting = [(us, nbytes) for nbytes, us, _ in sums if nbytes <= problem.limit_bytes]
    least = min((nbytes for nbytes, _, _ in sums), default=None)
    return (*min(fitting), least) if fitting else (None, None, least)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(problems())
def test_both_formulations_equal_brute_force_to_the_byte(problem: Problem) -> None:
    cost_us, nbytes, least = best(problem)
    for solve in (milp.solve, stage.solve_stage):
        found = solve(problem)
        if cost_us is None:
            assert (found.status, found.least_bytes, found.layers) == ("infeasible", least, ())
        else:
            assert (found.status, found.cost_us, found.peak_bytes) == ("optimal", cost_us, nbytes)
            assert found.peak_bytes <= problem.limit_bytes
            assert found.held_bytes == nbytes - problem.fixed_bytes - problem.transient_bytes
            assert len(found.layers) == sum(layer.count for layer in problem.classes)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_the_frontier_is_that_of_brute_force(problem: Problem) -> None:
    for layer in problem.classes:
        paths = LayerPaths(layer, cost_grid(problem), error_grid(problem))
        points = enumerate_plans(paths)
        assert points is not None
        found = []
        for nbytes, actions in zip(points.nbytes.tolist(), points.actions, strict=True):
            outcome = evaluate_layer(layer, actions)
            assert outcome.held_bytes == nbytes
            found.append((nbytes, outcome.cost_us, outcome.error if problem.error_budget is not None else 0.0))
        expected = layer_points(layer)
        if problem.error_budget is None:
            expected = undominated((nbytes, us, 0.0) for nbytes, us, _ in expected)
        assert sorted(found) == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.lists(st.integers(0, 1000), min_size=4, max_size=8))
def test_the_peak_never_rises_and_the_cost_never_falls_when_the_limit_falls(
    problem: Problem, shares: list[int]
) -> None:
    most = problem.fixed_bytes + problem.transient_bytes + sum(
        c.count * c.in_flight * sum(b.bytes for b in c.buffers) for c in problem.classes
    )  # fmt: skip
    earlier = None
    for share in sorted(shares, reverse=True):
        limited = Problem(
            problem.classes, most * share // 1000, problem.fixed_bytes, problem.error_budget, problem.transient_bytes
        )
        found = stage.solve_stage(limited)
        if found.status == "optimal":
            if earlier is not None:
                assert earlier.status == "optimal"
                assert found.peak_bytes <= earlier.peak_bytes
                assert found.cost_us >= earlier.cost_us
            assert found.peak_bytes <= limited.limit_bytes
        earlier = found


@pytest.mark.parametrize("solve", [milp.solve, stage.solve_stage])
def test_errors_that_add_up_to_the_budget_in_decimals_fit(solve) -> None:
    # In floats 0.1 + 0.2 is above 0.3.
    buffers = tuple(
        BufferItem(site, 10, True, (CodecChoice("int4", 1, 1.0, error),), must_hold=True)
        for site, error in (("a", 0.1), ("b", 0.2))
    )
    found = solve(Problem((LayerClass("", buffers, ()),), 2, 0, 0.3))
    assert (found.status, found.cost_us, found.held_bytes) == ("optimal", 2.0, 2)
    below = solve(Problem((LayerClass("", buffers, ()),), 2, 0, 0.29))
    assert (below.status, below.least_bytes) == ("infeasible", 11)
