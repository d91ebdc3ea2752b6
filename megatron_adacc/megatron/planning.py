"""A job on an absent device under every strategy, predicted: what `adacc plan`, `max-batch` and `frontier` show.

none        no recompute                          full         Megatron's full recompute
selective   Megatron's, of the core attention     quantized    direct INT4 of everything
auto        our plan within the limit, lossless   auto lossy   the same with lossy codecs, within an error budget
"""

from __future__ import annotations

import argparse
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_adacc.cost.analytic import AnalyticPrices
from megatron_adacc.cost.devices import DeviceSpec, device, device_names
from megatron_adacc.cost.limits import Limit
from megatron_adacc.cost.references import quantized_predicted, selective_predicted
from megatron_adacc.cost.stage_plan import (
    ClassFacts,
    NothingFits,
    Prediction,
    Room,
    StagePlan,
    full_predicted,
    none_predicted,
    plain_bytes,
    plan_stage,
)
from megatron_adacc.cost.step_time import pipeline_us, samples_per_second
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.joint_states import chosen_jointly
from megatron_adacc.megatron.offline_facts import OfflineJob, StageFacts
from megatron_adacc.megatron.trace_flags import flags_of_file, parse_known
from megatron_adacc.runtime.state_offer import solve_with_states

# So often a limit is raised to the least that was named, until a plan is found.
_RAISED = 4

REFERENCES = ("none", "full", "selective", "quantized")


@dataclass(frozen=True)
class Request:
    """What the command line asks for: Megatron's flags, the device, ranks of the job, limit (None: the device's
    memory less a reserve), error budget."""

    flags: tuple[str, ...]
    device: DeviceSpec
    world_size: int
    limit: Limit | None
    error_budget: float


@dataclass(frozen=True)
class Outcome:
    """A strategy on all stages. ``step_us``: of a whole training step; ``fits``: within the limit on every stage;
    ``plans``: what the solver found, one a stage; ``refusal``: the sentence of a stage where nothing fits, and the
    plans there are then of the least memory; ``state_bytes``: what a plan leaves on each stage to m and v and to sums
    of delayed gradients, empty where the optimizer is Megatron's."""

    name: str
    stages: tuple[Prediction, ...]
    step_us: float
    samples_per_second: float
    fits: bool
    plans: tuple[StagePlan, ...] = ()
    refusal: str | None = None
    state_bytes: tuple[int, ...] = ()

    @property
    def held_bytes(self) -> int:
        """On the stage that holds most."""
        return max(stage.held_bytes for stage in self.stages)

    @property
    def peak_bytes(self) -> int:
        """On the fullest stage."""
        return max(stage.peak_bytes for stage in self.stages)


_LIMIT = "such as 30GiB, or 25%% of the plain activations (default: memory less 5 %%)"


def add_options(
    parser: argparse.ArgumentParser, limit: str | None = _LIMIT, micro_batch: bool = True, error_budget: float = 0.0
) -> None:
    """The options that the commands share; all others are Megatron's flags. ``limit``: help of --limit, None where that
    is refused; ``micro_batch``: whether --micro-batch is taken; ``error_budget``: the default."""
    parser.add_argument("--config", metavar="FILE", help="a YAML of Megatron's flags by name, such as configs/*.yaml")
    parser.add_argument("--device", metavar="NAME", help=f"the GPU to plan for: {', '.join(device_names())}")
    parser.add_argument("--world", metavar="N", help="ranks of the job (default: those of one copy of the model)")
    parser.add_argument(
        "--error-budget",
        metavar="ERROR",
        help="plan with lossy codecs too, at most this relative gradient error (assumed, root mean square over layers; "
        f"default: {error_budget:g}{'' if error_budget else ', lossless'})",
    )
    # What is refused is known, so that it is refused in a sentence.
    parser.add_argument(
        "--micro-batch", metavar="N", help="the same as --micro-batch-size N" if micro_batch else argparse.SUPPRESS
    )
    parser.add_argument("--limit", metavar="LIMIT", help=argparse.SUPPRESS if limit is None else limit)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - prints them instead of the table")
    parser.set_defaults(arguments=[])


def read(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[Namespace, Request]:
    """The command's own options, and the request. Raises UserError for a mistake in either."""
    own, rest = parse_known(parser, arguments)
    if own.device is None:
        raise UserError(f"--device is missing: give one of {', '.join(device_names())}.")
    spec = device(own.device)
    limit = None
    if own.limit is not None:
        limit = Limit.parse(own.limit)
    budget = _error_budget(own.error_budget)
    flags = [*(flags_of_file(own.config) if own.config else []), *rest]
    if own.micro_batch is not None:
        flags += ["--micro-batch-size", str(whole("--micro-batch", own.micro_batch))]
    from megatron_adacc.megatron.read_job import ranks_of_one_replica

    smallest = ranks_of_one_replica(flags)
    world = smallest if own.world is None else whole("--world", own.world)
    if world % smallest:
        raise UserError(
            f"--world is {world}, but the model is split over {smallest} ranks: give a multiple of {smallest}."
        )
    return own, Request(tuple(flags), spec, world, limit, budget)


def whole(flag: str, text: str) -> int:
    """A whole number from 1 up. Raises UserError for anything else."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UserError(f"{flag} is {text!r}, but it must be a whole number of at least 1.")
    return int(text)


def _error_budget(text: str | None) -> float:
    try:
        budget = 0.0 if text is None else float(text)
    except ValueError:
        budget = math.nan
    if not 0 <= budget < math.inf:
        raise UserError(f"--error-budget is {text}, but an error is a number from 0 up.")
    return budget


def references(job: OfflineJob, limit_bytes: int) -> tuple[Outcome, ...]:
    """What others do, in the order of REFERENCES."""
    prices = prices_of(job)
    found: dict[str, list[Prediction]] = {name: [] for name in REFERENCES}
    for stage in job.stages:
        facts, room = stage.facts, stage.room
        found["none"].append(none_predicted(facts, room))
        found["full"].append(full_predicted(facts, room))
        found["selective"].append(selective_predicted(facts, room, prices))
        found["quantized"].append(quantized_predicted(facts, room, prices, stage.quantized))
    return tuple(outcome(job, name, stages, limit_bytes) for name, stages in found.items())


def prices_of(job: OfflineJob) -> AnalyticPrices:
    """The prices of the job's device."""
    return AnalyticPrices(job.device, job.args.tensor_model_parallel_size)


def outcome(job: OfflineJob, name: str, stages: Sequence[Prediction], limit_bytes: int) -> Outcome:
    """The whole step of a strategy that is predicted on every stage."""
    schedule = job.job.schedule
    step_us = pipeline_us([s.step_us for s in stages], schedule.micro_batches, schedule.chunks) + job.step_us
    samples = samples_per_second(
        job.args.micro_batch_size, schedule.micro_batches, job.args.data_parallel_size, step_us
    )
    fits = all(s.peak_bytes <= limit_bytes for s in stages)
    return Outcome(name, tuple(stages), step_us, samples, fits)


def auto(job: OfflineJob, limit: Limit, error_budget: float = 0.0, name: str = "auto") -> Outcome:
    """Our plan on every stage. Where nothing fits, the plan of the least memory, with the refusal."""
    plans: list[StagePlan] = []
    refusal: str | None = None
    state_bytes: list[int] = []
    if chosen_jointly(job.args) and limit.total_bytes is None:
        raise UserError(
            f"The limit is {limit}, of which the optimizer's state is no part: give --limit in bytes, such as "
            "30GiB, or --adacc-state-limit for the state."
        )
    for stage in job.stages:
        solved, state, refused = _with_state(stage, limit, error_budget, name)
        plans.append(solved)
        state_bytes += [] if state is None else [state]
        if refused is not None and refusal is None:
            refusal = refused if len(job.stages) == 1 else f"Pipeline stage {stage.stage}: {refused}"
    limit_bytes = limit.total_bytes if limit.total_bytes is not None else job.limit_bytes
    found = outcome(job, name, [plan.predicted for plan in plans], limit_bytes)
    fits = found.fits and refusal is None
    return Outcome(
        name, found.stages, found.step_us, found.samples_per_second, fits, tuple(plans), refusal,
        tuple(state_bytes),
    )  # fmt: skip


def least_bytes(job: OfflineJob, error_budget: float = 0.0) -> int:
    """A limit, in bytes, with which every stage has a plan: without an error budget the least; with one it may lie
    above the least, where that is not proven (planner/least.py)."""
    return max(_least_of(stage, error_budget) for stage in job.stages)


def _least_of(stage: StageFacts, error_budget: float) -> int:
    floor = max(1, stage.least_room.floor_bytes)
    facts = [fact.lossy if error_budget else fact for fact in stage.facts]
    try:
        plan_stage(facts, Limit(total_bytes=floor), stage.least_room, error_budget=error_budget)
        return floor
    except NothingFits as error:
        if error.least_bytes is None:
            raise
        return error.least_bytes


def _with_state(
    stage: StageFacts, limit: Limit, error_budget: float, name: str
) -> tuple[StagePlan, int | None, str | None]:
    """The plan of a stage, as runtime/stage_solver.py makes it where the job runs, and the bytes that it leaves to m
    and v. Where nothing fits, the plan of least memory and the sentence that says so."""
    facts = [fact.lossy if error_budget else fact for fact in stage.facts]
    refusals: list[str] = []

    def solve(room: Room, least: bool) -> StagePlan:
        if not least:
            return plan_stage(facts, limit, room, error_budget=error_budget, name=name)
        solved, refusal = _least(facts, limit, room, error_budget, name)
        refusals.extend([] if refusal is None else [refusal])
        return solved

    offer = stage.state.offer
    if offer is None or limit.total_bytes is None:
        solved, state = solve(stage.room, True), None if offer is None else offer.least_bytes
    else:
        solved, state = solve_with_states(offer, facts, limit, stage.counted, True, solve)
    return solved, state, refusals[0] if refusals else None


def _least(
    facts: Sequence[ClassFacts], limit: Limit, room: Room, error_budget: float, name: str
) -> tuple[StagePlan, str | None]:
    """The plan; where nothing fits, the one of least memory and the sentence that says so."""
    refusal: str | None = None
    for _ in range(_RAISED):
        try:
            return plan_stage(facts, limit, room, error_budget=error_budget, name=name), refusal
        except NothingFits as error:
            refusal = refusal or str(error)
            if error.least_bytes is None:
                raise
            if limit.share is not None:
                limit = Limit(share=Fraction(error.least_bytes, plain_bytes(facts)))
            else:
                limit = Limit(total_bytes=error.least_bytes)
    raise UserError(refusal or "")
