"""Workloads: requests that are generated, or read from public traces or Octavo's recordings.

Owns: the known kinds; opening and merging workloads; the options of every kind; Shaping (a window, a rate factor,
limits of number and length). Does not: read a format or draw lengths (the other modules do).
Invariants: each iteration of a workload gives the same arrivals; a workload stores only its specification; the notes
count every dropped or shortened request; `follows` stays correct when requests are dropped or merged.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from pathlib import Path

from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.workloads import synthetic, traces
from octavo.simulator.workloads.spec import BuildContext, Notes, Source, Spec

MAX_TENANTS = 100_000
TOO_LONG = ("keep", "clip", "drop")


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """A kind's builder and help text; flags: the kind reads a file, its requests may follow others."""

    build: Callable[[Spec, BuildContext], Source]
    help: str
    is_file: bool = True
    has_followers: bool = False


KINDS: dict[str, WorkloadKind] = {
    **{name: WorkloadKind(synthetic.open_loop, text, False) for name, (_, text) in synthetic.PROCESSES.items()},
    "closed": WorkloadKind(
        synthetic.closed_loop, "users=8, think=2: each sends a request after its last answer", False, True
    ),
    "chat": WorkloadKind(
        synthetic.conversations, "rate=R of conversations, turns=geometric(4), think=exponential(10)", False, True
    ),
    "azure": WorkloadKind(traces.azure, "Azure LLM inference trace, 2023 or 2024 (CSV)"),
    "burstgpt": WorkloadKind(traces.burstgpt, "BurstGPT, release 1 or 2 (CSV); model=, log="),
    "mooncake": WorkloadKind(traces.mooncake, "Mooncake trace (JSON lines); round=up"),
    "servegen": WorkloadKind(traces.servegen, "ServeGen's clients (JSON lines)"),
    "agentic": WorkloadKind(
        traces.agentic, "kv-cache-tester's agent sessions (JSON lines); every=S, or rate=R", True, True
    ),
    "serving_sim": WorkloadKind(traces.serving_sim, "LLMServingSim's workload (JSON lines)"),
    "clients": WorkloadKind(traces.service_log, "CSV with client, req_time, prompt_len, output_len"),
    "requests": WorkloadKind(traces.token_file, "a workload file of octavo bench (JSON); rate=R", True, True),
    "recording": WorkloadKind(traces.recording, "a folder that octavo serve --record, or octavo fleet --record, wrote"),
}


@dataclass(frozen=True, slots=True)
class Shaping:
    """Changes to a workload: a window from `start` to `end` (workload seconds), a rate factor, a `limit` of requests.

    `too_long` applies to a request with more than `max_len` tokens in all. clip: shorten the prompt, and the answer if
    it is more than half. drop: omit the request. keep: the engine refuses the prompt, or ends the answer at `max_len`.
    `rate_scale` does not change the pauses of a closed loop, which depend on users and tools.
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


class SimulatedWorkload:
    """Arrivals that can be iterated repeatedly. `notes` counts requests that the last iteration dropped or changed."""

    def __init__(self, texts: Sequence[str], shaping: Shaping) -> None:
        self.name = " + ".join(texts)
        self._texts = tuple(texts)
        self.shaping = shaping
        self.notes = Notes()
        opened = [_open(text, shaping.seed, index) for index, text in enumerate(texts)]
        self._sources = [source for _, source in opened]
        self._has_followers = any(kind.has_followers for kind, _ in opened)

    def arrivals(self) -> Iterator[Arrival] | list[Arrival]:
        """Return a list if requests may follow others (all of those must be known at the start), else an iterator."""
        return list(self) if self._has_followers else iter(self)

    def __reduce__(self) -> tuple[type[SimulatedWorkload], tuple[Sequence[str], Shaping]]:
        return SimulatedWorkload, (self._texts, self.shaping)

    def __iter__(self) -> Iterator[Arrival]:
        self.notes = Notes()
        arrivals = _merge(self._sources, self.notes)
        return shape_arrivals(arrivals, self.shaping, self.notes, has_followers=self._has_followers)


def open_workload(texts: str | Sequence[str], shaping: Shaping | None = None) -> SimulatedWorkload:
    """Return a workload from its specification: `KIND:...` or a recording's path. Several are merged by time.

    Raises ConfigError for a wrong specification. Iteration raises errors in a file.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not texts:
        raise ConfigError("there is no workload; give one, such as poisson:rate=2")
    return SimulatedWorkload(texts, shaping or Shaping())


def _open(text: str, seed: int, index: int) -> tuple[WorkloadKind, Source]:
    """Return one workload's source. Applies the options of every kind: tenant(s), zipf, priority, ttft, tpot, sort."""
    spec = Spec(text if text.partition(":")[0] in KINDS or not Path(text).is_dir() else f"recording:{text}")
    kind = KINDS.get(spec.kind)
    if kind is None:
        remedy = f"give one of {', '.join(sorted(KINDS))}, or a recording's folder"
        raise ConfigError(f"workload {text!r}: {unknown('kind', spec.kind, KINDS, remedy)}")
    if kind.is_file and not spec.path:
        raise ConfigError(f"workload {text!r} names no file; write {spec.kind}:PATH")
    if kind.is_file and not Path(spec.path).exists():
        raise ConfigError(f"workload {text!r}: there is no {spec.path}")
    if not kind.is_file and spec.path:
        raise ConfigError(f"workload {text!r}: {spec.path!r} is no option; write name=value")
    context = BuildContext(seed, index, lambda other: _open(other, seed, index)[1])
    source = _with_tenants(spec, context, kind.build(spec, context))
    if spec.choice("sort", ("no", "yes")) == "yes":
        source = _sorted(source)
    spec.close()
    return kind, source


def _sorted(source: Source) -> Source:
    def in_order(notes: Notes) -> Iterator[Arrival]:
        arrivals = sorted(source(notes), key=lambda arrival: arrival.time)
        if any(arrival.follows is not None for arrival in arrivals):
            raise ConfigError("sort=yes is for requests with times of their own; leave it out here")
        for arrival in arrivals:
            yield replace(arrival, time=arrival.time - arrivals[0].time)

    return in_order


def _with_tenants(spec: Spec, context: BuildContext, source: Source) -> Source:
    """Wrap the source so that its requests have a tenant, a priority and objectives."""
    tenant, priority = spec.text_of("tenant"), spec.count("priority", 0)
    ttft, tpot = spec.optional_number("ttft"), spec.optional_number("tpot")
    count, exponent = spec.count("tenants", 0), spec.number("zipf", 0.0, min_value=0.0)
    if count > MAX_TENANTS:
        raise ConfigError(f"workload {spec.text!r}: tenants is {count}; give at most {MAX_TENANTS}")
    if not (tenant or priority or ttft or tpot or count):
        return source
    zipf = synthetic.Zipf(count, exponent) if count else None

    def changed(notes: Notes) -> Iterator[Arrival]:
        rng, by_session = context.rng(spec, "tenants"), dict[str, str]()
        for arrival in source(notes):
            own = tenant or arrival.tenant
            if zipf is not None:
                own = f"tenant{zipf.draw(rng)}"
                own = by_session.setdefault(arrival.session, own) if arrival.session else own
            yield replace(
                arrival,
                tenant=own,
                priority=priority or arrival.priority,
                ttft_objective=ttft or arrival.ttft_objective,
                tpot_objective=tpot or arrival.tpot_objective,
            )

    return changed


def shape_arrivals(
    arrivals: Iterator[Arrival], shaping: Shaping, notes: Notes, *, has_followers: bool = True
) -> Iterator[Arrival]:
    """Yield the shaped arrivals; times count from the window's start. `has_followers`: requests may follow others."""
    indices = array("q")  # new index of each request; -1: dropped
    number = 0
    for arrival in arrivals:
        indices.append(-1)
        if number == shaping.limit:
            return
        parent = None
        if arrival.follows is not None:
            parent = indices[arrival.follows]
            if parent < 0:
                notes.add("turns left out because an earlier turn of their conversation was left out")
                continue
        elif arrival.time >= shaping.end:
            if not has_followers:
                return  # arrivals are in order of time, so the window has ended
            continue
        elif arrival.time < shaping.start:
            notes.add("before the window, left out")
            continue
        fitting = _fit(arrival, shaping, notes)
        if fitting is None:
            continue
        time = fitting.time if parent is not None else (fitting.time - shaping.start) / shaping.rate_scale
        indices[-1] = number
        number += 1
        is_same = time == fitting.time and parent == fitting.follows
        yield fitting if is_same else replace(fitting, time=time, follows=parent)


def _merge(sources: Sequence[Source], notes: Notes) -> Iterator[Arrival]:
    """Merge several workloads by the earliest time at which each request can arrive."""
    if len(sources) == 1:
        yield from sources[0](notes)
        return
    streams = [_Stream(source(notes)) for source in sources]
    started = [(number, stream) for number, stream in enumerate(streams) if stream.advance()]
    heap = [(stream.earliest, number, stream) for number, stream in started]
    heapify(heap)
    index = 0
    while heap:
        _, number, stream = heap[0]
        yield stream.take(index)
        index += 1
        if stream.advance():
            heapreplace(heap, (stream.earliest, number, stream))
        else:
            heappop(heap)


class _Stream:
    """One of several workloads: its next arrival, and its requests' indices in the merged workload."""

    def __init__(self, arrivals: Iterator[Arrival]) -> None:
        self.earliest = 0.0
        self._arrivals = arrivals
        self._next: Arrival | None = None
        self._indices = array("q")
        self._times = array("d")

    def advance(self) -> bool:
        """Fetch the next arrival; return False at the end of the stream."""
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
        self._indices.append(index)
        self._times.append(self.earliest)
        if arrival.follows is None:
            return arrival
        return replace(arrival, follows=self._indices[arrival.follows])


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
    # Drop the output's keys: the output of the whole prompt does not continue a shortened prompt.
    return replace(arrival, prompt_tokens=prompt, output_tokens=output, keys=keys, output_keys=())
