"""handle.report(): what becomes of each buffer, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_adacc.cost.limits import written_bytes
from megatron_adacc.cost.stage_plan import StagePlan
from megatron_adacc.graph.model import format_table
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.planner import Keep
from megatron_adacc.planner.reason import written_places
from megatron_adacc.runtime.program import Program
from megatron_adacc.runtime.traces import Trace, TraceCache

HEADING = ("site", "role", "shape", "dtype", "bytes")
WHY = "not recomputable because"


def report(cache: TraceCache, trace: Trace, layers: Sequence[int]) -> str:
    """The table of one traced call key; layers (places) with other actions have columns of their own."""
    graph = trace.graph
    assert graph is not None
    assert trace.evidence is not None
    programs = {} if trace.settled is None else {layer: cache.program(trace, layer) for layer in layers}
    state = "settled" if programs else "kept as autograd would" if trace.given_up else "traced once"
    header = (
        f"{graph.module} {fingerprint(graph)}: {len(graph.ops)} ops, {len(graph.packs)} saves "
        f"({graph.parameter_packs} parameters), {graph.activation_bytes:,} bytes; {state}"
    )
    groups: dict[tuple[str, ...], list[int]] = {}
    for layer, program in programs.items():
        groups.setdefault(tuple(_fate(program, index) for index in graph.saved), []).append(layer)
    fates = list(groups) or [tuple(str(Keep()) for _ in graph.saved)]
    titles = [written_places(tuple(places)) for places in groups.values()] if len(groups) > 1 else ["action"]
    rows: list[tuple[str, ...]] = [(*HEADING, *titles, WHY)]
    for number, index in enumerate(graph.saved):
        buffer = graph.buffers[index]
        reason = trace.evidence.refused.get(index, "" if buffer.writer is not None else buffer.note or "boundary")
        rows.append(
            (
                buffer.site,
                str(graph.role(index)),
                "x".join(map(str, buffer.base.size)) or "scalar",
                buffer.base.dtype,
                f"{buffer.nbytes:,}",
                *(group[number] for group in fates),
                reason,
            )
        )
    return header + "\n" + format_table(rows)


def _fate(program: Program, buffer: int) -> str:
    """The action, and how many operations make the buffer again."""
    action, length = str(program.action(buffer)), program.recipe_length(buffer)
    return f"{action}, {length} op{'s' * (length > 1)}" if length else action


def stage_report(stage: StagePlan) -> str:
    """What a solved plan promises beside no plan and full recompute, and how many layers do what."""
    rows: list[tuple[str, ...]] = [("strategy", "held", "peak", "step ms", "of none")]
    plain = stage.predictions[0].step_us
    for one in stage.predictions:
        share = f"{one.step_us / plain:.3f}" if plain else ""
        rows.append(
            (one.name, written_bytes(one.held_bytes), written_bytes(one.peak_bytes), f"{one.step_us / 1e3:.1f}", share)
        )
    lines = [
        f"plan {stage.plan.name}, limit {stage.limit}: {stage.verdict}, solved in "
        f"{stage.solution.solver_seconds:.2f} s; predicted for one micro-batch, of these layers alone:",
        format_table(rows),
        "",
    ]
    if stage.error:
        lines.insert(-1, f"lossy: root mean square of the layers' relative gradient errors {stage.error:.3f}")
    kinds: dict[tuple[int, tuple[tuple[str, str], ...]], list[int]] = {}
    for index, fact in enumerate(stage.facts):
        for place, answer in zip(fact.places, stage.solution.layers_of(index), strict=True):
            kinds.setdefault((index, tuple(sorted(answer.actions.items()))), []).append(place)
    for (index, actions), places in kinds.items():
        saved = {b.site for b in stage.facts[index].layer_class.buffers if b.saved}
        tally = Counter(action for site, action in actions if site in saved)
        words = ", ".join(f"{action} {n}" for action, n in sorted(tally.items()))
        module, where = stage.facts[index].problem.graph.module, written_places(tuple(places))
        lines.append(f"  {len(places)} x {module}, {where}: {words}")
    return "\n".join(lines)
