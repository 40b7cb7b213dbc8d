"""NetworkHop: the time that requests and tokens take between a fleet's front and its engines.

Owns: the distribution, and its form in words. Does not: delay anything (run does).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

from octavo.errors import ConfigError
from octavo.simulator.kv_transfer import read_values


@dataclass(frozen=True, slots=True)
class NetworkHop:
    """Seconds of one way between the front and an engine: their mean, and their standard deviation.

    A request takes one way from its choice by the router to its engine. Its tokens and its end take another one back,
    and the router counts it as open until then.
    """

    latency_s: float
    spread_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency_s), ("spread", self.spread_s)):
            if not 0 <= value < inf:
                raise ConfigError(f"{name} of a network hop is {value:g}; give seconds of at least 0")
        if self.spread_s and not self.latency_s:
            raise ConfigError(f"a network hop has a spread of {self.spread_s:g} s and no latency; give its latency too")

    def draw(self, rng: random.Random) -> float:
        """Return the seconds of one way, from a gamma distribution: it is never negative."""
        if not self.spread_s:
            return self.latency_s
        ratio = self.spread_s / self.latency_s
        return rng.gammavariate(1 / ratio**2, self.spread_s * ratio)

    def __str__(self) -> str:
        return f"{self.latency_s * 1e3:.3g} ms, spread {self.spread_s * 1e3:.3g} ms"


def read_hop(text: str) -> NetworkHop:
    """Return the hop `latency=0.3ms,spread=0.1ms`. Raises ConfigError."""
    values = read_values(text, ("latency", "spread"))
    if values is None or not text:
        raise ConfigError(f"network hop is {text!r}; give latency=0.3ms,spread=0.1ms")
    return NetworkHop(values["latency"], values["spread"])
