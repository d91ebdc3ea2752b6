"""The problem as it stands: binaries for each layer. For small problems, and as the measure of what is faster.

    binary  k_b keep    c_bq compress with q    x_o run o again    d_bq decode b again from q
    avail_b = k_b + sum_q c_bq + x_{writer(b)}
    (1) avail_b >= 1 for each saved b;  k_b + sum_q c_bq <= 1, = 1 where b must be held, = 0 where it cannot be
    (2) x_o <= avail_a for each buffer a that o reads
    (3) x_o = 0 for an op that may not be replayed
    (4) fixed + transient + sum over layers of in_flight * (sum_b bytes_b k_b + sum_bq bytes_bq c_bq) <= limit
    (5) sum err_bq c_bq <= error budget
    (6) d_bq >= c_bq + x_o - 1 for each o that reads b              the product in the objective, made linear
    minimise  sum over layers ( sum_o us_o x_o + sum_bq us_bq c_bq + again_us_bq d_bq )

The layers of a class are alike, and nothing here tells the solver so: it tries the same plans in all orders. Many
layers are for :mod:`megatron_adacc.planner.stage`. The bytes that are alive while a layer's backward runs are not part
of this formulation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from megatron_adacc.planner import lexicographic
from megatron_adacc.planner.lexicographic import Formulation
from megatron_adacc.planner.problem import LayerClass, Problem, of_one_moment
from megatron_adacc.planner.program import IntegerProgram
from megatron_adacc.planner.solution import (
    COMPRESS,
    DROP,
    KEEP,
    RECOMPUTE,
    LayerAnswer,
    Solution,
    evaluate_layer,
)  # fmt: skip
from megatron_adacc.planner.validate import validate


@dataclass
class _LayerVariables:
    """Variables of one layer: by (site, action) what holds a buffer, by op name what runs again."""

    class_index: int
    holds: dict[tuple[str, str], int] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)


def solve(problem: Problem, time_limit_seconds: float = 60.0) -> Solution:
    """The plan of least cost, of equal cost least bytes. Raises UserError for a problem that contradicts itself."""
    validate(problem)
    problem = of_one_moment(problem)
    started = time.monotonic()
    formulation = Formulation(
        IntegerProgram(started + time_limit_seconds), problem.fixed_bytes + problem.transient_bytes
    )
    layers = [
        _add_layer(formulation, problem, index)
        for index, layer in enumerate(problem.classes)
        for _ in range(layer.count)
    ]
    found = lexicographic.solve(formulation, problem, started)
    return lexicographic.solution(
        problem, found, lambda values: tuple(_answer(problem, variables, values) for variables in layers)
    )


def _add_layer(formulation: Formulation, problem: Problem, class_index: int) -> _LayerVariables:
    layer, program = problem.classes[class_index], formulation.program
    costs, errors = lexicographic.cost_grid(problem), lexicographic.error_grid(problem)
    variables = _LayerVariables(class_index)
    for op in layer.ops:
        if op.replayable:  # (3)
            variables.runs[op.name] = program.variable(1)
            formulation.cost.append((costs.units(op.us), variables.runs[op.name]))
    writers = {site: op.name for op in layer.ops for site in op.writes}
    available: dict[str, list[tuple[int, int]]] = {}
    for buffer in layer.buffers:
        holding: list[tuple[int, int]] = []
        choices = [(KEEP, buffer.bytes, 0, 0)] if buffer.storable else []
        choices += [
            (COMPRESS + c.name, c.bytes, costs.units(c.us), errors.units(c.error) if errors else 0)
            for c in buffer.codecs
            if buffer.storable
        ]
        for action, nbytes, cost, error in choices:
            held = variables.holds[buffer.site, action] = program.variable(1)
            holding.append((1, held))
            formulation.cost.append((cost, held))
            formulation.weight.append((layer.in_flight * nbytes, held))
            formulation.error.append((error, held))
        program.at_most(holding, 1)  # (1)
        if buffer.must_hold:
            program.equal(holding, 1)
        run = variables.runs.get(writers.get(buffer.site, ""))
        available[buffer.site] = holding + ([(1, run)] if run is not None else [])
        if buffer.saved:
            program.at_most([(-a, x) for a, x in available[buffer.site]], -1)
    for op in layer.ops:
        for site in dict.fromkeys(op.reads):
            if op.name in variables.runs and site in available:
                sources = [(-a, x) for a, x in available[site]]
                program.at_most([(1, variables.runs[op.name]), *sources], 0)  # (2)
    _decode_again(formulation, problem, layer, variables)
    return variables


def _decode_again(formulation: Formulation, problem: Problem, layer: LayerClass, variables: _LayerVariables) -> None:
    program, costs = formulation.program, lexicographic.cost_grid(problem)
    for buffer in layer.buffers:
        readers = [variables.runs[op.name] for op in layer.ops if buffer.site in op.reads and op.name in variables.runs]
        for codec in buffer.codecs:
            if codec.again_us and readers and buffer.storable:
                again = program.variable(1)
                formulation.cost.append((costs.units(codec.again_us), again))
                for run in readers:  # (6)
                    held = variables.holds[buffer.site, COMPRESS + codec.name]
                    program.at_most([(1, held), (1, run), (-1, again)], 1)


def _answer(problem: Problem, variables: _LayerVariables, values: tuple[int, ...]) -> LayerAnswer:
    layer = problem.classes[variables.class_index]
    actions = {buffer.site: RECOMPUTE if buffer.saved else DROP for buffer in layer.buffers}
    actions.update({site: action for (site, action), x in variables.holds.items() if values[x]})
    return LayerAnswer(variables.class_index, actions, evaluate_layer(layer, actions))
