"""ServeGen's client pools (Xiang et al., 2025): each client's rate and burstiness by windows, and its length quantiles.

Owns: reading the clients, drawing each one's requests, merging them in time. Does not: scale a rate (shaping does).
Invariant: a window's mean rate is the measured one, whatever the shape of its gaps.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import merge
from pathlib import Path

from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.rows import FileRow, json_rows
from octavo.simulator.workloads.lengths import Draw, quantiles, whole
from octavo.simulator.workloads.source import Notes, Source, Surroundings
from octavo.simulator.workloads.spec import Spec

MAX_CLIENTS = 10_000


@dataclass(frozen=True, slots=True)
class _Window:
    """From `start` on, `rate` requests a second with gaps of a unit mean."""

    start: float
    rate: float
    gap: Callable[[random.Random], float]


@dataclass(frozen=True, slots=True)
class _Client:
    name: str
    windows: list[_Window]
    end: float
    prompt: Draw
    output: Draw

    def times(self, rng: random.Random) -> Iterator[float]:
        """Yield a renewal process on the clock of expected arrivals: gaps of mean 1, mapped to time by the rates."""
        starts = [window.start for window in self.windows]
        now, place = self.windows[0].start, 0
        while True:
            left = self.windows[place].gap(rng)
            while True:
                window = self.windows[place]
                end = self.windows[place + 1].start if place + 1 < len(self.windows) else self.end
                room = (end - now) * window.rate
                if left < room:
                    now += left / window.rate
                    break
                left -= room
                now, place = end, place + 1
                if place == len(self.windows):
                    return
            yield now
            place = max(place, bisect_right(starts, now) - 1)


def servegen(spec: Spec, around: Surroundings) -> Source:
    """Read the clients of a pool, each one a tenant."""
    path = Path(spec.path)

    def source(notes: Notes) -> Iterator[Arrival]:
        clients: list[_Client] = []
        for row in json_rows(path):
            if len(clients) == MAX_CLIENTS:
                raise ConfigError(f"{path} has more than {MAX_CLIENTS} clients; split it")
            clients.append(_read_client(row))
        if not clients:
            raise ConfigError(f"{path} has no client; give ServeGen's clients as JSON lines")
        yield from merge(*(_requests(one, spec, around) for one in clients), key=lambda arrival: arrival.time)

    return source


def _requests(client: _Client, spec: Spec, around: Surroundings) -> Iterator[Arrival]:
    clock, chance = (around.rng(spec, f"{purpose} of {client.name}") for purpose in ("times", "lengths"))
    for time in client.times(clock):
        yield Arrival(time, whole(client.prompt, chance), whole(client.output, chance), tenant=client.name)


def _read_client(row: FileRow) -> _Client:
    windows, last = [], -math.inf
    raw = row.values.get("windows")
    if not isinstance(raw, list) or not raw:
        raise row.fault("windows", "give a list of [start, rate, variation, family, shape, scale]")
    for place, values in enumerate(raw):
        window = _read_window(values)
        if window is None or window.start <= last:
            raise ConfigError(
                f"{row.path}, line {row.line}, column windows[{place}]: {values!r}; give rising starts, as in "
                "[600, 93.5, 1.04, 'Gamma', 0.93, 0.0115]"
            )
        windows.append(window)
        last = window.start
    span = windows[1].start - windows[0].start if len(windows) > 1 else 600.0
    lengths = [_read_quantiles(row, name) for name in ("input_tokens", "output_tokens")]
    return _Client(f"client{row.text('client') or row.line}", windows, last + span, *lengths)


def _read_window(values: object) -> _Window | None:
    if not isinstance(values, list) or len(values) not in (3, 6):
        return None
    numbers = [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    if len(numbers) != len(values) - (len(values) == 6) or min(numbers[:2]) < 0:
        return None
    if len(values) == 3:
        return _Window(values[0], values[1], lambda rng: rng.expovariate(1.0))
    family, shape = values[3], float(values[4])
    if shape <= 0.01 or shape > 1e4 or family not in ("Gamma", "Weibull"):
        return None
    if family == "Gamma":
        return _Window(values[0], values[1], lambda rng: rng.gammavariate(shape, 1 / shape))
    scale = 1 / math.gamma(1 + 1 / shape)
    return _Window(values[0], values[1], lambda rng: rng.weibullvariate(scale, shape))


def _read_quantiles(row: FileRow, name: str) -> Draw:
    shares, table = row.values.get("quantile_pcts"), row.values.get("quantiles")
    values = table.get(name) if isinstance(table, dict) else None
    if not isinstance(shares, list) or not isinstance(values, list) or len(shares) != len(values) or not shares:
        raise row.fault("quantiles", f"give quantile_pcts, and as many numbers in quantiles.{name}")
    if not all(isinstance(value, (int, float)) and 0 <= value < 1e9 for value in (*shares, *values)):
        raise row.fault("quantiles", f"give numbers of at least 0 in quantiles.{name}")
    if sorted(shares) != shares or sorted(values) != values:
        raise row.fault("quantiles", f"give rising quantile_pcts and quantiles.{name}")
    return quantiles(list(zip(shares, values, strict=True)))
