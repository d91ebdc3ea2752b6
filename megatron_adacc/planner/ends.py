"""A stage as flows, the last layers of each chunk apart: a bound for all plans, and the plan that it would be of.

Bytes beside the held ones belong to a whole plan, so the flow of planner/stage.py cannot see them. Floors (planner/
floors.py) are linear in a plan's edges, and with most of them it is the last layers that matter: each layer before
them has, when it runs backward, the bytes of those behind it. So the last k layers of each chunk are flows of one
layer, all others of a class one flow as before, and (4) becomes for each moment of the schedule, each layer l of those
and each floor of its class

    (4) fixed + beside + sum over layers of alive * held + transient <= limit               transient: with the head
    (4') fixed + beside + sum over layers of alive * held - held_l - sum over j behind l of held_j
         + left_j of these + base + adds of l's edges <= limit

which hold for every plan within the limit, whatever its layers before the last need. The cheapest flow is a bound for
all plans, exact where floors are reached and no layer before the last needs more than these leave room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_adacc.planner import lexicographic
from megatron_adacc.planner.dominance import undominated
from megatron_adacc.planner.floors import Floor
from megatron_adacc.planner.flow import add_flow
from megatron_adacc.planner.frontier import PlanGraph, Stage
from megatron_adacc.planner.grid import Grid
from megatron_adacc.planner.problem import LayerClass, Moment, Problem
from megatron_adacc.planner.program import Answer, IntegerProgram
from megatron_adacc.planner.reduced import Narrowing, PricedFlow
from megatron_adacc.planner.solution import COMPRESS, LayerAnswer, evaluate_layer

Weights = list[NDArray[Any]]


@dataclass(frozen=True)
class EndPlans:
    """The plans that a layer apart may get, and its rows (4'): the base, and of each stage what its edges add."""

    graph: PlanGraph
    needs: Sequence[tuple[int, Weights]]


def any_plan(layer: LayerClass, paths: PlanGraph, floors: Sequence[Floor]) -> EndPlans:
    """All plans, with floors for what they need."""
    sites = [buffer.site for buffer in layer.buffers]
    needs = []
    for floor in floors:
        adds = [
            [sum(floor.adds.get((sites[i], action), 0) for i, action in holds) for holds in stage.holds]
            for stage in paths.stages
        ]
        needs.append((floor.base_bytes, [np.array(own, dtype=np.int64) for own in adds]))
    return EndPlans(paths, needs)


def one_of(
    layer: LayerClass, plans: Sequence[Mapping[str, str]], extra: Sequence[int], costs: Grid, errors: Grid | None
) -> EndPlans:
    """One of these plans, with what each needs exactly: a graph with an edge for each plan."""
    rows = []
    for actions, more in zip(plans, extra, strict=True):
        held = evaluate_layer(layer, actions).held_bytes
        rows.append((held, held + more, *units_of(layer, actions, costs, errors)))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    kept = undominated(np.zeros(len(rows), dtype=np.int64), list(columns))
    nbytes, needed, cost, error = columns[:, kept]
    sites = [buffer.site for buffer in layer.buffers]
    holds = tuple(tuple((i, plans[k][site]) for i, site in enumerate(sites)) for k in kept.tolist())
    stage = Stage(np.array([0, len(kept)]), np.zeros(len(kept), dtype=np.int64), nbytes, cost, error, holds)
    return EndPlans(PlanGraph([stage]), [(0, [needed])])


def units_of(layer: LayerClass, actions: Mapping[str, str], costs: Grid, errors: Grid | None) -> tuple[int, int]:
    """Cost and error, rounded op by op and codec by codec as in :class:`LayerPaths`."""
    runs = set(evaluate_layer(layer, actions).runs)
    again = [op for op in layer.ops if op.name in runs]
    read = {site for op in again for site in op.reads}
    cost = sum(costs.units(op.us) for op in again)
    error = 0
    for buffer in layer.buffers:
        for codec in buffer.codecs:
            if actions[buffer.site] == COMPRESS + codec.name:
                cost += costs.units(codec.us + (codec.again_us if buffer.site in read else 0.0))
                error += errors.units(codec.error) if errors else 0
    return cost, error


@dataclass(frozen=True)
class _Row:
    """sum over the flows of weights * edges <= right."""

    weights: tuple[Weights, ...]
    right: int


class Ends:
    """The program for one problem, with the last ``lengths[chunk]`` layers of each chunk apart."""

    def __init__(
        self, problem: Problem, paths: Sequence[PlanGraph], ends: Sequence[EndPlans],
        lengths: Mapping[int, int], deadline: float,
    ) -> None:  # fmt: skip
        """``ends``: by class."""
        self._problem, self._ends = problem, ends
        self._program = IntegerProgram(deadline)
        self.positions = last_positions(problem, lengths)
        sequence = problem.sequence
        apart = [sequence[position] for position in self.positions]
        self._flows = [
            add_flow(self._program, i, path, layer.count - apart.count(i))
            for i, (layer, path) in enumerate(zip(problem.classes, paths, strict=True))
            if layer.count > apart.count(i)
        ]
        self._end_of = {position: len(self._flows) + k for k, position in enumerate(self.positions)}
        self._flows += [add_flow(self._program, i, ends[i].graph, 1) for i in apart]
        self._cost = [t for flow in self._flows for t in flow.terms([stage.cost for stage in flow.paths.stages])]

    def cheapest(self, less: int = 0, at_most: int | None = None) -> Answer:
        """``less``: bytes of the limit that are left free. Where all plans are offered to the layers apart, and nothing
        is left free, no plan within the limit costs less than what comes out. ``at_most``: dearer ones are of no
        interest."""
        problem, program = self._problem, self._program
        errors = lexicographic.error_grid(problem)
        rows = self._memory(problem.limit_bytes - less)
        if errors is not None and problem.error_budget is not None:
            weighed = tuple([stage.error for stage in flow.paths.stages] for flow in self._flows)
            rows.append(_Row(weighed, errors.floor(problem.error_budget)))
        written = [program.at_most(self._terms(row), row.right) for row in rows]
        prices = program.prices(self._cost, written)
        values: list[Weights] = [[stage.cost.astype(np.float64) for stage in flow.paths.stages] for flow in self._flows]
        for row, price in zip(rows, prices, strict=True):
            for own, weights in zip(values, row.weights, strict=True):
                if price:
                    own[:] = [value + price * weight for value, weight in zip(own, weights, strict=True)]
        priced = [PricedFlow(f.paths, f.edges, f.layers, own) for f, own in zip(self._flows, values, strict=True)]
        worth = sum(price * row.right for row, price in zip(rows, prices, strict=True))
        answer = Narrowing(program, self._cost, priced, worth).minimise(at_most)
        for one in written:
            program.remove(one)
        return answer

    def answers(self, answer: Answer) -> tuple[LayerAnswer, ...]:
        """The layers of an answer, in no order."""
        return tuple(a for flow in self._flows for a in flow.answers(self._problem, answer.values))

    def _terms(self, row: _Row) -> list[tuple[int, int]]:
        return [t for f, own in zip(self._flows, row.weights, strict=True) for t in f.terms(own)]

    def _memory(self, limit_bytes: int) -> list[_Row]:
        problem = self._problem
        rows: list[_Row] = []
        sequence = problem.sequence
        for moment in problem.possible_peaks:
            room = limit_bytes - problem.fixed_bytes - moment.beside_bytes
            rows.append(_Row(self._held(moment, ()), room - (problem.transient_bytes if moment.head else 0)))
            behind: list[int] = []
            left = 0
            for position in reversed(self.positions):
                index = sequence[position]
                if problem.classes[index].chunk != moment.chunk:
                    continue
                freed = [*behind, position]
                for base, adds in self._ends[index].needs:
                    weights = list(self._held(moment, freed))
                    own = self._end_of[position]
                    weights[own] = [a + b for a, b in zip(weights[own], adds, strict=True)]
                    rows.append(_Row(tuple(weights), room - base - left))
                behind.append(position)
                left += problem.classes[index].left_bytes
        return rows

    def _held(self, moment: Moment, freed: Sequence[int]) -> tuple[Weights, ...]:
        """Of each flow what its edges hold, less one micro-batch's of the positions that are freed."""
        freed_flows = {self._end_of[position] for position in freed}
        return tuple(
            [(moment.alive[flow.class_index] - (k in freed_flows)) * stage.nbytes for stage in flow.paths.stages]
            for k, flow in enumerate(self._flows)
        )


def last_positions(problem: Problem, lengths: Mapping[int, int]) -> tuple[int, ...]:
    """The last layers of each chunk, so many as ``lengths`` says, in the order of execution."""
    of_chunk: dict[int, list[int]] = {}
    for position, index in enumerate(problem.sequence):
        of_chunk.setdefault(problem.classes[index].chunk, []).append(position)
    found = [p for chunk, own in of_chunk.items() for p in own[len(own) - min(len(own), lengths.get(chunk, 0)) :]]
    return tuple(sorted(found))
