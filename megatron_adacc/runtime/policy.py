"""From a traced graph to a layer plan: the plans that attach() takes by name, or one made beforehand."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from megatron_adacc.cost.layer_problem import held_anyway
from megatron_adacc.cost.measured import Shared
from megatron_adacc.cost.outliers import lossy_action
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.timing import Sample
from megatron_adacc.errors import UserError
from megatron_adacc.graph.model import FLOAT_DTYPES, LayerGraph, Origin, Role
from megatron_adacc.graph.recipes import group_recipes
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.graph.verify import Evidence, is_dense
from megatron_adacc.planner import Action, Compress, Keep, LayerPlan, Plan, Recompute

BITMASK = Compress("bitmask")
DIRECT_INT4 = Compress("group_int4", (("scale", "paper"),))

# What the codecs take; a float64 buffer is never compressed.
CODEC_DTYPES = FLOAT_DTYPES - {"float64"}

CODEC_OF_ROLE: Mapping[Role, str] = MappingProxyType({
    Role.LINEAR_INPUT: "outlier_int4",
    Role.NORM_OUTPUT: "outlier_int4",
    Role.QUERY_KEY_VALUE: "channel_int4",
    Role.ATTENTION_PROBABILITIES: "affine_int4",
    Role.RESIDUAL: "outlier_int4",
    Role.OTHER: "group_int4",
})  # fmt: skip


class Policy(Protocol):
    """Makes the plan of one layer from what its trace has shown; `settled`: whether a second trace agreed."""

    @property
    def name(self) -> str: ...

    @property
    def generation(self) -> int:
        """Grows when the plans of layers that were asked for before are others now."""

    def layer_plan(self, graph: LayerGraph, evidence: Evidence, layer: int, settled: bool) -> LayerPlan: ...

    def meet(self, graph: LayerGraph, evidence: Evidence) -> None:
        """A layer was traced; comes before the plan of that call is asked for."""

    def settle(
        self, seen: Collection[int], unseen: Collection[int], sample: Sample, rehearsal: Rehearsal,
        shared: Shared | None,
    ) -> None:  # fmt: skip
        """A trace has settled, of calls of the layers at the places ``seen``; comes before their plans are asked for.
        ``unseen``: places of layers of the class that have not run yet, likely with such a call.
        ``shared``: what all ranks have that the layers' collectives join (runtime/agree.py)."""

    def join(self, place: int, graph: LayerGraph) -> None:
        """The layer at this place runs with a trace for the first time, which has settled before."""

    def begin(self, places: tuple[int, ...]) -> None:
        """The first of these layers begins a forward."""


class FixedPolicy:
    """A policy that needs to learn nothing."""

    generation = 0

    def meet(self, graph: LayerGraph, evidence: Evidence) -> None:
        """Nothing is learned."""

    def settle(
        self, seen: Collection[int], unseen: Collection[int], sample: Sample, rehearsal: Rehearsal,
        shared: Shared | None,
    ) -> None:  # fmt: skip
        """Nothing is learned."""

    def join(self, place: int, graph: LayerGraph) -> None:
        """Nothing is learned."""

    def begin(self, places: tuple[int, ...]) -> None:
        """Nothing changes."""


@dataclass(frozen=True)
class KeepAll(FixedPolicy):
    """Every tensor stays."""

    name: str = "keep"

    def layer_plan(self, graph: LayerGraph, evidence: Evidence, layer: int, settled: bool) -> LayerPlan:
        return LayerPlan(fingerprint(graph), ())


def _fits_in_bits(graph: LayerGraph, evidence: Evidence, buffer: int) -> bool:
    """Whether the buffer is a mask of a dtype that bitmask takes."""
    dtype = graph.buffers[buffer].base.dtype
    return buffer in evidence.two_valued and (dtype in CODEC_DTYPES or dtype == "bool")


@dataclass(frozen=True)
class RecomputeAll(FixedPolicy):
    """Everything with a verified recipe is recomputed; two-valued tensors without one become bits."""

    min_bytes: int
    name: str = "recompute"

    def layer_plan(self, graph: LayerGraph, evidence: Evidence, layer: int, settled: bool) -> LayerPlan:
        actions: list[tuple[str, Action]] = []
        for buffer in sorted(graph.saved):
            if held_anyway(graph, buffer, self.min_bytes):
                continue
            if buffer in evidence.verified:
                actions.append((graph.buffers[buffer].site, Recompute()))
            elif _fits_in_bits(graph, evidence, buffer) and graph.last_state(buffer):
                actions.append((graph.buffers[buffer].site, BITMASK))
        return LayerPlan(fingerprint(graph), tuple(actions))


@dataclass(frozen=True)
class CompressAll(FixedPolicy):
    """Each float buffer by the codec of its role, statistics and masks without loss. What a mask and another
    held buffer give in one op (a dropped-out value) is not held a second time. A role without a codec is kept."""

    min_bytes: int
    name: str = "compress"
    codec_of_role: Mapping[Role, str] = field(default_factory=lambda: CODEC_OF_ROLE)

    def layer_plan(self, graph: LayerGraph, evidence: Evidence, layer: int, settled: bool) -> LayerPlan:
        actions: list[tuple[str, Action]] = []
        held = set(graph.saved)
        for buffer in sorted(graph.saved):
            found = graph.buffers[buffer]
            role = graph.role(buffer)
            if held_anyway(graph, buffer, self.min_bytes) or not is_dense(found):
                continue
            if not graph.last_state(buffer):
                continue
            if _fits_in_bits(graph, evidence, buffer):
                actions.append((found.site, BITMASK))
            elif _is_masked(graph, evidence, buffer, held):
                actions.append((found.site, Recompute()))
                held.discard(buffer)
            elif role in self.codec_of_role and found.base.dtype in CODEC_DTYPES:
                actions.append((found.site, lossy_action(graph, evidence, buffer, self.codec_of_role[role])))
        return LayerPlan(fingerprint(graph), tuple(actions))


@dataclass(frozen=True)
class QuantizeAll(FixedPolicy):
    """The paper's direct quantization, to compare with: INT4 codes in groups, without outlier separation and with
    the paper's scale, for every float buffer that autograd saves, the layer's input and statistics among them.
    Masks become bits; nothing is recomputed."""

    min_bytes: int
    name: str = "quantize"

    def layer_plan(self, graph: LayerGraph, evidence: Evidence, layer: int, settled: bool) -> LayerPlan:
        actions: list[tuple[str, Action]] = []
        for buffer in sorted(graph.saved):
            found = graph.buffers[buffer]
            is_input = found.origin == Origin.INPUT and found.nbytes >= self.min_bytes and not found.base.expanded
            if held_anyway(graph, buffer, self.min_bytes) and not is_input:
                continue
            if not is_dense(found) or not graph.last_state(buffer):
                continue
            if _fits_in_bits(graph, evidence, buffer):
                actions.append((found.site, BITMASK))
            elif found.base.dtype in CODEC_DTYPES:
                actions.append((found.site, DIRECT_INT4))
        return LayerPlan(fingerprint(graph), tuple(actions))


def _is_masked(graph: LayerGraph, evidence: Evidence, buffer: int, held: Collection[int]) -> bool:
    """Whether the buffer's own op makes it from a stored mask and other held buffers."""
    writer = graph.buffers[buffer].writer
    if writer is None or buffer not in evidence.verified:
        return False
    reads = graph.ops[writer].reads
    return any(b in evidence.two_valued for b in reads) and all(b in held and graph.last_state(b) for b in reads)


@dataclass(frozen=True)
class FromPlan(FixedPolicy):
    """A plan made beforehand: by the solver, from a file, or by hand."""

    plan: Plan
    name: str = field(default="plan")

    def layer_plan(self, graph: LayerGraph, evidence: Evidence, layer: int, settled: bool) -> LayerPlan:
        """The plan's actions for this layer. Raises UserError when it has none, or asks for a recompute that
        the settled trace has not shown to be exact. The first trace has proven no constant yet: what waits for
        that is kept in the first call."""
        sites = {graph.buffers[b].site: b for b in graph.saved}
        found = self.plan.find(fingerprint(graph), sites, layer)
        if found is None:
            raise UserError(
                f"Plan {self.plan.name} has no entry for layer {layer}, {graph.module} with graph "
                f"{fingerprint(graph)}; make the plan for this model, or attach with plan='recompute'."
            )
        actions = []
        for site, action in found.actions:
            if site not in sites:
                raise UserError(
                    f"Plan {self.plan.name} names {site}, which {graph.module} does not save; make the plan again "
                    "for this model."
                )
            buffer = sites[site]
            if isinstance(action, Recompute) and buffer not in evidence.verified:
                if not settled:
                    continue
                reason = evidence.refused.get(buffer, "it is not written by an op of the layer")
                raise UserError(f"Plan {self.plan.name} recomputes {site}, which is not possible: {reason}.")
            actions.append((site, action))
        return LayerPlan(fingerprint(graph), tuple(actions), found.layer)


def fitting(plan: LayerPlan, graph: LayerGraph, evidence: Evidence) -> LayerPlan | None:
    """The plan with what this graph has not proven kept; None where it names what the graph does not save, or the rest
    then cannot be recomputed."""
    sites = {graph.buffers[b].site: b for b in graph.saved}
    if any(site not in sites for site, _ in plan.actions):
        return None
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


def policy_for(plan: str | Plan, min_bytes: int) -> Policy:
    """The policy for attach()'s argument: a name, a Plan, or the path of a plan file."""
    if isinstance(plan, Plan):
        return FromPlan(plan)
    match plan:
        case "keep":
            return KeepAll()
        case "recompute":
            return RecomputeAll(min_bytes)
        case "compress":
            return CompressAll(min_bytes)
        case "quantize":
            return QuantizeAll(min_bytes)
    return FromPlan(Plan.load(plan))
