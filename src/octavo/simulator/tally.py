"""Tally: the state of each request while a simulation runs, and its entry in the outcomes when it ends.

Owns: open requests, and reading decisions and tokens from a commit. Does not: drive anything.
"""

from __future__ import annotations

from octavo.core.plan import Event, EventKind, Events
from octavo.core.request import FinishReason
from octavo.simulator.arrival import Arrival
from octavo.simulator.outcomes import NEVER, Outcomes


class Open:
    """A request that arrived and has not ended. `emitted`: tokens given before its replica's last death."""

    __slots__ = (
        "arrival", "at", "cached", "counts", "emitted", "first", "index", "name", "preemptions", "replica", "restarts",
        "start",
    )  # fmt: skip

    def __init__(self, index: int, arrival: Arrival, at: float) -> None:
        self.index = index
        self.name = f"r{index}"
        self.arrival = arrival
        self.at = at
        self.start = NEVER
        self.first = NEVER
        self.emitted = 0
        self.counts = [0] * len(arrival.choices)  # tokens of each choice, if there are several
        self.cached = 0
        self.preemptions = 0
        self.restarts = 0
        self.replica = -1


class Tally:
    """Open requests by name, and the outcomes of those that ended."""

    def __init__(self) -> None:
        self.outcomes = Outcomes()
        self.open: dict[str, Open] = {}
        self._several: dict[str, Open] = {}
        self.last_end = 0.0

    def begin(self, index: int, arrival: Arrival, at: float) -> Open:
        """Add a request that arrives."""
        entry = Open(index, arrival, at)
        self.open[entry.name] = entry
        if arrival.choices:
            self._several[entry.name] = entry
        return entry

    def decided(self, decisions: tuple[Event, ...]) -> list[Open]:
        """Record decisions; return the requests that ended."""
        ended = []
        for event in decisions:
            kind = event.kind
            if kind == EventKind.ADMITTED:
                entry = self.open[event.request_id]
                if entry.start == NEVER:
                    entry.start = event.time
                    entry.cached = event.cached_tokens
            elif kind == EventKind.FINISHED:
                assert event.finish_reason is not None
                entry = self.open[event.request_id]
                self.end(entry, event.time, event.finish_reason, event.num_tokens)
                ended.append(entry)
            elif kind == EventKind.PREEMPTED:
                self.open[event.request_id].preemptions += 1
        return ended

    def given(self, events: Events) -> None:
        """Record first tokens."""
        positions, at = events.positions, 0
        for _ in range(positions.count(0)):
            at = positions.index(0, at)
            entry = self.open[events.request_ids[at]]
            if entry.first == NEVER:
                entry.first = events.time
            at += 1

    def due(self, events: Events) -> list[tuple[str, int]]:
        """Count the tokens of requests with several choices; return the choices that have all of theirs."""
        if not self._several:
            return []
        due = []
        for name, choice in zip(events.request_ids, events.choices, strict=True):
            entry = self._several.get(name)
            if entry is not None:
                entry.counts[choice] += 1
                if entry.counts[choice] == entry.arrival.choices[choice]:
                    due.append((name, choice))
        return due

    def end(self, entry: Open, at: float, reason: FinishReason, num_tokens: int) -> None:
        """Move a request to the outcomes."""
        del self.open[entry.name]
        self._several.pop(entry.name, None)
        self.last_end = max(self.last_end, at)
        out, arrival = self.outcomes, entry.arrival
        out.indices.append(entry.index)
        out.arrivals.append(entry.at)
        out.starts.append(entry.start)
        out.first_tokens.append(entry.first)
        out.ends.append(at)
        out.prompt_tokens.append(arrival.prompt_tokens)
        out.output_tokens.append(num_tokens)
        out.longest.append(max(entry.counts, default=num_tokens))
        out.cached.append(entry.cached)
        out.preemptions.append(entry.preemptions)
        out.restarts.append(entry.restarts)
        out.replicas.append(entry.replica)
        out.tenants.append(out.tenant(arrival.tenant))
        out.reasons.append(reason)
