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
from dataclasses import dataclass, replace

import numpy as np

from megatron_adacc.planner import lexicographic
from megatron_adacc.planner.frontier import LayerPaths, TooWide
from megatron_adacc.planner.lexicographic import Formulation
from megatron_adacc.planner.position import (
    Design,
    Remembered,
    byte_price,
    designs,
    find_candidates,
    placed,
    without_tails,
)
from megatron_adacc.planner.problem import Problem
from megatron_adacc.planner.program import IntegerProgram
from megatron_adacc.planner.reduced import PricedFlow
from megatron_adacc.planner.solution import Extra, LayerAnswer, Solution, assemble, evaluate_layer, peak_by_class
from megatron_adacc.planner.uniform import solve_uniform
from megatron_adacc.planner.validate import LARGEST_BYTES, validate

# So many designs are tried, the most hopeful first.
_DESIGNS = 8


@dataclass(frozen=True)
class ClassFlow:
    """The variables of one class: of each stage of its paths, one for each edge."""

    class_index: int
    paths: LayerPaths
    edges: tuple[tuple[int, ...], ...]


def solve_stage(problem: Problem, extra: Extra | None = None, time_limit_seconds: float = 10.0) -> Solution:
    """The plan of least cost, of equal cost least peak, for the layers of a stage.

    ``extra``: the bytes alive beyond the held ones while a layer with these actions runs, asked for some dozens of
    plans a class; see :mod:`megatron_adacc.planner.position`. With it the answer is "optimal" only where no plan whose
    layers have at least the least extra bytes seen is cheaper; otherwise it is "feasible", with the gap to that.

    Raises UserError for a problem that contradicts itself."""
    validate(problem)
    started = time.monotonic()
    try:
        paths = [layer_paths(problem, i) for i in range(len(problem.classes))]
    except TooWide:
        return solve_uniform(problem, extra, time_limit_seconds)
    if extra is None or not problem.classes:
        return solve_flow(problem, paths, started, time_limit_seconds)
    return solve_by_position(problem, paths, Remembered(problem, extra), started, time_limit_seconds)


def solve_flow(
    problem: Problem, paths: list[LayerPaths], started: float, seconds: float, cheapest: bool = True,
    lightest: bool = True,
) -> Solution:  # fmt: skip
    """Without extra bytes: the ``cheapest`` plan, of these the ``lightest``; or one of these two alone."""
    program = IntegerProgram(started + seconds)
    formulation = Formulation(program, problem.fixed_bytes + problem.transient_bytes)
    flows = [add_flow(formulation, problem, i, paths[i]) for i in range(len(paths))]
    if not cheapest:
        formulation.cost, problem = [], replace(problem, limit_bytes=LARGEST_BYTES)
    found = lexicographic.solve(formulation, problem, started, lightest)
    return lexicographic.solution(
        problem, found, lambda values: tuple(answer for flow in flows for answer in _answers(problem, flow, values))
    )


def solve_by_position(
    problem: Problem, paths: list[LayerPaths], extra: Extra, started: float, seconds: float
) -> Solution:
    """With extra bytes: the best of some designs, and how far from the best of all it can be."""
    errors = lexicographic.error_grid(problem)
    found = [find_candidates(problem, i, path, errors, extra) for i, path in enumerate(paths)]
    least_lead = max(problem.transient_bytes, min((int(e) for own in found for e in own.extra), default=0))
    nothing = tuple((None, 0) for _ in paths)
    bound = solve_flow(replace(problem, transient_bytes=least_lead), paths, started, seconds)
    best = _Best(problem)
    most_extra = [int(own.extra.max(initial=0)) for own in found]

    def attempt(design: Design, cheapest: bool = True) -> tuple[LayerAnswer, ...]:
        rest = without_tails(problem, found, design, errors)
        if rest is None or time.monotonic() > started + seconds:
            return ()
        flow = solve_flow(rest, paths, started, seconds, cheapest, lightest=not cheapest)
        layers = placed(problem, found, design, flow.layers, extra) if flow.layers or not _layers(rest) else ()
        best.offer(layers, design)
        return layers

    if bound.layers:
        layers = placed(problem, found, Design(least_lead, nothing, 0.0), bound.layers, extra)
        best.offer(layers)
        if best.layers != layers:
            room = problem.limit_bytes - problem.fixed_bytes - least_lead
            seen = [max(a.extra_bytes for a in layers if a.class_index == i) for i in range(len(paths))]
            price = byte_price(problem, found, room)
            for design in designs(problem, found, price, seen)[:_DESIGNS]:
                layers = attempt(design)
                if layers and _over(problem, layers):  # what is not in the tail needs more than was taken
                    needed = [
                        max([e, *(a.extra_bytes for a in layers if a.class_index == i)]) for i, e in enumerate(seen)
                    ]
                    longer = [d for d in designs(problem, found, price, needed) if d.lead == design.lead]
                    layers = attempt(longer[0]) if longer and longer[0].tails != design.tails else layers
                    over = _over(problem, layers)
                    if over:
                        attempt(replace(design, lead=design.lead + over))
            if best.design is not None and best.lead < best.design.lead:
                attempt(replace(best.design, lead=best.lead))  # the room that its lead left over
    if not best.layers:
        price = 1.0  # of a byte, in bytes
        weights = [replace(own, points=replace(own.points, cost=own.points.cost * 0)) for own in found]
        planned = designs(problem, weights, price, most_extra)
        for design in [*planned[:_DESIGNS], Design(max(most_extra), nothing, 0.0)]:
            attempt(design, cheapest=False)
    seconds_taken = time.monotonic() - started
    if not best.layers:
        status = bound.status if bound.status == "unknown" else "infeasible"
        return Solution(status, solver_seconds=seconds_taken, least_bytes=best.least_peak)
    gap = best.cost_us / bound.cost_us - 1 if bound.cost_us else (math.inf if best.cost_us else 0.0)
    if bound.status != "optimal":
        return assemble(problem, best.layers, "feasible", seconds_taken, None, bound.note)
    if gap <= 1e-9:
        return assemble(problem, best.layers, "optimal", seconds_taken)
    note = "The bound takes each layer to need no more beside what it holds than the most modest plan does."
    return assemble(problem, best.layers, "feasible", seconds_taken, gap, note)


def _over(problem: Problem, layers: tuple[LayerAnswer, ...]) -> int:
    """Bytes above the limit."""
    return max(0, max(peak_by_class(problem, layers), default=0) - problem.limit_bytes)


def _layers(problem: Problem) -> int:
    return sum(layer.count for layer in problem.classes)


class _Best:
    """The cheapest layers offered that are within the limit, of equal cost those of least peak; and the least peak
    of all offered."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.layers: tuple[LayerAnswer, ...] = ()
        self.cost_us = math.inf
        self._peak = 0
        self.least_peak: int | None = None
        self.design: Design | None = None

    @property
    def lead(self) -> int:
        """What the layers need beside all that is held."""
        problem = self._problem
        held = sum(problem.classes[a.class_index].in_flight * a.outcome.held_bytes for a in self.layers)
        return self._peak - held - problem.fixed_bytes

    def offer(self, layers: tuple[LayerAnswer, ...], design: Design | None = None) -> None:
        if not layers:
            return
        peak = max(peak_by_class(self._problem, layers))
        self.least_peak = peak if self.least_peak is None else min(peak, self.least_peak)
        cost_us = math.fsum(layer.outcome.cost_us for layer in layers)
        if peak <= self._problem.limit_bytes and (cost_us, peak) < (self.cost_us, self._peak or peak + 1):
            self.layers, self.cost_us, self._peak, self.design = layers, cost_us, peak, design


def layer_paths(problem: Problem, class_index: int) -> LayerPaths:
    """The plans of one layer of the class."""
    costs, errors = lexicographic.cost_grid(problem), lexicographic.error_grid(problem)
    return LayerPaths(problem.classes[class_index], costs, errors, lossless=problem.error_budget == 0)


def add_flow(formulation: Formulation, problem: Problem, class_index: int, paths: LayerPaths) -> ClassFlow:
    """Add (7) and the class's part of (4), (5) and the objective."""
    layer, program = problem.classes[class_index], formulation.program
    edges: list[tuple[int, ...]] = []
    arriving: list[list[int]] = [[]]
    for number, stage in enumerate(paths.stages):
        variables = tuple(program.variable(layer.count) for _ in stage.holds)
        edges.append(variables)
        for node in range(len(stage.first) - 1):
            leaving = [(1, x) for x in variables[stage.first[node] : stage.first[node + 1]]]
            if number == 0:
                program.equal(leaving, layer.count)
            else:
                program.equal([*leaving, *((-1, x) for x in arriving[node])], 0)
        arriving = [[] for _ in range(max(stage.target, default=-1) + 1)]
        for x, target, nbytes, cost, error in zip(
            variables, stage.target.tolist(), stage.nbytes.tolist(), stage.cost.tolist(), stage.error.tolist(),
            strict=True,
        ):  # fmt: skip
            arriving[target].append(x)
            formulation.weight.append((layer.in_flight * nbytes, x))
            formulation.cost.append((cost, x))
            formulation.error.append((error, x))
    formulation.flows.append(PricedFlow(paths, tuple(edges), layer.count, layer.in_flight))
    return ClassFlow(class_index, paths, tuple(edges))


def _answers(problem: Problem, flow: ClassFlow, values: tuple[int, ...]) -> list[LayerAnswer]:
    """The flow as layers, with few different plans: a plan follows the fullest edge out of each node. The richest
    layers, which hold most, come last: there their bytes are freed first."""
    layer = problem.classes[flow.class_index]
    left = [np.array([values[x] for x in edges], dtype=np.int64) for edges in flow.edges]
    answers: list[LayerAnswer] = []
    while len(answers) < layer.count:
        node, taken = 0, []
        chosen: dict[int, str] = {}
        for stage, flowing in zip(flow.paths.stages, left, strict=True):
            edge = int(stage.first[node] + np.argmax(flowing[stage.first[node] : stage.first[node + 1]]))
            taken.append(edge)
            chosen.update(stage.holds[edge])
            node = int(stage.target[edge])
        alike = min((int(f[e]) for f, e in zip(left, taken, strict=True)), default=layer.count)
        for flowing, edge in zip(left, taken, strict=True):
            flowing[edge] -= alike
        actions = {buffer.site: chosen[i] for i, buffer in enumerate(layer.buffers)}
        answers += [LayerAnswer(flow.class_index, actions, evaluate_layer(layer, actions))] * alike
    return sorted(answers, key=lambda answer: (answer.outcome.held_bytes, -answer.outcome.cost_us))
