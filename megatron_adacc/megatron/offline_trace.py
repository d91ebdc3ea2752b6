"""`adacc trace --device NAME`: the layer as on a GPU that is not there."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_adacc.cost.devices import device
from megatron_adacc.graph.model import LayerGraph, format_table
from megatron_adacc.graph.recipes import group_recipes
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.graph.verify import Evidence
from megatron_adacc.megatron.offline import Settings, trace_offline
from megatron_adacc.planner import Action, LayerPlan, Recompute
from megatron_adacc.runtime.attach import MIN_BYTES
from megatron_adacc.runtime.policy import policy_for
from megatron_adacc.runtime.report import HEADING, WHY


@dataclass(frozen=True)
class AbsentLayer:
    """The first layer of the model on that device, and what a plan makes of it; nothing of it was computed."""

    graph: LayerGraph
    evidence: Evidence
    plan: LayerPlan
    notes: tuple[str, ...]

    def action(self, buffer: int) -> Action:
        """The plan's action for a saved buffer."""
        return self.plan.action(self.graph.buffers[buffer].site)

    def recipe_length(self, buffer: int) -> int:
        """Ops of the buffer's own recipe, 0 when it is not recomputed."""
        if not isinstance(self.action(buffer), Recompute):
            return 0
        stored = [b for b in self.graph.saved if not isinstance(self.action(b), Recompute)]
        return len(group_recipes(self.graph, stored, [buffer])[0].steps)

    def report(self) -> str:
        """The table that `adacc trace` prints of a layer that runs, and what was assumed."""
        rows: list[tuple[str, ...]] = [(*HEADING, "action", WHY)]
        for index in self.graph.saved:
            buffer, length = self.graph.buffers[index], self.recipe_length(index)
            action = f"{self.action(index)}, {length} op{'s' * (length > 1)}" if length else str(self.action(index))
            reason = self.evidence.refused.get(index, "" if buffer.writer is not None else buffer.note or "boundary")
            rows.append(
                (
                    *(buffer.site, str(self.graph.role(index)), "x".join(map(str, buffer.base.size)) or "scalar"),
                    *(buffer.base.dtype, f"{buffer.nbytes:,}", action, reason),
                )
            )
        header = (
            f"{self.graph.module} {fingerprint(self.graph)}: {len(self.graph.ops)} ops, {len(self.graph.packs)} saves "
            f"({self.graph.parameter_packs} parameters), {self.graph.activation_bytes:,} bytes; not computed"
        )
        return "\n".join((header, format_table(rows), "", *self.notes))


def trace_absent(flags: Sequence[str], device_name: str, plan: str) -> AbsentLayer:
    """Trace a layer of the model of these flags, on tensor-parallel rank 0 of its first pipeline stage.

    Raises UserError for an unknown device, for flags that Megatron refuses, and for a plan that does not fit."""
    spec = device(device_name)
    given = {token.split("=")[0] for token in flags}
    layers = [] if "--num-layers" in given else ["--num-layers", "1"]
    stage = trace_offline(Settings([*flags, *layers], capability=spec.capability, memory_bytes=spec.memory_bytes))
    first = stage.layers[0]
    layer_plan = policy_for(plan, MIN_BYTES).layer_plan(first.graph, first.evidence, first.places[0], True)
    notes = (f"As on {spec.full_name}, which computes nothing here: recipes are not verified.", *stage.assumptions)
    return AbsentLayer(first.graph, first.evidence, layer_plan, notes)
