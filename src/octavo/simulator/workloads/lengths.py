"""Distributions of prompt, answer and pause lengths, written as `512`, `lognormal(512,0.8)`, ...

Owns: the distributions and their parsing. Does not: draw from a file's pairs (synthetic does), or know arrivals.
Invariant: a draw is a number of at least 0, decided by the generator's state alone.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence

from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.simulator.workloads.spec import read_call, read_number

Draw = Callable[[random.Random], float]

# Deciles and tails of the public Azure traces of 2023 (Patel et al., Splitwise, ISCA 2024; CC-BY-4.0), measured: (per
# cent, prompt tokens, output tokens). The marginals only: prompt and output are drawn independently.
AZURE_CONV = (
    (0, 2, 7), (1, 29, 16), (5, 181, 41), (10, 207, 54), (25, 396, 85), (50, 1020, 129), (75, 1189, 395),
    (90, 2735, 424), (95, 4083, 451), (99, 4142, 601), (99.9, 6212, 954), (100, 14050, 1000),
)  # fmt: skip
AZURE_CODE = (
    (0, 3, 6), (1, 17, 6), (5, 75, 6), (10, 147, 7), (25, 578, 9), (50, 1469, 13), (75, 2745, 24), (90, 5194, 55),
    (95, 7315, 90), (99, 7436, 252), (99.9, 7437, 831), (100, 7437, 1899),
)  # fmt: skip
PAIRS = {"azure_conv": AZURE_CONV, "azure_code": AZURE_CODE}


def read_distribution(text: str, where: str) -> Draw:
    """Parse a distribution. Raises ConfigError naming `where`."""
    name, words = read_call(text, where)
    if name in ("quantiles", "empirical"):
        return _read_quantiles(words, where)
    if name not in _NAMED:
        raise ConfigError(f"{where} is {text!r}: {unknown('distribution', name, [*_NAMED, 'quantiles'])}")
    make, names = _NAMED[name]
    values = [read_number(word) for word in words]
    if len(values) != len(names) or any(value is None or not math.isfinite(value) or value < 0 for value in values):
        raise ConfigError(f"{where} is {text!r}; write {name}({','.join(names)}) with numbers of at least 0")
    return make(*(value for value in values if value is not None), where)


def quantiles(points: Sequence[tuple[float, float]], *, is_log: bool = False) -> Draw:
    """Return a draw by inverse transform over (per cent, value), linear between points, or linear in log(value).

    Below the first and above the last point, it gives their values.
    """
    shares = [share / 100 for share, _ in points]
    values = [math.log(max(value, 1.0)) if is_log else value for _, value in points]

    def draw(rng: random.Random) -> float:
        share = rng.random()
        place = bisect_right(shares, share)
        if place in (0, len(shares)):
            value = values[0 if place == 0 else -1]
        else:
            part = (share - shares[place - 1]) / (shares[place] - shares[place - 1])
            value = values[place - 1] + part * (values[place] - values[place - 1])
        return math.exp(value) if is_log else value

    return draw


def whole(draw: Draw, rng: random.Random, least: int = 1) -> int:
    """Return a draw as a whole number of tokens."""
    return max(least, round(draw(rng)))


def _fixed(value: float, where: str) -> Draw:
    return lambda rng: value


def _uniform(low: float, high: float, where: str) -> Draw:
    if low > high:
        raise ConfigError(f"{where} is uniform({low:g},{high:g}); give the smaller bound first")
    return lambda rng: low + (high - low) * rng.random()


def _lognormal(median: float, sigma: float, where: str) -> Draw:
    if not median or sigma > 8:
        raise ConfigError(f"{where} is lognormal({median:g},{sigma:g}); give a median above 0 and a sigma up to 8")
    return lambda rng: median * math.exp(rng.gauss(0.0, sigma))


def _normal(mean: float, sigma: float, where: str) -> Draw:
    return lambda rng: max(0.0, rng.gauss(mean, sigma))


def _exponential(mean: float, where: str) -> Draw:
    return lambda rng: -mean * math.log1p(-rng.random())


def _geometric(mean: float, where: str) -> Draw:
    if mean < 1:
        raise ConfigError(f"{where} is geometric({mean:g}); give a mean of at least 1")
    if mean == 1:
        return lambda rng: 1.0
    base = math.log1p(-1 / mean)
    return lambda rng: 1.0 + math.floor(math.log1p(-rng.random()) / base)


def _pareto(least: float, alpha: float, where: str) -> Draw:
    if not least or alpha <= 0:
        raise ConfigError(f"{where} is pareto({least:g},{alpha:g}); give a least value and an alpha above 0")
    return lambda rng: min(least * (1.0 - rng.random()) ** (-1 / alpha), 1e9)


_NAMED: dict[str, tuple[Callable[..., Draw], tuple[str, ...]]] = {
    "fixed": (_fixed, ("value",)),
    "uniform": (_uniform, ("low", "high")),
    "lognormal": (_lognormal, ("median", "sigma")),
    "normal": (_normal, ("mean", "sigma")),
    "exponential": (_exponential, ("mean",)),
    "geometric": (_geometric, ("mean",)),
    "pareto": (_pareto, ("least", "alpha")),
}


def _read_quantiles(words: Sequence[str], where: str) -> Draw:
    points: list[tuple[float, float]] = []
    for word in words:
        share, value = (read_number(part) for part in (*word.split(":"), "", "")[:2])
        if share is None or value is None or not 0 <= share <= 100 or not 0 <= value < math.inf:
            raise ConfigError(
                f"{where}: {word!r} is no quantile; write PERCENT:VALUE, as in quantiles(0:8,50:200,100:4K)"
            )
        if points and not (share > points[-1][0] and value >= points[-1][1]):
            raise ConfigError(f"{where}: {word!r} does not rise; give the quantiles in order")
        points.append((share, value))
    if len(points) < 2:
        raise ConfigError(f"{where} has {len(points)} quantiles; give at least two, as in quantiles(0:8,100:4K)")
    return quantiles(points)
