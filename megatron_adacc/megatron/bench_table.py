"""Table, sentences and picture of `adacc bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from megatron_adacc.megatron.bench_run import Row


def table(rows: Sequence[Row], clock: int) -> Table:
    """One row a strategy, in the order given."""
    found = Table()
    words = ("CPU s", "wall s")[clock]
    for heading in ("strategy", words, "/ plain", "/ full", "held MB", "peak MB", "error", "loss"):
        found.add_column(heading, justify="left" if heading == "strategy" else "right")
    for row in rows:
        if row.same_as or row.note or not row.times:
            found.add_row(row.name, f"as {row.same_as}" if row.same_as else row.note or "not timed")
            continue
        found.add_row(
            row.name, f"{row.seconds(clock):.3f}", *(f"{row.ratio(name, clock)[0]:.3f}" if name in row.beside else ""
            for name in ("plain", "full")), f"{row.held / 1e6:.1f}", f"{row.peak / 1e6:.1f}", f"{row.error:.2g}",
            f"{row.loss:.6f}",
        )  # fmt: skip
    return found


def summary(rows: Mapping[str, Row], clock: int) -> list[str]:
    """What follows from the rows: auto beside each lossless peer at its peak, and beside the paper's plan."""
    lines = []
    for name, row in rows.items():
        measured = rows[row.same_as] if row.same_as else row
        if not measured.times:
            continue
        if name.startswith("auto = "):
            peer = rows[name.removeprefix("auto = ").removesuffix(" peak")]
            lines.append(
                f"{peer.name}: auto at its peak takes {_beside(measured, peer, clock)}; {_peaks(measured, peer)}."
            )
        elif name.startswith("auto ") and name.replace("auto", "paper") in rows:
            paper = rows[name.replace("auto", "paper")]
            paper = rows[paper.same_as] if paper.same_as else paper
            if paper.times:
                same = (
                    "has the same plan as" if paper is measured else f"takes {_beside(measured, paper, clock)} beside"
                )
                lines.append(f"{name} {same} the paper's formulation at the same bytes.")
    return lines


def _beside(row: Row, other: Row, clock: int) -> str:
    """Ratio of two strategies, each by the plain steps of its own rounds: they may not have run side by side."""
    ratio = row.ratio("plain", clock)[0] / other.ratio("plain", clock)[0] if other.name != "plain" else 1.0
    reference = row.ratio(other.name, clock) if other.name in row.beside else None
    if reference is not None:
        return f"{reference[0]:.3f} ({reference[1]:.3f} to {reference[2]:.3f}) of its step"
    return f"{ratio:.3f} of its step"


def _peaks(row: Row, other: Row) -> str:
    return f"peak {row.peak / 1e6:.1f} MB beside {other.peak / 1e6:.1f}"


def draw(rows: Mapping[str, Row], title: str, clock: int, path: Path) -> None:
    """Step time over peak memory, both beside the plain run's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    plain = rows["plain"]
    kinds = {
        "auto": ("auto, lossless", "o", "tab:blue"),
        "paper": ("the paper's formulation, lossless", "s", "tab:green"),
        "compiled": ("torch.compile with a memory budget", "^", "tab:purple"),
        "compress": ("lossy", "x", "tab:red"),
        "quantize": ("lossy", "x", "tab:red"),
    }
    drawn: set[str] = set()
    for row in rows.values():
        if not row.times:
            continue
        label, marker, colour = kinds.get(row.name.split()[0], ("others, lossless", "D", "tab:orange"))
        at = (row.peak / plain.peak, row.ratio("plain", clock)[0])
        axes.plot(*at, marker, color=colour, label=None if label in drawn else label)
        drawn.add(label)
        if row.name.split()[0] not in ("auto", "paper"):
            axes.annotate(row.name, at, textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("peak memory of the step / plain's")
    axes.set_ylabel(f"step time / plain's ({('CPU', 'wall')[clock]} seconds, medians)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
