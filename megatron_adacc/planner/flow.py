"""The plans of alike layers as an integer flow through their graph of plans; see :mod:`megatron_adacc.planner.stage`.

integer  f_e         layers whose plan takes edge e, 0 <= f_e <= L
(7) sum of f over the edges out of a node = sum of f over the edges into it;   L at the start
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_adacc.planner.frontier import PlanGraph
from megatron_adacc.planner.problem import Problem
from megatron_adacc.planner.program import IntegerProgram, Term
from megatron_adacc.planner.solution import LayerAnswer, evaluate_layer


@dataclass(frozen=True)
class ClassFlow:
    """``layers`` layers of one class: of each stage of their paths a variable for each edge."""

    class_index: int
    paths: PlanGraph
    edges: tuple[tuple[int, ...], ...]
    layers: int

    def terms(self, weights: Sequence[NDArray[Any]]) -> list[Term]:
        """What the flow comes to where an edge weighs ``weights[stage][edge]``, whole numbers."""
        return [
            (weight, x)
            for own, variables in zip(weights, self.edges, strict=True)
            for weight, x in zip(own.tolist(), variables, strict=True)
        ]

    def answers(self, problem: Problem, values: tuple[int, ...]) -> list[LayerAnswer]:
        """The flow as layers, with few different plans: a plan follows the fullest edge out of each node. The richest
        layers, which hold most, come last: there their bytes are freed first."""
        layer = problem.classes[self.class_index]
        left = [np.array([values[x] for x in edges], dtype=np.int64) for edges in self.edges]
        answers: list[LayerAnswer] = []
        while len(answers) < self.layers:
            node, taken = 0, []
            chosen: dict[int, str] = {}
            for stage, flowing in zip(self.paths.stages, left, strict=True):
                edge = int(stage.first[node] + np.argmax(flowing[stage.first[node] : stage.first[node + 1]]))
                taken.append(edge)
                chosen.update(stage.holds[edge])
                node = int(stage.target[edge])
            alike = min((int(f[e]) for f, e in zip(left, taken, strict=True)), default=self.layers)
            for flowing, edge in zip(left, taken, strict=True):
                flowing[edge] -= alike
            actions = {buffer.site: chosen[i] for i, buffer in enumerate(layer.buffers)}
            answers += [LayerAnswer(self.class_index, actions, evaluate_layer(layer, actions))] * alike
        return sorted(answers, key=lambda answer: (answer.outcome.held_bytes, -answer.outcome.cost_us))


def add_flow(program: IntegerProgram, class_index: int, paths: PlanGraph, layers: int) -> ClassFlow:
    """A flow of so many layers, with (7)."""
    edges: list[tuple[int, ...]] = []
    arriving: list[list[int]] = [[]]
    for number, stage in enumerate(paths.stages):
        variables = tuple(program.variable(layers) for _ in stage.holds)
        edges.append(variables)
        for node in range(len(stage.first) - 1):
            leaving = [(1, x) for x in variables[stage.first[node] : stage.first[node + 1]]]
            if number == 0:
                program.equal(leaving, layers)
            else:
                program.equal([*leaving, *((-1, x) for x in arriving[node])], 0)
        arriving = [[] for _ in range(max(stage.target, default=-1) + 1)]
        for x, target in zip(variables, stage.target.tolist(), strict=True):
            arriving[target].append(x)
    return ClassFlow(class_index, paths, tuple(edges), layers)
