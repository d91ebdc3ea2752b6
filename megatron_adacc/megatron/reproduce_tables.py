"""The tables of the paper, from the paper, from predictions and from what was run; each says which it is.

Pure functions from records and predictions to text; `adacc reproduce` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_adacc.megatron.reproduce_jobs import METHODS, Experiment
from megatron_adacc.megatron.reproduce_records import FINISHED, NO_MEMORY, Record

GIB = 2**30
NOT_MEASURED = "not measured"
UNKNOWN = ""

# Adacc (arXiv 2508.00806). What is not here was not to be had in numbers: its cells stay empty.
PAPER_LARGEST = {("117m", "baseline"): 57, ("117m", "adacc"): 136}
PAPER_RECOMPUTE = "28-33 %"
PAPER_ACTIVATIONS = {("345m", 8): "76 %"}
PAPER_SPEEDUP = "1.01-1.37"


@dataclass(frozen=True)
class Table:
    """``note``: a sentence below it, or none. The first column is text, the others are figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """As a Markdown table under its title in bold."""
        head = f"| {' | '.join(self.columns)} |\n|---|{'---:|' * (len(self.columns) - 1)}\n"
        body = "".join(f"| {' | '.join(row)} |\n" for row in self.rows)
        return f"**{self.title}**\n\n{head}{body}" + (f"\n{self.note}\n" if self.note else "")


# What `predict` gives: {"device": ..., "runs": {(method, micro_batch): figures}, "largest": {method: micro_batch}}.
Prediction = Mapping[str, Any]


def tables(experiment: Experiment, prediction: Prediction | None, records: Sequence[Record]) -> list[Table]:
    """All tables of one model; ``records`` are of one device and one sequence length."""
    found = [_throughput(experiment, prediction)] if prediction is not None else []
    if any(not one.search for one in records):
        found.append(_measured_throughput(experiment, records))
        found.append(_accuracy(experiment, records))
    if not experiment.small:
        found += [_largest(experiment, prediction, records), _claims(experiment, prediction, records)]
    return found


def _title(experiment: Experiment) -> str:
    return f"{experiment.title}, sequence {experiment.sequence}"


def _where(records: Sequence[Record]) -> str:
    one = next((one for one in records if one.device is not None), records[0])
    if one.small:
        return f"small sizes on {one.ranks} ranks of the CPU: it runs; no statement about speed"
    further = f" with {' '.join(one.extra)}" if one.extra else ""
    return f"{one.ranks} x {one.device or 'a device that no run told'}{further}"


def _throughput(experiment: Experiment, prediction: Prediction) -> Table:
    runs = prediction["runs"]
    sizes = sorted({size for _, size in runs})

    def cell(method: str, size: int) -> str:
        one = runs.get((method, size))
        return UNKNOWN if one is None else f"{one['samples_per_second']:.1f}" if one["fits"] else "does not fit"

    return Table(
        f"{_title(experiment)}: samples a second, predicted for {experiment.ranks} x {prediction['device']}",
        ("micro-batch", *(method.title for method in METHODS.values())),
        tuple((str(size), *(cell(method, size) for method in METHODS)) for size in sizes),
    )


def _measured_throughput(experiment: Experiment, records: Sequence[Record]) -> Table:
    runs = {(one.method, one.micro_batch): one for one in records if not one.search}
    sizes = sorted({size for _, size in runs})

    def cell(method: str, size: int) -> str:
        one = runs.get((method, size))
        if one is None:
            return NOT_MEASURED
        return "no memory" if one.samples_per_second is None else f"{one.samples_per_second:.1f}"

    return Table(
        f"{_title(experiment)}: samples a second, measured: {_where(records)}",
        ("micro-batch", *(method.title for method in METHODS.values())),
        tuple((str(size), *(cell(method, size) for method in METHODS)) for size in sizes),
    )


def _accuracy(experiment: Experiment, records: Sequence[Record]) -> Table:
    """At the micro-batch that most methods finished, Baseline among them where it can be; the largest of such."""
    runs = [one for one in records if not one.search and one.final_loss is not None]

    def worth(size: int) -> tuple[bool, int, int]:
        there = [one.method for one in runs if one.micro_batch == size]
        return "baseline" in there, len(there), size

    size = max({one.micro_batch for one in runs}, key=worth, default=None)
    losses = {one.method: one for one in runs if one.micro_batch == size}
    base = losses["baseline"].final_loss if "baseline" in losses else None
    rows = []
    for method in METHODS.values():
        loss = losses[method.key].final_loss if method.key in losses else None
        less = "" if loss is None or base is None else f"{loss - base:+.6f}"
        rows.append((method.title, NOT_MEASURED if loss is None else f"{loss:.6f}", less))
    steps = {one.iterations for one in losses.values()}
    after = f" after {steps.pop()} iterations" if len(steps) == 1 else ""
    at = "" if size is None else f" at micro-batch {size}{after}"
    return Table(
        f"{_title(experiment)}: training loss{at}, measured: {_where(records)}",
        ("method", "last loss", "less Baseline's"),
        tuple(rows),
        "From the same seed and data. A lossless plan changes no bit of the training.",
    )


def _largest(experiment: Experiment, prediction: Prediction | None, records: Sequence[Record]) -> Table:
    rows = []
    for method in METHODS:
        paper = PAPER_LARGEST.get((experiment.key, method))
        predicted = UNKNOWN if prediction is None else str(prediction["largest"][method])
        rows.append(
            (METHODS[method].title, UNKNOWN if paper is None else str(paper), predicted, _largest_run(method, records))
        )
    return Table(
        f"{_title(experiment)}: largest micro-batch", ("method", "paper", "predicted", "measured"), tuple(rows),
        "Measured: the largest that finished, and the smallest above it that did not get its memory.",
    )  # fmt: skip


def _largest_run(method: str, records: Sequence[Record]) -> str:
    sizes: dict[str, list[int]] = {FINISHED: [], NO_MEMORY: []}
    for one in records:
        if one.method == method:
            sizes[one.outcome].append(one.micro_batch)
    if not sizes[FINISHED] and not sizes[NO_MEMORY]:
        return NOT_MEASURED
    ran = max(sizes[FINISHED], default=0)
    refused = min((size for size in sizes[NO_MEMORY] if size > ran), default=None)
    return str(ran) if refused is None or refused == ran + 1 else f"{ran} (not {refused})"


def _claims(experiment: Experiment, prediction: Prediction | None, records: Sequence[Record]) -> Table:
    """What the paper says in its text, beside our figures."""
    predicted = {} if prediction is None else {key: one for key, one in prediction["runs"].items() if one["fits"]}
    measured = {
        (one.method, one.micro_batch): {
            "step_ms": one.step_ms,
            "held_bytes": one.held_bytes,
            "peak_bytes": one.peak_bytes,
        }
        for one in records
        if one.step_ms is not None and not one.search
    }
    sources = (predicted, measured)
    empty = (UNKNOWN, NOT_MEASURED)
    rows = [
        ("time that Full Recomp adds to Baseline's step", PAPER_RECOMPUTE, *_each(_recompute, sources, empty)),
        ("Adacc, lossless, over the faster of Full Recomp and Quantization", PAPER_SPEEDUP,
         *_each(lambda runs: _speedup(runs, "adacc"), sources, empty)),
        ("the same with lossy codecs", PAPER_SPEEDUP,
         *_each(lambda runs: _speedup(runs, "adacc-lossy"), sources, empty)),
    ]  # fmt: skip
    for (key, size), text in PAPER_ACTIVATIONS.items():
        if key == experiment.key:
            share = [_activations(runs, size) for runs in sources]
            cells = [one or other for one, other in zip(share, empty, strict=True)]
            rows.append((f"activations of the layers, of the peak, micro-batch {size}", text, *cells))
    return Table(
        f"{_title(experiment)}: what the paper says in its text", ("", "paper", "predicted", "measured"), tuple(rows),
        "Ranges are over the micro-batches above. The paper's 28-33 % are of the step time, its speed-up is against "
        "what it calls the state of the art, its share of activations is of 32 GB.",
    )  # fmt: skip


Runs = Mapping[tuple[str, int], Mapping[str, Any]]


def _each(of: Any, sources: Sequence[Runs], empty: Sequence[str]) -> list[str]:
    return [of(runs) or other for runs, other in zip(sources, empty, strict=True)]


def _span(numbers: Sequence[float], digits: int) -> str:
    if not numbers:
        return ""
    low, high = f"{min(numbers):.{digits}f}", f"{max(numbers):.{digits}f}"
    return low if low == high else f"{low}-{high}"


def _recompute(runs: Runs) -> str:
    sizes = [size for method, size in runs if method == "baseline" and ("full", size) in runs]
    more = [100 * (runs["full", size]["step_ms"] / runs["baseline", size]["step_ms"] - 1) for size in sizes]
    found = _span(more, 0)
    return found and f"{found} %"


def _speedup(runs: Runs, ours: str) -> str:
    found = []
    for size in {size for method, size in runs if method == ours}:
        others = [runs[key]["step_ms"] for key in (("full", size), ("quantization", size)) if key in runs]
        if others:
            found.append(min(others) / runs[ours, size]["step_ms"])
    return _span(found, 2)


def _activations(runs: Runs, size: int) -> str:
    one = runs.get(("baseline", size))
    if one is None or not one["peak_bytes"]:
        return ""
    return f"{100 * one['held_bytes'] / one['peak_bytes']:.0f} %"
