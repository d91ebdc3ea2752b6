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

import time
from dataclasses import dataclass

import numpy as np

from megatron_adacc.planner import lexicographic
from megatron_adacc.planner.frontier import LayerPaths
from megatron_adacc.planner.lexicographic import Formulation
from megatron_adacc.planner.problem import Problem
from megatron_adacc.planner.program import IntegerProgram
from megatron_adacc.planner.solution import Extra, LayerAnswer, Solution, evaluate_layer
from megatron_adacc.planner.validate import validate


@dataclass(frozen=True)
class ClassFlow:
    """The variables of one class: of each stage of its paths, one for each edge."""

    class_index: int
    paths: LayerPaths
    edges: tuple[tuple[int, ...], ...]


def solve_stage(problem: Problem, extra: Extra | None = None, time_limit_seconds: float = 10.0) -> Solution:
    """The plan of least cost, of equal cost least peak, for the layers of a stage.

    Raises UserError for a problem that contradicts itself."""
    validate(problem)
    started = time.monotonic()
    formulation = Formulation(IntegerProgram(started + time_limit_seconds))
    flows = [
        add_flow(formulation, problem, index, layer_paths(problem, index)) for index in range(len(problem.classes))
    ]
    found = lexicographic.solve(formulation, problem, started)
    return lexicographic.solution(
        problem,
        found,
        lambda values: tuple(answer for flow in flows for answer in _answers(problem, flow, values)),
    )


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
    return ClassFlow(class_index, paths, tuple(edges))


def _answers(problem: Problem, flow: ClassFlow, values: tuple[int, ...]) -> list[LayerAnswer]:
    """The flow as layers. The richest layers, which hold most, come last: there their bytes are freed first."""
    layer = problem.classes[flow.class_index]
    left = [np.array([values[x] for x in edges], dtype=np.int64) for edges in flow.edges]
    answers = []
    for _ in range(layer.count):
        node = 0
        chosen: dict[int, str] = {}
        for stage, flowing in zip(flow.paths.stages, left, strict=True):
            out = np.arange(stage.first[node], stage.first[node + 1])
            edge = int(out[np.flatnonzero(flowing[out])[0]])
            flowing[edge] -= 1
            chosen.update(stage.holds[edge])
            node = int(stage.target[edge])
        actions = {buffer.site: chosen[i] for i, buffer in enumerate(layer.buffers)}
        answers.append(LayerAnswer(flow.class_index, actions, evaluate_layer(layer, actions)))
    return sorted(answers, key=lambda answer: (answer.outcome.held_bytes, -answer.outcome.cost_us))
