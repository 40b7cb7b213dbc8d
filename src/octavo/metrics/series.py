"""Counter and Histogram: numbers that only grow.

Owns: the counts. Does not: know their names or how they are exposed.
Invariants: written by one thread (the event loop's), so without locks; an observation costs one bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0,
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)


class Counter:
    """A sum per combination of label values."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}

    def add(self, amount: float = 1, *labels: str) -> None:
        """Add to the sum under these label values."""
        self.values[labels] = self.values.get(labels, 0) + amount


class Histogram:
    """How often values fell into each bucket; `bounds` are inclusive upper ends."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> Iterator[tuple[str, float]]:
        """Prometheus buckets: (upper bound as text, values at or below it)."""
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            yield ("+Inf" if bound == float("inf") else repr(float(bound))), running
