"""Least cost, of equal cost least bytes: what the formulations of one problem share.

A formulation is an integer program with, for each variable, what one unit of it costs, weighs and errs. Costs and
errors are whole numbers of a `Grid`; bytes are bytes. The grids depend on the problem without its limit, so that with
a falling limit the least cost never falls, and therefore the peak never rises: where the cost stays, so does the
least peak of that cost; where it rises, every plan of the old cost is above the new limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from megatron_adacc.planner.flow import ClassFlow
from megatron_adacc.planner.grid import Grid
from megatron_adacc.planner.problem import Problem
from megatron_adacc.planner.program import Answer, IntegerProgram, Term
from megatron_adacc.planner.reduced import Narrowing, PricedFlow
from megatron_adacc.planner.solution import LayerAnswer, Solution, assemble

# Units of cost and of error that a whole stage may come to: what HiGHS adds up without loss.
MOST_UNITS = 2**27
# So many plans of least cost are tried one by one for a lighter one.
_LIGHTER = 3
# For the plan of least memory, when the time is over and there is no other.
LAST_RESORT_SECONDS = 5.0


@dataclass
class Formulation:
    """An integer program, and what its variables come to: cost (units), bytes of (4), error (units); and
    ``other_bytes``, which stand beside them in (4); and, if it is one of flows, these."""

    program: IntegerProgram
    other_bytes: int
    cost: list[Term] = field(default_factory=list)
    weight: list[Term] = field(default_factory=list)
    error: list[Term] = field(default_factory=list)
    flows: list[ClassFlow] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """``answer`` of the formulation; ``least_bytes``: where it is infeasible, the least right side of (4) that is
    not, None if there is none; ``by_least_memory``: the time was over before any answer, and this is the plan of
    least memory."""

    answer: Answer
    least_bytes: int | None
    seconds: float
    by_least_memory: bool = False


def cost_grid(problem: Problem) -> Grid:
    """The grid of the problem's microseconds."""
    values, total = [], 0.0
    for layer in problem.classes:
        codecs = [codec for buffer in layer.buffers for codec in buffer.codecs]
        values += [op.us for op in layer.ops] + [c.us for c in codecs] + [c.again_us for c in codecs]
        dearest = sum(max((c.us + c.again_us for c in buffer.codecs), default=0.0) for buffer in layer.buffers)
        total += layer.count * (sum(op.us for op in layer.ops) + dearest)
    return Grid.fitting(values, total, MOST_UNITS)


def error_grid(problem: Problem) -> Grid | None:
    """The grid of the problem's errors, which are rounded up; None where they do not matter."""
    if problem.error_budget is None:
        return None
    values = [c.error for layer in problem.classes for buffer in layer.buffers for c in buffer.codecs]
    return Grid.fitting([*values, problem.error_budget], problem.error_budget, MOST_UNITS, round_up=True)


def solve(formulation: Formulation, problem: Problem, started: float, lightest: bool = True) -> Found:
    """Solve (4) and (5) over the formulation. started: of time.monotonic(). ``lightest``: of equal cost least bytes."""
    program = formulation.program
    room = problem.limit_bytes - formulation.other_bytes
    errors = error_grid(problem)
    rows = []
    budget = 0
    if errors is not None and problem.error_budget is not None:
        budget = errors.floor(problem.error_budget)
        rows.append(program.at_most(formulation.error, budget))  # (5)
    memory = program.at_most(formulation.weight, room)  # (4)
    minimise: Callable[[int | None], Answer] = partial(program.minimise, formulation.cost)
    if formulation.flows and formulation.cost:
        byte_price, *error_price = program.prices(formulation.cost, [memory, *rows])
        flows = [
            PricedFlow(
                f.paths, f.edges, f.layers,
                f.paths.values(byte_price * problem.classes[f.class_index].in_flight, sum(error_price)),
            )
            for f in formulation.flows
        ]  # fmt: skip
        worth = byte_price * room + sum(error_price) * budget
        minimise = Narrowing(program, formulation.cost, flows, worth).minimise
    answer = minimise(None)
    if answer.status == "optimal":
        answer = _lightest(formulation, answer, minimise) if lightest else answer
        return Found(answer, None, time.monotonic() - started)
    if answer.status == "feasible":
        return Found(answer, None, time.monotonic() - started)
    program.remove(memory)
    program.extend(LAST_RESORT_SECONDS)
    least = program.minimise(formulation.weight)
    if least.found and least.objective <= room:
        answer = Answer("feasible", least.values, bound=answer.bound)
        return Found(answer, None, time.monotonic() - started, by_least_memory=True)
    if least.status in ("optimal", "infeasible"):
        answer = Answer("infeasible")
    least_bytes = formulation.other_bytes + least.objective if least.status == "optimal" else None
    return Found(answer, least_bytes, time.monotonic() - started)


def _lightest(formulation: Formulation, best: Answer, minimise: Callable[[int | None], Answer]) -> Answer:
    """Of the answers that cost as little as ``best`` the lightest: the cheapest that is lighter, as often as it costs
    the same. Minimising the bytes beside a bound on the cost comes to the same and is harder for the solver."""
    program = formulation.program
    divisor = math.gcd(*(a for a, _ in formulation.weight)) or 1
    for _ in range(_LIGHTER):
        weight = sum(a * best.values[x] for a, x in formulation.weight)
        lighter = program.at_most(formulation.weight, weight - divisor, in_limbs=True)
        cheapest = minimise(best.objective)
        program.remove(lighter)
        if not cheapest.found:
            return best
        best = replace(best, values=cheapest.values)
    dearest = program.at_most(formulation.cost, best.objective)
    lightest = program.minimise(formulation.weight)
    program.remove(dearest)
    return replace(best, values=lightest.values or best.values)


def solution(problem: Problem, found: Found, layers: Callable[[tuple[int, ...]], tuple[LayerAnswer, ...]]) -> Solution:
    """The Solution of what was found; ``layers`` reads the layers from the variables' values."""
    answer = found.answer
    if not answer.found:
        return Solution(answer.status, solver_seconds=found.seconds, least_bytes=found.least_bytes)
    gap, note = None, ""
    result = assemble(problem, layers(answer.values), answer.status, found.seconds)
    if answer.status == "feasible":
        bound = max(cost_grid(problem).value(math.ceil(answer.bound - 0.01)), 0.0) if answer.bound > -math.inf else 0.0
        gap = result.cost_us / bound - 1 if bound > 0 else (math.inf if result.cost_us else 0.0)
        note = "The solver stopped before it had proven that no plan is cheaper."
        if found.by_least_memory:
            note = "The solver found no plan in its time; this is the plan of least memory."
    return replace(result, gap=gap, note=note)
