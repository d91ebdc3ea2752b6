"""The policy "auto": traces are timed and rehearsed as they settle, then the solver plans all layers at once.

Until a settled trace is known for every layer, layers get the plan of least memory that is certain: everything with a
proven recipe is recomputed. That is so in the first forward of the first layers, and where a trace has one layer in
the whole first step (the first layer, if its input needs no gradient). Then the problem is solved, and from then on
each layer has its plan. A layer is planned by the call of most bytes that it was seen with: a later one of more (a
longer sequence) solves the problem again; for one of fewer the plan holds by its sites, and what was not proven for it
is kept.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from megatron_adacc.cost.cache import PriceCache
from megatron_adacc.cost.errors import gradient_errors, lossy_choices
from megatron_adacc.cost.layer_problem import Offer, bitmask_offers, layer_problem
from megatron_adacc.cost.measured import MeasuredPrices, Shared
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.simulate import Simulator
from megatron_adacc.cost.stage_plan import ClassFacts, StagePlan
from megatron_adacc.cost.timeline import OtherSavesError, Timeline, record
from megatron_adacc.cost.timing import Sample
from megatron_adacc.errors import UserError
from megatron_adacc.graph.model import LayerGraph
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.graph.verify import Evidence
from megatron_adacc.planner import LayerPlan, Plan
from megatron_adacc.runtime.policy import RecomputeAll, fitting
from megatron_adacc.runtime.setting import Setting
from megatron_adacc.runtime.stage_solver import StageSolver

logger = logging.getLogger(__name__)

ERROR_SECONDS = 5.0  # for measuring what lossy actions cost, a layer class

# A layer that has not settled after others, which have, began this many forwards is not waited for.
PATIENCE = 3


@dataclass(frozen=True)
class _Cover:
    """What a layer is planned as: the graph of this fingerprint with these bytes of activations. ``seen``: it ran with
    it; else it is only likely to."""

    name: str
    nbytes: int
    seen: bool


@dataclass
class Auto:
    """See the module. One object serves all layers of a call of attach().

    ``given``: a plan that is in force from the first forward on, and stays as long as it fits, as one of a
    checkpoint."""

    setting: Setting
    classes: tuple[tuple[int, ...], ...]
    name: str = "auto"
    generation: int = 0
    stage: StagePlan | None = None
    given: Plan | None = None
    startup_seconds: float = 0.0
    _facts: dict[str, ClassFacts] = field(default_factory=dict)  # by fingerprint of the graph
    _cover: dict[int, _Cover] = field(default_factory=dict)  # by place, what the layer is planned as
    _solved_for: dict[int, str] | None = None
    _plans: dict[int, LayerPlan] = field(default_factory=dict)  # by place
    _begun: dict[tuple[int, ...], int] = field(default_factory=dict)
    _measured: MeasuredPrices | None = None

    def __post_init__(self) -> None:
        self.solver = StageSolver(self.setting)

    def begin(self, places: tuple[int, ...]) -> None:
        """A step begins for these layers; a layer that never comes, or never does the same, is not waited for."""
        if self.stage is not None or not self._cover.keys() & set(places):
            return
        self._begun[places] = self._begun.get(places, 0) + 1
        if self._begun[places] >= PATIENCE:
            missing = sorted({place for c in self.classes for place in c} - self._cover.keys())
            logger.warning("The plan is made without layers %s, which did not run or not do the same twice.", missing)
            self._solve()

    def layer_plan(self, graph: LayerGraph, evidence: Evidence, layer: int, settled: bool) -> LayerPlan:
        """The solved plan as far as it goes for this graph; before, everything that can be is recomputed."""
        fallback = RecomputeAll(self.setting.min_bytes).layer_plan(graph, evidence, layer, settled)
        plan = self.given if self.stage is None else self.stage.plan
        if plan is None or (self.stage is not None and not settled):
            return fallback
        sites = {graph.buffers[b].site: b for b in graph.saved}
        found = self._plans.get(layer)
        if found is None:
            found = plan.find(fingerprint(graph), sites, layer)
        if found is None:
            return fallback
        return fitting(found, graph, evidence) or fallback

    def meet(self, graph: LayerGraph, evidence: Evidence) -> None:
        """Nothing is learned before a trace settles."""

    def settle(
        self, seen: Collection[int], unseen: Collection[int], sample: Sample, rehearsal: Rehearsal,
        shared: Shared | None,
    ) -> None:  # fmt: skip
        """Time and rehearse the layer; solve when every layer is known. Raises UserError where no plan fits."""
        name = fingerprint(sample.graph)
        cover = _Cover(name, sample.graph.activation_bytes, True)
        likely = replace(cover, seen=False)
        better = {place: cover for place in seen if self._improves(place, cover)}
        better |= {place: likely for place in unseen if self._improves(place, likely)}
        if better and name not in self._facts:
            start = time.perf_counter()
            self._facts[name] = self._learn(sample, rehearsal, shared)
            self.startup_seconds += time.perf_counter() - start
        self._cover_with(better)

    def join(self, place: int, graph: LayerGraph) -> None:
        """Solve again where the layer was taken for another. Raises UserError where no plan fits."""
        cover = _Cover(fingerprint(graph), graph.activation_bytes, True)
        if cover.name in self._facts and self._improves(place, cover):
            self._cover_with({place: cover})

    def _improves(self, place: int, cover: _Cover) -> bool:
        known = self._cover.get(place)
        return known is None or (known.seen, known.nbytes) < (cover.seen, cover.nbytes)

    def _cover_with(self, better: Mapping[int, _Cover]) -> None:
        self._cover.update(better)
        complete = all(place in self._cover for places in self.classes for place in places)
        if (complete or self.stage is not None) and self._names() != self._solved_for:
            self._solve()

    def _names(self) -> dict[int, str]:
        return {place: cover.name for place, cover in self._cover.items()}

    def _learn(self, sample: Sample, rehearsal: Rehearsal, shared: Shared | None) -> ClassFacts:
        with self.setting.preserve():
            gradients = 0 if self.setting.main_gradients else gradient_bytes(sample.module)
            timeline = self._rehearsed(sample, rehearsal, gradients > 0)
            prices = self._prices(sample.context.device)
            prices.measure(sample, rehearsal, shared)
            lossless = bitmask_offers(sample.graph, sample.evidence, self.setting.min_bytes)
            lossy = self._lossy_offers(sample, rehearsal, shared)
        problem, with_lossy = (
            layer_problem(
                sample.graph, sample.evidence, prices, offers, min_bytes=self.setting.min_bytes, dead=timeline.dead
            )
            for offers in (lossless, (*lossless, *lossy))
        )
        simulator = Simulator(sample.graph, timeline, sample.context)
        step_us, forward_us = prices.step_us(sample.graph), prices.forward_us(sample.graph)
        return ClassFacts(problem, simulator, (), forward_us, step_us, gradients, with_lossy)

    def _lossy_offers(self, sample: Sample, rehearsal: Rehearsal, shared: Shared | None) -> tuple[Offer, ...]:
        """Codecs whose errors were measured on this call's activations; none where no error is allowed."""
        if not self.setting.error_budget:
            return ()
        choices = lossy_choices(sample.graph, sample.evidence, self.setting.min_bytes)
        # Ranks that exchange tensors in the backward must run it equally often, and those with one plan offer the same.
        alone = shared is None and all(group.size() == 1 for group in self.setting.groups)
        seconds = ERROR_SECONDS if alone else math.inf
        errors = gradient_errors(sample.graph, rehearsal, choices, seconds=seconds)
        return tuple(
            replace(one, error=errors[one.buffer, one.label]) for one in choices if (one.buffer, one.label) in errors
        )

    def timed_us(self, graph: LayerGraph, op: int) -> float | None:
        """Microseconds of an op as it was timed; None for one that was not, and for graphs that were not."""
        if self._measured is None or fingerprint(graph) not in self._facts:
            return None
        return self._measured.op_us(graph, op)

    def _prices(self, device: torch.device) -> MeasuredPrices:
        if self._measured is None:
            self._measured = MeasuredPrices(device, PriceCache.of(device))
        return self._measured

    @staticmethod
    def _rehearsed(sample: Sample, rehearsal: Rehearsal, gradients_stay: bool) -> Timeline:
        try:
            return record(sample.graph, rehearsal, gradients_stay)
        except OtherSavesError as error:
            raise UserError(
                f"The plan 'auto' runs a layer again to see what its backward needs, and {sample.graph.module} "
                f"does not do the same twice ({error}); use the plan 'recompute' or a plan file."
            ) from error

    def _solve(self) -> None:
        """The first rank of the groups solves; all get its plan, or its error."""
        names = self._names()
        given, self.given = self.given, None
        self._take(self.solver.solve(self.solver.parts(self._facts, names), given))
        self._solved_for = names

    def solve_again(self, least: bool = False) -> None:
        """Solve once more, with what the solver's ``change`` says by now; before the first answer that is left to it.
        All ranks of the groups call it between the same two steps.

        Raises UserError where nothing fits, unless ``least``: then the plan of the least memory is taken."""
        if self.stage is not None:
            self._take(self.solver.solve(self.solver.parts(self._facts, self._names()), least=least))

    def forget(self) -> None:
        """Learn all layers anew as they are traced again; until then everything that can be is recomputed."""
        self._facts, self._cover, self._plans, self._begun = {}, {}, {}, {}
        self._solved_for, self.stage = None, None
        self.solver.change.errors = {}
        self.generation += 1

    def take_over(self, other: Auto) -> None:
        """Go on with what another one has learned of the limit and of the memory."""
        self.solver.change.limit = other.solver.change.limit
        self.solver.change.more_bytes = other.solver.change.more_bytes

    def _take(self, stage: StagePlan) -> None:
        self.stage = stage
        self._plans = {}
        for fact in stage.facts:
            graph = fact.problem.graph
            for place in fact.places:
                found = stage.plan.find(fingerprint(graph), [graph.buffers[b].site for b in graph.saved], place)
                if found is not None:
                    self._plans[place] = found
        self.generation += 1


def gradient_bytes(module: nn.Module) -> int:
    """Bytes of the gradients that a backward will make and leave."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad and p.grad is None)
