"""Both formulations against an enumeration that knows nothing of them: all ways to hold, all sets of ops that run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_problems import Point, layer_points, problems, undominated

from megatron_adacc.planner import milp, stage
from megatron_adacc.planner.frontier import LayerPaths, enumerate_plans
from megatron_adacc.planner.lexicographic import cost_grid, error_grid
from megatron_adacc.planner.problem import BufferItem, CodecChoice, LayerClass, Problem
from megatron_adacc.planner.solution import evaluate_layer


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
