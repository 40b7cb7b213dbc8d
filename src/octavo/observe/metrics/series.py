"""Counter and Histogram: numbers that only grow, but for a reset.

Owns: the counts. Does not: know their names or how they are exposed.
Invariants: written by one thread (the event loop's), so without locks; an observation costs one bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0,
)  # fmt: skip
# A fifth apart from 10 us to over 10 minutes: a quantile read from these is off by a tenth at most.
FINE_SECONDS = tuple(1e-5 * 1.2**power for power in range(100))
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

    __slots__ = ("bounds", "counts", "max", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.reset()

    def reset(self) -> None:
        """Forget all values."""
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.max = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
        if value > self.max:
            self.max = value

    def quantile(self, share: float) -> float | None:
        """The value below which `share` of all values lie, to within its bucket; None without values."""
        rank, running = share * sum(self.counts), 0
        for index, count in enumerate(self.counts):
            if count and running + count >= rank:
                low = self.bounds[index - 1] if index else 0.0
                high = self.bounds[index] if index < len(self.bounds) else self.max
                return min(self.max, low + (high - low) * (rank - running) / count)
            running += count
        return None

    def summary(self) -> dict[str, float | int | None]:
        """Number of values, their mean, the usual quantiles and the greatest; None where there are no values."""
        num_values = sum(self.counts)
        figures: dict[str, float | int | None] = {"count": num_values}
        figures["mean"] = self.total / num_values if num_values else None
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            figures[name] = self.quantile(share)
        figures["max"] = self.max if num_values else None
        return figures

    def cumulative(self, shown: Collection[float] | None = None) -> Iterator[tuple[str, float]]:
        """Prometheus buckets: (upper bound as text, values at or below it); of `shown` bounds only, which are ours."""
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            if bound == float("inf"):
                yield "+Inf", running
            elif shown is None or bound in shown:
                yield repr(float(bound)), running
