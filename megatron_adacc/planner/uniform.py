"""One plan for all layers of a class, with dependencies. For layers whose graph of plans is too wide for a flow.

It is the formulation of :mod:`megatron_adacc.planner.milp` for one layer of each class that weighs, costs and errs as
much as all of them.
"""

from __future__ import annotations

import time
from dataclasses import replace

from megatron_adacc.planner import milp
from megatron_adacc.planner.problem import LayerClass, Problem, of_one_moment
from megatron_adacc.planner.solution import Extra, LayerAnswer, Solution, assemble, evaluate_layer, peak_by_class

# So often the room for extra bytes is corrected.
_ATTEMPTS = 5


def solve_uniform(problem: Problem, extra: Extra | None = None, time_limit_seconds: float = 10.0) -> Solution:
    """The best plan of which all layers of a class have the same; never called optimal.

    ``extra`` as for :func:`megatron_adacc.planner.stage.solve_stage`. Raises UserError for a problem that contradicts
    itself."""
    started = time.monotonic()
    reserve = problem.transient_bytes
    one = of_one_moment(problem)
    one = replace(one, classes=tuple(_as_one(layer) for layer in one.classes))
    for _ in range(_ATTEMPTS):
        left = max(0.1, started + time_limit_seconds - time.monotonic())
        found = milp.solve(replace(one, transient_bytes=reserve), left)
        if not found.layers:
            return replace(found, solver_seconds=time.monotonic() - started)
        of_class = {}
        for answer in found.layers:
            index, actions = answer.class_index, answer.actions
            outcome = evaluate_layer(problem.classes[index], actions)
            of_class[index] = LayerAnswer(index, actions, outcome, extra(index, actions) if extra else 0)
        layers = [of_class[index] for index in problem.sequence]
        peak = max(peak_by_class(problem, tuple(layers)))
        over = peak - problem.limit_bytes
        if over <= 0:
            note = "All layers of a class have the same plan: their graph is too wide to give each its own."
            return assemble(problem, tuple(layers), "feasible", time.monotonic() - started, None, note)
        reserve = max(reserve + over, peak - problem.fixed_bytes - found.held_bytes)
    return Solution("infeasible", solver_seconds=time.monotonic() - started, least_bytes=peak)


def _as_one(layer: LayerClass) -> LayerClass:
    """All layers of the class as one."""
    times = layer.count
    buffers = tuple(
        replace(
            buffer,
            codecs=tuple(
                replace(c, us=times * c.us, error=times * c.error, again_us=times * c.again_us) for c in buffer.codecs
            ),
        )
        for buffer in layer.buffers
    )
    ops = tuple(replace(op, us=times * op.us) for op in layer.ops)
    return replace(layer, buffers=buffers, ops=ops, count=1, in_flight=times * layer.in_flight)
