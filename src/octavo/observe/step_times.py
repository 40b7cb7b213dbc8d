"""How long the parts of each step took: the last steps and totals.

Owns: the last `size` steps' seconds per part, and totals. Does not: measure (the loop does) or print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.observe.metrics.rings import RecordRing

PARTS = ("schedule", "prepare", "forward", "sample", "emit", "step")


class StepTimes:
    """Seconds per part of each step; `step` is the whole turn from plan to emit."""

    def __init__(self, size: int = 4096) -> None:
        self._ring = RecordRing(f"<{len(PARTS)}d", size)
        self._totals = [0.0] * len(PARTS)

    @property
    def num_steps(self) -> int:
        """Steps added."""
        return self._ring.num_added

    def add(self, parts: Sequence[float]) -> None:
        """Note one step: seconds in the order of PARTS."""
        self._ring.add(*parts)
        for part, seconds in enumerate(parts):
            self._totals[part] += seconds

    def get(self, number: int) -> tuple[float, ...] | None:
        """Return the seconds of the step added as `number` (from 0) by PARTS; None when it is not kept."""
        return self._ring.get(number)

    def recent(self, part: str) -> list[float]:
        """Return the seconds of the last steps, oldest first."""
        index = PARTS.index(part)
        return [seconds[index] for seconds in self._ring]

    def totals(self) -> Mapping[str, float]:
        """Return the seconds per part since the start."""
        return dict(zip(PARTS, self._totals, strict=True))

    def summary(self) -> Mapping[str, object]:
        """Return the number of steps, and per part the total and the median of the recent ones, in seconds."""
        kept = [sorted(column) for column in zip(*self._ring, strict=True)]
        medians = dict.fromkeys(PARTS, 0.0) | {
            part: column[len(column) // 2] for part, column in zip(PARTS, kept, strict=False)
        }
        return {"num_steps": self.num_steps, "total_s": self.totals(), "median_s": medians}
