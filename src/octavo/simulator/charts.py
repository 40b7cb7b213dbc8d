"""Draws line charts as SVG text: inside a page, in the page's light or dark colours, or as a separate file.

Owns: axes (linear or logarithmic), ticks, stepped or straight lines, a legend. Does not: write files or compute points.
Equal numbers give equal text. The caller reduces the points to a number that a chart can show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 460, 290, 62, 30, 14, 62
# Okabe and Ito's colours, darkened: legible on white and on near-black, and distinct for colour-blind readers.
LIGHT = ("#0072b2", "#c8500a", "#007a5a", "#9b4f8a", "#8a6d00", "#c22d4a", "#3b6f8f", "#555555")
DARK = ("#56b4e9", "#f08a4b", "#2fc49a", "#d39ac6", "#e6c84a", "#f2738c", "#8fc1e0", "#b8b8b8")


@dataclass(frozen=True, slots=True)
class Line:
    """A named line of (x, y) points. `colour` is an index into the palette; a line that shows a bound is dashed."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    is_dashed: bool = False
    is_step: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart's axes and lines. `is_log`: x in powers of ten, for widely spread values."""

    title: str
    x_name: str
    y_name: str
    lines: Sequence[Line]
    is_log: bool = False
    top: float | None = None


def draw(chart: Chart) -> str:
    """Return one chart as an `svg` element, for a page whose style sheet defines the colour variables."""
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title, quote=True)}">'
    return "\n".join([head, *_chart(chart), "</svg>"])


def draw_alone(charts: Sequence[Chart], columns: int = 2) -> str:
    """Return charts in rows as one SVG file, which follows the viewer's light or dark setting."""
    columns = min(columns, len(charts)) or 1
    width, height = WIDTH * columns, HEIGHT * -(-len(charts) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE_ALONE}</style>",
        f'<rect width="{width}" height="{height}" class="page"/>',
    ]
    for index, chart in enumerate(charts):
        row, column = divmod(index, columns)
        parts += [f'<g transform="translate({column * WIDTH} {row * HEIGHT})">', *_chart(chart), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def palette(colours: Sequence[str]) -> str:
    """Return the lines' colours as CSS variables."""
    return "".join(f"--c{index}:{colour};" for index, colour in enumerate(colours))


RULES = (
    "svg text{font:11px system-ui,sans-serif;fill:var(--muted)}svg .title{font-size:12.5px;fill:var(--fg)}"
    "svg .grid{stroke:var(--grid);fill:none}svg .line{fill:none;stroke-width:1.6;stroke-linejoin:round}"
    "svg .dash{stroke-dasharray:5 4}"
)
_STYLE_ALONE = (
    f"svg{{--fg:#1c1e21;--muted:#5d636b;--grid:#e3e5e8;--page:#fff;{palette(LIGHT)}}}"
    "@media(prefers-color-scheme:dark){"
    f"svg{{--fg:#e8eaed;--muted:#a2a8b0;--grid:#33373d;--page:#17191c;{palette(DARK)}}}}}"
    f".page{{fill:var(--page)}}{RULES}"
)


@dataclass(frozen=True, slots=True)
class _Axes:
    low: float
    high: float
    top: float
    is_log: bool

    def x(self, value: float) -> float:
        """Return the x coordinate of a value, within the chart."""
        low, high = (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        position = math.log10(max(value, self.low)) if self.is_log else value
        share = (position - low) / (high - low) if high > low else 0.5
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, share)), 1)

    def y(self, value: float) -> float:
        """Return the y coordinate of a value."""
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(value, self.top) / self.top, 1)


def _chart(chart: Chart) -> list[str]:
    points = [point for line in chart.lines for point in line.points if not chart.is_log or point[0] > 0]
    title = f'<text x="{LEFT - 48}" y="16" class="title">{escape(chart.title)}</text>'
    if not points:
        return [title, f'<text x="{LEFT}" y="60">nothing to show</text>']
    xs = [x for x, _ in points]
    axes = _Axes(min(xs), max(xs), chart.top or _round_up(max(y for _, y in points)), chart.is_log)
    parts, right, base = [title], WIDTH - RIGHT, HEIGHT - BOTTOM
    for step in range(5):
        value = axes.top * step / 4
        parts.append(f'<path d="M{LEFT} {axes.y(value)}H{right}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{axes.y(value) + 4}" text-anchor="end">{short(value)}</text>')
    for value in _ticks(axes):
        parts.append(f'<path d="M{axes.x(value)} {base}v4" class="grid"/>')
        parts.append(f'<text x="{axes.x(value)}" y="{base + 15}" text-anchor="middle">{short(value)}</text>')
    parts.append(f'<text x="{right}" y="{base + 29}" text-anchor="end">{escape(chart.x_name)}</text>')
    parts.append(f'<text x="{right}" y="16" text-anchor="end">{escape(chart.y_name)}</text>')
    return [*parts, *(_path(line, axes) for line in chart.lines), *_legend(chart.lines)]


def _path(line: Line, axes: _Axes) -> str:
    commands: list[str] = []
    for x, y in ((axes.x(x), axes.y(y)) for x, y in line.points if not axes.is_log or x > 0):
        if not commands:
            commands.append(f"M{x:g} {y:g}")
        else:
            commands.append(f"H{x:g}V{y:g}" if line.is_step else f"L{x:g} {y:g}")
    dash = " dash" if line.is_dashed else ""
    return f'<path d="{"".join(commands)}" class="line{dash}" style="stroke:var(--c{line.colour % len(LIGHT)})"/>'


def _legend(lines: Sequence[Line]) -> list[str]:
    named = [line for line in lines if line.name]
    if len(named) < 2:
        return []
    parts, x, y = [], 14.0, HEIGHT - BOTTOM + 44
    for line in named[: len(LIGHT)]:
        width = 6.2 * len(line.name) + 12
        if x + width > WIDTH and x > 14:
            x, y = 14.0, y + 13
        colour = f"fill:var(--c{line.colour % len(LIGHT)})"
        parts.append(f'<text x="{x:.0f}" y="{y}" style="{colour}">{escape(line.name)}</text>')
        x += width
    return parts


def _ticks(axes: _Axes) -> list[float]:
    """Return about five round values; on a logarithmic axis powers of ten, and with few of those also 2 and 5 times."""
    if axes.is_log:
        first, last = math.floor(math.log10(axes.low)), math.ceil(math.log10(axes.high))
        steps = (1, 2, 5) if last - first <= 2 else (1,)
        values = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [value for value in values if axes.low * 0.999 <= value <= axes.high * 1.001]
    unit = _round_up((axes.high - axes.low) / 5)
    first = math.ceil(axes.low / unit)
    return [unit * (first + index) for index in range(12) if unit * (first + index) <= axes.high * (1 + 1e-9)]


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 4, 5, 8 times a power of ten; 1 for values not above 0."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 2, 4, 5, 8, 10, 20) if step * unit >= value * (1 - 1e-12))


def short(value: float) -> str:
    """Return a short text of a number: 12k, 3.4M, 0.05."""
    for bound, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= bound:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"
