"""How long the parts of each step took, in bounded rings: the split that the bench prints.

Owns: the last `size` steps' seconds per part, and totals. Does not: measure (the loop does) or print.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

PARTS = ("schedule", "prepare", "forward", "sample", "emit", "step")


class StepTimes:
    """Rings of seconds per part; `step` is the whole turn from plan to emit."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._rings = {part: array("d", bytes(8 * size)) for part in PARTS}
        self._totals = dict.fromkeys(PARTS, 0.0)
        self.num_steps = 0

    def add(self, parts: Sequence[float]) -> None:
        """Note one step: seconds in the order of PARTS."""
        place = self.num_steps % self._size
        for part, seconds in zip(PARTS, parts, strict=True):
            self._rings[part][place] = seconds
            self._totals[part] += seconds
        self.num_steps += 1

    def get(self, number: int) -> tuple[float, ...] | None:
        """Seconds of the step added as `number` (from 0), in the order of PARTS; None when gone or not there yet."""
        if not max(0, self.num_steps - self._size) <= number < self.num_steps:
            return None
        return tuple(self._rings[part][number % self._size] for part in PARTS)

    def recent(self, part: str) -> array[float]:
        """Seconds of the last steps, oldest first."""
        ring, place = self._rings[part], self.num_steps % self._size
        return ring[:place] if self.num_steps < self._size else ring[place:] + ring[:place]

    def totals(self) -> Mapping[str, float]:
        """Seconds per part since the start."""
        return dict(self._totals)

    def summary(self) -> Mapping[str, object]:
        """Steps, and per part the total and the median of the recent ones, in seconds."""
        medians = {part: _median(self.recent(part)) for part in PARTS}
        return {"num_steps": self.num_steps, "total_s": self.totals(), "median_s": medians}


def _median(values: array[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
