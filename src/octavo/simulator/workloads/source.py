"""What every kind of workload shares: a source of arrivals, its seed and options, and its notes.

Owns: Notes (what was left out or changed, counted), Reader (order and emptiness of a trace's rows), Zipf.
Does not: know a format or a process. Invariant: nothing is left out or changed without a note.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from octavo.simulator.arrival import Arrival
from octavo.simulator.rows import FileRow
from octavo.simulator.workloads.spec import Spec


class Notes:
    """Counts of what was left out or changed, by description."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, words: str, number: int = 1) -> None:
        """Add to a count."""
        if number:
            self.counts[words] = self.counts.get(words, 0) + number


Source = Callable[[Notes], Iterator[Arrival]]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a kind is built with: the seed, its place among several, and a function that opens another specification."""

    seed: int
    place: int
    open_source: Callable[[str], Source]

    def rng(self, spec: Spec, purpose: str) -> random.Random:
        """Return a generator for one purpose, so that one more draw of lengths moves no arrival."""
        return random.Random(f"{self.seed}/{self.place}/{spec.kind}/{purpose}")


class Reader:
    """Converts a trace's rows: times from the first on, in order, with at least one prompt and one output token."""

    def __init__(self, spec: Spec) -> None:
        self.is_sorting = spec.choice("sort", ("no", "yes")) == "yes"
        self.notes = Notes()
        self._first: float | None = None
        self._latest = 0.0

    def begin(self, notes: Notes) -> None:
        """Start a new iteration."""
        self.notes, self._first, self._latest = notes, None, 0.0

    def time(self, row: FileRow, name: str, seconds: float) -> float:
        """Return seconds since the first row. Raises ConfigError if they fall, unless rows are sorted later."""
        if self._first is None:
            self._first = self._latest = seconds
        if seconds < self._latest and not self.is_sorting:
            raise row.fault(
                name, "this is earlier than the line before; give sort=yes, which reads the whole file first"
            )
        self._latest = seconds
        return seconds - self._first

    def tokens(self, prompt: int, output: int) -> tuple[int, int] | None:
        """Return both counts as an engine can take them, or None for a request to leave out."""
        if not prompt:
            self.notes.add("without a prompt, left out")
            return None
        if not output:
            self.notes.add("answers of no token, taken as one")
        return prompt, max(1, output)


class Zipf:
    """Draws 0 .. count - 1, the k-th with weight 1 / (k + 1) ** exponent; an exponent of 0 is uniform."""

    def __init__(self, count: int, exponent: float) -> None:
        self._bounds = list(accumulate((place + 1) ** -exponent for place in range(count)))

    def draw(self, rng: random.Random) -> int:
        """Draw a number."""
        return min(bisect_right(self._bounds, rng.random() * self._bounds[-1]), len(self._bounds) - 1)
