"""handle.report(): what becomes of each buffer, and why."""

from __future__ import annotations

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
