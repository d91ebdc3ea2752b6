"""A run's report as one HTML page that loads nothing and runs no script: what `adacc report` writes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from megatron_adacc.cost.limits import written_bytes
from megatron_adacc.megatron.report_blocks import HATCH, legend, plan_blocks, styles_of, totals_bar
from megatron_adacc.megatron.report_svg import Chart, Line, Marker, number, thinned

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))

# name -> (on white, on dark): each with a contrast of at least 3 to its ground.
COLOURS = {
    "keep": ("#0072b2", "#5cb0ff"),
    "recompute": ("#b86e00", "#ffb74d"),
    "bitmask": ("#007f5f", "#4dd0a5"),
    "codec0": ("#a8327e", "#f48fb1"),
    "codec1": ("#c0392b", "#ff8a75"),
    "codec2": ("#5e4fa2", "#b39ddb"),
    "codec3": ("#6b6b00", "#d4d46a"),
    "codec4": ("#00838f", "#4dd0e1"),
    "codec5": ("#555555", "#b0b0b0"),
    "s0": ("#1f4e9c", "#8ab4f8"),
    "s1": ("#b3261e", "#f28b82"),
    "s2": ("#5f6368", "#bdc1c6"),
    "ink": ("#1d2329", "#e6e6e6"),
    "soft": ("#5a636c", "#a9b1b8"),
    "line": ("#dfe3e7", "#3a4047"),
    "ground": ("#ffffff", "#16191d"),
}


def page(report: Mapping[str, Any]) -> str:
    """The page of a report. Raises KeyError, TypeError or ValueError where it is none."""
    title = f"{report['summary']['strategy']}: {report['summary']['iterations']} iterations"
    sections = [
        _summary(report),
        _section("Memory over layers", _layers(report)),
        _section("The plan", _plan(report)),
        _section("Memory over time", _memory(report)),
        _section("Loss", _loss(report)),
        _section("Gradient errors", _errors(report)),
        _section("Frontier", _frontiers(report)),
        _section("Plan changes", _changes(report)),
    ]
    body = "\n".join(sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_css()}</style>
</head>
<body>
<h1>Plan {escape(title)}</h1>
{body}
</body>
</html>
"""


def _css() -> str:
    light, dark = (
        " ".join(f"--{name}: {colours[i]};" for name, colours in COLOURS.items()) for i in (0, 1)
    )  # fmt: skip
    actions = [name for name in COLOURS if name in ("keep", "recompute", "bitmask") or name.startswith("codec")]
    fills = "\n".join(f"rect.{name} {{ fill: var(--{name}); }}" for name in actions)
    lines = "\n".join(
        f".line.{name} {{ stroke: var(--{name}); }} .marker.{name}, rect.{name} {{ fill: var(--{name}); }} "
        f"li i.{name} {{ background: var(--{name}); }}"
        for name in ("s0", "s1", "s2")
    )
    return f"""
:root {{ color-scheme: light dark; {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
body {{ font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: var(--ink); background: var(--ground);
  margin: 2em auto; max-width: 1000px; padding: 0 1em; }}
h1 {{ font-size: 1.5em; }} h2 {{ font-size: 1.15em; margin: 2em 0 0.2em; }}
p {{ margin: 0.3em 0 0.6em; }} p.note, p.none, dt {{ color: var(--soft); }}
svg {{ max-width: 100%; height: auto; display: block; }} svg.bar {{ min-width: 160px; }}
svg text {{ font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink); }}
.grid {{ stroke: var(--line); fill: none; }} .axis {{ stroke: var(--soft); fill: none; }}
.line {{ fill: none; stroke-width: 1.8; }} .line.s1 {{ stroke-dasharray: 7 3; }} .line.s2 {{ stroke-dasharray: 2 3; }}
.mark {{ stroke: var(--soft); stroke-dasharray: 3 3; fill: none; }}
.marker {{ stroke: var(--ground); }} rect.without {{ fill: none; stroke: var(--soft); }}
.blocks rect, .legend rect, .bar rect {{ stroke: var(--ground); stroke-width: 0.6; }}
rect.light {{ fill-opacity: 0.3; }} .stripe {{ fill: var(--ground); opacity: 0.65; }}
.blocks rect.hatch, .legend rect.hatch, .bar rect.hatch {{ fill: url(#hatch); stroke: none; }}
{fills}
{lines}
.legend {{ list-style: none; padding: 0; margin: 0.3em 0; }}
.legend li {{ display: inline-block; margin-right: 1.4em; }}
.legend svg {{ display: inline-block; vertical-align: -0.15em; }}
.legend i {{ display: inline-block; width: 1.6em; height: 0.25em; margin-right: 0.4em; vertical-align: 0.25em; }}
dl {{ display: flex; flex-wrap: wrap; gap: 0.4em 2.2em; margin: 0.6em 0; }}
dd {{ margin: 0; font-size: 1.25em; font-variant-numeric: tabular-nums; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ padding: 0.35em 0.8em 0.35em 0; text-align: left; vertical-align: top; }}
tr {{ border-bottom: 1px solid var(--line); }}
"""


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def _note(words: str) -> str:
    return f'<p class="note">{escape(words)}</p>'


def _summary(report: Mapping[str, Any]) -> str:
    summary, job = report["summary"], report["run"]
    loss = summary["final_lm_loss"]
    tiles = {
        "step, median": f"{summary['step_ms_median']:.1f} ms",
        "held for backward": written_bytes(summary["held_bytes"]),
        "peak": "unknown" if summary["peak_bytes"] is None else written_bytes(summary["peak_bytes"]),
        "final loss": "unknown" if loss is None else f"{loss:.4f}",
    }
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles.items())
    words = (
        f"{job['num_layers']} layers, hidden {job['hidden_size']}, sequence {job['seq_length']}, micro-batch "
        f"{job['micro_batch_size']}, {job['dtype']}, on {report['device']}, {report['world_size']} ranks"
    )
    return f"{_note(words)}\n<dl>{items}</dl>"


def _unit(values: Sequence[float]) -> tuple[str, int]:
    largest = max(values, default=0)
    return next((unit for unit in _UNITS if largest >= unit[1]), _UNITS[-1])


def _layers(report: Mapping[str, Any]) -> str:
    held = {int(name.rpartition(".")[2]): size for name, size in report["layer_held_bytes"].items()}
    plain = {layer["layer"]: sum(t["bytes"] for t in layer["tensors"]) for layer in _one_rank(report.get("plan", []))}
    unit, scale = _unit([*held.values(), *plain.values()])
    chart = Chart(
        "Memory over layers", "layer", f"{unit} held", zero=True,
        bars=[
            ("without a plan", "without", [(n, size / scale) for n, size in sorted(plain.items())]),
            ("held, measured", "s0", [(n, size / scale) for n, size in sorted(held.items())]),
        ],
    )  # fmt: skip
    outline = " The outline is what it saves for backward without a plan." if plain else ""
    return _note(f"Held by each layer for the backward pass of one micro-batch, measured.{outline}") + chart.svg()


def _one_rank(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Tensor-parallel ranks have the same plan: the first one's."""
    return sorted(
        (one for one in entries if one["tensor_rank"] == 0), key=lambda one: (one["stage"], one.get("layer", 0))
    )


def _plan(report: Mapping[str, Any]) -> str:
    plan = _one_rank(report.get("plan", []))
    if not plan:
        return _note(
            f"None is recorded: {report['summary']['strategy']} has no plan for single tensors, or the report is of an "
            "earlier version."
        )
    styles = styles_of(t["action"] for layer in plan for t in layer["tensors"])
    words = (
        "A row is a layer, a block a tensor that it saves for backward, its width the tensor's bytes. Full: in memory; "
        "hatched: dropped, and made again; light: what compression saves. Rest the pointer on a block for its name."
    )
    return f"{_note(words)}\n{legend(styles)}\n{plan_blocks(plan, styles)}"


def _marks(report: Mapping[str, Any]) -> list[tuple[float, str]]:
    return [(d["step"], f"step {d['step']}: {'; '.join(d['why'])}") for d in report.get("decisions", [])]


def _memory(report: Mapping[str, Any]) -> str:
    rows = report["iterations"]
    known = [row[key] for row in rows for key in ("held_bytes", "peak_bytes") if row[key] is not None]
    unit, scale = _unit(known)
    lines, group = [], 1
    for name, style, key in (("peak of the step", "s1", "peak_bytes"), ("held for backward", "s0", "held_bytes")):
        values = [(row["iteration"], None if row[key] is None else row[key] / scale) for row in rows]
        points, group = thinned(values, max)
        lines.append(Line(name, style, points))
    chart = Chart("Memory over time", "iteration", unit, lines, marks=_marks(report), zero=True)
    return (
        _line_legend(lines)
        + _note(_grouped("Largest over the ranks; dotted lines: decisions on the plan.", group))
        + chart.svg()
    )


def _grouped(words: str, group: int) -> str:
    return words if group == 1 else f"{words} {group} logged iterations are one point."


def _line_legend(lines: Sequence[Line]) -> str:
    items = "".join(f'<li><i class="{line.style}"></i>{escape(line.name)}</li>' for line in lines)
    return f'<ul class="legend">{items}</ul>'


def _loss(report: Mapping[str, Any]) -> str:
    points, group = thinned([(row["iteration"], row["lm_loss"]) for row in report["iterations"]], statistics.fmean)
    chart = Chart(
        "Loss", "iteration", "lm loss", [Line("lm loss", "s0", points)], marks=_marks(report)
    )  # fmt: skip
    return _note(_grouped("Training loss; dotted lines: decisions on the plan.", group)) + chart.svg()


def _errors(report: Mapping[str, Any]) -> str:
    found: dict[int, list[float]] = {}
    for one in report.get("gradient_errors", []):
        found.setdefault(one["step"], []).append(one["error"])
    if not found:
        return _note(
            "None were measured. They are of lossy plans, in runs with --adacc-check-gradients-every N; a lossless "
            "plan has the gradients of no plan, bit for bit."
        )
    lines = [
        Line("largest of the layers", "s1", [(step, max(errors)) for step, errors in sorted(found.items())]),
        Line(
            "median of the layers", "s0", [(step, statistics.median(errors)) for step, errors in sorted(found.items())]
        ),
    ]
    chart = Chart("Gradient errors", "iteration", "relative error", lines, marks=_marks(report), logarithmic=True)
    words = "Of each layer beside exact gradients for the same step: |g - g_exact| / |g_exact|, on a logarithmic scale."
    return _line_legend(lines) + _note(words) + chart.svg()


def _frontiers(report: Mapping[str, Any]) -> str:
    frontiers = _one_rank(report.get("frontiers", []))
    if not frontiers:
        return _note("None is recorded: only --adacc-plan auto has a solver to ask, at the end of a run.")
    return "\n".join(_frontier(one, len(frontiers) > 1) for one in frontiers)


def _frontier(one: Mapping[str, Any], several: bool) -> str:
    key = f"{one['unit']}_bytes"
    places = [*one["points"], one["none"], one["full"], one["chosen"]]
    unit, scale = _unit([place[key] for place in places])

    def marker(name: str, place: Mapping[str, Any], style: str, shape: str) -> Marker:
        return Marker(name, style, place[key] / scale, place["step_us"] / 1e3, shape)

    curve = sorted({(place[key] / scale, place["step_us"] / 1e3) for place in (*one["points"], one["chosen"])})
    markers = [marker("auto, another limit", place, "s0", "circle") for place in one["points"]]
    markers += [
        marker("nothing recomputed", one["none"], "s2", "square"),
        marker("full recompute", one["full"], "s2", "circle"),
        marker("the plan of this run", one["chosen"], "s1", "diamond"),
    ]
    words = "held for backward" if one["unit"] == "held" else "peak"
    stage = f"Stage {one['stage']}. " if several else ""
    chart = Chart(
        f"{stage}Frontier", f"{unit}, {words}", "ms a micro-batch", [Line("auto", "s0", curve)], markers,
        marks=[(one["limit_bytes"] / scale, f"limit: {written_bytes(one['limit_bytes'])}")],
    )  # fmt: skip
    chosen = one["chosen"]
    note = (
        f"{stage}Predicted from costs measured in this run. Diamond: the plan in force ({written_bytes(chosen[key])}, "
        f"{number(chosen['step_us'] / 1e3)} ms); dots on the line: auto under other limits; grey square: nothing "
        "recomputed; grey dot: full recompute; dotted line: the limit."
    )
    return _note(note) + chart.svg()


def _changes(report: Mapping[str, Any]) -> str:
    decisions = report.get("decisions", [])
    if not decisions:
        return _note("None: the plan was the same to the end.")
    styles = styles_of(name for d in decisions for name in d["plan"])
    largest = max((sum(d["plan"].values()) for d in decisions), default=0)
    rows = []
    for one in decisions:
        bar = totals_bar(one["plan"], styles, largest) if one["plan"] else "the layers are traced again"
        where = f"stage {one['stage']}, tensor rank {one['tensor_rank']}"
        cells = [str(one["step"]), where, bar, _list(one["why"]), _list(one["changed"]), escape(one["effect"])]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("step", "ranks", "plan", "why", "what changed", "predicted"))
    words = "Bars: bytes that a micro-batch's layers save for backward, by what becomes of them from that step on."
    defined = f'<svg width="0" height="0" aria-hidden="true">{HATCH}</svg>' if not report.get("plan") else ""
    return f"{_note(words)}{defined}{legend(styles)}<table>\n<tr>{head}</tr>\n{chr(10).join(rows)}\n</table>"


def _list(values: Sequence[str]) -> str:
    return "<br>".join(escape(value) for value in values)
