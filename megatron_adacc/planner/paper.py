"""The formulation of Adacc (arXiv 2508.00806), to compare with: one plan for all layers, no dependencies.

    binary  k_b keep    c_bq compress with q    r_b recompute
    k_b + sum_q c_bq + r_b = 1                                        for each saved b
    fixed + transient + sum over classes of in_flight * layers * held bytes of the plan <= limit
    sum over the layers of err_bq c_bq <= error budget
    minimise  sum over classes of layers * ( sum_b alone_b r_b + sum_bq us_bq c_bq )

alone_b are the microseconds of the ops that make b again when every other saved buffer is there: its writer, and what
that needs of buffers that are not saved. So an op that two buffers need counts twice, and what a recomputed operand
needs does not count at all. Such a plan can always be carried out, since an operand that is recomputed can be made
from saved ones in its turn; its true cost is counted with the dependencies, as for every other plan.
"""

from __future__ import annotations

import time
from dataclasses import replace

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


def solve_paper(problem: Problem, time_limit_seconds: float = 10.0) -> Solution:
    """The paper's plan, with its true cost. Its note says what the formulation took the cost to be.

    Raises UserError for a problem that contradicts itself."""
    validate(problem)
    problem = of_one_moment(problem)
    started = time.monotonic()
    program = IntegerProgram(started + time_limit_seconds)
    formulation = Formulation(program, problem.fixed_bytes + problem.transient_bytes)
    chosen = [_add_class(formulation, problem, i) for i in range(len(problem.classes))]
    found = lexicographic.solve(formulation, problem, started)

    def layers(values: tuple[int, ...]) -> tuple[LayerAnswer, ...]:
        answers: list[LayerAnswer] = []
        for i, (layer, variables) in enumerate(zip(problem.classes, chosen, strict=True)):
            actions = {buffer.site: DROP for buffer in layer.buffers if not buffer.saved}
            actions |= {site: action for (site, action), x in variables.items() if values[x]}
            answers += [LayerAnswer(i, actions, evaluate_layer(layer, actions))] * layer.count
        return tuple(answers)

    result = lexicographic.solution(problem, found, layers)
    if not result.layers:
        return result
    promised = lexicographic.cost_grid(problem).value(found.answer.objective)
    return replace(
        result, note=f"One plan for all layers, without dependencies, which takes the cost for {promised:g} us."
    )


def alone_us(layer: LayerClass) -> dict[str, float]:
    """Of each saved buffer that can be made again from the other saved ones, the microseconds of that."""
    writers = {site: op for op in layer.ops for site in op.writes}
    buffers = {buffer.site: buffer for buffer in layer.buffers}
    found = {}
    for buffer in layer.buffers:
        if not buffer.saved or buffer.must_hold:
            continue
        runs: dict[str, float] = {}
        pending, possible = [buffer.site], True
        while pending and possible:
            op = writers.get(pending.pop())
            possible = op is not None and op.replayable
            if op is not None and possible and op.name not in runs:
                runs[op.name] = op.us
                pending += [s for s in op.reads if s in buffers and not buffers[s].saved]
        if possible:
            found[buffer.site] = sum(runs.values())
    return found


def _add_class(formulation: Formulation, problem: Problem, class_index: int) -> dict[tuple[str, str], int]:
    """The variables of the one plan of a class, by (site, action)."""
    layer, program = problem.classes[class_index], formulation.program
    costs, errors = lexicographic.cost_grid(problem), lexicographic.error_grid(problem)
    again = alone_us(layer)
    variables: dict[tuple[str, str], int] = {}
    for buffer in layer.buffers:
        # What is not saved is never held: without dependencies nothing would be gained.
        if not (buffer.saved or buffer.must_hold):
            continue
        options: list[tuple[str, int, float, float]] = []
        if buffer.storable:
            options.append((KEEP, buffer.bytes, 0.0, 0.0))
            options += [(COMPRESS + c.name, c.bytes, c.us, c.error) for c in buffer.codecs]
        if buffer.site in again:
            options.append((RECOMPUTE, 0, again[buffer.site], 0.0))
        for action, nbytes, us, error in options:
            x = variables[buffer.site, action] = program.variable(1)
            formulation.cost.append((layer.count * costs.units(us), x))
            formulation.weight.append((layer.count * layer.in_flight * nbytes, x))
            formulation.error.append((layer.count * errors.units(error) if errors else 0, x))
        program.equal([(1, variables[buffer.site, action]) for action, *_ in options], 1)
    return variables
