"""The history of a run's plan, from its report: what was decided, when and why, as a table and as a picture."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_adacc.cost.limits import written_bytes
from megatron_adacc.graph.model import format_table

# Kept, made again, and packed, each codec in a shade of its own; also for those with weak colour vision.
_COLOURS = {"keep": "#5b6b7a", "recompute": "#e0a33a", "bitmask": "#2f9e8f"}
_CODECS = ("#1f5fbf", "#7a4fc0", "#4aa3df", "#b0589b", "#274b7a")


def load_history(path: str) -> dict[str, Any] | None:
    """The report in a file; None where there is none, but a plan, perhaps."""
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return None
    is_report = isinstance(content, dict) and "iterations" in content and "summary" in content
    return content if is_report else None


def history_text(report: Mapping[str, Any]) -> str:
    """Heading and table."""
    decisions = report.get("decisions", [])
    if not decisions:
        return _heading(report)
    rows = [(str(d["step"]), _where(d), "; ".join(d["why"]), "; ".join(d["changed"]), d["effect"]) for d in decisions]
    table = format_table([("step", "ranks", "why", "what changed", "predicted"), *rows])
    return f"{_heading(report)}\n\n{table}"


def _heading(report: Mapping[str, Any]) -> str:
    return (
        f"Plan {report['summary']['strategy']} in {report['summary']['iterations']} iterations on {report['device']}, "
        f"{report['world_size']} ranks: {len(report.get('decisions', []))} decisions."
    )


def _where(decision: Mapping[str, Any]) -> str:
    return f"stage {decision['stage']}, tensor rank {decision['tensor_rank']}"


def history_page(report: Mapping[str, Any]) -> str:
    """One HTML page that loads nothing: for each decision what becomes of the saved bytes from then on, and why."""
    decisions = report.get("decisions", [])
    names = list(dict.fromkeys(name for d in decisions for name in d["plan"]))
    colours = _colours(names)
    largest = max((sum(d["plan"].values()) for d in decisions), default=0) or 1
    legend = " ".join(
        f'<span class="key"><i style="background: {colours[name]}"></i>{html.escape(name)}</span>' for name in names
    )
    rows = "\n".join(_row(decision, colours, largest) for decision in decisions)
    heading = html.escape(
        history_text({**report, "decisions": []}).replace("0 decisions", f"{len(decisions)} decisions")
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>History of the plan</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: 0.4em 0.9em; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd; }}
td.n, th.n {{ text-align: right; }}
td.bar {{ width: 22em; }}
.bar div {{ display: flex; height: 1.1em; }}
.key {{ margin-right: 1.2em; white-space: nowrap; }}
.key i {{ display: inline-block; width: 0.9em; height: 0.9em; margin-right: 0.4em; vertical-align: -0.1em; }}
</style>
</head>
<body>
<h1>History of the plan</h1>
<p>{heading} The bars show the bytes that a micro-batch's layers save, by what becomes of them from that step on.</p>
<p>{legend}</p>
<table>
<tr><th class="n">step</th><th>ranks</th><th>plan</th><th>why</th><th>what changed</th><th>predicted</th></tr>
{rows}
</table>
</body>
</html>
"""


def _row(decision: Mapping[str, Any], colours: Mapping[str, str], largest: int) -> str:
    parts = "".join(
        f'<i style="background: {colours[name]}; width: {100 * size / largest:.2f}%" '
        f'title="{html.escape(name)}: {written_bytes(size)}"></i>'
        for name, size in decision["plan"].items()
    )
    bar = f"<div>{parts}</div>" if parts else "the layers are traced again"

    def lines(values: Sequence[str]) -> str:
        return "<br>".join(html.escape(value) for value in values)

    return (
        f'<tr><td class="n">{decision["step"]}</td><td>{html.escape(_where(decision))}</td><td class="bar">{bar}</td>'
        f"<td>{lines(decision['why'])}</td><td>{lines(decision['changed'])}</td>"
        f"<td>{html.escape(decision['effect'])}</td></tr>"
    )


def _colours(names: Sequence[str]) -> dict[str, str]:
    others = [name for name in names if name not in _COLOURS]
    return {**_COLOURS, **{name: _CODECS[i % len(_CODECS)] for i, name in enumerate(others)}}
