"""Percentiles of measured times. Owns: the rule (nearest rank). Does not: measure or print."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

POINTS = (50, 90, 95, 99)


def percentile(values: Iterable[float], point: float) -> float:
    """Return the smallest value that at least `point` per cent of the values do not exceed; 0 of no values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(point / 100 * len(ordered)) - 1)]


def spread_ms(seconds: Iterable[float]) -> Mapping[str, float]:
    """Return the percentiles of POINTS as {"p50": ...}, in milliseconds."""
    ordered = sorted(seconds)
    return {f"p{point}": round(percentile(ordered, point) * 1e3, 3) for point in POINTS}
