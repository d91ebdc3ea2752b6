"""`adacc trace`: what one layer of a model keeps for its backward pass, and what a plan makes of it.

    adacc trace --config configs/gpt_demo.yaml --plan recompute --html layer.html

The model is given by Megatron's flags. One layer of it is built by Megatron's own builder, runs on random tokens
until it is traced (twice, as a rule) and once more to be measured, and is reported. Nothing is trained, no data set
or tokenizer is read, and no GPU is needed.
"""

import argparse
import contextlib
import json
import os
import sys
import traceback
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_adacc.errors import UserError
from megatron_adacc.megatron.one_rank import noise_aside
from megatron_adacc.megatron.trace_flags import flags_of_file, model_flags, parse_known
from megatron_adacc.outputs import check_folders, write
from megatron_adacc.planner import Action, Compress, Keep, Plan, Recompute

if TYPE_CHECKING:
    from megatron_adacc.graph import LayerGraph
    from megatron_adacc.graph.picture import Fate
    from megatron_adacc.graph.verify import Evidence
    from megatron_adacc.runtime.attach import Handle

PROGRAM = "adacc trace"
FORMAT = 1
NAMED_PLANS = ("keep", "recompute", "compress")

# Below the table, what its words mean; _STATES: the last words of the first line of a layer that runs.
_LEGEND = (
    "First line: fingerprint, which only equal layers share and by which a plan file names this one; ops that write "
    "tensors; how often autograd saved a tensor, parameters among them, which are held anyway and have no row.\n"
    "N ops: as many are run again to rebuild the tensor from what the plan stores, counted for it alone."
)
_STATES = {
    "settled": "settled: two traces, on other inputs, agreed, and so the layer is run by the plan from then on.",
    "kept as autograd would": "kept as autograd would: no two traces agreed, and so there is no plan.",
}

# The traced forwards hold every tensor that the layer writes, and what a replay makes of it beside that: 2.4 times
# the estimate of what autograd holds, seen at h512 s512 b4 fp32.
_TRACE_FACTOR = 3


@dataclass(frozen=True)
class Row:
    """One saved buffer of the layer. A storage that two rows share counts in the first only.

    `bytes` are the buffer's, `autograd_bytes` what autograd holds for it, `held_bytes` what is held under the
    plan; `recipe_ops` is 0 where nothing is recomputed; `not_recomputable` is the reason, or empty."""

    site: str
    role: str
    shape: list[int]
    dtype: str
    bytes: int
    action: str
    recipe_ops: int
    not_recomputable: str
    autograd_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class Totals:
    """Sums over the rows, and what the layer's stash was seen to hold after a forward (bytes; None where there is
    no stash, because the layer's traces do not agree and it is kept as autograd would)."""

    autograd_bytes: int
    held_bytes: int
    measured_bytes: int | None

    def __str__(self) -> str:
        share = f" ({self.held_bytes / self.autograd_bytes:.1%})" if self.autograd_bytes else ""
        measured = "" if self.measured_bytes is None else f", measured after a forward: {self.measured_bytes:,}"
        return (
            f"autograd would hold {self.autograd_bytes:,} bytes for this layer; under the plan {self.held_bytes:,} "
            f"bytes{share} are held{measured}."
        )


def configure(parser: argparse.ArgumentParser) -> None:
    """Our own options; all others are Megatron's flags."""
    parser.usage = (
        "adacc trace [--config FILE] [--plan PLAN] [--device NAME] [--html FILE] [--json FILE|-] [-o PLANFILE] "
        "[Megatron's flags]"
    )
    parser.description = "Show what one layer of a model keeps for its backward pass, and what a plan makes of it."
    parser.add_argument("--config", metavar="FILE", help="a YAML of Megatron's flags by name, such as configs/*.yaml")
    parser.add_argument(
        "--plan",
        "--adacc-plan",
        default="recompute",
        metavar="PLAN",
        help="keep, recompute, compress or the path of a plan file (default: recompute)",
    )
    parser.add_argument("--device", metavar="NAME", help="as on a GPU that is not there, such as v100-32gb")
    parser.add_argument("--html", metavar="FILE", help="write a picture of the layer as one self-contained page")
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON; - prints it instead of the table")
    parser.add_argument("-o", "--output", metavar="PLANFILE", help="write the plan, for --adacc-plan PLANFILE")
    parser.set_defaults(arguments=[])


def run(args: Namespace) -> int:
    """Trace, print, write. Raises UserError for a mistake in the flags or files given."""
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False, exit_on_error=False)
    configure(parser)
    own, megatron_flags = parse_known(parser, args.arguments)
    _check_own(own)
    given = [*(flags_of_file(own.config) if own.config else []), *megatron_flags]
    if own.device:
        graph, fates, rows, totals, table, plan = _trace_absent(given, own.device, own.plan)
        title = f"{graph.module} on {own.device} under {own.plan}"
    else:
        flags = model_flags(given)
        with noise_aside():
            graph, fates, rows, totals, handle = _trace(flags, own.plan)
            title, table, plan = f"{graph.module} under {own.plan}", handle.report(), handle.plan
    content = _json(graph, own.plan, rows, totals)
    files = {}
    if own.html:
        from megatron_adacc.graph.picture import page

        files[own.html] = page(graph, fates, title, str(totals))
    if own.json and own.json != "-":
        files[own.json] = content
    if own.output and plan.layers:
        files[own.output] = plan.to_json() + "\n"
    sys.stdout.write(content if own.json == "-" else f"{table}\n\n{_legend(table)}\n\n{totals}\n")
    for path, text in files.items():
        write(path, text)
        (sys.stderr if own.json == "-" else sys.stdout).write(f"wrote {path}\n")
    if own.output and not plan.layers:
        raise UserError(
            f"{graph.module} runs other ops from call to call, so that no plan can be made for it: leave out -o."
        )
    return 0


def _legend(table: str) -> str:
    state = table.splitlines()[0].rpartition("; ")[2]
    return f"{_LEGEND}\n{_STATES[state]}" if state in _STATES else _LEGEND


def _check_own(own: Namespace) -> None:
    from megatron_adacc.megatron import strategies

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("adacc trace runs in one process: start it without torchrun.")
    if own.plan not in NAMED_PLANS and not os.path.isfile(own.plan):
        way_out = " For auto, use adacc plan --device NAME, or a job with --adacc-plan auto."
        raise UserError(
            f"--plan is {own.plan!r}, but adacc trace shows {', '.join(NAMED_PLANS)}, or the path of a plan file."
            + (way_out if own.plan == "auto" else "")
        )
    strategies.get(own.plan)  # a file that is no plan is refused before anything is built
    check_folders(own.html, own.output, or_printed=own.json)


def _trace(flags: list[str], plan: str) -> tuple["LayerGraph", dict[int, "Fate"], list[Row], Totals, "Handle"]:
    """Build the layer, run it, and read off what became of its tensors."""
    from megatron_adacc.megatron import launch, one_rank

    launch.prepare(PROGRAM, flags)
    sys.argv = [PROGRAM, *flags]
    import torch

    from megatron_adacc.runtime.attach import attach
    from megatron_adacc.runtime.traces import MAX_TRACES

    args = one_rank.start(plan)
    try:
        _check_memory(args)
        model, layers = one_rank.build(args)
        with attach(layers, plan) as handle:
            for _ in range(MAX_TRACES):
                one_rank.forward(model, args)
                if handle.plan.layers:
                    break  # two traces agreed; a layer that never does so is kept as autograd would
            output = one_rank.forward(model, args)
            measured = handle.stored_bytes() if handle.plan.layers else None
            del output
        graph, fates = _fates(handle)
        rows = _rows(graph, fates)
        totals = Totals(sum(row.autograd_bytes for row in rows), sum(row.held_bytes for row in rows), measured)
        return graph, fates, rows, totals, handle
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"The layer does not fit into the device's memory: give a smaller --micro-batch-size or --seq-length "
            f"({str(error).splitlines()[0]})"
        ) from None
    except (AssertionError, ValueError, RuntimeError, ImportError) as error:
        refusal = _refusal_of_megatron(error)
        if refusal is None:
            raise
        raise refusal from error
    finally:
        torch.distributed.destroy_process_group()


def _refusal_of_megatron(error: Exception) -> UserError | None:
    """A sentence where Megatron's own code refuses to build or run the layer; None for another's error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, UserError) or not any(f"/megatron/{part}/" in frame.filename for part in ("core", "training")):
        return None
    place = "/".join(frame.filename.split("/")[-3:])
    words = str(error).strip() or f"this does not hold: {(frame.line or '').removeprefix('assert ')}"
    return UserError(f"Megatron cannot run this layer: {words} ({place}, line {frame.lineno})")


def _check_memory(args: Namespace) -> None:
    """UserError, before anything is allocated, where the traced forwards would not fit into the host's memory.

    The estimate follows s b h (34 + 5 a s / h) bytes of 16-bit activations a layer (arXiv 2205.05198, eq. 1),
    with the width of the MLP in place of 4 h and the run's bytes an element."""
    import torch

    if torch.cuda.is_available():
        return  # a GPU's allocator raises an error, where a host's process is ended
    width = 2 if args.fp16 or args.bf16 else 4
    tokens, hidden = args.seq_length * args.micro_batch_size, args.hidden_size
    values = tokens * (9 * hidden + 2 * args.ffn_hidden_size + 5 * args.num_attention_heads * args.seq_length // 2)
    weights = 4 * hidden * hidden + 3 * hidden * args.ffn_hidden_size * (args.num_experts or 1)
    weights += (args.max_position_embeddings + 256) * hidden
    needed = width * (_TRACE_FACTOR * values + weights)
    available = _available_bytes()
    if available is not None and needed > available:
        raise UserError(
            f"Tracing a layer of this size needs about {needed / 2**30:,.1f} GiB of memory, and "
            f"{available / 2**30:,.1f} GiB are free: give a smaller --micro-batch-size or --seq-length, by which the "
            "bytes scale."
        )


def _available_bytes() -> int | None:
    """Free memory of this machine or of the container it runs in; None where the system does not say."""
    free = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(free, default=None)


def _trace_absent(
    flags: list[str], device: str, plan: str
) -> tuple["LayerGraph", dict[int, "Fate"], list[Row], Totals, str, Plan]:
    """As _trace, of a layer on a GPU that is not there; in place of the handle its table and plan."""
    from megatron_adacc.megatron.offline_trace import trace_absent

    layer = trace_absent(flags, device, plan)
    graph = layer.graph
    fates = _fates_of(graph, layer.evidence, {b: (layer.action(b), layer.recipe_length(b)) for b in graph.saved})
    rows = _rows(graph, fates)
    totals = Totals(sum(row.autograd_bytes for row in rows), sum(row.held_bytes for row in rows), None)
    return graph, fates, rows, totals, layer.report(), Plan((layer.plan,), plan)


def _fates(handle: "Handle") -> tuple["LayerGraph", dict[int, "Fate"]]:
    """The graph of the traced layer, and what becomes of each buffer that autograd saves."""
    cache = handle._caches[0]
    trace = cache.traces()[0]
    graph = trace.graph
    assert graph is not None
    assert trace.evidence is not None
    if trace.settled is None:
        return graph, _fates_of(graph, trace.evidence, {b: (Keep(), 0) for b in graph.saved})
    program = cache.program(trace, 0)
    actions = {b: (program.action(b), program.recipe_length(b)) for b in graph.saved}
    return graph, _fates_of(graph, trace.evidence, actions)


def _fates_of(graph: "LayerGraph", evidence: "Evidence", actions: dict[int, tuple[Action, int]]) -> dict[int, "Fate"]:
    """`actions`: for each saved buffer, what becomes of it and the length of its recipe."""
    from megatron_adacc import codecs
    from megatron_adacc.graph.picture import Fate, Kind
    from megatron_adacc.graph.replay import torch_dtype

    fates = {}
    for index, (action, length) in actions.items():
        buffer = graph.buffers[index]
        kind: Kind
        match action:
            case Compress(codec, options):
                base = buffer.base
                kind = "compress"
                held = codecs.get(codec, **dict(options)).packed_bytes(base.size, torch_dtype(base.dtype))
            case Recompute():
                kind, held = "recompute", 0
            case _:
                kind, held = "keep", buffer.nbytes
        reason = evidence.refused.get(index, "" if buffer.writer is not None else buffer.note or "boundary")
        fates[index] = Fate(kind, str(action), held, length, reason)
    return fates


def _rows(graph: "LayerGraph", fates: dict[int, "Fate"]) -> list[Row]:
    rows, seen = [], set()
    for index, fate in fates.items():
        buffer = graph.buffers[index]
        again = buffer.storage in seen
        seen.add(buffer.storage)
        rows.append(
            Row(
                site=buffer.site,
                role=str(graph.role(index)),
                shape=list(buffer.base.size),
                dtype=buffer.base.dtype,
                bytes=buffer.nbytes,
                action=fate.label,
                recipe_ops=fate.recipe_ops,
                not_recomputable=fate.refused,
                autograd_bytes=0 if again else buffer.nbytes,
                held_bytes=0 if again and fate.kind == "keep" else fate.held_bytes,
            )
        )
    return rows


def _json(graph: "LayerGraph", plan: str, rows: list[Row], totals: Totals) -> str:
    from megatron_adacc.graph.serialize import fingerprint

    content = {
        "format": FORMAT,
        "module": graph.module,
        "fingerprint": fingerprint(graph),
        "plan": plan,
        "ops": len(graph.ops),
        "saves": len(graph.packs),
        "parameter_saves": graph.parameter_packs,
        "rows": [asdict(row) for row in rows],
        "totals": asdict(totals),
    }
    return json.dumps(content, indent=1) + "\n"
