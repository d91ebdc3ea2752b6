"""What the planner has to know about a training job on a device that is not there: layers, prices and room.

    job = learn(flags, device("v100-32gb"))
    for stage in job.stages:
        plan_stage(stage.facts, Limit(total_bytes=job.limit_bytes), stage.room)

Each pipeline stage is traced on fake tensors (megatron/offline.py), its layers are rehearsed there for what lives while
they run (cost/timeline.py), and prices come from the device table (cost/analytic.py). Stages of equal layers that are
neither the first nor the last are traced once.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_adacc.cost.analytic import AnalyticPrices
from megatron_adacc.cost.devices import DeviceSpec
from megatron_adacc.cost.errors import lossy_choices
from megatron_adacc.cost.in_flight import heaviest
from megatron_adacc.cost.job import Job
from megatron_adacc.cost.layer_problem import Offer, bitmask_offers, layer_problem
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.simulate import Simulator
from megatron_adacc.cost.stage_plan import ClassFacts, Room
from megatron_adacc.cost.step_time import optimizer_us
from megatron_adacc.cost.timeline import record
from megatron_adacc.cost.typical_errors import typical_errors
from megatron_adacc.graph.model import LayerGraph
from megatron_adacc.graph.replay import Context
from megatron_adacc.graph.verify import Evidence
from megatron_adacc.megatron import offline_states
from megatron_adacc.megatron.auto_setting import room_of
from megatron_adacc.megatron.offline import Layers, Settings, Stage, open_stage
from megatron_adacc.megatron.offline_flags import parallel_sizes
from megatron_adacc.megatron.offline_states import StageState
from megatron_adacc.megatron.read_job import job_of_args
from megatron_adacc.planner import LayerPlan
from megatron_adacc.runtime.attach import MIN_BYTES
from megatron_adacc.runtime.policy import QuantizeAll

RESERVE = 0.05


@dataclass(frozen=True)
class StageFacts:
    """One pipeline stage. ``quantized``: by class, the plan of direct quantization; ``room``: with the job's state, of
    32 bits where they are to be chosen; ``room.other_us``: the time outside the layers, of one micro-batch;
    ``counted``: the room without a state plan."""

    stage: int
    facts: tuple[ClassFacts, ...]
    room: Room
    quantized: tuple[LayerPlan, ...]
    state: StageState
    counted: Room

    @property
    def least_room(self) -> Room:
        """With the smallest state that is on offer."""
        offer = self.state.offer
        return self.room if offer is None else offer.room(self.counted, offer.least_bytes)


@dataclass(frozen=True)
class OfflineJob:
    """The job on the device. ``args``: Megatron's validated arguments; ``step_us``: what a training step takes once,
    beside its micro-batches (gradient reduction, optimizer); ``assumptions``: sentences."""

    device: DeviceSpec
    args: Namespace
    job: Job
    stages: tuple[StageFacts, ...]
    step_us: float
    assumptions: tuple[str, ...]

    @property
    def limit_bytes(self) -> int:
        """The device's memory less the reserve."""
        return int((1 - RESERVE) * self.device.memory_bytes)


def learn(flags: Sequence[str], device: DeviceSpec, world_size: int | None = None) -> OfflineJob:
    """Trace and price every stage of the job that `flags` describe. Lossy codecs are on offer in ``fact.lossy``, at the
    errors of cost/typical_errors.py.

    Raises UserError for what Megatron refuses, and for kinds of models that cannot be traced or are not counted."""
    traced: dict[object, tuple[tuple[ClassFacts, ...], tuple[LayerPlan, ...], float]] = {}
    job: Job | None = None
    stages: list[StageFacts] = []
    _, pipeline = parallel_sizes(flags)
    for stage in range(pipeline):
        key = None if job is None else _likeness(job, stage)
        if key is None or key not in traced:
            settings = Settings(
                flags, pipeline_rank=stage, world_size=world_size, capability=device.capability,
                memory_bytes=device.memory_bytes,
            )  # fmt: skip
            with open_stage(settings) as opened:
                if job is None:
                    args, assumptions = opened.args, opened.assumptions
                    offline_states.complete(args, flags)
                    job = job_of_args(args, cuda=True)
                key = _likeness(job, stage)
                traced[key] = _of_stage(opened, AnalyticPrices(device, args.tensor_model_parallel_size))
        assert job is not None
        facts, quantized, outside_us = traced[key]
        alive = heaviest(job.schedule, stage, [chunk.layers for chunk in job.stages[stage]])
        parts = tuple(fact.part(fact.places, fact.layer_class.chunk, alive[fact.layer_class.chunk]) for fact in facts)
        counted = replace(room_of(job, stage), other_us=outside_us)
        state = offline_states.state_of(args, job, stage)
        room = counted
        if state.offer is not None:
            room = state.offer.room(counted, max(form.bytes for form in state.offer.forms))
        stages.append(StageFacts(stage, parts, room, quantized, state, counted))
    assert job is not None
    step_us = max(optimizer_us(job, stage, device) for stage in range(pipeline))
    return OfflineJob(device, args, job, tuple(stages), step_us, (*assumptions, *offline_states.assumed(args)))


def _likeness(job: Job, stage: int) -> object:
    """Equal for stages that are traced alike."""
    return job.stages[stage]


def _of_stage(stage: Stage, prices: AnalyticPrices) -> tuple[tuple[ClassFacts, ...], tuple[LayerPlan, ...], float]:
    found = [(_facts(layers, prices), _quantized(layers)) for layers in stage.layers]
    found.sort(key=lambda one: one[0].places[0])
    outside_us = sum(prices.step_us(outside.graph) for outside in stage.outside)
    return tuple(fact for fact, _ in found), tuple(plan for _, plan in found), outside_us


def _facts(layers: Layers, prices: AnalyticPrices) -> ClassFacts:
    graph, evidence, call = layers.graph, layers.evidence, layers.call
    timeline = record(graph, Rehearsal(call.module, call.forward, call.args, call.kwargs))
    lossless = list(bitmask_offers(graph, evidence, MIN_BYTES))
    problem, with_lossy = (
        layer_problem(graph, evidence, prices, offers, min_bytes=MIN_BYTES, count=layers.count, chunk=layers.chunk)
        for offers in (lossless, [*lossless, *_lossy_offers(graph, evidence)])
    )
    simulator = Simulator(graph, timeline, Context(layers.objects, torch.device("cuda")))
    return ClassFacts(
        problem, simulator, layers.places, prices.ops_us(graph, graph.ops), prices.step_us(graph), 0, with_lossy
    )


def _quantized(layers: Layers) -> LayerPlan:
    return QuantizeAll(MIN_BYTES).layer_plan(layers.graph, layers.evidence, layers.places[0], True)


def _lossy_offers(graph: LayerGraph, evidence: Evidence) -> list[Offer]:
    """The codecs whose errors are known for the role of a saved buffer; the errors are assumed."""
    choices = lossy_choices(graph, evidence, MIN_BYTES)
    errors = typical_errors(graph, choices)
    known = [one for one in choices if (one.buffer, one.label) in errors]
    return [replace(one, error=errors[one.buffer, one.label]) for one in known]
