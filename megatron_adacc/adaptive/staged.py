"""A policy in two stages: a lossless plan first, then the one that was asked for.

Columns for outlier channels, and under "auto" the errors of lossy actions, are taken from tensors of the training.
Those of the first steps of a model say little, so the second stage begins after the warm-up and sees the tensors as
they are then: its layers are traced again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from megatron_adacc.cost.measured import Shared
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.timing import Sample
from megatron_adacc.errors import UserError
from megatron_adacc.graph import Evidence, LayerGraph, Role
from megatron_adacc.planner import LayerPlan
from megatron_adacc.runtime.policy import CODEC_OF_ROLE, Policy

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
    ``refusal`` is why the first stage ended before its time, if it did."""

    def __init__(self, first: Policy, later: Policy) -> None:
        self.current = first
        self.trace_again = False
        self._later = later
        self._generations = 0  # of the first stage, once it has ended
        self.refusal: str | None = None

    @property
    def name(self) -> str:
        return self.current.name

    @property
    def generation(self) -> int:
        return self._generations + self.current.generation

    @property
    def lossy(self) -> bool:
        return self.current is self._later

    def begin_lossy(self) -> None:
        """Enter the second stage; a second call does nothing."""
        if not self.lossy:
            self._generations = self.current.generation + 1
            self.current = self._later
            self.trace_again = True

    def layer_plan(self, graph: LayerGraph, evidence: Evidence, layer: int, settled: bool) -> LayerPlan:
        return self.current.layer_plan(graph, evidence, layer, settled)

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
