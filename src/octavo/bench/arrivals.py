"""Arrival times of the requests of an online bench: seconds from the start, from a rate and a seed.

Owns: the processes (gamma gaps: shape 1 is Poisson's, less is burstier; fixed gaps; all as soon as there is room).
Does not: wait or send. Invariant: the same arguments give the same times on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.errors import ConfigError

KINDS = ("poisson", "fixed", "bursty")
BURSTY_SHAPE = 0.25  # a coefficient of variation of 2 = 1 / sqrt(shape), twice Poisson's


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests a second (inf: no gaps), the process, and the shape of its gaps' gamma distribution."""

    rate: float = math.inf
    kind: str = "poisson"
    shape: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"--request-rate is {self.rate:g}; give requests a second above 0, or inf")
        if self.kind not in KINDS:
            raise ConfigError(f"--arrivals is {self.kind!r}; give one of {', '.join(KINDS)}")
        if self.shape is not None and not (0 < self.shape < math.inf):
            raise ConfigError(f"--burstiness is {self.shape:g}; give a number above 0 (1 = Poisson, less = burstier)")

    @property
    def is_open_loop(self) -> bool:
        """True if requests arrive independently of the server."""
        return self.rate < math.inf

    def times(self) -> Iterator[float]:
        """Yield arrival times without end; the first is 0."""
        draw, now = random.Random(self.seed), 0.0
        shape = self.shape or (BURSTY_SHAPE if self.kind == "bursty" else 1.0)
        while True:
            yield now
            if self.is_open_loop:
                gap = 1.0 if self.kind == "fixed" else draw.gammavariate(shape, 1 / shape)
                now += gap / self.rate

    def describe(self) -> str:
        """Return a description for the report."""
        if not self.is_open_loop:
            return "as soon as there is room"
        shape = "" if self.shape is None else f", gamma shape {self.shape:g}"
        return f"{self.kind}, {self.rate:g} a second{shape}"
