"""The policy "auto": traces are timed and rehearsed as they settle, then the solver plans all layers at once.

Until every layer class has settled, layers get the plan of least memory that is certain: everything with a proven
recipe is recomputed. That is so in the first forward of the first layers, and for a class of one layer in the
whole first step. When the last class has settled the problem is solved, and from then on each layer has its plan.
A later call key of more bytes (a longer sequence) solves it again; for one of fewer bytes the plan holds by its
sites, and what was not proven for it is kept.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from megatron_adacc.cost.cache import PriceCache
from megatron_adacc.cost.errors import gradient_errors, lossy_choices
from megatron_adacc.cost.layer_problem import Offer, bitmask_offers, layer_problem
from megatron_adacc.cost.limits import Limit
from megatron_adacc.cost.measured import MeasuredPrices, Shared
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.simulate import Simulator
from megatron_adacc.cost.stage_plan import ClassFacts, Room, StagePlan, given_stage, plan_stage
from megatron_adacc.cost.timeline import OtherSavesError, Timeline, record
from megatron_adacc.cost.timing import Sample
from megatron_adacc.errors import UserError
from megatron_adacc.graph.model import LayerGraph
from megatron_adacc.graph.recipes import group_recipes
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.graph.verify import Evidence
from megatron_adacc.planner import Keep, LayerPlan, Plan, Recompute
from megatron_adacc.runtime.agree import check_equal
from megatron_adacc.runtime.policy import RecomputeAll

logger = logging.getLogger(__name__)

ERROR_SECONDS = 5.0  # for measuring what lossy actions cost, a layer class

# A class that has not settled after the others began this many forwards is not waited for.
PATIENCE = 3


@dataclass(frozen=True)
class Setting:
    """What auto plans for.

    ``limit``: None for what the device has, less a reserve. ``room``: called when the problem is solved, with
    the device; what the activations share it with. ``chunk_of``: by place of a layer, the virtual pipeline stage
    that it lies in, 0 where it is not named; ``in_flight``: by virtual stage, micro-batches held at the peak.
    ``groups``: process groups, each rank of which trains the same layers and gets the plan of the group's first.
    ``error_budget``: as in :func:`plan_stage`.
    ``preserve``: a context that puts back what a forward of the layers changes beside torch's default generators.
    ``main_gradients``: parameter gradients are added to memory that is in the room already, as Megatron's are."""

    limit: Limit | None
    room: Callable[[torch.device], Room]
    chunk_of: Sequence[int] = ()
    in_flight: Sequence[int] = (1,)
    groups: Sequence[dist.ProcessGroup] = ()
    preserve: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    main_gradients: bool = False
    error_budget: float = 0.0
    min_bytes: int = 1024


@dataclass
class Auto:
    """See the module. One object serves all layers of a call of attach()."""

    setting: Setting
    classes: tuple[tuple[int, ...], ...]
    name: str = "auto"
    generation: int = 0
    stage: StagePlan | None = None
    startup_seconds: float = 0.0
    _facts: dict[tuple[int, ...], ClassFacts] = field(default_factory=dict)
    _begun: dict[tuple[int, ...], int] = field(default_factory=dict)
    _measured: MeasuredPrices | None = None

    def begin(self, places: tuple[int, ...]) -> None:
        """A step begins for these layers; a class that never comes is not waited for."""
        if self.stage is not None or places not in self._facts:
            return
        self._begun[places] = self._begun.get(places, 0) + 1
        if self._begun[places] >= PATIENCE:
            missing = [c for c in self.classes if c not in self._facts]
            logger.warning("The plan is made without layers %s, which have not run yet.", missing)
            self._solve()

    def layer_plan(self, graph: LayerGraph, evidence: Evidence, layer: int, settled: bool) -> LayerPlan:
        """The solved plan as far as it goes for this graph; before, everything that can be is recomputed."""
        fallback = RecomputeAll(self.setting.min_bytes).layer_plan(graph, evidence, layer, settled)
        if self.stage is None or not settled:
            return fallback
        sites = {graph.buffers[b].site: b for b in graph.saved}
        found = self.stage.plan.find(fingerprint(graph), sites, layer)
        if found is None:
            return fallback
        return _fitting(found, graph, evidence, sites) or fallback

    def settle(self, places: tuple[int, ...], sample: Sample, rehearsal: Rehearsal, shared: Shared | None) -> None:
        """Time and rehearse the layer; solve when every class is known. Raises UserError where no plan fits."""
        known = self._facts.get(places)
        if known is not None and known.problem.graph.activation_bytes >= sample.graph.activation_bytes:
            return
        start = time.perf_counter()
        self._facts[places] = self._learn(places, sample, rehearsal, shared)
        self.startup_seconds += time.perf_counter() - start
        if len(self._facts) == len(self.classes):
            self._solve()

    def _learn(
        self, places: tuple[int, ...], sample: Sample, rehearsal: Rehearsal, shared: Shared | None
    ) -> ClassFacts:
        with self.setting.preserve():
            gradients = 0 if self.setting.main_gradients else gradient_bytes(sample.module)
            timeline = self._rehearsed(sample, rehearsal, gradients > 0)
            prices = self._prices(sample.context.device)
            prices.measure(sample, rehearsal, shared)
            lossless = bitmask_offers(sample.graph, sample.evidence, self.setting.min_bytes)
            lossy = self._lossy_offers(sample, rehearsal, shared)
        problem, with_lossy = (
            layer_problem(
                sample.graph, sample.evidence, prices, offers, min_bytes=self.setting.min_bytes, count=len(places)
            )
            for offers in (lossless, (*lossless, *lossy))
        )
        simulator = Simulator(sample.graph, timeline, sample.context)
        step_us, forward_us = prices.step_us(sample.graph), prices.forward_us(sample.graph)
        return ClassFacts(problem, simulator, places, forward_us, step_us, gradients, with_lossy)

    def _lossy_offers(self, sample: Sample, rehearsal: Rehearsal, shared: Shared | None) -> tuple[Offer, ...]:
        """Codecs whose errors were measured on this call's activations; none where no error is allowed."""
        if not self.setting.error_budget:
            return ()
        choices = lossy_choices(sample.graph, sample.evidence, self.setting.min_bytes)
        # Ranks that exchange tensors in the backward must run it equally often, and those with one plan offer the same.
        alone = shared is None and not self.setting.groups
        seconds = ERROR_SECONDS if alone else math.inf
        errors = gradient_errors(sample.graph, rehearsal, choices, seconds=seconds)
        return tuple(
            replace(one, error=errors[one.buffer, one.label]) for one in choices if (one.buffer, one.label) in errors
        )

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
        device = next(iter(self._facts.values())).simulator.device
        facts = [part for c in sorted(self._facts) for part in self._by_chunk(self._facts[c])]
        facts.sort(key=lambda fact: fact.places[0])
        check_equal([line for fact in facts for line in described(fact)], self.setting.groups)
        limit, room = self.setting.limit or device_limit(device), self.setting.room(device)
        own: StagePlan | None = None
        message: tuple[str | None, str | None] = (None, None)  # the plan, or why there is none
        if all(group.rank() == 0 for group in self.setting.groups):
            try:
                own = self._solved(facts, limit, room)
                message = (own.plan.to_json(), None)
            except UserError as error:
                message = (None, str(error))
        for group in self.setting.groups:
            if group.size() > 1:
                box = [message]
                dist.broadcast_object_list(box, group=group, group_src=0)
                message = box[0]
        text, refusal = message
        if refusal is not None:
            raise UserError(refusal)
        assert text is not None
        self.stage = own or given_stage(facts, Plan.from_json(text), limit, room)
        self.generation += 1

    def _by_chunk(self, fact: ClassFacts) -> list[ClassFacts]:
        """One class a virtual pipeline stage: they differ in how many micro-batches are in flight."""
        chunk_of, in_flight = self.setting.chunk_of, self.setting.in_flight
        places: dict[int, list[int]] = {}
        for place in fact.places:
            places.setdefault(chunk_of[place] if place < len(chunk_of) else 0, []).append(place)
        return [fact.part(tuple(found), chunk, in_flight[chunk]) for chunk, found in places.items()]

    def _solved(self, facts: Sequence[ClassFacts], limit: Limit, room: Room) -> StagePlan:
        """The fastest plan; lossy actions are on offer where an error is allowed."""
        if self.setting.error_budget:
            facts = [fact.lossy for fact in facts]
        return plan_stage(facts, limit, room, error_budget=self.setting.error_budget)


def _fitting(plan: LayerPlan, graph: LayerGraph, evidence: Evidence, sites: Mapping[str, int]) -> LayerPlan | None:
    """The plan with what this graph has not proven kept; None where the rest then cannot be recomputed."""
    actions = tuple(
        (site, action)
        for site, action in plan.actions
        if not isinstance(action, Recompute) or sites[site] in evidence.verified
    )
    chosen = dict(actions)
    dropped = [b for s, b in sites.items() if isinstance(chosen.get(s, Keep()), Recompute)]
    try:
        group_recipes(graph, set(sites.values()) - set(dropped), dropped)
    except ValueError:
        return None
    return LayerPlan(fingerprint(graph), actions, plan.layer)


def described(fact: ClassFacts) -> list[str]:
    """What a plan depends on and all ranks that follow it must have in common, one line a buffer."""
    places = ", ".join(map(str, fact.places))
    return [f"layers {places} of {fact.problem.graph.module}"] + [
        f"{b.site} of {b.bytes} bytes" + (", held under any plan" if b.must_hold else "")
        for b in fact.layer_class.buffers
        if b.saved
    ]


def gradient_bytes(module: nn.Module) -> int:
    """Bytes of the gradients that a backward will make and leave."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad and p.grad is None)


def device_limit(device: torch.device) -> Limit:
    """What a plan may use where nothing was said: the device's memory less a reserve of 5 %."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        import psutil

        total = psutil.virtual_memory().total
    return Limit(total_bytes=int(0.95 * total))
