"""Replicas and their router on one virtual clock.

Owns: the heap of next events, the workload's arrivals, which request follows which, deaths and restarts.
Does not: step an engine (replica) or choose one (routers).
Invariants: events are in order of time, at equal times deaths first, then arrivals, then replicas by number; an idle
replica is never advanced; each request ends exactly once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf, nextafter

from octavo.core.request import FinishReason
from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.outcomes import NEVER
from octavo.simulator.replica import Replica
from octavo.simulator.routers import create_router
from octavo.simulator.setup import Setup
from octavo.simulator.tally import Open, Tally
from octavo.simulator.totals import Samples, SimulatedRun

LOOK_EVERY = 1024  # events between two checks of `give_up`
_FAILURE, _ARRIVAL, _REPLICA = 0, 1, 2


class Fleet:
    """One simulation; `run` once."""

    def __init__(self, workload: Iterable[Arrival], setup: Setup) -> None:
        self._setup = setup
        self._tally = Tally()
        self._samples = Samples()
        self._replicas = [Replica(number, setup, self._tally, self._samples) for number in range(setup.replicas)]
        self._up = self._replicas[:]
        self._router = create_router(setup.router, setup.seed)
        self._heap: list[tuple[float, int, int]] = []
        self._followers: dict[int, list[tuple[int, Arrival]]] = {}  # by the request that they follow
        self._ends = array("d")  # of each arrival, by its index
        self._coming: dict[int, Arrival] = {}  # arrivals in the heap
        self._orphans: list[Open] = []  # requests that wait while no replica is up
        self._now = 0.0
        self._num_events = 0
        self._gave_up = False
        self._last_arrival = -inf
        self._is_whole = isinstance(workload, Sequence)
        self._stream: Iterator[tuple[int, Arrival]] = self._timed(workload)

    def run(self) -> SimulatedRun:
        """Simulate until every request has ended."""
        for number, failure in enumerate(self._setup.failures):
            heappush(self._heap, (failure.time, _FAILURE, number))
        self._pull()
        heap, give_up = self._heap, self._setup.give_up
        while heap and (self._coming or self._tally.open):
            self._now, kind, number = heappop(heap)
            if kind == _REPLICA:
                self._advance(self._replicas[number])
            elif kind == _ARRIVAL:
                self._arrive(number)
            else:
                self._fail(number)
            self._num_events += 1
            if give_up is not None and self._num_events % LOOK_EVERY == 0 and give_up(self._tally, self._now):
                self._gave_up = True
                break
        return self._close()

    def _advance(self, replica: Replica) -> None:
        if replica.next_at != self._now or not replica.is_up:
            return  # an outdated entry: the replica's next_at has changed
        ended = replica.advance()
        if replica.next_at != inf:
            heappush(self._heap, (replica.next_at, _REPLICA, replica.number))
        for entry in ended:
            self._ended(entry)

    def _close(self) -> SimulatedRun:
        for entry in () if self._gave_up else list(self._tally.open.values()):  # all replicas died for good
            self._tally.end(entry, max(self._now, entry.at), FinishReason.ERROR, entry.emitted)
        if self._followers and not self._gave_up:
            names = [index for later in self._followers.values() for index, _ in later]
            raise ConfigError(f"arrival {min(names)} of the workload follows one that never came")
        for replica in self._replicas:
            replica.close()
        return SimulatedRun(
            self._tally.outcomes,
            [one.totals for one in self._replicas],
            self._tally.last_end,
            self._samples,
            self._gave_up,
        )

    # --- arrivals -----------------------------------------------------------------------------------

    def _timed(self, workload: Iterable[Arrival]) -> Iterator[tuple[int, Arrival]]:
        """Yield the arrivals that have a time of their own; register the others under the request they follow."""
        if isinstance(workload, Sequence):
            for index, arrival in enumerate(workload):
                if arrival.follows is not None:
                    self._follow(index, arrival, len(workload))
        for index, arrival in enumerate(workload):
            if arrival.follows is None:
                yield index, arrival
            elif not self._is_whole:
                self._follow(index, arrival, index)

    def _follow(self, index: int, arrival: Arrival, end: int) -> None:
        """Register a request under the one it follows, or enter it if that has ended already."""
        leader = arrival.follows
        assert leader is not None
        if not 0 <= leader < end or leader == index:
            raise ConfigError(f"arrival {index} of the workload follows {leader}; there is no such other arrival yet")
        ended = self._ends[leader] if leader < len(self._ends) else NEVER
        if ended == NEVER:
            self._followers.setdefault(leader, []).append((index, arrival))
        elif ended + arrival.time > self._now:
            self._enter(index, arrival, ended + arrival.time)
        else:
            raise ConfigError(
                f"arrival {index} of the workload follows {leader}, and was to come at {ended + arrival.time} s, which "
                f"is past at {self._now} s; give those that follow in the order of when they can come at the earliest"
            )

    def _pull(self) -> None:
        """Enter the next arrival of the workload."""
        entry = next(self._stream, None)
        if entry is None:
            return
        index, arrival = entry
        if arrival.time < self._last_arrival:
            raise ConfigError(
                f"arrival {index} of the workload comes at {arrival.time} s, after one at {self._last_arrival} s; "
                "sort it by time"
            )
        self._last_arrival = arrival.time
        self._enter(index, arrival, arrival.time)

    def _enter(self, index: int, arrival: Arrival, at: float) -> None:
        self._coming[index] = arrival
        heappush(self._heap, (at, _ARRIVAL, index))

    def _arrive(self, index: int) -> None:
        arrival = self._coming.pop(index)
        self._send(self._tally.begin(index, arrival, self._now))
        if arrival.follows is None:
            self._pull()

    def _send(self, entry: Open) -> None:
        """Give a request to a replica; keep it if none is up."""
        if not self._up:
            self._orphans.append(entry)
            return
        target = self._router.choose(entry.arrival, self._up)
        replica = self._replicas[target.number]
        before = replica.next_at
        replica.give(entry, self._now)
        if replica.next_at != before:
            heappush(self._heap, (replica.next_at, _REPLICA, replica.number))

    def _ended(self, entry: Open) -> None:
        """Enter the requests that follow this one, at a time strictly after its end."""
        if entry.index >= len(self._ends):
            self._ends.extend([NEVER] * (entry.index + 1 - len(self._ends)))
        self._ends[entry.index] = self._now
        for index, arrival in self._followers.pop(entry.index, ()):
            self._enter(index, arrival, max(self._now + arrival.time, nextafter(self._now, inf)))

    # --- deaths -------------------------------------------------------------------------------------

    def _fail(self, number: int) -> None:
        """Kill or revive a replica: number n is failure n, number n + len(failures) its restart."""
        failures = self._setup.failures
        failure = failures[number % len(failures)]
        replica = self._replicas[failure.replica]
        if number >= len(failures):
            self._revive(replica)
            return
        if not replica.is_up:
            return
        lost = replica.die(self._now)
        self._up = [one for one in self._replicas if one.is_up]
        if failure.restart_s is not None:
            heappush(self._heap, (self._now + failure.restart_s, _FAILURE, number + len(failures)))
            replica.totals.down_s += failure.restart_s
        for entry in lost:
            self._send(entry)

    def _revive(self, replica: Replica) -> None:
        replica.revive(self._now)
        self._up = [one for one in self._replicas if one.is_up]
        orphans, self._orphans = self._orphans, []
        for entry in orphans:
            self._send(entry)
