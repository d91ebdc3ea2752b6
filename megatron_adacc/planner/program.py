"""Integer programs whose answers are exact in integers, on OR-Tools' MathOpt with HiGHS.

HiGHS computes in doubles and takes a row as met when it is violated by less than a tolerance; with coefficients of
1e10 bytes that is a byte or more. So a row sum_i a_i x_i <= r with large numbers is first given in units of u:

    sum_i floor(a_i / u) x_i <= floor(r / u)

which every solution of the row satisfies, and the answer is checked in Python's integers. If it satisfies the row, it
is the best of a larger set, so the best. If not, the row is written in *limbs* and the program solved again. With base
B, a_i = sum_k a_ik B^k and r = sum_k r_k B^k (the top limb unbounded) the row is

    sum_i a_i0 x_i       <= r_0 + B t_1
    sum_i a_i1 x_i + t_1 <= r_1 + B t_2      ...      t_k >= 0, integer

which is exact for integers: t_1 is at least the carry ceil((sum a_i0 x_i - r_0) / B). A row that fails even so is
tightened by its excess, and then the answer is not called optimal.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_adacc.errors import UserError

# Numbers in rows in units, and in rows in limbs, stay below these.
LARGEST = 2**26
LARGEST_LIMB = 2**22
LIMB = 2**17
# An objective whose values stay below this is taken as HiGHS minimises it.
LARGEST_OBJECTIVE = 2**34

_ATTEMPTS = 4

Term = tuple[int, int]  # coefficient, variable


def mathopt() -> Any:
    """OR-Tools' MathOpt, imported when first needed. Raises UserError where it is not installed."""
    try:
        from ortools.math_opt.python import mathopt as module
    except ImportError as error:
        raise UserError(
            f"Solving for a plan needs OR-Tools, which cannot be imported ({error}): pip install 'ortools>=9.15'."
        ) from error
    return module


@dataclass(frozen=True)
class Answer:
    """``status``: optimal | feasible | infeasible | unknown; ``values`` of the variables;
    ``objective`` of the values; ``bound``: no solution is below it."""

    status: str
    values: tuple[int, ...] = ()
    objective: int = 0
    bound: float = -math.inf

    @property
    def found(self) -> bool:
        """Whether ``values`` are a solution (of a program without variables there is one, without values)."""
        return self.status in ("optimal", "feasible")


@dataclass
class _Row:
    """sum of terms <= (or =) right, as written for HiGHS in ``constraints``: in units, or in limbs."""

    terms: tuple[Term, ...]
    right: int
    equal: bool
    in_limbs: bool = False
    unit: int = 1
    constraints: list[Any] = field(default_factory=list)

    def excess(self, values: tuple[int, ...]) -> int:
        left = sum(a * values[x] for a, x in self.terms)
        return abs(left - self.right) if self.equal else left - self.right


class IntegerProgram:
    """Minimise a sum of integer terms over rows of integer terms. Variables are numbers: 0, 1, ..."""

    def __init__(self, deadline: float) -> None:
        """deadline: of time.monotonic(); what is not proven by then is not."""
        self._mathopt = mathopt()
        self._model = self._mathopt.Model()
        self._deadline = deadline
        self._variables: list[Any] = []
        self._upper: list[int] = []
        self._rows: list[_Row] = []

    def extend(self, seconds: float) -> None:
        """Give it at least this much time from now on."""
        self._deadline = max(self._deadline, time.monotonic() + seconds)

    def variable(self, upper: int) -> int:
        """A new integer variable, 0 <= x <= upper."""
        self._variables.append(self._model.add_integer_variable(lb=0, ub=upper))
        self._upper.append(upper)
        return len(self._variables) - 1

    def limit(self, variable: int, upper: int) -> None:
        """Until it is said otherwise, the variable is at most ``upper``, which is not above what it was made with."""
        self._variables[variable].upper_bound = upper

    def prices(self, terms: Iterable[Term], rows: Iterable[_Row]) -> tuple[float, ...]:
        """Of the linear relaxation of minimising ``terms``: by how much a unit more on the right side of each row
        would make it less. Zeros where that has no solution, or a row is in limbs."""
        module, rows = self._mathopt, tuple(rows)
        for variable in self._variables:
            variable.integer = False
        self._model.minimize(self._sum(terms))
        result = module.solve(self._model, module.SolverType.GLOP)
        for variable in self._variables:
            variable.integer = True
        if not result.has_dual_feasible_solution() or any(row.in_limbs for row in rows):
            return tuple(0.0 for _ in rows)
        duals = result.dual_values()
        return tuple(max(0.0, -duals[row.constraints[0]] / row.unit) for row in rows)

    def equal(self, terms: Iterable[Term], right: int) -> None:
        """sum of terms = right; for small coefficients."""
        row = _Row(tuple(terms), right, True)
        row.constraints.append(self._model.add_linear_constraint(self._sum(row.terms) == right))
        self._rows.append(row)

    def at_most(self, terms: Iterable[Term], right: int, in_limbs: bool = False) -> _Row:
        """sum of terms <= right, exactly, however large; coefficients may be negative if they are small.
        ``in_limbs``: do not try it in units first."""
        row = _Row(tuple((a, x) for a, x in terms if a), right, False, in_limbs)
        self._write(row)
        self._rows.append(row)
        return row

    def remove(self, row: _Row) -> None:
        """Take a row out again."""
        self._unwrite(row)
        self._rows.remove(row)

    def minimise(self, terms: Iterable[Term], at_most: int | None = None) -> Answer:
        """The least sum of terms, none of whose coefficients is negative. ``at_most``: sums above it are of no
        interest; "infeasible" when there is none below.

        Where the sum is large, HiGHS may take the second best for the best; then an exact row asks for one unit less
        until there is nothing."""
        wanted = tuple((a, x) for a, x in terms if a)
        divisor = math.gcd(*(a for a, _ in wanted)) or 1
        answer = self._checked(wanted, at_most)
        if sum(a * self._upper[x] for a, x in wanted) // divisor < LARGEST_OBJECTIVE:
            return answer
        while answer.status == "optimal":
            better = self.at_most(wanted, answer.objective - divisor, in_limbs=True)
            following = self._checked(wanted, None)
            self.remove(better)
            if following.status == "infeasible":
                break
            answer = replace(answer, status="feasible") if following.status == "unknown" else following
        return answer

    def _checked(self, wanted: tuple[Term, ...], at_most: int | None) -> Answer:
        """Solve, check in integers, tighten what fails and solve again."""
        bound: float | None = None
        tightened: list[tuple[_Row, int]] = []
        try:
            for _ in range(_ATTEMPTS):
                answer = self._solve(wanted, at_most)
                bound = answer.bound if bound is None or not tightened else bound
                failed = [row for row in self._rows if answer.found and row.excess(answer.values) > 0]
                if not failed:
                    status = "feasible" if tightened and answer.status == "optimal" else answer.status
                    if tightened and status == "infeasible":
                        status = "unknown"
                    return Answer(status, answer.values, answer.objective, bound)
                for row in failed:
                    if row.equal:
                        raise ArithmeticError("The solver answered with values that break an equation.")
                    self._unwrite(row)
                    if row.in_limbs:
                        tightened.append((row, row.right))
                        row.right -= row.excess(answer.values)
                    row.in_limbs = True
                    self._write(row)
            return Answer("unknown", bound=-math.inf if bound is None else bound)
        finally:
            for row, right in reversed(tightened):
                self._unwrite(row)
                row.right = right
                self._write(row)

    def _solve(self, wanted: tuple[Term, ...], at_most: int | None = None) -> Answer:
        module, model = self._mathopt, self._model
        left = self._deadline - time.monotonic()
        if left <= 0:
            return Answer("unknown")
        model.minimize(self._sum(wanted))
        parameters = module.SolveParameters(
            time_limit=datetime.timedelta(seconds=left), relative_gap_tolerance=0.0, absolute_gap_tolerance=0.9
        )
        # parameters.highs.double_options["mip_feasibility_tolerance"] = 1e-9
        result = module.solve(model, module.SolverType.HIGHS, params=parameters)
        reason, reasons = result.termination.reason, module.TerminationReason
        if reason in (reasons.INFEASIBLE, reasons.INFEASIBLE_OR_UNBOUNDED):
            # Every variable is bounded, so that the second can only mean the first.
            return Answer("infeasible")
        bound = result.termination.objective_bounds.dual_bound
        if not result.has_primal_feasible_solution():
            return Answer("unknown", bound=bound)
        values = tuple(round(v) for v in result.variable_values(self._variables))
        objective = sum(a * values[x] for a, x in wanted)
        status = "optimal" if reason == reasons.OPTIMAL else "feasible"
        if at_most is not None and objective > at_most:
            return Answer("infeasible") if status == "optimal" else Answer("unknown", bound=bound)
        return Answer(status, values, objective, bound)

    def _sum(self, terms: Iterable[Term]) -> Any:
        return self._mathopt.fast_sum([float(a) * self._variables[x] for a, x in terms])

    def _constrain(self, row: _Row, terms: Iterable[Term], right: int) -> None:
        row.constraints.append(self._model.add_linear_constraint(self._sum(terms) <= float(right)))

    def _write(self, row: _Row) -> None:
        """Give the row to HiGHS."""
        divisor = math.gcd(*(a for a, _ in row.terms)) or 1
        terms = [(a // divisor, x) for a, x in row.terms]
        right = row.right // divisor
        if any(a < 0 for a, _ in terms):
            self._constrain(row, terms, right)
            return
        right = max(right, -1)  # below that it cannot be met either, and says so in small numbers
        if not row.in_limbs:
            unit = max(1, right // LARGEST)
            row.unit = unit * divisor
            self._constrain(row, [(min(a // unit, 2 * LARGEST), x) for a, x in terms if a >= unit], right // unit)
            return
        carry: list[Term] = []
        while max((a for a, _ in terms), default=0) > LARGEST_LIMB or right > LARGEST_LIMB:
            low = [(a % LIMB, x) for a, x in terms]
            most = sum(a * self._upper[x] for a, x in [*low, *carry])
            following = self.variable(most // LIMB + 1)
            self._constrain(row, [*low, *carry, (-LIMB, following)], right % LIMB)
            terms, right, carry = [(a // LIMB, x) for a, x in terms if a // LIMB], right // LIMB, [(1, following)]
        self._constrain(row, [*terms, *carry], right)

    def _unwrite(self, row: _Row) -> None:
        for constraint in row.constraints:
            self._model.delete_linear_constraint(constraint)
        row.constraints.clear()
