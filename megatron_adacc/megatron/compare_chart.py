"""The picture of `adacc compare-training`: training loss, and its difference to off, with the spread over the seeds."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_adacc.atomic import atomic_file
from megatron_adacc.megatron.compare_study import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTH = 20  # steps in a running mean

# Colours that stay apart with weak colour vision, and lines that differ without colour.
_STYLES = {
    "off": ("#222222", "-"),
    "full": ("#8a8a8a", "--"),
    "auto": ("#0072b2", "-."),
    "auto lossy": ("#009e73", "-"),
    "compress": ("#e69f00", "-"),
    "quantize": ("#d55e00", "-"),
}


def save_png(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw a column for each condition; the file appears whole."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of its font cache
    from matplotlib.figure import Figure

    conditions = list(dict.fromkeys(one.outliers for one in outcomes))
    figure = Figure(figsize=(1 + 6.0 * len(conditions), 6.6), dpi=110, layout="constrained")
    axes = figure.subplots(2, len(conditions), sharex=True, squeeze=False, height_ratios=(3, 2))
    for column, outliers in enumerate(conditions):
        own = [one for one in outcomes if one.outliers == outliers]
        above, below = axes[0][column], axes[1][column]
        above.set_title("with planted outlier channels" if outliers else "without planted outlier channels")
        _draw(own, above, below)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    with atomic_file(path) as stream:
        stream.write(drawn.getvalue())


def _draw(outcomes: Sequence[Outcome], above: Axes, below: Axes) -> None:
    off = {one.seed: smooth(one.losses) for one in outcomes if one.strategy == "off"}
    for strategy in dict.fromkeys(one.strategy for one in outcomes):
        group = [one for one in outcomes if one.strategy == strategy]
        colour, line = _STYLES[strategy]
        curves = [smooth(one.losses) for one in group]
        _band(above, curves, colour, line, strategy)
        pairs = [(curve, off[one.seed]) for curve, one in zip(curves, group, strict=True) if one.seed in off]
        if strategy != "off" and pairs:
            beside = [[100 * (a / b - 1) for a, b in zip(mine, other, strict=True)] for mine, other in pairs]
            _band(below, beside, colour, line, strategy)
    below.axhline(0, color="#222222", linewidth=0.8)
    above.set_ylabel(f"training loss (mean of {SMOOTH} steps)")
    below.set_ylabel("beside off, %")
    below.set_xlabel("iteration")
    above.legend(fontsize=8)
    for one in (above, below):
        one.grid(alpha=0.3)


def _band(axes: Axes, curves: Sequence[Sequence[float]], colour: str, line: str, label: str) -> None:
    """The mean of the curves, and from the lowest to the highest of them in a lighter shade."""
    steps = range(1, len(curves[0]) + 1)
    columns = [
        [value if math.isfinite(value) else math.nan for value in column] for column in zip(*curves, strict=True)
    ]
    axes.plot(steps, [sum(c) / len(c) for c in columns], color=colour, linestyle=line, linewidth=1.4, label=label)
    if len(curves) > 1:
        axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.15)


def smooth(values: Sequence[float]) -> list[float]:
    """Running mean of the last SMOOTH values, of fewer at the beginning."""
    windows = (values[max(0, i - SMOOTH + 1) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
