"""Line charts as SVG text, without a library.

Owns: axes (logarithmic in powers of two, or linear from 0), ticks, lines, a legend. Does not: write files.
Equal numbers give equal text, so that a picture in the repository changes only with its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1f6fb2", "#c0392b", "#2e8b57", "#8e44ad", "#b8860b", "#555555")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 420, 300, 62, 34, 18, 58


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A named line of (x, y) points with x above 0; a floor or a bound is dashed."""

    name: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: its axes and its lines."""

    title: str
    x_name: str
    y_name: str
    lines: Sequence[ChartLine]


def draw(panels: Sequence[Panel]) -> str:
    """Return an SVG with the panels side by side."""
    width = WIDTH * len(panels)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif"'
    parts = [head + ' font-size="11">', f'<rect width="{width}" height="{HEIGHT}" fill="white"/>']
    for index, panel in enumerate(panels):
        parts += [f'<g transform="translate({index * WIDTH} 0)">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    if not points:
        return [f'<text x="{LEFT}" y="20">{escape(panel.title)}: nothing was measured</text>']
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = _round_up(max(y for _, y in points))
    span = math.log2(high / low) or 1.0

    def x_of(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * math.log2(value / low) / span, 1)

    def y_of(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top, 1)

    parts = [f'<text x="{LEFT}" y="18" font-size="12">{escape(panel.title)}</text>']
    for step in range(5):
        value, right = top * step / 4, WIDTH - RIGHT
        parts.append(f'<path d="M{LEFT} {y_of(value)}H{right}" stroke="#ddd" fill="none"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y_of(value) + 4}" text-anchor="end">{value:g}</text>')
    base = HEIGHT - BOTTOM
    for value in sorted({x for x, _ in points}):
        parts.append(f'<text x="{x_of(value)}" y="{base + 14}" text-anchor="middle">{value:g}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{base + 28}" text-anchor="middle">{escape(panel.x_name)}</text>'
    )
    middle = (TOP + base) / 2
    turn = f'transform="rotate(-90 14 {middle})"'
    parts.append(f'<text x="14" y="{middle}" text-anchor="middle" {turn}>{escape(panel.y_name)}</text>')
    for index, line in enumerate(panel.lines):
        colour, dash = COLOURS[index % len(COLOURS)], ' stroke-dasharray="5 3"' if line.is_dashed else ""
        path = " ".join(f"{x_of(x)},{y_of(y)}" for x, y in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>')
        place = f'x="{LEFT + index * (WIDTH - LEFT - RIGHT) / max(3, len(panel.lines)):.0f}" y="{HEIGHT - 8}"'
        parts.append(f'<text {place} fill="{colour}">{escape(line.name)}</text>')
    return parts


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 4, 8 times a power of ten; 1 for values not above 0."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 2, 4, 8, 10, 20) if step * unit >= value)
