"""Arrival processes: times of requests, from a rate and a random generator.

Owns: the processes. Does not: say what arrives. Invariant: times never fall; the same state gives the same times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from octavo.errors import ConfigError
from octavo.simulator.workloads.spec import Spec

Times = Callable[[random.Random], Iterator[float]]


def read_process(spec: Spec) -> Times:
    """Return the process that a spec's kind and options name."""
    return _PROCESSES[spec.kind](spec)


def _poisson(spec: Spec) -> Times:
    return _renewal(spec.number("rate"), _exponential)


def _constant(spec: Spec) -> Times:
    rate = spec.number("rate")

    def times(rng: random.Random) -> Iterator[float]:
        number = 0
        while True:
            yield number / rate
            number += 1

    return times


def _bursty(spec: Spec) -> Times:
    """Return gaps of a gamma distribution: a coefficient of variation of 1 is Poisson, 2 twice as bursty."""
    rate, shape = spec.number("rate"), spec.number("cv", 2.0) ** -2
    if not 1e-4 <= shape <= 1e4:
        raise ConfigError(f"workload {spec.text!r}: cv is {shape**-0.5:g}; give 0.01 to 100")
    return _renewal(rate, lambda rng: rng.gammavariate(shape, 1 / shape))


def _weibull(spec: Spec) -> Times:
    rate, shape = spec.number("rate"), spec.number("shape", 0.5)
    if not 0.05 <= shape <= 20:
        raise ConfigError(f"workload {spec.text!r}: shape is {shape:g}; give 0.05 to 20 (1 = Poisson, less = burstier)")
    scale = 1 / math.gamma(1 + 1 / shape)
    return _renewal(rate, lambda rng: rng.weibullvariate(scale, shape))


def _on_off(spec: Spec) -> Times:
    """Return a process that is Poisson at `rate` for `on` seconds, silent for `off` seconds, and repeats."""
    rate, on_s, off_s = spec.number("rate"), spec.number("on", 10.0), spec.number("off", 10.0, least=0.0)

    def times(rng: random.Random) -> Iterator[float]:
        busy = 0.0  # seconds of `on` time so far
        while True:
            busy += _exponential(rng) / rate
            yield busy + off_s * (busy // on_s)

    return times


def _mmpp(spec: Spec) -> Times:
    """Return a Poisson process whose rate changes between `low` and `high` at exponential times (Markov-modulated)."""
    rates = (spec.number("high"), spec.number("low", least=0.0))
    stays = (spec.number("high_s", 10.0), spec.number("low_s", 30.0))

    def times(rng: random.Random) -> Iterator[float]:
        now, state = 0.0, 1
        until = _exponential(rng) * stays[state]
        while True:
            # Exponential gaps have no memory, so the gap is drawn anew at a change of rate.
            gap = _exponential(rng) / rates[state] if rates[state] else math.inf
            if now + gap < until:
                now += gap
                yield now
            else:
                now, state = until, 1 - state
                until = now + _exponential(rng) * stays[state]

    return times


def _wave(spec: Spec) -> Times:
    """Return a Poisson process whose rate varies by `swing` of it each `period` s (thinning: Lewis, Shedler 1979)."""
    rate, period = spec.number("rate"), spec.number("period", 86400.0)
    swing = spec.number("swing", 0.5, least=0.0)
    if swing > 1:
        raise ConfigError(f"workload {spec.text!r}: swing is {swing:g}; give 0 to 1")

    def times(rng: random.Random) -> Iterator[float]:
        now, peak = 0.0, rate * (1 + swing)
        while True:
            now += _exponential(rng) / peak
            if rng.random() * peak < rate * (1 - swing * math.cos(2 * math.pi * now / period)):
                yield now

    return times


def _burst(spec: Spec) -> Times:
    """Return a process in which all requests arrive at 0."""

    def times(rng: random.Random) -> Iterator[float]:
        while True:
            yield 0.0

    return times


def _renewal(rate: float, gap: Callable[[random.Random], float]) -> Times:
    def times(rng: random.Random) -> Iterator[float]:
        now = 0.0
        while True:
            now += gap(rng) / rate
            yield now

    return times


def _exponential(rng: random.Random) -> float:
    return -math.log1p(-rng.random())


_PROCESSES: dict[str, Callable[[Spec], Times]] = {
    "poisson": _poisson,
    "constant": _constant,
    "bursty": _bursty,
    "weibull": _weibull,
    "onoff": _on_off,
    "mmpp": _mmpp,
    "wave": _wave,
    "all_at_once": _burst,
}
PROCESSES = tuple(_PROCESSES)
