"""handle.report(): what becomes of each buffer, and why."""

from __future__ import annotations

from megatron_adacc.cost.limits import written_bytes
from megatron_adacc.cost.stage_plan import StagePlan
from megatron_adacc.graph.model import format_table
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.planner import Keep
from megatron_adacc.runtime.traces import Trace, TraceCache

HEADING = ("site", "role", "shape", "dtype", "bytes", "action", "recipe", "not recomputable because")


def report(cache: TraceCache, trace: Trace, layer: int) -> str:
    """The table of one traced call key."""
    graph = trace.graph
    assert graph is not None
    assert trace.evidence is not None
    program = cache.program(trace, layer) if trace.settled is not None else None
    state = "settled" if program is not None else "kept as autograd would" if trace.given_up else "traced once"
    header = (
        f"{graph.module} {fingerprint(graph)}: {len(graph.ops)} ops, {len(graph.packs)} saves "
        f"({graph.parameter_packs} parameters), {graph.activation_bytes:,} bytes; {state}"
    )
    rows: list[tuple[str, ...]] = [HEADING]
    for index in graph.saved:
        buffer = graph.buffers[index]
        action = Keep() if program is None else program.action(index)
        length = 0 if program is None else program.recipe_length(index)
        reason = trace.evidence.refused.get(index, "" if buffer.writer is not None else buffer.note or "boundary")
        rows.append(
            (
                buffer.site,
                str(graph.role(index)),
                "x".join(map(str, buffer.base.size)) or "scalar",
                buffer.base.dtype,
                f"{buffer.nbytes:,}",
                str(action),
                str(length) if length else "",
                reason,
            )
        )
    return header + "\n" + format_table(rows)


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
        f"{stage.solution.solver_seconds:.2f} s; predicted for one micro-batch of these layers:",
        format_table(rows),
        "",
    ]
    if stage.error:
        lines.insert(-1, f"lossy: root mean square of the layers' relative gradient errors {stage.error:.3f}")
    kinds: dict[tuple[int, tuple[tuple[str, str], ...]], int] = {}
    for answer in stage.solution.layers:
        kind = (answer.class_index, tuple(sorted(answer.actions.items())))
        kinds[kind] = kinds.get(kind, 0) + 1
    for (index, actions), count in kinds.items():
        layer_class = stage.facts[index].layer_class
        saved = {b.site for b in layer_class.buffers if b.saved}
        tally: dict[str, int] = {}
        for site, action in actions:
            if site in saved:
                tally[action] = tally.get(action, 0) + 1
        words = ", ".join(f"{action} {n}" for action, n in sorted(tally.items()))
        lines.append(f"  {count} x {layer_class.name}: {words}")
    return "\n".join(lines)
