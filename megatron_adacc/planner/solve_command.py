"""`adacc solve`: the planner alone, for people who bring their own costs.

    adacc solve problem.json [--json FILE|-]

The file's format is that of :mod:`megatron_adacc.planner.problem_file`. The answer:

    {"status": "optimal", "cost_us": 8.0, "held_bytes": 19, "actions": {"a": "keep"}, "solver_seconds": 0.003}

with "actions" a list, one entry a layer in the order of execution, when the problem has more than one layer. Where
the solver stopped early, "status" is "feasible" and "gap" says by how much the cost may be above the least, as a part
of it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from itertools import groupby
from typing import Any

from megatron_adacc.errors import UserError
from megatron_adacc.outputs import check_folders, write
from megatron_adacc.planner.problem import Problem
from megatron_adacc.planner.problem_file import read_problem
from megatron_adacc.planner.quiet import solver_prints_to_stderr
from megatron_adacc.planner.solution import Solution


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = "Solve a problem that is given as JSON: what is kept, compressed and recomputed."
    parser.add_argument("problem", metavar="PROBLEM", help="the problem as JSON; docs/planner.md has its format")
    parser.add_argument("--json", metavar="FILE", help="write the answer as JSON; - prints it instead of the table")
    parser.add_argument(
        "--time-limit", metavar="SECONDS", type=float, default=60.0, help="stop the solver after this (default: 60)"
    )


def run(args: argparse.Namespace) -> int:
    """Solve and show. Raises UserError for a mistake in the file, and, naming the least limit that works, where no
    plan fits."""
    if not 0 < args.time_limit < math.inf:
        raise UserError(f"--time-limit must be a number of seconds above 0, not {args.time_limit}.")
    check_folders(or_printed=args.json)
    problem = read_problem(args.problem)
    from megatron_adacc.planner.stage import solve_stage

    with solver_prints_to_stderr():
        solution = solve_stage(problem, time_limit_seconds=args.time_limit)
    if not solution.layers:
        raise UserError(_no_plan(problem, solution))
    content = json.dumps(answer_data(solution), indent=1) + "\n"
    if args.json == "-":
        sys.stdout.write(content)
        return 0
    if args.json:
        write(args.json, content)
    _print_table(problem, solution)
    return 0


def answer_data(solution: Solution) -> dict[str, Any]:
    """The answer as JSON's types."""
    actions = [dict(layer.actions) for layer in solution.layers]
    found: dict[str, Any] = {
        "status": solution.status,
        "cost_us": solution.cost_us,
        "held_bytes": solution.held_bytes,
        "actions": actions if len(actions) > 1 else actions[0],
        "solver_seconds": solution.solver_seconds,
    }
    if solution.gap is not None:
        found["gap"] = solution.gap if math.isfinite(solution.gap) else None
    return found


def _no_plan(problem: Problem, solution: Solution) -> str:
    if solution.status != "infeasible":
        return "The solver found no plan in its time; give it more with --time-limit SECONDS."
    if solution.least_bytes is None:
        reason = (
            ": something that autograd needs can neither be held nor be made again"
            if problem.error_budget is None
            else ", within this error budget"
        )
        return f"No limit has a plan{reason}; change the buffers, the ops or the budget."
    return (
        f"No plan fits into limit_bytes {problem.limit_bytes}: the least limit that works is {solution.least_bytes} "
        "bytes."
    )


def _print_table(problem: Problem, solution: Solution) -> None:
    """Sites against groups of layers with equal plans, and a line of totals."""
    from rich.console import Console
    from rich.table import Table

    groups: list[tuple[str, dict[str, str]]] = []
    first = 1
    for actions, layers in groupby(dict(layer.actions) for layer in solution.layers):
        last = first + len(list(layers)) - 1
        groups.append((f"layer {first}" if first == last else f"layers {first}-{last}", actions))
        first = last + 1
    table = Table("site", "bytes", *(("action",) if len(groups) == 1 else (name for name, _ in groups)))
    table.columns[1].justify = "right"
    for buffer in problem.classes[0].buffers:
        table.add_row(buffer.site, f"{buffer.bytes:,}", *(actions[buffer.site] for _, actions in groups))
    console = Console(file=sys.stdout, highlight=False, markup=False)
    console.print(table)
    verdict = solution.status
    if solution.gap is not None:
        verdict += f", at most {solution.gap:.2%} above the least cost. {solution.note}"
    sys.stdout.write(
        f"{verdict}\ncost {solution.cost_us:g} us, held {solution.held_bytes:,} bytes, peak {solution.peak_bytes:,} "
        f"of {problem.limit_bytes:,} bytes, solved in {solution.solver_seconds:.3f} s\n"
    )
