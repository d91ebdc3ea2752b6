"""A policy in two stages: a lossless plan first, then the one that was asked for.

Columns for outlier channels, and under "auto" the errors of lossy actions, are taken from tensors of the training.
Those of the first steps of a model say little, so the second stage begins after the warm-up and sees the tensors as
they are then: its layers are traced again.

It is also where a plan is changed from outside: one that was in force before a restart goes on, and a layer's lossy
actions are withdrawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch.distributed as dist

from megatron_adacc.cost.measured import Shared
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.timing import Sample
from megatron_adacc.errors import UserError
from megatron_adacc.graph import Evidence, LayerGraph, Role
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.planner import LayerPlan, Plan
from megatron_adacc.runtime.agree import check_equal, first_rank_says
from megatron_adacc.runtime.attach import MIN_BYTES
from megatron_adacc.runtime.auto import Auto
from megatron_adacc.runtime.policy import CODEC_OF_ROLE, CompressAll, FromPlan, Policy, RecomputeAll, fitting

CODEC_OF_LEVEL = MappingProxyType({
    "outlier_separated": "outlier_int4",
    "channel_wise": "channel_int4",
    "direct": "group_int4",
})  # fmt: skip
ROLES_OF_TARGET = MappingProxyType({
    "Linear": (Role.LINEAR_INPUT, Role.NORM_OUTPUT, Role.RESIDUAL),
    "Attention": (Role.QUERY_KEY_VALUE,),
})  # fmt: skip


def codec_of_role(levels: Mapping[str, str]) -> Mapping[Role, str]:
    """The codecs of the plan "compress" for these compression levels, the usual one where a level is not given. With
    "none" for Attention its probabilities are kept as well."""
    codecs = dict(CODEC_OF_ROLE)
    for target, level in levels.items():
        for role in ROLES_OF_TARGET[target]:
            if level == "none":
                codecs.pop(role)
            else:
                codecs[role] = CODEC_OF_LEVEL[level]
    if levels.get("Attention") == "none":
        codecs.pop(Role.ATTENTION_PROBABILITIES)
    return MappingProxyType(codecs)


class Staged:
    """See the module. ``lossy`` says which stage it is; ``trace_again`` asks for new traces at the end of the step;
    ``refusal`` is why the first stage ended before its time, if it did.

    ``first`` is None where there is nothing to wait for. ``groups``: process groups whose ranks follow the first one's
    plan; a solver knows them itself. ``exact``: places of layers whose lossy actions have been withdrawn."""

    def __init__(self, first: Policy | None, later: Policy, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self._groups = [group for group in groups if group.size() > 1]
        self.current = later if first is None else first
        self.trace_again = False
        self.refusal: str | None = None
        self.exact: frozenset[int] = frozenset()
        self._later = later
        self._given: Plan | None = None
        self._agreed: dict[tuple[str, ...], LayerPlan] = {}  # by what a graph saves
        self._generations = 0  # of stages that have ended, and of changes made here

    @property
    def name(self) -> str:
        return self.current.name

    @property
    def generation(self) -> int:
        return self._generations + self.current.generation

    @property
    def lossy(self) -> bool:
        return self.current is self._later

    @property
    def auto(self) -> Auto | None:
        """The policy that a solver answers for, if it is one."""
        return self.current if isinstance(self.current, Auto) else None

    def known(self, plan: Plan) -> Plan:
        """The plan of the settled traces, with what holds for those that have not settled."""
        given = () if self._given is None else self._given.layers
        return replace(plan, layers=tuple(dict.fromkeys((*plan.layers, *self._agreed.values(), *given))))

    def begin_lossy(self) -> None:
        """Enter the second stage; a second call does nothing."""
        if self.lossy:
            return
        if isinstance(self.current, Auto) and isinstance(self._later, Auto):
            self._later.take_over(self.current)
        self._generations += self.current.generation + 1
        self.current = self._later
        self._given, self._agreed = None, {}
        self.trace_again = True

    def resume(self, plan: Plan, lossy: bool, exact: Collection[int]) -> None:
        """Go on with a plan that was in force before, until it is changed."""
        if lossy:
            self.begin_lossy()
        self.trace_again = False
        self.exact = frozenset(exact)
        if self.auto is not None:
            self.auto.given = plan
            self.auto.solver.change.exact = set(exact)
        elif not isinstance(self.current, FromPlan):
            self._given, self._agreed = plan, {}
        self._generations += 1

    def withdraw(self, places: Collection[int]) -> None:
        """Lossy actions of the layers at these places end. Under "auto" that is for the solver."""
        self.exact |= frozenset(places)
        if self.auto is not None:
            self.auto.solver.change.exact = set(self.exact)
        else:
            self._generations += 1

    def layer_plan(self, graph: LayerGraph, evidence: Evidence, layer: int, settled: bool) -> LayerPlan:
        if layer in self.exact and self.auto is None:
            return RecomputeAll(MIN_BYTES).layer_plan(graph, evidence, layer, settled)
        agreed = self._agreed.get(_saves(graph))
        found = self._given_plan(graph, evidence, layer) if agreed is None else fitting(agreed, graph, evidence)
        if found is not None:
            return found
        return self.current.layer_plan(graph, evidence, layer, settled)

    def _given_plan(self, graph: LayerGraph, evidence: Evidence, layer: int) -> LayerPlan | None:
        """What the plan that was in force before a restart says of this layer."""
        if self._given is None:
            return None
        found = self._given.find(fingerprint(graph), [graph.buffers[b].site for b in graph.saved], layer)
        return None if found is None else fitting(found, graph, evidence)

    def meet(self, graph: LayerGraph, evidence: Evidence) -> None:
        """How many outlier columns a plan reserves depends on tensors, which ranks have others of, and the calls of a
        layer as well: the plan of the first rank's first call is for all. Raises UserError on all ranks where one has
        another layer."""
        self.current.meet(graph, evidence)
        name = _saves(graph)
        if isinstance(self.current, CompressAll) and name not in self._agreed:
            check_equal([f"{graph.module}, which saves {words}" for words in name], self._groups)
            own = self._given_plan(graph, evidence, -1) or self.current.layer_plan(graph, evidence, -1, True)
            self._agreed[name] = first_rank_says(own, self._groups)

    def settle(
        self, seen: Collection[int], unseen: Collection[int], sample: Sample, rehearsal: Rehearsal,
        shared: Shared | None,
    ) -> None:  # fmt: skip
        with self._lossy_where_nothing_fits():
            self.current.settle(seen, unseen, sample, rehearsal, shared)

    def join(self, place: int, graph: LayerGraph) -> None:
        with self._lossy_where_nothing_fits():
            self.current.join(place, graph)

    def begin(self, places: tuple[int, ...]) -> None:
        with self._lossy_where_nothing_fits():
            self.current.begin(places)

    @contextlib.contextmanager
    def _lossy_where_nothing_fits(self) -> Iterator[None]:
        """Where the first stage has no plan, the second begins at once. It then knows nothing until layers are traced
        again; until then they have the plan that needs least memory without loss."""
        try:
            yield
        except UserError as error:
            if self.lossy:
                raise
            self.refusal = str(error)
            self.begin_lossy()


def _saves(graph: LayerGraph) -> tuple[str, ...]:
    """What a plan sees of a graph. A first call may make scratch memory that later ones find: another graph, with the
    same plan."""
    buffers = [graph.buffers[b] for b in graph.saved]
    return tuple(f"{b.site} {list(b.base.size)} {b.base.dtype}" for b in buffers)
