"""`adacc max-batch`: the largest micro-batch that fits, under every strategy.

    adacc max-batch --config configs/gpt_117m.yaml --device v100-32gb --sequence 512 --sequence 1024

All sizes are straight lines in the micro-batch. So the answer is guessed from two traces of the job, and looked for on
further traces until one micro-batch fits and one more does not. What a strategy without choices needs is the largest of
some sizes, and so convex: beyond two traces it lies above the line through them, and need not be traced.
"""

from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_adacc.cost.limits import Limit
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import planning
from megatron_adacc.megatron.plan_table import console, waiting
from megatron_adacc.outputs import check_folders, write
from megatron_adacc.planner.quiet import solver_prints_to_stderr

PROGRAM = "adacc max-batch"
FORMAT = 1

ERROR_BUDGET = 0.02
_FIRST = (32, 64)
_LINES = 5
_LARGEST = 2**16

# Of GPT-117M on a V100 with 32 GB: Adacc (arXiv 2508.00806), which does not say the sequence length.
_PAPER_MODEL = (12, 768, 12)
_PAPER = (136, 57)


def configure(parser: argparse.ArgumentParser) -> None:
    """Our own options; all others are Megatron's flags."""
    parser.usage = (
        "adacc max-batch --device NAME [--config FILE] [--sequence N]... [--limit LIMIT] [--error-budget ERROR]\n"
        "                       [--world N] [--json FILE|-] [Megatron's flags]"
    )
    parser.description = "The largest micro-batch that fits, under every strategy, predicted."
    planning.add_options(
        parser, limit="bytes, such as 30GiB (default: memory less 5 %%)", micro_batch=False, error_budget=ERROR_BUDGET
    )
    parser.add_argument(
        "--sequence",
        metavar="N",
        action="append",
        help="sequence length; may be given several times (default: half of --seq-length, and --seq-length)",
    )


def run(args: Namespace) -> int:
    """Search and print. Raises UserError for a mistake in the flags, and for a limit that is a share."""
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False, exit_on_error=False)
    configure(parser)
    own, request = planning.read(parser, args.arguments)
    if own.micro_batch is not None:
        raise UserError("adacc max-batch looks for the micro-batch: leave --micro-batch out.")
    if request.limit is not None and request.limit.total_bytes is None:
        raise UserError(f"--limit {own.limit} is a share of what a micro-batch holds: give bytes, such as 30GiB.")
    if own.error_budget is None:
        request = replace(request, error_budget=ERROR_BUDGET)
    check_folders(or_printed=own.json)
    sequences = [planning.whole("--sequence", text) for text in own.sequence or ()]
    found = []
    for sequence in sequences or _default_sequences(request):
        with waiting(f"sequence {sequence}: tracing and solving"), solver_prints_to_stderr():
            found.append(_at(request, sequence))
    content = {"format": FORMAT, "predicted": True, "device": request.device.name, "sequences": found}
    text = json.dumps(content, indent=1) + "\n"
    if own.json == "-":
        sys.stdout.write(text)
    else:
        _show(request, found)
    if own.json and own.json != "-":
        write(own.json, text)
    return 0


def _default_sequences(request: planning.Request) -> list[int]:
    from megatron_adacc.megatron.offline_flags import offline_flags
    from megatron_adacc.megatron.read_job import value_of

    length = planning.whole("--seq-length", value_of(offline_flags(request.flags)[0], "--seq-length"))
    return [length // 2, length] if length > 1 else [length]


class Batches:
    """The job at any micro-batch, each traced once. The micro-batches of a step stay as many as the flags say."""

    def __init__(self, request: planning.Request, sequence: int) -> None:
        self._request = request
        self._sequence = ["--seq-length", str(sequence), "--max-position-embeddings", str(sequence)]
        self._jobs: dict[int, planning.OfflineJob] = {}
        self._least: dict[tuple[str, int], int] = {}
        self._at_once = _micro_batches_at_once(request.flags)

    def job(self, batch: int) -> planning.OfflineJob:
        """The job with this micro-batch."""
        if batch not in self._jobs:
            from megatron_adacc.megatron.offline_facts import learn

            request = self._request
            flags = [*request.flags, *self._sequence, "--micro-batch-size", str(batch)]
            if self._at_once is not None:
                flags += ["--global-batch-size", str(batch * self._at_once)]
            self._jobs[batch] = learn(flags, request.device, request.world_size)
        return self._jobs[batch]

    def limit(self, batch: int) -> Limit:
        """What the strategies share."""
        return self._request.limit or Limit(total_bytes=self.job(batch).limit_bytes)

    def needed_bytes(self, name: str, batch: int) -> int:
        """A limit, in bytes, with which the strategy runs: the least, or with an error budget one that works."""
        if name in planning.REFERENCES:
            return self._reference(name, batch).peak_bytes
        key = name, batch
        if key not in self._least:
            self._least[key] = planning.least_bytes(self.job(batch), self._budget(name))
        return self._least[key]

    def outcome(self, name: str, batch: int) -> planning.Outcome:
        """The strategy, as fast as it can be within the limit."""
        if name in planning.REFERENCES:
            return self._reference(name, batch)
        return planning.auto(self.job(batch), self.limit(batch), self._budget(name), name)

    def _reference(self, name: str, batch: int) -> planning.Outcome:
        limit = self.limit(batch).total_bytes
        assert limit is not None
        found = planning.references(self.job(batch), limit)
        return found[planning.REFERENCES.index(name)]

    def _budget(self, name: str) -> float:
        return self._request.error_budget if name == "auto lossy" else 0.0


def largest(batches: Batches, name: str) -> int:
    """The largest micro-batch with which the strategy fits; 0 where none does."""

    total = batches.limit(_FIRST[0]).total_bytes
    assert total is not None
    known = {batch: batches.needed_bytes(name, batch) for batch in _FIRST}
    while True:
        low = max((batch for batch, needed in known.items() if needed <= total), default=0)
        high = min((batch for batch, needed in known.items() if needed > total), default=_LARGEST)
        if high - low <= 1 or (name in planning.REFERENCES and _above(known, low, total)):
            return low
        guess = _on_line(known, low, high, total)
        if len(known) > _LINES and len(known) % 2 and high < _LARGEST:
            guess = (low + high) // 2  # where it is no line after all
        guess = min(max(guess, low + 1), high - 1)
        known[guess] = batches.needed_bytes(name, guess)


def _above(known: dict[int, int], low: int, total: int) -> bool:
    """Whether the line through the two largest known points that fit is above ``total`` at the next micro-batch."""
    before = max((batch for batch in known if batch < low), default=None)
    if before is None or low not in known:
        return False
    return known[low] + (known[low] - known[before]) / (low - before) > total


def _on_line(known: dict[int, int], low: int, high: int, total: int) -> int:
    """Where the line through the known points around ``total``, or through the two nearest, reaches it."""
    around = [batch for batch in (low, high) if batch in known]
    first, second = around if len(around) == 2 else sorted(known)[-2:] if high == _LARGEST else sorted(known)[:2]
    if known[second] <= known[first]:
        return 2 * max(known)
    return first + (total - known[first]) * (second - first) // (known[second] - known[first])


def _micro_batches_at_once(flags: Sequence[str]) -> int | None:
    """Micro-batches of a step on all ranks together, None where the flags do not say."""
    from megatron_adacc.megatron.read_job import value_of

    of_step, one = value_of(flags, "--global-batch-size"), value_of(flags, "--micro-batch-size") or "1"
    if not of_step:
        return None
    return max(1, planning.whole("--global-batch-size", of_step) // planning.whole("--micro-batch-size", one))


def _at(request: planning.Request, sequence: int) -> dict[str, Any]:
    batches = Batches(request, sequence)
    names = [*planning.REFERENCES, "auto", *(["auto lossy"] if request.error_budget else [])]
    rows = []
    for name in names:
        batch = largest(batches, name)
        row: dict[str, Any] = {"strategy": name, "micro_batch": batch}
        if batch:
            found = batches.outcome(name, batch)
            row |= {"peak_bytes": found.peak_bytes, "samples_per_second": found.samples_per_second}
        rows.append(row)
    args = batches.job(_FIRST[0]).args
    plain, own = rows[0]["micro_batch"], rows[names.index("auto")]["micro_batch"]
    return {
        "sequence": sequence,
        "model": [args.num_layers, args.hidden_size, args.num_attention_heads],
        "limit": str(batches.limit(_FIRST[0])),
        "rows": rows,
        "auto_over_none": own / plain if plain else None,
    }


def _show(request: planning.Request, found: Sequence[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    out = console()
    for part in found:
        title = f"Predicted on {request.device.full_name}, sequence {part['sequence']}, limit {part['limit']}"
        out.print(title)
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("strategy", no_wrap=True)
        for name in ("largest micro-batch", "of none", "peak", "samples/s"):
            table.add_column(name, justify="right")
        plain = part["rows"][0]["micro_batch"]
        for row in part["rows"]:
            label = row["strategy"] + (f" (error {request.error_budget:g})" if row["strategy"] == "auto lossy" else "")
            if not row["micro_batch"]:
                table.add_row(label, "none fits", "", "", "")
                continue
            ratio = f"{row['micro_batch'] / plain:.2f}" if plain else ""
            table.add_row(
                label,
                f"{row['micro_batch']:,}",
                ratio,
                f"{row['peak_bytes'] / 2**30:.2f} GiB",
                f"{row['samples_per_second']:.1f}",
            )
        out.print(table)
        if part["auto_over_none"] is not None:
            own = next(row["micro_batch"] for row in part["rows"] if row["strategy"] == "auto")
            out.print(f"sequence {part['sequence']}: auto / none = {own} / {plain} = {part['auto_over_none']:.2f}")
    if tuple(found[0]["model"]) == _PAPER_MODEL:
        ours, plain = _PAPER
        out.print(
            f"Adacc (arXiv 2508.00806) reports {ours} / {plain} = {ours / plain:.2f} for GPT-117M; it does not say the "
            "sequence length."
        )
