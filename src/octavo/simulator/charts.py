"""Draws charts as SVG text: inside a page, in the page's light or dark colours, or as a separate file.

Owns: axes (linear or logarithmic), ticks, lines (stepped or straight), stacked bands, marked values, a legend.
Does not: write files or compute points.
Equal numbers give equal text. The caller reduces the points to a number that a chart can show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 460, 290, 62, 30, 14, 62
LEGEND = 28  # height of the legend's two rows
FAR = 4  # a marked y above so many times the highest point does not extend the axis: the lines would be flat
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
class Mark:
    """A dashed line at a value of x (`is_upright`) or y, with texts beside it, each with a colour (None: muted)."""

    value: float
    texts: Sequence[tuple[str, int | None]]
    is_upright: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart's axes and lines. `is_log`: x in powers of ten, for widely spread values.

    `is_stacked`: the lines are bands on top of each other; all have the same values of x.
    """

    title: str
    x_name: str
    y_name: str
    lines: Sequence[Line]
    is_log: bool = False
    top: float | None = None
    marks: Sequence[Mark] = ()
    is_stacked: bool = False


def draw(chart: Chart) -> str:
    """Return one chart as an `svg` element, for a page whose style sheet defines the colour variables."""
    height = HEIGHT if _legend(chart.lines, chart.is_stacked) else HEIGHT - LEGEND
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(chart.title, quote=True)}">'
    return "\n".join([head, *_chart(chart), "</svg>"])


def draw_alone(charts: Sequence[Chart]) -> str:
    """Return charts in rows of two as one SVG file, which follows the viewer's light or dark setting."""
    columns = min(2, len(charts)) or 1
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
    "svg .dash{stroke-dasharray:5 4}svg .band{fill-opacity:.72;stroke:none}"
    "svg .mark{stroke:var(--fg);stroke-dasharray:5 4;stroke-width:1.2;fill:none}"
    "svg .note{font-weight:600;paint-order:stroke;stroke:var(--panel,var(--page));stroke-width:4px}"
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
    axes = _axes(chart, points)
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
    drawn = _bands(chart.lines, axes) if chart.is_stacked else [_path(line, axes) for line in chart.lines]
    marks = [text for mark in chart.marks for text in _mark(mark, axes)]
    return [*parts, *drawn, *marks, *_legend(chart.lines, chart.is_stacked)]


def _axes(chart: Chart, points: Sequence[tuple[float, float]]) -> _Axes:
    """Return axes that hold the points and the marks, except marks far above all points."""
    xs = [x for x, _ in points] + [mark.value for mark in chart.marks if mark.is_upright]
    if chart.is_stacked:
        highest = max(sum(level) for level in zip(*([y for _, y in line.points] for line in chart.lines), strict=True))
    else:
        highest = max(y for _, y in points)
    near = [mark.value for mark in chart.marks if not mark.is_upright and mark.value <= FAR * highest]
    return _Axes(min(xs), max(xs), chart.top or _round_up(max(highest, *near, 0.0)), chart.is_log)


def _bands(lines: Sequence[Line], axes: _Axes) -> list[str]:
    """Return the areas between each line's sum with the lines before it and the sum without it."""
    below = [0.0] * len(lines[0].points)
    parts = []
    for line in lines:
        above = [low + y for low, (_, y) in zip(below, line.points, strict=True)]
        xs = [axes.x(x) for x, _ in line.points]
        edge = [f"{x:g} {axes.y(y):g}" for x, y in zip(xs, above, strict=True)]
        edge += [f"{x:g} {axes.y(y):g}" for x, y in zip(reversed(xs), reversed(below), strict=True)]
        parts.append(f'<path d="M{"L".join(edge)}Z" class="band" style="fill:var(--c{line.colour % len(LIGHT)})"/>')
        below = above
    return parts


def _mark(mark: Mark, axes: _Axes) -> list[str]:
    base, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    if mark.is_upright:
        at = axes.x(mark.value)
        is_left = at > right - 6.5 * max(len(text) for text, _ in mark.texts)
        parts = [f'<path d="M{at} {TOP}V{base}" class="mark"/>']
        y = TOP + 14.0 if is_left else base - 8 - 14.0 * (len(mark.texts) - 1)
        x, anchor = (at - 6, "end") if is_left else (at + 6, "start")
    else:
        is_above = mark.value > axes.top
        at = axes.y(mark.value)
        parts = [] if is_above else [f'<path d="M{LEFT} {at}H{right}" class="mark"/>']
        x, y, anchor = LEFT + 4.0, TOP + 13.0 if at < TOP + 24 else at - 6, "start"
    for row, (text, colour) in enumerate(mark.texts):
        fill = "" if colour is None else f' style="fill:var(--c{colour % len(LIGHT)})"'
        place = f'x="{x:g}" y="{y + 14 * row:g}" text-anchor="{anchor}"'
        parts.append(f'<text {place} class="note"{fill}>{escape(text)}</text>')
    return parts


def _path(line: Line, axes: _Axes) -> str:
    commands: list[str] = []
    for x, y in ((axes.x(x), axes.y(y)) for x, y in line.points if not axes.is_log or x > 0):
        if not commands:
            commands.append(f"M{x:g} {y:g}")
        else:
            commands.append(f"H{x:g}V{y:g}" if line.is_step else f"L{x:g} {y:g}")
    dash = " dash" if line.is_dashed else ""
    return f'<path d="{"".join(commands)}" class="line{dash}" style="stroke:var(--c{line.colour % len(LIGHT)})"/>'


def _legend(lines: Sequence[Line], is_stacked: bool) -> list[str]:
    named = [line for line in lines if line.name]
    if len(named) < 2 and not is_stacked:
        return []
    parts, x, y = [], 14.0, HEIGHT - BOTTOM + 44
    for line in named[: len(LIGHT)]:
        width = 6.7 * len(line.name) + 28
        if x + width > WIDTH and x > 14:
            x, y = 14.0, y + 13
        place = f'x="{x:.0f}" y="{y - 9 if is_stacked else y - 5}" width="10" height="{10 if is_stacked else 3}"'
        parts.append(f'<rect {place} style="fill:var(--c{line.colour % len(LIGHT)})"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="{y}">{escape(line.name)}</text>')
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
