"""Generated workloads: an arrival process, lengths, prefixes that groups share, conversations and closed loops.

Owns: what is drawn, in what order. Does not: know a process's or a distribution's formula (gaps, lengths do).
Invariants: the same spec and seed give the same arrivals; requests of one group share their prefix's keys and
no others; a turn of a conversation begins with all of the turns before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice

from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.workloads.gaps import read_process
from octavo.simulator.workloads.lengths import PAIRS, Draw, quantiles, read_distribution, whole
from octavo.simulator.workloads.source import Notes, Source, Surroundings, Zipf
from octavo.simulator.workloads.spec import Spec

KEY_TOKENS = 16
DEFAULT_REQUESTS = 1000
MAX_PAIRS = 1_000_000  # of a trace from which lengths are drawn
_STRIDE = 1 << 32  # keys of one group, or of one conversation: no prompt has more blocks


def open_loop(spec: Spec, around: Surroundings) -> Source:
    """Return requests that arrive independently of the earlier ones."""
    times, lengths, prefixes, until = read_process(spec), _Lengths(spec, around), _Prefixes(spec), _Until(spec)
    if spec.kind == "all_at_once" and until.count is None:
        raise ConfigError(f"workload {spec.text!r} never ends; give requests=N")

    def source(notes: Notes) -> Iterator[Arrival]:
        clock, chance = around.rng(spec, "times"), around.rng(spec, "lengths")
        groups = around.rng(spec, "groups")
        for time in until.cut(times(clock)):
            prompt, output = lengths.draw(chance)
            yield prefixes.arrival(time, prompt, output, groups)

    return source


def closed_loop(spec: Spec, around: Surroundings) -> Source:
    """Return requests of a number of users, each sending the next one a pause after its last answer."""
    users, think = spec.count("users", 8, least=1), _distribution(spec, "think", "fixed(0)")
    lengths, prefixes, until = _Lengths(spec, around), _Prefixes(spec), _Until(spec)
    if until.count is None:
        raise ConfigError(f"workload {spec.text!r} has no end that a closed loop knows; give requests=N")
    number = until.count

    def source(notes: Notes) -> Iterator[Arrival]:
        chance, groups = around.rng(spec, "lengths"), around.rng(spec, "groups")
        # By the earliest time at which each can arrive, as if answers took none: a parent is always before its child.
        heap: list[tuple[float, int, float, int | None]] = [(0.0, user, 0.0, None) for user in range(users)]
        for index in range(number):
            nominal, user, pause, parent = heappop(heap)
            prompt, output = lengths.draw(chance)
            one = prefixes.arrival(pause, prompt, output, groups)
            yield replace(one, session=f"user{user}", follows=parent)
            pause = think(chance)
            heappush(heap, (nominal + pause, user, pause, index))

    return source


def conversations(spec: Spec, around: Surroundings) -> Source:
    """Return conversations that begin at a rate, each turn a pause after the answer before."""
    rate = spec.number("rate")
    turns, think = _distribution(spec, "turns", "geometric(4)"), _distribution(spec, "think", "exponential(10)")
    lengths, prefixes, until = _Lengths(spec, around), _Prefixes(spec), _Until(spec)

    def source(notes: Notes) -> Iterator[Arrival]:
        chance, groups, clock = (around.rng(spec, purpose) for purpose in ("lengths", "groups", "times"))
        heap: list[tuple[float, int, _Talk]] = []
        begun, next_start, index = 0, clock.expovariate(rate), 0
        while until.count is None or index < until.count:
            while not heap or heap[0][0] >= next_start:
                if until.duration is not None and next_start >= until.duration:
                    break
                length = whole(turns, chance)
                heappush(heap, (next_start, begun, _Talk(begun, length, prefixes.group(groups), pause=next_start)))
                begun, next_start = begun + 1, next_start + clock.expovariate(rate)
            if not heap:
                return
            nominal, serial, talk = heappop(heap)
            yield talk.turn(*lengths.draw(chance), prefixes, index)
            index += 1
            if talk.turns_left:
                talk.pause = think(chance)
                heappush(heap, (nominal + talk.pause, serial, talk))

    return source


@dataclass(slots=True)
class _Talk:
    """One conversation: how many tokens it has so far, and when its next turn comes."""

    serial: int
    turns_left: int
    group: int
    pause: float
    said: int = 0
    parent: int | None = None

    def turn(self, prompt: int, output: int, prefixes: _Prefixes, index: int) -> Arrival:
        """Return the next turn: all earlier tokens, and a new message."""
        said = (self.said or prefixes.length) + prompt
        keys = self._keys(said + output, prefixes)
        arrival = Arrival(
            self.pause, said, output, tenant=prefixes.name(self.group), session=f"talk{self.serial}",
            keys=keys[: said // KEY_TOKENS], key_tokens=KEY_TOKENS, output_keys=keys[said // KEY_TOKENS :],
            follows=self.parent,
        )  # fmt: skip
        self.said, self.parent, self.turns_left = said + output, index, self.turns_left - 1
        return arrival

    def _keys(self, num_tokens: int, prefixes: _Prefixes) -> tuple[int, ...]:
        shared = prefixes.length // KEY_TOKENS
        own = (self.serial + prefixes.count) * _STRIDE
        return (*prefixes.keys(self.group), *range(own, own + num_tokens // KEY_TOKENS - shared))


class _Prefixes:
    """The prefixes of groups: `prefix` tokens for each of `groups`, which are drawn by Zipf's law."""

    def __init__(self, spec: Spec) -> None:
        self.length = spec.count("prefix", 0)
        self.count = spec.count("groups", 1, least=1)
        self._as_tenants = spec.choice("group_tenants", ("no", "yes")) == "yes"
        self._zipf = Zipf(self.count, spec.number("group_zipf", 0.0, least=0.0))

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
        """Return a request of a drawn group; the part after the prefix is its own."""
        group = self.group(rng)
        keys = self.keys(group) if self.length else ()
        size = KEY_TOKENS if self.length else 0
        return Arrival(time, self.length + prompt, output, tenant=self.name(group), keys=keys, key_tokens=size)


class _Lengths:
    """Pairs of lengths: two distributions, a preset, or the pairs of a trace, drawn with replacement."""

    def __init__(self, spec: Spec, around: Surroundings) -> None:
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
            arrivals = around.open_source(words)(Notes())
            self._pairs = [(one.prompt_tokens, one.output_tokens) for one in islice(arrivals, MAX_PAIRS)]
        if words and preset is None and not self._pairs:
            raise ConfigError(
                f"workload {spec.text!r}: lengths is {words!r}; give {', '.join(PAIRS)}, or a trace as in azure:FILE"
            )

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Draw prompt and output tokens."""
        if self._pairs:
            return self._pairs[int(rng.random() * len(self._pairs))]
        return whole(self._prompt, rng), whole(self._output, rng)


class _Until:
    """The end of a generated workload: after `requests`, or `duration` seconds, whichever is first."""

    def __init__(self, spec: Spec) -> None:
        self.duration = spec.number("duration") if "duration" in spec.options else None
        spec.text_of("duration")
        default = 0 if self.duration is not None else DEFAULT_REQUESTS
        self.count = spec.count("requests", default, least=1) or None

    def cut(self, times: Iterator[float]) -> Iterator[float]:
        """Yield the times before the end."""
        for time in times if self.count is None else islice(times, self.count):
            if self.duration is not None and time >= self.duration:
                return
            yield time


def _length(spec: Spec, name: str, default: str) -> Draw:
    """Return a distribution of tokens. Raises ConfigError for one that is always 0."""
    draw, chance = _distribution(spec, name, default), random.Random(0)
    if not any(draw(chance) >= 0.5 for _ in range(64)):
        raise ConfigError(f"workload {spec.text!r}: {name} is {spec.text_of(name)!r}; give at least 1 token")
    return draw


def _distribution(spec: Spec, name: str, default: str) -> Draw:
    return read_distribution(spec.text_of(name, default), f"workload {spec.text!r}: {name}")
