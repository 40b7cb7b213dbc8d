"""Generated workloads: arrival processes, distributions of lengths, shared prefixes, conversations and closed loops.

Owns: the random draws, their order and their formulas. Does not: read files.
Invariants: the same spec and seed give the same arrivals; times never decrease; requests of one group share the keys of
the group's prefix and no others; a conversation's turn begins with all tokens of its earlier turns.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, islice

from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.workloads.spec import BuildContext, Notes, Source, Spec, read_call, read_number

KEY_TOKENS = 16
DEFAULT_REQUESTS = 1000
MAX_PAIRS = 1_000_000  # maximum pairs of lengths that are read from a trace
_STRIDE = 1 << 32  # number of keys reserved for one group or conversation: no prompt has more blocks

# --- arrival processes: a rate and a random generator give the times of requests

Times = Callable[[random.Random], Iterator[float]]


def _poisson(spec: Spec) -> Times:
    return _renewal(spec.number("rate"), _unit_gap)


def _constant(spec: Spec) -> Times:
    rate = spec.number("rate")

    def times(rng: random.Random) -> Iterator[float]:
        number = 0
        while True:
            yield number / rate
            number += 1

    return times


def _bursty(spec: Spec) -> Times:
    """Return a process with gamma-distributed gaps; a coefficient of variation of 1 is a Poisson process."""
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
    """Return a process that alternates `on` seconds of Poisson arrivals at `rate` with `off` seconds without any."""
    rate, on_s, off_s = spec.number("rate"), spec.number("on", 10.0), spec.number("off", 10.0, min_value=0.0)

    def times(rng: random.Random) -> Iterator[float]:
        busy = 0.0  # elapsed seconds of `on` time
        while True:
            busy += _unit_gap(rng) / rate
            yield busy + off_s * (busy // on_s)

    return times


def _mmpp(spec: Spec) -> Times:
    """Return a Markov-modulated Poisson process: the rate switches between `low` and `high` at exponential times."""
    rates = (spec.number("high"), spec.number("low", min_value=0.0))
    stays = (spec.number("high_s", 10.0), spec.number("low_s", 30.0))

    def times(rng: random.Random) -> Iterator[float]:
        now, state = 0.0, 1
        until = _unit_gap(rng) * stays[state]
        while True:
            # Exponential gaps are memoryless, so draw a new gap at a change of rate.
            gap = _unit_gap(rng) / rates[state] if rates[state] else math.inf
            if now + gap < until:
                now += gap
                yield now
            else:
                now, state = until, 1 - state
                until = now + _unit_gap(rng) * stays[state]

    return times


def _wave(spec: Spec) -> Times:
    """Return a Poisson process with a sinusoidal rate: amplitude `swing` x rate, `period` s (Lewis, Shedler 1979)."""
    rate, period = spec.number("rate"), spec.number("period", 86400.0)
    swing = spec.number("swing", 0.5, min_value=0.0)
    if swing > 1:
        raise ConfigError(f"workload {spec.text!r}: swing is {swing:g}; give 0 to 1")

    def times(rng: random.Random) -> Iterator[float]:
        now, peak = 0.0, rate * (1 + swing)
        while True:
            now += _unit_gap(rng) / peak
            if rng.random() * peak < rate * (1 - swing * math.cos(2 * math.pi * now / period)):
                yield now

    return times


def _burst(spec: Spec) -> Times:
    """Return a process in which all requests arrive at time 0."""

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


def _unit_gap(rng: random.Random) -> float:
    return -math.log1p(-rng.random())


# Name -> (builder, help text).
PROCESSES: dict[str, tuple[Callable[[Spec], Times], str]] = {
    "poisson": (_poisson, "rate=R"),
    "constant": (_constant, "rate=R, equal gaps"),
    "bursty": (_bursty, "rate=R, cv=2: gamma gaps of that coefficient of variation"),
    "weibull": (_weibull, "rate=R, shape=0.5"),
    "onoff": (_on_off, "rate=R for on=10 seconds, nothing for off=10"),
    "mmpp": (_mmpp, "low=R, high=R, high_s=10, low_s=30: Poisson that changes its rate at random"),
    "wave": (_wave, "rate=R, swing=0.5, period=86400: Poisson whose rate rises and falls in a day"),
    "all_at_once": (_burst, "requests=N at the start"),
}

# --- distributions of prompt, answer and pause lengths, written as `512`, `lognormal(512,0.8)`, ...
# A draw is a number of at least 0 that depends only on the generator's state.

Draw = Callable[[random.Random], float]

# Measured deciles and tails of the public Azure traces of 2023 (Patel et al., Splitwise, ISCA 2024; CC-BY-4.0), as (per
# cent, prompt tokens, output tokens). Prompt and output are drawn independently from these marginal distributions.
AZURE_CONV = (
    (0, 2, 7), (1, 29, 16), (5, 181, 41), (10, 207, 54), (25, 396, 85), (50, 1020, 129), (75, 1189, 395),
    (90, 2735, 424), (95, 4083, 451), (99, 4142, 601), (99.9, 6212, 954), (100, 14050, 1000),
)  # fmt: skip
AZURE_CODE = (
    (0, 3, 6), (1, 17, 6), (5, 75, 6), (10, 147, 7), (25, 578, 9), (50, 1469, 13), (75, 2745, 24), (90, 5194, 55),
    (95, 7315, 90), (99, 7436, 252), (99.9, 7437, 831), (100, 7437, 1899),
)  # fmt: skip
PAIRS = {"azure_conv": AZURE_CONV, "azure_code": AZURE_CODE}


def read_distribution(text: str, option: str) -> Draw:
    """Parse a distribution. Raises ConfigError naming the option."""
    name, words = read_call(text, option)
    if name in ("quantiles", "empirical"):
        return _read_quantiles(words, option)
    if name not in _NAMED:
        raise ConfigError(f"{option} is {text!r}: {unknown('distribution', name, [*_NAMED, 'quantiles'])}")
    make, names = _NAMED[name]
    values = [read_number(word) for word in words]
    if len(values) != len(names) or any(value is None or not math.isfinite(value) or value < 0 for value in values):
        raise ConfigError(f"{option} is {text!r}; write {name}({','.join(names)}) with numbers of at least 0")
    return make(*(value for value in values if value is not None), option)


def quantiles(points: Sequence[tuple[float, float]]) -> Draw:
    """Return a draw by inverse transform over (per cent, value), linear between points.

    Below the first point and above the last one, the draw is that point's value.
    """
    shares = [share / 100 for share, _ in points]
    values = [value for _, value in points]

    def draw(rng: random.Random) -> float:
        share = rng.random()
        right = bisect_right(shares, share)
        if right in (0, len(shares)):
            return values[0 if right == 0 else -1]
        part = (share - shares[right - 1]) / (shares[right] - shares[right - 1])
        return values[right - 1] + part * (values[right] - values[right - 1])

    return draw


def draw_tokens(draw: Draw, rng: random.Random) -> int:
    """Return a draw as a whole number of tokens, at least 1."""
    return max(1, round(draw(rng)))


def _fixed(value: float, option: str) -> Draw:
    return lambda rng: value


def _uniform(low: float, high: float, option: str) -> Draw:
    if low > high:
        raise ConfigError(f"{option} is uniform({low:g},{high:g}); give the smaller bound first")
    return lambda rng: low + (high - low) * rng.random()


def _lognormal(median: float, sigma: float, option: str) -> Draw:
    if not median or sigma > 8:
        raise ConfigError(f"{option} is lognormal({median:g},{sigma:g}); give a median above 0 and a sigma up to 8")
    return lambda rng: median * math.exp(rng.gauss(0.0, sigma))


def _normal(mean: float, sigma: float, option: str) -> Draw:
    return lambda rng: max(0.0, rng.gauss(mean, sigma))


def _exponential(mean: float, option: str) -> Draw:
    return lambda rng: -mean * math.log1p(-rng.random())


def _geometric(mean: float, option: str) -> Draw:
    if mean < 1:
        raise ConfigError(f"{option} is geometric({mean:g}); give a mean of at least 1")
    if mean == 1:
        return lambda rng: 1.0
    base = math.log1p(-1 / mean)
    return lambda rng: 1.0 + math.floor(math.log1p(-rng.random()) / base)


def _pareto(low: float, alpha: float, option: str) -> Draw:
    if not low or alpha <= 0:
        raise ConfigError(f"{option} is pareto({low:g},{alpha:g}); give a least value and an alpha above 0")
    return lambda rng: min(low * (1.0 - rng.random()) ** (-1 / alpha), 1e9)


_NAMED: dict[str, tuple[Callable[..., Draw], tuple[str, ...]]] = {
    "fixed": (_fixed, ("value",)),
    "uniform": (_uniform, ("low", "high")),
    "lognormal": (_lognormal, ("median", "sigma")),
    "normal": (_normal, ("mean", "sigma")),
    "exponential": (_exponential, ("mean",)),
    "geometric": (_geometric, ("mean",)),
    "pareto": (_pareto, ("least", "alpha")),
}


def _read_quantiles(words: Sequence[str], option: str) -> Draw:
    points: list[tuple[float, float]] = []
    for word in words:
        share, value = (read_number(part) for part in (*word.split(":"), "", "")[:2])
        if share is None or value is None or not 0 <= share <= 100 or not 0 <= value < math.inf:
            raise ConfigError(
                f"{option}: {word!r} is no quantile; write PERCENT:VALUE, as in quantiles(0:8,50:200,100:4K)"
            )
        if points and not (share > points[-1][0] and value >= points[-1][1]):
            raise ConfigError(f"{option}: {word!r} does not rise; give the quantiles in order")
        points.append((share, value))
    if len(points) < 2:
        raise ConfigError(f"{option} has {len(points)} quantiles; give at least two, as in quantiles(0:8,100:4K)")
    return quantiles(points)


class Zipf:
    """Draws 0 .. count - 1, the k-th with weight 1 / (k + 1) ** exponent; an exponent of 0 is uniform."""

    def __init__(self, count: int, exponent: float) -> None:
        self._bounds = list(accumulate((index + 1) ** -exponent for index in range(count)))

    def draw(self, rng: random.Random) -> int:
        """Draw a number."""
        return min(bisect_right(self._bounds, rng.random() * self._bounds[-1]), len(self._bounds) - 1)


# --- workloads


def open_loop(spec: Spec, context: BuildContext) -> Source:
    """Return requests that arrive independently of earlier requests."""
    make_times, _ = PROCESSES[spec.kind]
    times, lengths, prefixes, until = make_times(spec), _Lengths(spec, context), _Prefixes(spec), _Until(spec)
    if spec.kind == "all_at_once" and until.count is None:
        raise ConfigError(f"workload {spec.text!r} never ends; give requests=N")

    def source(notes: Notes) -> Iterator[Arrival]:
        clock, chance = context.rng(spec, "times"), context.rng(spec, "lengths")
        groups = context.rng(spec, "groups")
        for time in until.cut(times(clock)):
            prompt, output = lengths.draw(chance)
            yield prefixes.arrival(time, prompt, output, groups)

    return source


def closed_loop(spec: Spec, context: BuildContext) -> Source:
    """Return the requests of `users` users. A user sends the next request a pause after the previous answer."""
    users, think = spec.count("users", 8, min_value=1), _distribution(spec, "think", "fixed(0)")
    lengths, prefixes, until = _Lengths(spec, context), _Prefixes(spec), _Until(spec)
    if until.count is None:
        raise ConfigError(f"workload {spec.text!r} has no end that a closed loop knows; give requests=N")
    number = until.count

    def source(notes: Notes) -> Iterator[Arrival]:
        chance, groups = context.rng(spec, "lengths"), context.rng(spec, "groups")
        # Ordered by earliest possible arrival (as if answers took no time), so that a parent precedes its child.
        heap: list[tuple[float, int, float, int | None]] = [(0.0, user, 0.0, None) for user in range(users)]
        for index in range(number):
            nominal, user, pause, parent = heappop(heap)
            prompt, output = lengths.draw(chance)
            one = prefixes.arrival(pause, prompt, output, groups)
            yield replace(one, session=f"user{user}", follows=parent)
            pause = think(chance)
            heappush(heap, (nominal + pause, user, pause, index))

    return source


def conversations(spec: Spec, context: BuildContext) -> Source:
    """Return conversations that begin at a rate. Each turn arrives a pause after the previous answer."""
    rate = spec.number("rate")
    turns, think = _distribution(spec, "turns", "geometric(4)"), _distribution(spec, "think", "exponential(10)")
    lengths, prefixes, until = _Lengths(spec, context), _Prefixes(spec), _Until(spec)

    def source(notes: Notes) -> Iterator[Arrival]:
        chance, groups, clock = (context.rng(spec, purpose) for purpose in ("lengths", "groups", "times"))
        heap: list[tuple[float, int, _Conversation]] = []
        num_started, next_start, index = 0, clock.expovariate(rate), 0
        while until.count is None or index < until.count:
            while not heap or heap[0][0] >= next_start:
                if until.duration is not None and next_start >= until.duration:
                    break
                length = draw_tokens(turns, chance)
                started = _Conversation(num_started, length, prefixes.group(groups), pause=next_start)
                heappush(heap, (next_start, num_started, started))
                num_started, next_start = num_started + 1, next_start + clock.expovariate(rate)
            if not heap:
                return
            nominal, serial, conversation = heappop(heap)
            yield conversation.turn(*lengths.draw(chance), prefixes, index)
            index += 1
            if conversation.turns_left:
                conversation.pause = think(chance)
                heappush(heap, (nominal + conversation.pause, serial, conversation))

    return source


@dataclass(slots=True)
class _Conversation:
    """One conversation: its number of tokens so far, and the pause before its next turn."""

    serial: int
    turns_left: int
    group: int
    pause: float
    num_tokens: int = 0
    parent: int | None = None

    def turn(self, prompt: int, output: int, prefixes: _Prefixes, index: int) -> Arrival:
        """Return the next turn. Its prompt has all earlier tokens and a new message."""
        prompt += self.num_tokens or prefixes.length
        shared = prefixes.length // KEY_TOKENS
        own = (self.serial + prefixes.count) * _STRIDE
        keys = (*prefixes.keys(self.group), *range(own, own + (prompt + output) // KEY_TOKENS - shared))
        arrival = Arrival(
            self.pause, prompt, output, tenant=prefixes.name(self.group), session=f"talk{self.serial}",
            keys=keys[: prompt // KEY_TOKENS], key_tokens=KEY_TOKENS, output_keys=keys[prompt // KEY_TOKENS :],
            follows=self.parent,
        )  # fmt: skip
        self.num_tokens, self.parent, self.turns_left = prompt + output, index, self.turns_left - 1
        return arrival


class _Prefixes:
    """Shared prefixes: `groups` groups, each with its own prefix of `prefix` tokens. Groups are drawn by Zipf's law."""

    def __init__(self, spec: Spec) -> None:
        self.length = spec.count("prefix", 0)
        self.count = spec.count("groups", 1, min_value=1)
        self._as_tenants = spec.choice("group_tenants", ("no", "yes")) == "yes"
        self._zipf = Zipf(self.count, spec.number("group_zipf", 0.0, min_value=0.0))

    def group(self, rng: random.Random) -> int:
        """Draw a group."""
        return self._zipf.draw(rng) if self.count > 1 else 0

    def name(self, group: int) -> str:
        """Return the group's tenant name if groups are tenants, else ""."""
        return f"group{group}" if self._as_tenants else ""

    def keys(self, group: int) -> range:
        """Return the keys of the group's full prefix blocks."""
        return range(group * _STRIDE, group * _STRIDE + self.length // KEY_TOKENS)

    def arrival(self, time: float, prompt: int, output: int, rng: random.Random) -> Arrival:
        """Return a request of a random group. Only the group's prefix is shared with other requests."""
        group = self.group(rng)
        keys = self.keys(group) if self.length else ()
        size = KEY_TOKENS if self.length else 0
        return Arrival(time, self.length + prompt, output, tenant=self.name(group), keys=keys, key_tokens=size)


class _Lengths:
    """A source of (prompt, output) lengths: two distributions, a preset, or a trace's pairs drawn with replacement."""

    def __init__(self, spec: Spec, context: BuildContext) -> None:
        words = spec.text_of("lengths")
        preset = PAIRS.get(words)
        self._prompt: Draw = _length(spec, "prompt", "lognormal(512,0.8)")
        self._output: Draw = _length(spec, "output", "lognormal(128,0.7)")
        self._pairs: list[tuple[int, int]] = []
        if words and ("prompt" in spec.options or "output" in spec.options):
            raise ConfigError(f"workload {spec.text!r} gives lengths twice; give lengths=, or prompt= and output=")
        if preset is not None:
            self._prompt = quantiles([(share, prompt) for share, prompt, _ in preset])
            self._output = quantiles([(share, output) for share, _, output in preset])
        elif ":" in words:
            arrivals = context.open_source(words)(Notes())
            self._pairs = [(one.prompt_tokens, one.output_tokens) for one in islice(arrivals, MAX_PAIRS)]
        if words and preset is None and not self._pairs:
            raise ConfigError(
                f"workload {spec.text!r}: lengths is {words!r}; give {', '.join(PAIRS)}, or a trace as in azure:FILE"
            )

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Draw prompt and output tokens."""
        if self._pairs:
            return self._pairs[int(rng.random() * len(self._pairs))]
        return draw_tokens(self._prompt, rng), draw_tokens(self._output, rng)


class _Until:
    """The end of a generated workload: `requests` requests or `duration` seconds, whichever is reached first."""

    def __init__(self, spec: Spec) -> None:
        self.duration = spec.optional_number("duration")
        default = 0 if self.duration is not None else DEFAULT_REQUESTS
        self.count = spec.count("requests", default, min_value=1) or None

    def cut(self, times: Iterator[float]) -> Iterator[float]:
        """Yield the times before the end."""
        for time in times if self.count is None else islice(times, self.count):
            if self.duration is not None and time >= self.duration:
                return
            yield time


def _length(spec: Spec, name: str, default: str) -> Draw:
    """Return a distribution of token counts. Raises ConfigError if the distribution is always 0."""
    draw, chance = _distribution(spec, name, default), random.Random(0)
    if not any(draw(chance) >= 0.5 for _ in range(64)):
        raise ConfigError(f"workload {spec.text!r}: {name} is {spec.text_of(name)!r}; give at least 1 token")
    return draw


def _distribution(spec: Spec, name: str, default: str) -> Draw:
    return read_distribution(spec.text_of(name, default), f"workload {spec.text!r}: {name}")
