"""The picture of `adacc frontier`: peak memory against step time, as PNG, or as a page that needs nothing else."""

from __future__ import annotations

import html
import importlib.util
import io
import logging
from typing import TYPE_CHECKING, Any

from megatron_adacc.errors import UserError
from megatron_adacc.megatron.frontier_command import rows, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30

# name -> (label, colour, marker)
_CURVES = {
    "auto": ("auto: lossless, a plan for each layer", "#1f5fbf", "o"),
    "auto lossy": ("auto with lossy codecs", "#1f9f6f", "D"),
    "paper": ("the paper's formulation: one plan, no dependencies", "#c05a00", "s"),
}
_REFERENCES = {
    "none": ("none: everything kept", "#222222", "P"),
    "full": ("Megatron's full recompute", "#b0203a", "X"),
    "selective": ("Megatron's selective recompute", "#7a3fb0", "^"),
    "quantized": ("direct quantization (INT4)", "#808000", "v"),
}


def need_matplotlib() -> None:
    """Raises UserError where it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "Drawing needs matplotlib: install megatron-adacc with its plots extra, or leave out --png/--html."
        )


def figure(content: dict[str, Any]) -> Figure:
    """Peak memory in GiB against the time of a training step; the second axis gives it as a part of the plain one."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of its font cache
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9.5, 6.0), dpi=110, layout="constrained")
    axes = drawn.add_subplot()
    plain = content["references"]["none"]["step_ms"]
    for name, curve in content["curves"].items():
        label, colour, marker = _CURVES[name]
        shown = sorted(curve, key=lambda point: point["peak_bytes"])
        axes.plot(
            [point["peak_bytes"] / GIB for point in shown],
            [point["step_ms"] for point in shown],
            color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=label, zorder=3 if name == "auto" else 2,
        )  # fmt: skip
    for name, point in content["references"].items():
        label, colour, marker = _REFERENCES[name]
        axes.scatter(
            [point["peak_bytes"] / GIB], [point["step_ms"]], color=colour, marker=marker, s=95, label=label, zorder=4,
            edgecolors="white",
        )  # fmt: skip
    axes.axvline(content["memory_bytes"] / GIB, color="#888888", linewidth=1.0)
    axes.axvline(content["limit_bytes"] / GIB, color="#888888", linewidth=1.0, linestyle="--")
    top = axes.get_xaxis_transform()
    for nbytes, words, side in (
        (content["limit_bytes"], "memory less 5 %", "right"),
        (content["memory_bytes"], "device's memory", "left"),
    ):
        shift = -0.004 if side == "right" else 0.004
        left, right = axes.get_xlim()
        axes.text(
            nbytes / GIB + shift * (right - left), 0.98, words, transform=top, rotation=90, ha=side, va="top",
            color="#666666", fontsize=8,
        )  # fmt: skip
    axes.set_xlabel("peak memory" + (" of the fullest stage" if content["stages"] > 1 else "") + " (GiB)")
    axes.set_ylabel("time of a training step (ms)")
    axes.set_title(title(content), fontsize=10.5)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    relative = axes.secondary_yaxis("right", functions=(lambda ms: ms / plain, lambda part: part * plain))
    relative.set_ylabel("of the step without recompute")
    relative.yaxis.set_major_formatter(lambda value, _: f"{value:.2f}")
    axes.legend(fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=2, frameon=False)
    return drawn


def save_png(content: dict[str, Any], path: str) -> None:
    """Raises UserError where the file cannot be written."""
    try:
        figure(content).savefig(path, format="png")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


def page(content: dict[str, Any]) -> str:
    """One HTML page with the picture as SVG and all figures; it loads nothing."""
    import matplotlib

    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "adacc", "svg.fonttype": "none"}):
        figure(content).savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    heading, *lines = rows(content)
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heading)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    notes = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in content["assumptions"])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{html.escape(title(content))}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 68em; padding: 0 1em; color: #222; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; margin-top: 1em; }}
th, td {{ padding: 0.25em 0.9em; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
</style>
</head>
<body>
<h1>What a memory limit costs</h1>
<p>{html.escape(title(content))}. Left is less memory, down is faster. Nothing here was measured.</p>
{svg}
<table>
<tr>{head}</tr>
{body}
</table>
{notes}
</body>
</html>
"""
