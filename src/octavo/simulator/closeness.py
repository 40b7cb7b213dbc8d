"""Times of requests, and the errors of predicted times with their confidence intervals.

Owns: Times, errors of statistics, their intervals. Does not: simulate, measure, or lay out tables.
Intervals: a bootstrap of blocks of neighbouring requests (Kuensch, Ann. Statist. 17, 1989), because neighbours share
their steps; a draw takes the same requests of the prediction and of the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
KINDS = ("ttft", "tpot", "e2e")
NUM_DRAWS = 400
BLOCK = 10  # neighbouring requests that are drawn together
STATISTICS: dict[str, Callable[[Column], float]] = {
    "mean": lambda column: float(np.mean(column)),
    "p50": lambda column: float(np.percentile(column, 50)),
    "p90": lambda column: float(np.percentile(column, 90)),
    "p99": lambda column: float(np.percentile(column, 99)),
}


class Error(NamedTuple):
    """(predicted - measured) / measured of a statistic, with the bounds of its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:+.1f} % ({100 * self.low:+.1f} to {100 * self.high:+.1f})"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each request: to the first token, for each token after it (where there is one), to the end."""

    ttft: Column
    tpot: Column
    e2e: Column

    @staticmethod
    def of(arrivals: Column, first_tokens: Column, ends: Column, output_tokens: Column) -> Times:
        """Return the Times of arrivals, first tokens and ends on one clock."""
        longer = output_tokens > 1
        tpot = (ends[longer] - first_tokens[longer]) / (output_tokens[longer] - 1)
        return Times(first_tokens - arrivals, tpot, ends - arrivals)

    @staticmethod
    def joined(parts: Sequence[Times]) -> Times:
        """Return the Times of several groups of requests, one after the other."""
        return Times(*(np.concatenate([getattr(part, kind) for part in parts]) for kind in KINDS))

    def errors(self, measured: Times) -> dict[str, dict[str, Error]]:
        """Return the error of each statistic of each kind of time."""
        return {kind: _errors(getattr(self, kind), getattr(measured, kind)) for kind in KINDS}

    def misses(self, measured: Times) -> dict[str, Column]:
        """Return |predicted - measured| / measured of each request, for each kind of time."""
        pairs = {kind: (getattr(self, kind), getattr(measured, kind)) for kind in KINDS}
        return {kind: np.abs(mine / theirs - 1) for kind, (mine, theirs) in pairs.items()}


def mean_misses(misses: dict[str, Column]) -> dict[str, float]:
    """Return the mean of the requests' misses, for each kind of time."""
    return {kind: float(np.mean(values)) for kind, values in misses.items()}


class Change(NamedTuple):
    """How much more, or less, one prediction misses than another, as a share of the other's misses; its standard error.

    Both are means over the kinds of time; the error is that of means of blocks of neighbouring requests.
    """

    value: float
    error: float

    def __str__(self) -> str:
        return f"{100 * self.value:+.0f} % +- {100 * self.error:.0f} %"


def change(misses: dict[str, Column], others: dict[str, Column]) -> Change:
    """Return the change from the other misses to these."""
    values, errors = [], []
    for kind in KINDS:
        off, base = misses[kind] - others[kind], max(float(np.mean(others[kind])), 1e-9)
        means = [float(np.mean(block)) for block in np.array_split(off, max(2, len(off) // BLOCK))]
        values.append(float(np.mean(off)) / base)
        errors.append(float(np.std(means, ddof=1)) / len(means) ** 0.5 / base)
    return Change(float(np.mean(values)), float(np.mean(errors)))


def _errors(predicted: Column, measured: Column) -> dict[str, Error]:
    random, count = np.random.default_rng(0), len(measured)
    num_blocks = -(-count // BLOCK)
    draws = []
    for _ in range(NUM_DRAWS if count > BLOCK else 0):
        starts = random.integers(0, count - BLOCK + 1, num_blocks)
        draws.append((starts[:, None] + np.arange(BLOCK)).ravel()[:count])
    found = {}
    for name, statistic in STATISTICS.items():
        value = statistic(predicted) / statistic(measured) - 1
        drawn = [statistic(predicted[draw]) / statistic(measured[draw]) - 1 for draw in draws] or [-np.inf, np.inf]
        low, high = np.percentile(drawn, [2.5, 97.5]) if draws else drawn
        found[name] = Error(value, float(low), float(high))
    return found
