"""Predicted and measured times of requests side by side.

Owns: a comparison's table and charts. Does not: simulate or measure.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from octavo.simulator.charts import Chart, Line
from octavo.simulator.closeness import Times


def table(title: str, predicted: Times, measured: Times) -> str:
    """The comparison in words, for a terminal and for Markdown alike."""
    lines = [f"| {title} | measured mean | predicted mean | error of the mean | p50 | p90 | p99 |", "|---" * 7 + "|"]
    for name, errors in predicted.errors(measured).items():
        means = np.mean(getattr(measured, name)), np.mean(getattr(predicted, name))
        shares = " | ".join(map(str, errors.values()))
        lines.append(f"| {name} | {means[0]:.4g} s | {means[1]:.4g} s | {shares} |")
    return "\n".join(lines)


def charts(title: str, named: Mapping[str, Times]) -> list[Chart]:
    """Return cumulative distributions of e2e and tpot for several Times, the measured one first."""
    made = []
    for name, unit, scale in (("e2e", "seconds", 1.0), ("tpot", "milliseconds", 1e3)):
        lines = []
        for place, (called, times) in enumerate(named.items()):
            values = np.sort(getattr(times, name)) * scale
            points = [(float(value), 100 * (rank + 1) / len(values)) for rank, value in enumerate(values)]
            lines.append(Line(called, points, place, is_step=True))
        made.append(Chart(f"{title}: {name}", unit, "% of requests", lines, top=100))
    return made
