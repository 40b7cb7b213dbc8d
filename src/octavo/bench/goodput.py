"""Objectives of a service (time to first token and so on, in milliseconds), and the requests that met all of them.

Owns: reading `ttft:500 tpot:50 e2e:5000`, and the judgement of one request. Does not: measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from octavo.errors import ConfigError

NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Objectives:
    """Bounds in seconds by name; without bounds, every answered request is good."""

    bounds_s: Mapping[str, float]

    @classmethod
    def read(cls, words: Iterable[str]) -> Objectives:
        """Read NAME:MILLISECONDS pairs. Raises ConfigError."""
        bounds: dict[str, float] = {}
        for word in words:
            name, colon, text = word.partition(":")
            try:
                bound = float(text) if colon else 0.0
            except ValueError:
                bound = 0.0
            if name not in NAMES or not 0 < bound < float("inf"):
                raise ConfigError(f"--goodput is {word!r}; give {', '.join(NAMES)} with milliseconds, as in ttft:500")
            if name in bounds:
                raise ConfigError(f"--goodput gives {name} twice; give it once")
            bounds[name] = bound / 1e3
        return cls(bounds)

    def are_met(self, seconds: Mapping[str, float]) -> bool:
        """Return True if a request's times are within every bound."""
        return all(seconds[name] <= bound for name, bound in self.bounds_s.items())

    def describe(self) -> dict[str, float]:
        """Return milliseconds by name."""
        return {name: bound * 1e3 for name, bound in self.bounds_s.items()}
