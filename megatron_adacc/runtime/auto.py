"""The policy "auto": traces are timed and rehearsed as they settle, then the solver plans all layers at once.

Until a settled trace is known for every layer, layers get the plan of least memory that is certain: everything with a
proven recipe is recomputed. That is so in the first forward of the first layers, and where a trace has one layer in
the whole first step (the first layer, if its input needs no gradient). Then the problem is solved, and from then on
each layer has its plan. A layer is planned by the call of most bytes that it was seen with: a later one of more (a
longer sequence) solves the problem again; for one of fewer the plan holds by its sites, and what was not proven for it
is kept.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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

# A layer that has not settled after others, which have, began this many forwards is not waited for.
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

    def __post_init__(self) -> None:
        if not 0 <= self.error_budget < math.inf:
            raise UserError(f"The error budget is {self.error_budget}, but an error is a number from 0 up.")


@dataclass(frozen=True)
class _Cover:
    """What a layer is planned as: the graph of this fingerprint with these bytes of activations. ``seen``: it ran with
    it; else it is only likely to."""

    name: str
    nbytes: int
    seen: bool


@dataclass
class Auto:
    """See the module. One object serves all layers of a call of attach()."""

    setting: Setting
    classes: tuple[tuple[int, ...], ...]
    name: str = "auto"
    generation: int = 0
    stage: StagePlan | None = None
    startup_seconds: float = 0.0
    _facts: dict[str, ClassFacts] = field(default_factory=dict)  # by fingerprint of the graph
    _cover: dict[int, _Cover] = field(default_factory=dict)  # by place, what the layer is planned as
    _solved_for: dict[int, str] | None = None
    _plans: dict[int, LayerPlan] = field(default_factory=dict)  # by place
    _begun: dict[tuple[int, ...], int] = field(default_factory=dict)
    _measured: MeasuredPrices | None = None

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
        if self.stage is None or not settled:
            return fallback
        sites = {graph.buffers[b].site: b for b in graph.saved}
        found = self._plans.get(layer)
        if found is None:
            found = self.stage.plan.find(fingerprint(graph), sites, layer)
        if found is None or any(site not in sites for site, _ in found.actions):
            return fallback
        return _fitting(found, graph, evidence, sites) or fallback

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
        names = self._names()
        facts = self._parts(names)
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
        self._solved_for = names
        self._plans = {}
        for fact in facts:
            graph = fact.problem.graph
            for place in fact.places:
                found = self.stage.plan.find(fingerprint(graph), [graph.buffers[b].site for b in graph.saved], place)
                if found is not None:
                    self._plans[place] = found
        self.generation += 1

    def _parts(self, names: Mapping[int, str]) -> list[ClassFacts]:
        """One class for each graph and virtual pipeline stage, in the order of execution: stages differ in how many
        micro-batches are in flight."""
        chunk_of, in_flight = self.setting.chunk_of, self.setting.in_flight
        places: dict[tuple[int, str], list[int]] = {}
        for place in sorted(names):
            chunk = chunk_of[place] if place < len(chunk_of) else 0
            places.setdefault((chunk, names[place]), []).append(place)
        parts = [
            self._facts[name].part(tuple(found), chunk, in_flight[chunk]) for (chunk, name), found in places.items()
        ]
        return sorted(parts, key=lambda fact: (fact.layer_class.chunk, fact.places[0]))

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
