"""Which edges of a flow can matter, from the prices of the linear relaxation.

At prices p_r >= 0 of the rows sum_e w_re f_e <= right_r (those of bytes and of error) let z_c be the cheapest path of
flow c, which has L_c layers, where an edge is worth cost_e + sum_r p_r w_re. For any such prices no plan within the
rows costs less than

    bound = sum_c L_c z_c - sum_r p_r right_r

and none that uses edge e costs less than bound + r_e, r_e being by how much the cheapest path through e is above z_c.
So once a plan of cost C is known, edges with r_e > C - bound are in no plan that is as cheap, and few are left. The
search starts with the edges within a guess; what it finds is the best of all if it costs no more than bound + guess,
and otherwise says with which edges to look again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_adacc.planner.frontier import PlanGraph
from megatron_adacc.planner.program import Answer, IntegerProgram, Term

# The first guess of how far the best plan is above the bound, as a part of the bound, and by what it grows.
_GUESS = 1e-2
_GROWTH = 8.0


@dataclass(frozen=True)
class PricedFlow:
    """A flow: its variables by stage, how many layers it has, and of each stage what its edges are worth."""

    paths: PlanGraph
    edges: tuple[tuple[int, ...], ...]
    layers: int
    values: Sequence[NDArray[np.float64]]


class Narrowing:
    """Minimises the cost of flows over the edges that can matter."""

    def __init__(
        self, program: IntegerProgram, cost: Sequence[Term], flows: Sequence[PricedFlow], rows_worth: float
    ) -> None:
        """rows_worth: sum over the rows of their prices times their right sides."""
        self._program, self._cost, self._flows = program, cost, flows
        self.bound = -rows_worth
        above: list[NDArray[np.float64]] = []
        for flow in flows:
            cheapest, detours = flow.paths.detours(flow.values)
            self.bound += flow.layers * cheapest
            above += detours
        self._variables = np.array([x for flow in flows for stage in flow.edges for x in stage], dtype=np.int64)
        self._above = np.concatenate(above) if above else np.zeros(0)
        self._upper = np.array([flow.layers for flow in flows for stage in flow.edges for _ in stage], dtype=np.int64)

    def minimise(self, at_most: int | None = None) -> Answer:
        """As IntegerProgram.minimise of the cost."""
        if not np.isfinite(self.bound):  # a class without any plan
            return self._program.minimise(self._cost, at_most)
        # The prices come from floats: a unit is allowed for.
        slack = 1.0 + 1e-9 * abs(self.bound)
        try:
            if at_most is not None:
                self._allow(at_most - self.bound + slack)
                return self._program.minimise(self._cost, at_most)
            guess = max(_GUESS * abs(self.bound), 1.0)
            while True:
                everything = self._allow(guess + slack)
                answer = self._program.minimise(self._cost)
                if everything or answer.status == "unknown":
                    return answer
                if answer.status == "feasible":
                    return replace(answer, bound=min(answer.bound, self.bound + guess))
                if answer.status == "optimal" and answer.objective <= self.bound + guess + slack:
                    return answer
                guess = answer.objective - self.bound if answer.status == "optimal" else guess * _GROWTH
        finally:
            self._allow(np.inf)

    def _allow(self, above: float) -> bool:
        """Let the edges carry layers that are at most this far above; gives whether these are all."""
        allowed = (self._above <= above) | np.isinf(self._above)  # no plan has the latter: they do no harm
        for x, upper, can in zip(self._variables.tolist(), self._upper.tolist(), allowed.tolist(), strict=True):
            self._program.limit(x, upper if can else 0)
        return bool(allowed.all())
