"""Integer programs: limbs, large objectives, wrong answers of the solver, no time."""

import sys
import time
from dataclasses import replace

import pytest

from megatron_adacc.errors import UserError
from megatron_adacc.planner.grid import Grid
from megatron_adacc.planner.problem import BufferItem, LayerClass, OpItem, Problem
from megatron_adacc.planner.program import Answer, IntegerProgram
from megatron_adacc.planner.stage import solve_stage

LARGE = 2**40


def make_program(seconds: float = 10.0) -> IntegerProgram:
    return IntegerProgram(time.monotonic() + seconds)


def drop_as_little_as_fits(sizes: list[int], room: int, in_limbs: bool) -> tuple[int, ...]:
    """1 for what is kept."""
    program = make_program()
    kept = [program.variable(1) for _ in sizes]
    dropped = [program.variable(1) for _ in sizes]
    for k, d in zip(kept, dropped, strict=True):
        program.equal([(1, k), (1, d)], 1)
    program.at_most(list(zip(sizes, kept, strict=True)), room, in_limbs)
    answer = program.minimise([(10 + i, d) for i, d in enumerate(dropped)])
    assert answer.status == "optimal"
    return tuple(answer.values[k] for k in kept)


@pytest.mark.parametrize("in_limbs", [False, True])
def test_a_row_is_exact_to_the_unit(in_limbs):
    sizes = [LARGE + 1, LARGE + 2, LARGE + 3]
    assert drop_as_little_as_fits(sizes, 2 * LARGE + 5, in_limbs) == (0, 1, 1)
    assert drop_as_little_as_fits(sizes, 2 * LARGE + 4, in_limbs) == (1, 0, 1)
    assert drop_as_little_as_fits(sizes, 2 * LARGE + 3, in_limbs) == (1, 1, 0)
    assert drop_as_little_as_fits(sizes, 2 * LARGE + 2, in_limbs) == (0, 0, 1)
    assert drop_as_little_as_fits(sizes, LARGE, in_limbs) == (0, 0, 0)


def test_a_large_objective_is_minimised_to_the_unit():
    program = make_program()
    first, second, third = (program.variable(1) for _ in range(3))
    program.equal([(1, first), (1, second), (1, third)], 1)
    answer = program.minimise([(LARGE + 2, first), (LARGE + 1, second), (LARGE + 3, third)])
    assert (answer.status, answer.values, answer.objective) == ("optimal", (0, 1, 0), LARGE + 1)


def test_above_the_bound_of_interest_there_is_nothing():
    program = make_program()
    x = program.variable(9)
    program.at_most([(-1, x)], -4)
    assert program.minimise([(3, x)], at_most=12).values == (4,)
    assert program.minimise([(3, x)], at_most=11).status == "infeasible"


def test_a_row_that_is_taken_out_binds_no_longer():
    program = make_program()
    x = program.variable(9)
    row = program.at_most([(-LARGE, x)], -3 * LARGE)
    assert program.minimise([(1, x)]).objective == 3
    program.remove(row)
    assert program.minimise([(1, x)]).objective == 0


def test_contradicting_rows_are_infeasible():
    program = make_program()
    x = program.variable(9)
    program.at_most([(1, x)], 3)
    program.equal([(1, x)], 4)
    assert program.minimise([(1, x)]) == Answer("infeasible")


def test_an_answer_that_breaks_a_row_is_tightened_and_not_called_optimal(monkeypatch):
    program = make_program()
    kept, dropped = program.variable(1), program.variable(1)
    program.equal([(1, kept), (1, dropped)], 1)
    program.at_most([(LARGE, kept)], LARGE - 1)
    honest = IntegerProgram._solve
    calls = []

    def overshoot_twice(self, wanted, at_most=None):
        calls.append(1)
        # As a solver within its tolerance would: one unit too much, in units and then in limbs.
        return Answer("optimal", (1, 0), 0, 0.0) if len(calls) <= 2 else honest(self, wanted, at_most)

    monkeypatch.setattr(IntegerProgram, "_solve", overshoot_twice)
    answer = program.minimise([(5, dropped)])
    assert (len(calls), answer.status, answer.values, answer.bound) == (3, "feasible", (0, 1), 0.0)
    # The tightened row is as it was: the next answer is the solver's own.
    assert program.minimise([(5, dropped)]) == replace(answer, status="optimal", bound=5.0)


def test_an_answer_that_breaks_an_equation_is_a_defect(monkeypatch):
    program = make_program()
    x = program.variable(3)
    program.equal([(1, x)], 2)
    monkeypatch.setattr(IntegerProgram, "_solve", lambda self, wanted, at_most=None: Answer("optimal", (1,), 1, 1.0))
    with pytest.raises(ArithmeticError, match="break an equation"):
        program.minimise([(1, x)])


def test_without_time_nothing_is_known():
    program = make_program(seconds=0.0)
    x = program.variable(1)
    assert program.minimise([(1, x)]).status == "unknown"


# ---- what a solver that stops early makes of a plan ----


def two_buffers(limit_bytes: int) -> Problem:
    buffers = (BufferItem("a", 10, True), BufferItem("b", 20, True))
    ops = (OpItem("a", 4, (), ("a",)), OpItem("b", 6, (), ("b",)))
    return Problem((LayerClass("", buffers, ops),), limit_bytes)


def test_without_time_the_plan_of_least_memory_is_given_and_said():
    found = solve_stage(two_buffers(25), time_limit_seconds=0.0)
    assert (found.status, found.held_bytes, found.cost_us) == ("feasible", 0, 10)
    assert found.note == "The solver found no plan in its time; this is the plan of least memory."
    assert found.gap is not None


def test_without_time_an_impossible_limit_is_still_said():
    held = BufferItem("a", 10, True, must_hold=True)
    found = solve_stage(Problem((LayerClass("", (held,), ()),), 9), time_limit_seconds=0.0)
    assert (found.status, found.least_bytes) == ("infeasible", 10)


def test_an_unproven_plan_has_its_gap(monkeypatch):
    honest = IntegerProgram._solve

    def stops_early(self, wanted, at_most=None):
        return replace(honest(self, wanted, at_most), status="feasible", bound=3.2)

    monkeypatch.setattr(IntegerProgram, "_solve", stops_early)
    found = solve_stage(two_buffers(25))
    # The bound is one of whole units of cost: nothing costs less than 4.
    assert (found.status, found.cost_us, found.gap) == ("feasible", 4, 0.0)
    assert found.note == "The solver stopped before it had proven that no plan is cheaper."


def test_without_ortools_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.math_opt.python", None)
    with pytest.raises(UserError, match=r"needs OR-Tools, which cannot be imported .* pip install"):
        solve_stage(two_buffers(25))


# ---- grids ----


@pytest.mark.parametrize(
    ("values", "largest_sum", "most_units", "digits"),
    [
        ([1.0, 2.5, 0.25], 10, 10**6, 2),
        ([100.0, 300.0], 1000, 10**6, -2),
        ([0.1, 0.123456789], 1000, 10**6, 3),
        ([], 0, 10, 0),
        ([5e12], 5e12, 1000, -12),
        ([5.1234e12], 5.1234e12, 1000, -10),
    ],
)
def test_a_grid_is_exact_where_it_can_be(values, largest_sum, most_units, digits):
    grid = Grid.fitting(values, largest_sum, most_units)
    assert grid.digits == digits


def test_a_grid_rounds_to_the_nearest_or_up_and_down():
    assert [Grid(1).units(v) for v in (0.1, 0.14, 0.16, 3.0)] == [1, 1, 2, 30]
    assert [Grid(1, round_up=True).units(v) for v in (0.1, 0.11, 0.3)] == [1, 2, 3]
    assert Grid(1).floor(0.39) == 3
    assert Grid(1).value(25) == 2.5
