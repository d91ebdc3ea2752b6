"""State and activations under one limit: against brute force, and against each planner alone."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_problems import layer_points, problems, undominated

from megatron_adacc.errors import UserError
from megatron_adacc.planner import stage
from megatron_adacc.planner.joint import Activations, JointPlan, StateForm, combined, plan_jointly
from megatron_adacc.planner.problem import Problem
from megatron_adacc.planner.solution import Solution

# Multiples of a power of two: float sums are exact.
ERRORS = st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0, 4.0])


@st.composite
def parts(draw: st.DrawFn) -> list[list[StateForm]]:
    """Blocks of 32, 16, 8 and 4 bits: fewer bytes, more error, an update that takes longer."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 12))
        steps = [draw(ERRORS) for _ in range(3)]
        us = draw(st.sampled_from([0.0, 0.5]))
        errors = [0.0, *itertools.accumulate(steps)]
        found.append([StateForm(size * 8 >> k, errors[k], us if k else 0.0) for k in range(4)])
    return found


def solved(problem: Problem) -> Callable[[int], Activations[Any] | None]:
    """The activations' planner, by the bytes that it is given."""

    def ask(limit_bytes: int) -> Activations[Solution] | None:
        found = stage.solve_stage(replace(problem, limit_bytes=limit_bytes))
        return Activations(found.cost_us, found.peak_bytes, found) if found.layers else None

    return ask


def among(points: list[tuple[int, float]]) -> Callable[[int], Activations[Any] | None]:
    """The same by enumeration."""

    def ask(limit_bytes: int) -> Activations[None] | None:
        fitting = min(((us, nbytes) for nbytes, us in points if nbytes <= limit_bytes), default=None)
        return None if fitting is None else Activations(*fitting, None)

    return ask


def activation_points(problem: Problem) -> list[tuple[int, float]]:
    """(bytes, us) of every way to hold and to run again, within the error budget."""
    sums = [(problem.fixed_bytes + problem.transient_bytes, 0.0, 0.0)]
    for layer in problem.classes:
        for _ in range(layer.count):
            sums = undominated(
                (a + layer.in_flight * b, us + more, error + further)
                for a, us, error in sums
                for b, more, further in layer_points(layer)
            )
    budget = problem.error_budget
    within = [(nbytes, us, 0.0) for nbytes, us, error in sums if budget is None or error <= budget]
    return [(nbytes, us) for nbytes, us, _ in undominated(within)]


def check(
    problem: Problem, blocks: list[list[StateForm]], price: float, micro_batches: int, more: int, solver: bool
) -> None:
    limit = problem.limit_bytes + more
    everything = activation_points(problem)
    every_state = undominated(
        (sum(f.bytes for f in choice), sum(f.us + price * f.error for f in choice), 0.0)
        for choice in itertools.product(*blocks)
    )
    costs = [
        micro_batches * us + state_cost
        for nbytes, us in everything
        for state_bytes, state_cost, _ in every_state
        if nbytes + state_bytes <= limit
    ]
    ask = solved(problem) if solver else among(everything)
    found = plan_jointly(combined(blocks), ask, limit, price, micro_batches=micro_batches)
    if not costs:
        assert found is None
        return
    assert found is not None
    assert found.cost_us == found.bound_us == min(costs)
    # Not a byte above the limit, also when the state uses up what is left.
    assert found.activations.bytes + found.form.bytes <= limit
    assert found.activations.bytes + found.state_bytes == limit
    exact = sum(part[0].bytes for part in blocks)
    activations_alone = [micro_batches * us for nbytes, us in everything if nbytes + exact <= limit]
    cheapest = min(us for _, us in everything)
    kept = min(nbytes for nbytes, us in everything if us == cheapest)
    states_alone = [
        micro_batches * cheapest + state_cost
        for state_bytes, state_cost, _ in every_state
        if state_bytes + kept <= limit
    ]
    assert found.cost_us <= min([*activations_alone, *states_alone], default=math.inf)


PRICES = st.sampled_from([0.0, 0.5, 1.0, 8.0])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems(), parts(), PRICES, st.integers(1, 3), st.integers(0, 96))
def test_it_equals_brute_force_and_neither_planner_alone_is_better(
    problem: Problem, blocks: list[list[StateForm]], price: float, micro_batches: int, more: int
) -> None:
    check(problem, blocks, price, micro_batches, more, solver=False)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(problems(), parts(), PRICES, st.integers(1, 3), st.integers(0, 96))
def test_so_it_does_with_the_solver(
    problem: Problem, blocks: list[list[StateForm]], price: float, micro_batches: int, more: int
) -> None:
    check(problem, blocks[:1], price, micro_batches, more, solver=True)


STAIRS = [(0, 90.0), (10, 50.0), (20, 30.0), (40, 10.0), (60, 0.0)]  # from so many bytes on, so many microseconds


def stairs(room: int) -> Activations[str] | None:
    fitting = [(us, nbytes) for nbytes, us in STAIRS if nbytes <= room]
    us, nbytes = min(fitting)
    return Activations(us, nbytes, f"{nbytes} bytes")


FORMS = [StateForm(80 - 2 * i, 0.01 * i * i) for i in range(31)]  # 80 to 20 bytes, errors 0 to 9


@pytest.mark.parametrize(
    ("price", "state", "activations"),
    [(0.0, 40, 60), (1.0, 40, 60), (10.0, 60, 40), (50.0, 80, 20), (1e6, 80, 20)],
)
def test_the_price_of_an_error_says_who_gives(price: float, state: int, activations: int) -> None:
    """Limit 100. Exact state leaves 20 bytes (30 us); 60 bytes of state (error 1) leave 40 (10 us); 40 (error 4) leave
    60 (0 us). So state gives its first 20 bytes below a price of 20 us, the next 20 below 10 / 3."""
    found = plan_jointly(FORMS, stairs, 100, price)
    assert found is not None
    assert (found.form.bytes, found.activations.bytes) == (state, activations)


def test_few_forms_are_asked_for() -> None:
    forms = [StateForm(10**6 - i, i / 1000) for i in range(10**5)]

    def activations(room: int) -> Activations[None]:
        return Activations(max(0.0, 100.0 - room / 1000), 0, None)

    # 100 - (5e4 + i) / 1000 + 2 i / 1000 grows with i: exact state is best.
    found = plan_jointly(forms, activations, 1050000, 2.0)
    assert found is not None
    assert (found.form, found.cost_us) == (forms[0], 50.0)
    assert found.questions <= 64
    assert found.bound_us <= found.cost_us


def test_an_answer_that_was_stopped_has_a_bound_and_is_no_worse_than_one_planner_alone() -> None:
    found: JointPlan[str] | None = plan_jointly(FORMS, stairs, 100, 10.0, kept_bytes=60, most_questions=0)
    assert found is not None
    assert found.questions == 3
    assert found.cost_us == 30.0  # of exact state: 30; of activations that are all kept: 40
    assert found.bound_us < 20.0  # the best is 20


def test_what_is_no_question() -> None:
    assert plan_jointly(FORMS, stairs, 19, 1.0) is None
    with pytest.raises(UserError, match="no form"):
        plan_jointly([], stairs, 100, 1.0)
    with pytest.raises(UserError, match="finite"):
        plan_jointly(FORMS, stairs, 100, -1.0)
