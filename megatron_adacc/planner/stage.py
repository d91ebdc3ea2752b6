"""Many layers that are alike: an integer flow through the layer's graph of plans.

A plan of one layer is a path through :class:`megatron_adacc.planner.frontier.LayerPaths`. Plans of L alike layers are
L paths, and what matters of them is how many take each edge:

    integer  f_e         layers whose plan takes edge e, 0 <= f_e <= L
    (7) sum of f over the edges out of a node = sum of f over the edges into it;   L at the start
    (4) fixed + transient + sum over classes of in_flight * sum_e bytes_e f_e <= limit
    (5) sum error_e f_e <= error budget
    minimise sum cost_e f_e

Every integer flow falls apart into L paths, so this loses nothing, and (1), (2), (3) and (6) are in the graph. The
solver does not see which layer is which, nor which choice of one op goes with which of another where they do not
depend on each other: with a binary for each layer, or with a count for each plan of the frontier, it has to prove
that none of the many plans that differ in that alone is better. Classes are flows of their own that share (4), (5).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from megatron_adacc.planner import lexicographic
from megatron_adacc.planner.ends import units_of
from megatron_adacc.planner.floors import Floor, floors_of_seen
from megatron_adacc.planner.flow import add_flow
from megatron_adacc.planner.frontier import LayerPaths, TooWide
from megatron_adacc.planner.least import Least, least_memory
from megatron_adacc.planner.lexicographic import Formulation
from megatron_adacc.planner.position import Remembered, Search
from megatron_adacc.planner.problem import Problem
from megatron_adacc.planner.program import IntegerProgram
from megatron_adacc.planner.seen import look_at_plans
from megatron_adacc.planner.solution import Extra, LayerAnswer, Solution, assemble, evaluate_layer
from megatron_adacc.planner.uniform import solve_uniform
from megatron_adacc.planner.validate import validate

Floors = Sequence[Sequence[Floor]]

_NOT_SURE = "The bound knows of each layer only what it needs under any plan."
_ONLY_SEEN = "The bound takes each plan to need no less, for what it holds, than those that were looked at."
_LEAST = "The solver found no cheaper plan; this is the plan of least memory."


def solve_stage(
    problem: Problem, extra: Extra | None = None, floors: Floors | None = None, time_limit_seconds: float = 10.0
) -> Solution:
    """The plan of least cost, of equal cost least peak, for the layers of a stage.

    ``extra``: the bytes alive beyond the held ones while a layer with these actions runs; see
    :mod:`megatron_adacc.planner.position`. ``floors``: of each class, what held and extra bytes are at least
    (planner/floors.py). With extra bytes the answer is "optimal" only where it costs no more than the bound, which no
    plan beats; without floors, no plan that needs no less than those that were looked at. Otherwise it is "feasible",
    with the gap to the bound. Where nothing fits it is "infeasible" with a limit that has a plan, and whether that is
    the least (planner/least.py).

    Raises UserError for a problem that contradicts itself."""
    validate(problem)
    started = time.monotonic()
    by_position = extra is not None or problem.moments or any(layer.left_bytes for layer in problem.classes)
    remembered = Remembered(problem, extra or (lambda class_index, actions: 0))
    try:
        paths = [layer_paths(problem, i) for i in range(len(problem.classes))]
    except TooWide:
        found = solve_uniform(problem, extra, time_limit_seconds)
        if found.layers or found.status != "infeasible" or not by_position:
            return found
        return _least(problem, least_memory(problem, remembered, floors, lexicographic.error_grid(problem)), started)
    if not by_position or not problem.classes:
        return solve_flow(problem, paths, started, time_limit_seconds)
    return _by_position(problem, paths, remembered, floors, started, time_limit_seconds)


def solve_flow(
    problem: Problem, paths: list[LayerPaths], started: float, seconds: float, lightest: bool = True
) -> Solution:
    """Without extra bytes: the cheapest plan; ``lightest``: of these the one of least bytes."""
    program = IntegerProgram(started + seconds)
    formulation = Formulation(program, problem.fixed_bytes + problem.transient_bytes)
    for i, (layer, own) in enumerate(zip(problem.classes, paths, strict=True)):
        flow = add_flow(program, i, own, layer.count)
        formulation.flows.append(flow)
        formulation.cost += flow.terms([stage.cost for stage in own.stages])
        formulation.weight += flow.terms([layer.in_flight * stage.nbytes for stage in own.stages])
        formulation.error += flow.terms([stage.error for stage in own.stages])
    found = lexicographic.solve(formulation, problem, started, lightest)
    return lexicographic.solution(
        problem, found, lambda values: tuple(a for flow in formulation.flows for a in flow.answers(problem, values))
    )


def _by_position(
    problem: Problem, paths: list[LayerPaths], extra: Remembered, floors: Floors | None, started: float, seconds: float
) -> Solution:
    errors = lexicographic.error_grid(problem)
    complete = False
    known = floors
    if known is None:
        complete = look_at_plans(problem, paths, errors, extra)
        known = [_floors_of_known(problem, i, extra) for i in range(len(paths))]
    search = Search(problem, paths, extra, known, started + seconds)
    search.among_all()
    if not search.layers and search.bound.found:
        if floors is not None:
            complete = look_at_plans(problem, paths, errors, extra)
        search.among_known(complete)
    if not search.layers:
        least = least_memory(problem, extra, floors, errors)
        if least is None or least.peak_bytes > problem.limit_bytes:
            return _least(problem, least, started)
        search.among_known()
        if not search.layers:
            costs = lexicographic.cost_grid(problem)
            units = sum(units_of(problem.classes[a.class_index], a.actions, costs, None)[0] for a in least.layers)
            return _rated(problem, least.layers, units, search, _LEAST, started)
    search.make_lighter()
    note = _NOT_SURE if floors is not None or complete else _ONLY_SEEN
    return _rated(problem, search.layers, search.units, search, note, started)


def _floors_of_known(problem: Problem, index: int, extra: Remembered) -> tuple[Floor, ...]:
    layer = problem.classes[index]
    plans, more = extra.known(index)
    held = [evaluate_layer(layer, actions).held_bytes for actions in plans]
    return floors_of_seen(layer, np.array(held, dtype=np.int64), np.array(more, dtype=np.int64))


def _rated(
    problem: Problem, layers: tuple[LayerAnswer, ...], units: int, search: Search, note: str, started: float
) -> Solution:
    """The layers, with what is known of how good they are."""
    taken = time.monotonic() - started
    bound = float(search.bound.objective) if search.bound.status == "optimal" else search.bound.bound
    if search.bound.status == "optimal" and units <= bound:
        return assemble(problem, layers, "optimal", taken, note=note if note == _ONLY_SEEN else "")
    return assemble(problem, layers, "feasible", taken, units / bound - 1 if bound > 0 else math.inf, note)


def _least(problem: Problem, least: Least | None, started: float) -> Solution:
    """The plan of least memory if it is within the limit; otherwise the limit that it needs."""
    taken = time.monotonic() - started
    if least is None:
        return Solution("infeasible", solver_seconds=taken)
    if least.peak_bytes <= problem.limit_bytes:
        return assemble(problem, least.layers, "feasible", taken, None, _LEAST)
    return Solution("infeasible", solver_seconds=taken, least_bytes=least.peak_bytes, least_proven=least.proven)


def layer_paths(problem: Problem, class_index: int) -> LayerPaths:
    """The plans of one layer of the class."""
    costs, errors = lexicographic.cost_grid(problem), lexicographic.error_grid(problem)
    return LayerPaths(problem.classes[class_index], costs, errors, lossless=problem.error_budget == 0)
