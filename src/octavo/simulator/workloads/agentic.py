"""Sessions of coding agents: requests that follow one another, with prompts that mostly repeat.

Owns: the format of kv-cache-tester's sessions (a JSON line each: requests with t, in, out, api_time, think_time and
runs of 64-token block ids), and the closed loop made of it. Does not: keep the recorded durations: a request arrives
the recorded pause after the end of the one that it waited for, however long that takes here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from pathlib import Path

from octavo.simulator.arrival import Arrival
from octavo.simulator.rows import FileRow, json_rows
from octavo.simulator.workloads.source import Notes, Source, Surroundings
from octavo.simulator.workloads.spec import Spec

DEFAULT_BLOCK = 64
MAX_BLOCKS = 1 << 24  # of one prompt
_STRIDE = 1 << 40  # keys of one session, whose ids are its own


def agentic(spec: Spec, around: Surroundings) -> Source:
    """Return the sessions of a file; `every` seconds apart, or at a `rate`, by default all at once."""
    path = Path(spec.path)
    every = spec.number("every", 0.0, least=0.0)
    rate = spec.number("rate") if "rate" in spec.options else 0.0
    spec.text_of("rate")

    def source(notes: Notes) -> Iterator[Arrival]:
        clock, start = around.rng(spec, "times"), 0.0
        sessions: list[list[tuple[Arrival, int | None]]] = []
        for row in json_rows(path):
            sessions.append(_read_session(row, len(sessions), start, notes))
            start += clock.expovariate(rate) if rate else every
        yield from _by_earliest(sessions)

    return source


def _by_earliest(sessions: list[list[tuple[Arrival, int | None]]]) -> Iterator[Arrival]:
    """Yield all requests by the earliest time at which each can arrive, as if answers took no time: parents first."""
    earliest: list[list[float]] = []
    for turns in sessions:
        times: list[float] = []
        for arrival, parent in turns:
            times.append(arrival.time + (0.0 if parent is None else times[parent]))
        earliest.append(times)
    heap = [(times[place], number, place) for number, times in enumerate(earliest) for place in range(len(times))]
    heapify(heap)
    index_of: dict[tuple[int, int], int] = {}
    while heap:
        _, number, place = heappop(heap)
        arrival, parent = sessions[number][place]
        if parent is not None and (number, parent) not in index_of:
            heappush(heap, (earliest[number][place], number, place))
            continue
        index_of[number, place] = len(index_of)
        yield arrival if parent is None else replace(arrival, follows=index_of[number, parent])


def _read_session(row: FileRow, number: int, start: float, notes: Notes) -> list[tuple[Arrival, int | None]]:
    """Return requests, each with the index of the one it waited for: of those that had ended, the last to end."""
    block = row.count("block_size") if "block_size" in row.values else DEFAULT_BLOCK
    if not block:
        raise row.fault("block_size", "give at least 1")
    name = row.text("id") or f"session{number}"
    turns: list[tuple[Arrival, int | None]] = []
    ends: list[float] = []
    for request in row.rows("requests"):
        time, prompt, output = request.number("t"), request.count("in"), request.count("out")
        if not prompt:
            notes.add("without a prompt, left out")
            continue
        notes.add("answers of no token, taken as one", 0 if output else 1)
        parent = max((place for place, end in enumerate(ends) if end <= time + 1.0), key=ends.__getitem__, default=None)
        pause = max(0.0, time - ends[parent]) if parent is not None else start + time
        keys = _keys(request, number * _STRIDE)[: prompt // block]
        arrival = Arrival(pause, prompt, max(1, output), session=name, keys=keys, key_tokens=block)
        turns.append((arrival, parent))
        ends.append(time + request.number("api_time", 0.0))
    return turns


def _keys(row: FileRow, base: int) -> Sequence[int]:
    """Return block ids from runs of (first, count)."""
    runs = row.values.get("hash_runs", [])
    is_list = isinstance(runs, list) and all(isinstance(run, list) and len(run) == 2 for run in runs)
    if not is_list or not all(type(one) is int and 0 <= one < _STRIDE for run in runs for one in run):
        raise row.fault("hash_runs", "give a list of [first id, how many]")
    if sum(count for _, count in runs) > MAX_BLOCKS:
        raise row.fault("hash_runs", f"give at most {MAX_BLOCKS} blocks")
    if len(runs) == 1:
        return range(base + runs[0][0], base + runs[0][0] + runs[0][1])
    return tuple(base + one for first, count in runs for one in range(first, first + count))
