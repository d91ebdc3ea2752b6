"""A picture of a layer graph: one self-contained HTML page with an inline SVG, no script, nothing to load.

    buffers from outside   | ops, one below the other |   buffers that the ops write
    (parameters, inputs)   | in execution order       |   in the row of their op

A bar's length is its buffer's bytes, on one scale; its colour says what becomes of it. A line leaves an op
for each buffer that it writes, and branches down a lane of its own to every op that reads the buffer. Pure
text from pure data: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Literal

from megatron_adacc.graph.model import Buffer, LayerGraph, Op

Kind = Literal["keep", "compress", "recompute"]

# Colour and explanation of each kind of bar, in the order of the legend.
_LEGEND = {
    "keep": ("#c8414f", "saved for backward: kept"),
    "compress": ("#e8a33d", "saved for backward: compressed; the dark part is what is held"),
    "recompute": ("#2f7fb0", "saved for backward: dropped and recomputed"),
    "unsaved": ("#cfd4da", "not saved: gone after the forward"),
    "outside": ("#ffffff", "from outside, not counted: parameter, constant, input that is not saved"),
}

_SLOT = 36  # height of one buffer: a line of text above, the bar and a second text below
_GAP = 8  # between rows
_BAR = 13
_LONGEST = 240  # px of the largest buffer's bar
_SHORTEST = 2.0
_LANE = 9
_OP_WIDTH = 230
_LEFT_WIDTH = 430
_RIGHT_WIDTH = 620
_MARGIN = 16

_CSS = """
body { font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; color: #1d2329; margin: 24px; background: #fff }
h1 { font-size: 20px; margin: 0 0 4px } p { margin: 4px 0 12px; max-width: 75em }
ul.legend { list-style: none; padding: 0; margin: 8px 0 }
ul.legend li { display: inline-block; margin-right: 22px }
.swatch { display: inline-block; width: 26px; height: 12px; border: 1px solid #555; margin-right: 6px }
svg text { font: 11px "DejaVu Sans", system-ui, sans-serif; fill: #1d2329 }
svg text.name { font-weight: 600 } svg text.small { fill: #4c555e }
.op rect { fill: #f4f1e8; stroke: #6b6557 } .op.barrier rect { stroke-width: 2; stroke-dasharray: 5 3 }
.buffer rect.bar { stroke: #444; stroke-width: .8 } .buffer.outside rect.bar { stroke-dasharray: 3 2 }
.buffer rect.held { fill: #8a5200 }
.edge { fill: none; stroke: #8d959d; stroke-width: 1.1 } .dot { fill: #8d959d }
.edge.saved { stroke: #4c555e }
table { border-collapse: collapse; margin-top: 20px; font-size: 12px }
th, td { text-align: left; padding: 3px 10px; border-bottom: 1px solid #d8dce0; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
"""


@dataclass(frozen=True)
class Fate:
    """What becomes of one saved buffer: `label` is the action as a plan prints it, `held_bytes` what stays in
    memory, `recipe_ops` the length of its recipe (0: none), `refused` why it is not recomputed (or empty)."""

    kind: Kind
    label: str
    held_bytes: int
    recipe_ops: int = 0
    refused: str = ""


def page(graph: LayerGraph, fates: Mapping[int, Fate], title: str, summary: str) -> str:
    """The HTML page of a graph, well-formed as XML too.

    Args:
        fates: by index, for every buffer of ``graph.saved``; the others are drawn as not saved.
        title, summary: plain text for the heading and for the line of totals below it.
    """
    drawing = _Drawing(graph, fates)
    legend = "".join(
        f'<li><span class="swatch" style="background: {colour}"></span>{escape(words)}</li>'
        for colour, words in _LEGEND.values()
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title>\n'
        f"<style>{_CSS}{_colours()}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<p class="totals">{escape(summary)}</p>\n'
        f"<p>Ops run from top to bottom: {len(graph.ops)}. A bar is a buffer, its length its bytes: "
        f'<span class="scale">100 px are {_size(round(100 * drawing.bytes_per_px))}</span> (at least '
        f"{_SHORTEST:g} px). A line goes from an op to what it writes, and on to the ops that read it. A dashed op "
        "may not run again. Rest the pointer on a box for details.</p>\n"
        f'<ul class="legend">{legend}</ul>\n{drawing.svg()}\n{_table(graph, fates)}\n</body></html>\n'
    )


def _colours() -> str:
    return "".join(f".buffer.{kind} rect.bar {{ fill: {colour} }}\n" for kind, (colour, _) in _LEGEND.items())


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}" if nbytes < 1000 * scale else f"{nbytes / scale:.0f} {unit}"
    return f"{nbytes} B"


def _shape(buffer: Buffer) -> str:
    return "x".join(map(str, buffer.base.size)) or "scalar"


def _shorten(text: str, characters: int) -> str:
    """The end of a long name: it says more than the beginning."""
    return text if len(text) <= characters else "…" + text[1 - characters :]


def _lanes(spans: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """A lane for each (buffer, first row, last row), so that no two spans in one lane share a row."""
    ends: list[int] = []
    lanes: dict[int, int] = {}
    for buffer, first, last in sorted(spans, key=lambda span: (span[1], span[2])):
        lane = next((i for i, end in enumerate(ends) if end < first), len(ends))
        ends[lane : lane + 1] = [last]
        lanes[buffer] = lane
    return lanes


class _Drawing:
    """Where everything lies: a row an op, and the buffers of both sides in slots of their row."""

    def __init__(self, graph: LayerGraph, fates: Mapping[int, Fate]) -> None:
        self.graph = graph
        self.fates = fates
        largest = max((b.nbytes for b in graph.buffers), default=1)
        self.bytes_per_px = max(largest, 1) / _LONGEST
        self.readers: dict[int, list[int]] = {b.index: [] for b in graph.buffers}
        for op in graph.ops:
            for buffer in op.reads:
                self.readers[buffer].append(op.index)
        self.returned = {view.buffer for view in graph.outputs}
        last_row = max(len(graph.ops) - 1, 0)
        self.row = {
            b.index: b.writer if b.writer is not None else min(self.readers[b.index], default=last_row)
            for b in graph.buffers
        }
        self._place()

    def _place(self) -> None:
        rows = max(len(self.graph.ops), 1)
        slots = {(row, side): 0 for row in range(rows) for side in (False, True)}
        slot: dict[int, int] = {}
        for buffer in self.graph.buffers:
            key = (self.row[buffer.index], buffer.writer is not None)
            slot[buffer.index] = slots[key]
            slots[key] += 1
        self.top: list[int] = []
        self.height: list[int] = []
        y = _MARGIN
        for row in range(rows):
            self.top.append(y)
            self.height.append(max(1, slots[row, False], slots[row, True]) * _SLOT)
            y += self.height[-1] + _GAP
        self.total_height = y + _MARGIN
        self.bar_top = {b.index: self.top[self.row[b.index]] + slot[b.index] * _SLOT + 17 for b in self.graph.buffers}
        self.lane: dict[int, int] = {}
        counts = []
        for written in (False, True):
            spans = [
                (b.index, self.row[b.index], max(later))
                for b in self.graph.buffers
                if (b.writer is not None) == written
                and (later := [r for r in self.readers[b.index] if r > self.row[b.index]])
            ]
            lanes = _lanes(spans)
            self.lane |= lanes
            counts.append(max(lanes.values(), default=-1) + 1)
        self.op_left = _LEFT_WIDTH + 24 + counts[0] * _LANE
        self.op_right = self.op_left + _OP_WIDTH
        self.bars_left = self.op_right + 24 + counts[1] * _LANE
        self.total_width = self.bars_left + _RIGHT_WIDTH

    def svg(self) -> str:
        edges = "\n".join(self._edges(b) for b in self.graph.buffers)
        boxes = "\n".join(self._buffer(b) for b in self.graph.buffers)
        ops = "\n".join(self._op(op) for op in self.graph.ops)
        return (
            f'<svg width="{self.total_width}" height="{self.total_height}" '
            f'viewBox="0 0 {self.total_width} {self.total_height}" role="img">\n'
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
            'orient="auto"><path d="M0 0L8 4L0 8z" fill="#6c747c"/></marker></defs>\n'
            f"{edges}\n{ops}\n{boxes}\n</svg>"
        )

    def _kind(self, buffer: Buffer) -> str:
        fate = self.fates.get(buffer.index)
        return fate.kind if fate is not None else "unsaved" if buffer.writer is not None else "outside"

    def _edges(self, buffer: Buffer) -> str:
        """From the writing op to the bar, and from there to every reader."""
        index, y = buffer.index, self.bar_top[buffer.index] + _BAR / 2
        written = buffer.writer is not None
        op_side, bar_side = (self.op_right, self.bars_left) if written else (self.op_left, _LEFT_WIDTH)
        name = "edge saved" if index in self.fates else "edge"
        row = self.row[index]
        parts = []
        if written:
            parts.append(f'<path class="{name}" d="M{op_side} {y}H{bar_side - 3}" marker-end="url(#arrow)"/>')
        elif row in self.readers[index]:
            parts.append(f'<path class="{name}" d="M{bar_side} {y}H{op_side - 1}" marker-end="url(#arrow)"/>')
        if index not in self.lane:
            return "".join(parts)
        offset = 16 + self.lane[index] * _LANE
        x, end = (op_side + offset, op_side + 1) if written else (op_side - offset, op_side - 1)
        parts.append(f'<circle class="dot" cx="{x}" cy="{y}" r="2.4"/>')
        for reader in self.readers[index]:
            if reader > row:
                to = self._entry(reader, index, written)
                parts.append(f'<path class="{name}" d="M{x} {y}V{to}H{end}" marker-end="url(#arrow)"/>')
        return "".join(parts)

    def _entry(self, reader: int, buffer: int, written: bool) -> float:
        """Where the line meets the reading op: above the lines of its own buffers, each read apart."""
        coming = [
            b
            for b in self.graph.ops[reader].reads
            if (self.graph.buffers[b].writer is not None) == written and self.row[b] < reader
        ]
        return self.top[reader] + 3 + 14 * (coming.index(buffer) + 0.5) / len(coming)

    def _op(self, op: Op) -> str:
        x, y, height = self.op_left, self.top[op.index], self.height[op.index]
        middle = y + height / 2
        module = op.module or "the layer"
        reads, writes = ([self.graph.buffers[b].site for b in found] for found in (op.reads, op.writes))
        details = [f"{op.index}: {op.target}", f"module: {module}"]
        details += [f"reads {', '.join(reads) or 'nothing'}", f"writes {', '.join(writes) or 'nothing'}"]
        if op.barrier:
            details.append(f"may not run again: {op.barrier}")
        return (
            f'<g class="op{" barrier" if op.barrier else ""}"><title>{escape(chr(10).join(details))}</title>'
            f'<rect x="{x}" y="{y}" width="{_OP_WIDTH}" height="{height}" rx="4"/>'
            f'<text class="name" x="{x + 10}" y="{middle - 3}">{op.index}  {escape(_shorten(op.target, 30))}</text>'
            f'<text class="small" x="{x + 10}" y="{middle + 12}">{escape(_shorten(module, 33))}</text>'
            "</g>"
        )

    def _buffer(self, buffer: Buffer) -> str:
        fate = self.fates.get(buffer.index)
        width, kind = max(_SHORTEST, buffer.nbytes / self.bytes_per_px), self._kind(buffer)
        y, written = self.bar_top[buffer.index], buffer.writer is not None
        x = self.bars_left if written else _LEFT_WIDTH - width
        role = str(self.graph.role(buffer.index))
        details = [buffer.site, f"role: {role}", f"{_shape(buffer)} {buffer.base.dtype}", f"{buffer.nbytes:,} bytes"]
        if fate is not None:
            details.append(f"{fate.label}, {fate.held_bytes:,} bytes held")
            details += [f"recipe of {fate.recipe_ops} ops"] if fate.recipe_ops else []
            details += [f"not recomputed: {fate.refused}"] if fate.refused else []
        words = [_size(buffer.nbytes), _shape(buffer)]
        if written:
            words += [buffer.base.dtype, role] + ([fate.label] if fate is not None else [])
        words += ["layer output"] if buffer.index in self.returned else []
        anchor, name_x, words_x = ("start", x, x + width + 6) if written else ("end", _LEFT_WIDTH, x - 6)
        bars = f'<rect class="bar" x="{x:g}" y="{y}" width="{width:g}" height="{_BAR}"/>'
        if fate is not None and fate.kind == "compress":
            held = max(1.0, width * fate.held_bytes / max(buffer.nbytes, 1))
            bars += f'<rect class="held" x="{x:g}" y="{y}" width="{held:g}" height="{_BAR}"/>'
        saved = ' class="name"' if fate is not None else ""
        site, text = escape(_shorten(buffer.site, 64)), escape(" · ".join(words))
        return (
            f'<g class="buffer {kind}"><title>{escape(chr(10).join(details))}</title>{bars}'
            f'<text{saved} x="{name_x:g}" y="{y - 4}" text-anchor="{anchor}">{site}</text>'
            f'<text class="small" x="{words_x:g}" y="{y + 10.5}" text-anchor="{anchor}">{text}</text>'
            "</g>"
        )


def _table(graph: LayerGraph, fates: Mapping[int, Fate]) -> str:
    heading = ("site", "role", "shape", "dtype", "bytes", "action", "held", "recipe", "not recomputable because")
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in heading) + "</tr>"]
    for index, fate in fates.items():
        buffer = graph.buffers[index]
        words = (buffer.site, str(graph.role(index)), _shape(buffer), buffer.base.dtype)
        cells = [f"<td>{escape(word)}</td>" for word in words]
        cells.append(f'<td class="number">{buffer.nbytes:,}</td><td>{escape(fate.label)}</td>')
        cells.append(f'<td class="number">{fate.held_bytes:,}</td>')
        cells.append(f'<td class="number">{fate.recipe_ops or ""}</td><td>{escape(fate.refused)}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>"
