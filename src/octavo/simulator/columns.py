"""Columns: a run's outcomes as arrays, each request's latencies, and the statistics of latencies.

Owns: the definitions of the latencies, percentiles and intervals. Times are seconds.
Percentiles are of the nearest rank. A mean has a 95 % interval from batch means: twenty batches in order of arrival
(Law and Kelton). The interval shows how much a longer run might change the mean, not the cost model's accuracy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from octavo.core.request import FinishReason
from octavo.simulator.outcomes import NEVER, Outcomes

POINTS = (50, 90, 95, 99)
METRICS = ("ttft", "tpot", "e2e", "queue")
NUM_BATCHES = 20
STUDENT_T = 2.093  # two-sided 95 % for 19 degrees of freedom
Facts = dict[str, Any]
Points = list[tuple[float, float]]


class Columns(NamedTuple):
    """The Outcomes of these names as numpy arrays, in order of arrival. A latency that a request lacks is NaN."""

    arrivals: np.ndarray
    starts: np.ndarray
    first_tokens: np.ndarray
    ends: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    longest: np.ndarray
    tenants: np.ndarray
    replicas: np.ndarray
    first_replicas: np.ndarray
    reasons: np.ndarray

    @staticmethod
    def of(outcomes: Outcomes, first: int = 0) -> Columns:
        """Convert outcomes from the entry `first` on."""
        order = np.argsort(np.asarray(outcomes.arrivals[first:]), kind="stable")
        return Columns(*(np.asarray(getattr(outcomes, name)[first:])[order] for name in Columns._fields))

    @property
    def served(self) -> np.ndarray:
        """Return True for each request that ended as requested."""
        return np.isin(self.reasons, (FinishReason.STOP, FinishReason.LENGTH))

    def latency(self, name: str) -> np.ndarray:
        """Return one latency per request, in seconds: ttft, tpot (per token after the first), e2e, or queue."""
        if name == "ttft":
            return np.where(self.first_tokens != NEVER, self.first_tokens - self.arrivals, np.nan)
        if name == "queue":
            return np.where(self.starts != NEVER, self.starts - self.arrivals, np.nan)
        if name == "e2e":
            return np.where(self.served, self.ends - self.arrivals, np.nan)
        has_pace = self.served & (self.longest > 1) & (self.first_tokens != NEVER)
        return np.where(has_pace, (self.ends - self.first_tokens) / np.maximum(self.longest - 1, 1), np.nan)


def spread(values: np.ndarray) -> Facts:
    """Return the count, the mean with its interval, percentiles and the maximum of the values that are not NaN."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {"count": 0, "mean": None, **{f"p{point}": None for point in POINTS}, "max": None}
    ordered = np.sort(known)
    ranks = {f"p{point}": float(ordered[nearest_rank(point, len(ordered))]) for point in POINTS}
    return {
        "count": len(known), "mean": float(known.mean()), "mean_within": _half_width(known), **ranks,
        "max": float(ordered[-1]),
    }  # fmt: skip


def nearest_rank(point: float, count: int) -> int:
    """Return the index of a percentile in `count` sorted values, by the nearest-rank definition."""
    return max(0, math.ceil(point / 100 * count) - 1)


def _half_width(values: np.ndarray) -> float | None:
    if len(values) < 5 * NUM_BATCHES:
        return None
    means = np.array([batch.mean() for batch in np.array_split(values, NUM_BATCHES)])
    return float(STUDENT_T * means.std(ddof=1) / math.sqrt(NUM_BATCHES))


def within(columns: Columns, name: str, bound: float) -> np.ndarray:
    """Return True for each request whose latency is at most `bound` seconds.

    A one-token answer has no tpot, so it cannot miss a tpot bound. A missing ttft misses its bound.
    """
    values = columns.latency(name)
    kept: np.ndarray = columns.served & ((values <= bound) | (np.isnan(values) & (name == "tpot")))
    return kept
