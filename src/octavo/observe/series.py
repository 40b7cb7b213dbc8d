"""Series of bounded size: histograms of values, and the seconds of the last steps, by part and by number of tokens.

Owns: the counts, the last records, and the model of a step's time.
Does not: measure, or know the names under which they are exported.
Invariants: one thread writes, so there are no locks; an observation costs one bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from statistics import fmean, linear_regression, median_high

from octavo.core.plan import StepPlan

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0,
)  # fmt: skip
# From 10 us to over 10 minutes in steps of a fifth: the error of a quantile is at most a tenth.
FINE_SECONDS = tuple(1e-5 * 1.2**power for power in range(100))
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
PARTS = ("schedule", "prepare", "forward", "sample", "emit", "step")  # of a step; `step` is the whole step
NUM_STEPS = 64  # steps stored of each kind (with prompts, without)
NUM_RECENT = 16  # steps that measure the machine's present speed
MIN_STEPS = 4
_SAME_RUN = 0.1  # a pause before a step is counted as part of it if it is at most this share of it


class Histogram:
    """The number of values in each bucket; `bounds` are inclusive upper ends."""

    __slots__ = ("bounds", "counts", "max", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.reset()

    def reset(self) -> None:
        """Drop all values."""
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.max = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
        if value > self.max:
            self.max = value

    def quantile(self, share: float) -> float | None:
        """Return the value below which `share` of all values are, to within its bucket; None without values."""
        rank, running = share * sum(self.counts), 0
        for index, count in enumerate(self.counts):
            if count and running + count >= rank:
                low = self.bounds[index - 1] if index else 0.0
                high = self.bounds[index] if index < len(self.bounds) else self.max
                return min(self.max, low + (high - low) * (rank - running) / count)
            running += count
        return None

    def summary(self) -> dict[str, float | int | None]:
        """Return the number of values, their mean, quantiles and maximum; None where there are no values."""
        count = sum(self.counts)
        return {
            "count": count,
            "mean": self.total / count if count else None,
            **{f"p{share}": self.quantile(share / 100) for share in (50, 90, 99)},
            "max": self.max if count else None,
        }

    def cumulative(self, shown: Collection[float] | None = None) -> Iterator[tuple[str, float]]:
        """Yield Prometheus buckets: (upper bound as text, values up to it); of `shown` bounds only, if given."""
        *running, total = accumulate(self.counts)
        for bound, count in zip(self.bounds, running, strict=True):
            if shown is None or bound in shown:
                yield repr(float(bound)), count
        yield "+Inf", total


class StepTimes:
    """Seconds per part of the last `size` steps, and totals."""

    def __init__(self, size: int = 4096) -> None:
        self.num_steps = 0
        self._last: deque[tuple[float, ...]] = deque(maxlen=size)
        self._totals = [0.0] * len(PARTS)

    def add(self, parts: Sequence[float]) -> None:
        """Add a step's seconds, in the order of PARTS."""
        self.num_steps += 1
        self._last.append(tuple(parts))
        for part, seconds in enumerate(parts):
            self._totals[part] += seconds

    def get(self, number: int) -> tuple[float, ...] | None:
        """Return the seconds of the step added as `number` (from 0) by PARTS; None if it is not kept."""
        index = number - self.num_steps + len(self._last)
        return self._last[index] if 0 <= index < len(self._last) else None

    def summary(self) -> Mapping[str, object]:
        """Return the number of steps, and per part the total and the median of the recent ones, in seconds."""
        medians = [median_high(column) for column in zip(*self._last, strict=True)] or [0.0] * len(PARTS)
        return {
            "num_steps": self.num_steps,
            "total_s": dict(zip(PARTS, self._totals, strict=True)),
            "median_s": dict(zip(PARTS, medians, strict=True)),
        }


class StepTimeModel:
    """The seconds of a step by its tokens, from the last steps."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS)
        self._others: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS)
        self._recent: deque[tuple[int, float]] = deque(maxlen=NUM_RECENT)
        self._last_end = -inf

    def add(self, plan: StepPlan, end: float) -> None:
        """Add a step that has a result. If plans overlap, its time begins at the end of the previous step."""
        seconds, begin = end - plan.now, plan.now
        if begin - self._last_end <= _SAME_RUN * seconds:
            begin = self._last_end
        self._last_end = end
        kept = self._prompts if plan.num_query_tokens > len(plan.slots) else self._others
        kept.append((plan.num_query_tokens, end - begin))
        self._recent.append(kept[-1])

    def fit(self) -> tuple[float, float] | None:
        """Return (seconds per step, additional seconds per token); None before there were enough steps.

        A machine's speed changes, and steps with prompts may be old, so only the latest steps set the first number.
        """
        points = (*self._prompts, *self._others)
        if len(points) < MIN_STEPS:
            return None
        tokens, seconds = zip(*points, strict=True)
        slope = linear_regression(tokens, seconds).slope if len(set(tokens)) > 1 else 0.0
        mean_k, mean_s = (fmean(column) for column in zip(*self._recent, strict=True))
        slope = min(max(slope, 0.0), mean_s / mean_k)  # neither a step nor a token takes a negative time
        return mean_s - slope * mean_k, slope
