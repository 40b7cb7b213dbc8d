"""Changes to a workload before it runs: a window of it, a scaled rate, a limit, a longest length; and merging.

Owns: those, and keeping `follows` right when requests are left out or merged. Does not: draw or read.
Invariant: every request left out or shortened is counted in the notes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace

from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.workloads.source import Notes, Source

TOO_LONG = ("keep", "clip", "drop")


@dataclass(frozen=True, slots=True)
class Shaping:
    """A window, `start` to `end` in seconds of the workload's own time; `rate_scale` speeds up arrivals in it.

    `limit` requests at most. For a request longer than `max_len` tokens in all, `too_long` is clip: the prompt is
    shortened, the answer too if it takes more than half; drop: it is left out; keep: the engine refuses the
    prompt, or ends the answer there. Pauses of a closed loop belong to users and tools: no scale changes them.
    """

    seed: int = 0
    rate_scale: float = 1.0
    start: float = 0.0
    end: float = math.inf
    limit: int | None = None
    max_len: int | None = None
    too_long: str = "keep"

    def __post_init__(self) -> None:
        checks = (
            ("rate_scale", self.rate_scale, 0 < self.rate_scale < math.inf, "give a number above 0"),
            ("start", self.start, 0 <= self.start < math.inf, "give seconds of at least 0"),
            ("end", self.end, self.end > self.start, f"give seconds above the start, {self.start:g}"),
            ("limit", self.limit, self.limit is None or self.limit >= 1, "give at least 1"),
            ("max_len", self.max_len, self.max_len is None or self.max_len >= 2, "give at least 2 tokens"),
            ("too_long", self.too_long, self.too_long in TOO_LONG, f"give one of {', '.join(TOO_LONG)}"),
        )
        for name, value, is_right, remedy in checks:
            if not is_right:
                raise ConfigError(f"{name} is {value!r}; {remedy}")


def shape(
    arrivals: Iterator[Arrival], shaping: Shaping, notes: Notes, *, has_followers: bool = True
) -> Iterator[Arrival]:
    """Yield the shaped workload, its times from the window's start on. `has_followers`: some may follow others."""
    places = array("q")  # new index of each request that came in; -1: left out
    number = 0
    for arrival in arrivals:
        places.append(-1)
        if number == shaping.limit:
            return
        parent = None
        if arrival.follows is not None:
            parent = places[arrival.follows]
            if parent < 0:
                notes.add("turns of a conversation whose turn before was left out, left out")
                continue
        elif arrival.time >= shaping.end:
            if not has_followers:
                return  # open arrivals are in order: nothing of the window is left
            continue
        elif arrival.time < shaping.start:
            notes.add("before the window, left out")
            continue
        fitting = _fit(arrival, shaping, notes)
        if fitting is None:
            continue
        time = fitting.time if parent is not None else (fitting.time - shaping.start) / shaping.rate_scale
        places[-1] = number
        number += 1
        is_same = time == fitting.time and parent == fitting.follows
        yield fitting if is_same else replace(fitting, time=time, follows=parent)


def merge(sources: Sequence[Source], notes: Notes) -> Iterator[Arrival]:
    """Merge several workloads by the earliest time at which each request can arrive."""
    if len(sources) == 1:
        yield from sources[0](notes)
        return
    streams = [_Stream(source(notes), number) for number, source in enumerate(sources)]
    heap = [(stream.earliest, stream.number, stream) for stream in streams if stream.advance()]
    heap = [(stream.earliest, number, stream) for _, number, stream in heap]
    heapify(heap)
    index = 0
    while heap:
        stream = heap[0][2]
        yield stream.take(index)
        index += 1
        if stream.advance():
            heapreplace(heap, (stream.earliest, stream.number, stream))
        else:
            heappop(heap)


class _Stream:
    """One of several workloads: its next arrival, and its requests' indices in the merged workload."""

    def __init__(self, arrivals: Iterator[Arrival], number: int) -> None:
        self.number = number
        self.earliest = 0.0
        self._arrivals = arrivals
        self._next: Arrival | None = None
        self._places = array("q")
        self._times = array("d")

    def advance(self) -> bool:
        """Fetch the next arrival; return False at the end."""
        self._next = next(self._arrivals, None)
        if self._next is None:
            return False
        self.earliest = self._next.time
        if self._next.follows is not None:
            self.earliest += self._times[self._next.follows]
        return True

    def take(self, index: int) -> Arrival:
        """Return the fetched arrival, as request `index` of the merged workload."""
        arrival = self._next
        assert arrival is not None
        self._places.append(index)
        self._times.append(self.earliest)
        if arrival.follows is None:
            return arrival
        return replace(arrival, follows=self._places[arrival.follows])


def _fit(arrival: Arrival, shaping: Shaping, notes: Notes) -> Arrival | None:
    longest = shaping.max_len
    if longest is None or arrival.prompt_tokens + arrival.output_tokens <= longest:
        return arrival
    if shaping.too_long == "keep":
        notes.add(f"longer than {longest} tokens, left to the engine, which refuses such prompts and ends such answers")
        return arrival
    if shaping.too_long == "drop":
        notes.add(f"longer than {longest} tokens, left out")
        return None
    output = min(arrival.output_tokens, max(longest // 2, longest - arrival.prompt_tokens))
    prompt = min(arrival.prompt_tokens, longest - output)
    notes.add(f"longer than {longest} tokens, shortened to it")
    notes.add("prompt tokens cut", arrival.prompt_tokens - prompt)
    notes.add("output tokens cut", arrival.output_tokens - output)
    keys = arrival.keys[: prompt // arrival.key_tokens] if arrival.key_tokens else ()
    # What was generated after the whole prompt does not follow a cut one: its keys are dropped.
    return replace(arrival, prompt_tokens=prompt, output_tokens=output, keys=keys, output_keys=())
