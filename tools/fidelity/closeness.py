"""Predicted and measured times of requests side by side.

Owns: Times, their comparison, its table and charts. Does not: simulate or measure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.simulator.charts import Chart, Line

Column = npt.NDArray[np.float64]
STATISTICS: dict[str, Callable[[Column], float]] = {
    "mean": lambda column: float(np.mean(column)),
    "p50": lambda column: float(np.percentile(column, 50)),
    "p90": lambda column: float(np.percentile(column, 90)),
    "p99": lambda column: float(np.percentile(column, 99)),
}


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each request: to the first token, for each token behind it (where there is one), to the end."""

    ttft: Column
    tpot: Column
    e2e: Column

    @staticmethod
    def of(arrivals: Column, first_tokens: Column, ends: Column, output_tokens: Column) -> Times:
        """Return the Times of arrivals, first tokens and ends on one clock."""
        longer = output_tokens > 1
        tpot = (ends[longer] - first_tokens[longer]) / (output_tokens[longer] - 1)
        return Times(first_tokens - arrivals, tpot, ends - arrivals)

    def errors(self, measured: Times) -> dict[str, dict[str, float]]:
        """(predicted - measured) / measured of each statistic of each time."""
        return {
            name: {
                word: statistic(getattr(self, name)) / statistic(getattr(measured, name)) - 1
                for word, statistic in STATISTICS.items()
            }
            for name in ("ttft", "tpot", "e2e")
        }


def table(title: str, predicted: Times, measured: Times) -> str:
    """The comparison in words, for a terminal and for Markdown alike."""
    lines = [
        f"| {title} | measured mean | predicted mean | error of the mean | p50 | p90 | p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, errors in predicted.errors(measured).items():
        means = np.mean(getattr(measured, name)), np.mean(getattr(predicted, name))
        shares = " | ".join(f"{100 * errors[word]:+.1f} %" for word in STATISTICS)
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
