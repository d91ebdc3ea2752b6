"""Charts as inline SVG: lines, bars and points with axes, drawn with the page's CSS variables. Pure text from numbers.

Coordinates are pixels of a drawing WIDTH wide; the page shrinks it where the window is narrower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 1000
LEFT, RIGHT, TOP, BOTTOM = 84, 20, 14, 46
MOST_POINTS = 600  # of a line; of more, neighbours are drawn as one

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Line:
    """``style``: a CSS class of the page, which gives colour and dashes. A point without a value is a gap."""

    name: str
    style: str
    points: Points


@dataclass(frozen=True)
class Marker:
    """A point with a name of its own. ``shape``: circle, square or diamond."""

    name: str
    style: str
    x: float
    y: float
    shape: str = "circle"


@dataclass(frozen=True)
class Scale:
    """From values to pixels, linear or logarithmic. ``low`` is drawn at ``start``."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.logarithmic else (self.low, self.high)
        at = math.log10(value) if self.logarithmic else value
        return self.start + (at - low) / ((high - low) or 1.0) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round values within the scale; of a logarithmic one over more than a decade, those with 1, 2 and 5."""
        if self.logarithmic and self.high > 10 * self.low:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1,) if len(powers) > 4 else (1, 2, 5)
            values = [step * 10.0**power for power in powers for step in steps]
        else:
            step = _round_step((self.high - self.low) / 5)
            values = [step * i for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        slack = 1e-9 * abs(self.high - self.low)
        return [value for value in values if self.low - slack <= value <= self.high + slack]


def _round_step(about: float) -> float:
    if about <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(about))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= about * 0.999))


@dataclass(frozen=True)
class Chart:
    """What is drawn, and on which axes. ``marks``: vertical lines at x, each with words; ``zero``: the y axis begins
    at 0; ``logarithmic``: y; ``whole``: x has whole numbers only."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    markers: Sequence[Marker] = ()
    marks: Sequence[tuple[float, str]] = ()
    zero: bool = False
    logarithmic: bool = False
    height: int = 260
    bars: Sequence[tuple[str, str, Sequence[tuple[float, float]]]] = field(default=())  # name, style, (x, height)

    def svg(self) -> str:
        """The drawing; a sentence where there is nothing to draw."""
        values = [(x, y) for line in self.lines for x, y in line.points if y is not None and self._drawable(y)]
        values += [(m.x, m.y) for m in self.markers] + [point for _, _, points in self.bars for point in points]
        if not values:
            return f'<p class="none">{escape(self.title)}: nothing was recorded.</p>'
        x, y = self._x_scale([v for v, _ in values]), self._y_scale([v for _, v in values])
        parts = [self._axes(x, y), *(self._bars(x, y)), *(self._mark(x, *mark) for mark in self.marks)]
        parts += [self._line(line, x, y) for line in self.lines] + [self._marker(m, x, y) for m in self.markers]
        body = "\n".join(part for part in parts if part)
        return (
            f'<svg class="chart" width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-label="{escape(self.title)}">\n<title>{escape(self.title)}</title>\n{body}\n</svg>'
        )

    def _drawable(self, y: float) -> bool:
        return math.isfinite(y) and (y > 0 or not self.logarithmic)

    def _x_scale(self, values: Sequence[float]) -> Scale:
        low, high = min(values), max(values)
        pad = 0.6 if self.bars else 0.04 * (high - low) if self.markers else 0.0
        pad = pad if high > low or self.bars else 0.5
        return Scale(low - pad, high + pad, LEFT, WIDTH - RIGHT)

    def _y_scale(self, values: Sequence[float]) -> Scale:
        low, high = min(values), max(values)
        if self.logarithmic:
            return Scale(low / 1.3, high * 1.3, self.height - BOTTOM, TOP, True)
        low = 0.0 if self.zero else low
        pad = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        return Scale(low if self.zero else low - pad, high + pad, self.height - BOTTOM, TOP)

    def _axes(self, x: Scale, y: Scale) -> str:
        floor = self.height - BOTTOM
        parts = []
        for value in y.ticks:
            at = y(value)
            parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{number(value)}</text>')
        for value in x.ticks:
            if value == round(value) or self.markers:
                parts.append(f'<text x="{x(value):.1f}" y="{floor + 18}" text-anchor="middle">{number(value)}</text>')
        parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}"/>')
        turned = f"translate(16 {(TOP + floor) / 2:.0f}) rotate(-90)"
        parts.append(
            f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{floor + 38}" text-anchor="middle">{escape(self.x_label)}</text>'
        )
        parts.append(f'<text transform="{turned}" text-anchor="middle">{escape(self.y_label)}</text>')
        return "\n".join(parts)

    def _line(self, line: Line, x: Scale, y: Scale) -> str:
        words, drawing = [], False
        for at, value in line.points:
            if value is None or not self._drawable(value):
                drawing = False
                continue
            words.append(f"{'L' if drawing else 'M'}{x(at):.1f} {y(value):.1f}")
            drawing = True
        return f'<path class="line {line.style}" d="{"".join(words)}"><title>{escape(line.name)}</title></path>'

    def _bars(self, x: Scale, y: Scale) -> list[str]:
        floor = self.height - BOTTOM
        found = []
        for name, style, points in self.bars:
            for at, value in points:
                left, right, top = x(at - 0.38), x(at + 0.38), y(value)
                found.append(
                    f'<rect class="{style}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
                    f'height="{max(0.0, floor - top):.1f}"><title>{escape(self.x_label)} {at:g}, {escape(name)}: '
                    f"{number(value)} {escape(self.y_label)}</title></rect>"
                )
        return found

    def _mark(self, x: Scale, at: float, words: str) -> str:
        if not x.low <= at <= x.high:
            return ""
        return f'<path class="mark" d="M{x(at):.1f} {TOP}V{self.height - BOTTOM}"><title>{escape(words)}</title></path>'

    def _marker(self, one: Marker, x: Scale, y: Scale) -> str:
        at, up = x(one.x), y(one.y)
        match one.shape:
            case "square":
                shape = f'<rect class="marker {one.style}" x="{at - 6:.1f}" y="{up - 6:.1f}" width="12" height="12">'
                end = "</rect>"
            case "diamond":
                shape = f'<path class="marker {one.style}" d="M{at:.1f} {up - 10:.1f}l10 10l-10 10l-10 -10z">'
                end = "</path>"
            case _:
                shape = f'<circle class="marker {one.style}" cx="{at:.1f}" cy="{up:.1f}" r="4.5">'
                end = "</circle>"
        words = f"{one.name}: {number(one.x)} {self.x_label}, {number(one.y)} {self.y_label}"
        return f"{shape}<title>{escape(words)}</title>{end}"


def number(value: float) -> str:
    """Four digits at most, without an exponent where that is short."""
    if value == 0:
        return "0"
    if abs(value) >= 1000 and value == round(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def thinned(points: Points, combine: Callable[[list[float]], float]) -> tuple[list[tuple[float, float | None]], int]:
    """At most MOST_POINTS points: of so many neighbours (the second result) the last x and their combined value."""
    group = -(-len(points) // MOST_POINTS) or 1
    found: list[tuple[float, float | None]] = []
    for start in range(0, len(points), group):
        part = points[start : start + group]
        known = [y for _, y in part if y is not None]
        found.append((part[-1][0], combine(known) if len(known) == len(part) else None))
    return found, group
