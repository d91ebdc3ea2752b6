"""A plan as coloured blocks: a row a layer, a block a saved tensor, its width the tensor's bytes.

A tensor that is kept is a full block, one that is recomputed is hatched, and of one that is compressed the part that is
held is full and the rest light: so the full parts are what the layer holds, also for those who see no colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from megatron_adacc.cost.limits import written_bytes
from megatron_adacc.megatron.report_svg import WIDTH

_LABEL = 92  # px for the names of the rows
_ROW, _GAP = 20, 4
_CODECS = 6  # colours that the page has for codecs
_ORDER = {"keep": 0, "bitmask": 1, "recompute": 3}


def styles_of(actions: Iterable[str]) -> dict[str, str]:
    """A CSS class for each action, always the same for keep, recompute and bitmask."""
    names = sorted(dict.fromkeys(actions), key=lambda name: (_ORDER.get(name, 2), name))
    codecs = [name for name in names if name not in _ORDER]
    return {name: name if name in _ORDER else f"codec{codecs.index(name) % _CODECS}" for name in names}


def legend(styles: Mapping[str, str]) -> str:
    """The actions with their colours."""
    items = "".join(
        '<li><svg width="26" height="14" aria-hidden="true">'
        f"{_block(0, 0, 26, 14, style, 10 if _packed(style) else None)}</svg> {escape(name)}</li>"
        for name, style in styles.items()
    )
    return f'<ul class="legend">{items}</ul>'


def plan_blocks(plan: Sequence[Mapping[str, Any]], styles: Mapping[str, str]) -> str:
    """The drawing of ``plan``, a report's: one entry a layer."""
    largest = max((sum(t["bytes"] for t in layer["tensors"]) for layer in plan), default=0) or 1
    scale = (WIDTH - _LABEL - 4) / largest
    height = len(plan) * (_ROW + _GAP)
    rows = []
    for number, layer in enumerate(plan):
        top, at = number * (_ROW + _GAP), float(_LABEL)
        rows.append(f'<text x="{_LABEL - 8}" y="{top + 15}" text-anchor="end">layer {layer["layer"]}</text>')
        for tensor in sorted(layer["tensors"], key=lambda t: list(styles).index(t["action"])):
            width = tensor["bytes"] * scale
            style = styles[tensor["action"]]
            held = tensor["held_bytes"] * scale if _packed(style) else None
            words = (
                f"layer {layer['layer']}, {tensor['site']} ({tensor['role']}): {tensor['action']}, "
                f"{written_bytes(tensor['bytes'])}, held {written_bytes(tensor['held_bytes'])}"
            )
            block = _block(at, top, width, _ROW, style, held)
            rows.append(f'<g class="tensor"><title>{escape(words)}</title>{block}</g>')
            at += width
    body = "\n".join(rows)
    return (
        f'<svg class="blocks" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="The plan of each layer">\n{HATCH}\n{body}\n</svg>'
    )


def totals_bar(totals: Mapping[str, int], styles: Mapping[str, str], largest: int) -> str:
    """One bar of bytes by action, 260 px for ``largest``."""
    at, parts = 0.0, []
    for name in styles:
        if name in totals:
            width = 260 * totals[name] / max(1, largest)
            words = f"{name}: {written_bytes(totals[name])}"
            parts.append(f"<g><title>{escape(words)}</title>{_block(at, 0, width, 16, styles[name], None)}</g>")
            at += width
    return f'<svg class="bar" width="260" height="16">{"".join(parts)}</svg>'


def _packed(style: str) -> bool:
    return style == "bitmask" or style.startswith("codec")


def _block(x: float, y: float, width: float, height: float, style: str, held: float | None) -> str:
    """``held``: px of a compressed tensor that stay in memory, None for what is not drawn in two parts."""
    kind = "light" if held is not None else "whole"
    found = f'<rect class="{style} {kind}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}"/>'
    if held is not None:
        found += f'<rect class="{style} held" x="{x:.2f}" y="{y}" width="{min(held, width):.2f}" height="{height}"/>'
    if style == "recompute":
        found += f'<rect class="hatch" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}"/>'
    return found


HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="stripe" width="2" height="6"/></pattern></defs>'
)
