"""Simulates a workload on one engine, or on several behind a router, on one virtual clock.

Owns: the event heap; the workload's arrivals; requests that follow other requests; network hops; failures and restarts.
Does not: step an engine (replica), choose one (fleet.routing), judge the outcome (summary).
Invariants: equal workload and setup give an equal SimulatedRun, with fast_forward or without. Events are in order of
time; at equal times failures come first, then scaling, transfers, hops, arrivals, and replicas by number. An idle
replica is never advanced. Each request ends exactly once.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf, nextafter

from octavo.core.request import FinishReason
from octavo.errors import ConfigError
from octavo.fleet.routing import create_router
from octavo.observe.recording.reader import rare_collections
from octavo.simulator.arrival import Arrival
from octavo.simulator.kv_transfer import KVTransfer, KVTransfers
from octavo.simulator.lockstep import LockStep
from octavo.simulator.outcomes import NEVER, RequestTracker, Samples, SimulatedRequest, SimulatedRun
from octavo.simulator.pipeline import PipelineStages, Stepper
from octavo.simulator.replica import Replica
from octavo.simulator.scaling import ReplicaLifetime, ReplicaStatus, ScaledGroup
from octavo.simulator.setup import ReplicaGroup, Role, Setup

LOOK_EVERY = 256  # events between two checks of `give_up`
_FAILURE, _SCALING, _TRANSFER, _HOP, _ARRIVAL, _REPLICA = 0, 1, 2, 3, 4, 5


def simulate(workload: Iterable[Arrival], setup: Setup) -> SimulatedRun:
    """Simulate a workload to its end.

    `workload` must be in order of time. In a sequence, a request that follows another one may be anywhere. In an
    iterator it must come after that one, in order of the requests' earliest possible arrivals. Raises ConfigError.
    """
    with rare_collections():
        return _Fleet(workload, setup).run()


class _Pool:
    """The engines among which a router chooses, and the requests that wait for one of them to be up."""

    def __init__(self, setup: Setup) -> None:
        self.router = create_router(setup.router, setup.seed)
        self.up: list[Replica] = []
        self.unrouted: list[SimulatedRequest] = []


class _Fleet:
    """One simulation. Call `run` once."""

    def __init__(self, workload: Iterable[Arrival], setup: Setup) -> None:
        self._setup = setup
        self._tracker = RequestTracker()
        self._samples = Samples()
        self._replicas: list[Replica] = []  # all engines
        self._parts: list[list[Stepper]] = []  # what steps by itself, of each replica of the setup
        self._members: list[list[Replica]] = []  # the engines of each replica
        self._steppers: list[Stepper] = []  # the same, of each engine
        self._replica_of: list[int] = []  # the number of each engine's replica
        self._scaled: list[ScaledGroup] = []
        self._draining: dict[int, ScaledGroup] = {}  # replicas that get no new requests and stop after their last one
        self._entrance = _Pool(setup)  # of requests that arrive
        self._decoders = _Pool(setup) if setup.is_disaggregated else self._entrance  # of those that are handed over
        self._pool_of: list[_Pool] = []  # of each replica
        for group in setup.fleet:
            self._add(group)
        self._note_up()
        self._transfers: KVTransfers | None = None
        if setup.link is not None:
            devices = [
                group.replica.kv_devices for group in setup.fleet for _ in range(group.most * group.replica.num_engines)
            ]
            self._transfers = KVTransfers(setup.link, setup.kv_token_bytes, devices)
        self._moving: dict[int, tuple[SimulatedRequest, KVTransfer]] = {}  # by index of the request
        self._transferred: list[KVTransfer] = []
        self._hop, self._hop_rng = setup.hop, random.Random(f"hops {setup.seed}")
        self._crossing: dict[int, SimulatedRequest] = {}  # between the router and an engine, by index of the request
        self._handover_end = min(group.replica.limits.max_model_len for group in setup.fleet)
        self._heap: list[tuple[float, int, int]] = []
        self._followers: dict[int, list[tuple[int, Arrival]]] = {}  # followed request -> its followers
        self._ends = array("d")  # end of each request, by index
        self._arriving: dict[int, Arrival] = {}  # arrivals in the heap
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
        for number, scaled in enumerate(self._scaled):
            heappush(self._heap, (scaled.rule.every_s, _SCALING, number))
        self._pull()
        heap, give_up = self._heap, self._setup.give_up
        while heap and (self._arriving or self._tracker.open or self._crossing):
            self._now, kind, number = heappop(heap)
            if kind == _REPLICA:
                self._advance(self._steppers[number])
            elif kind == _ARRIVAL:
                self._arrive(number)
            elif kind == _TRANSFER:
                self._end_transfer(number)
            elif kind == _HOP:
                self._end_hop(number)
            elif kind == _SCALING:
                self._scale(number)
            else:
                self._fail(number)
            self._num_events += 1
            if give_up is not None and self._num_events % LOOK_EVERY == 0 and give_up(self._tracker, self._now):
                self._gave_up = True
                break
        return self._close()

    def _add(self, group: ReplicaGroup) -> None:
        """Add the replicas of a group. With a scaling rule, those that may start later are down."""
        first = len(self._parts)
        for _ in range(group.most):
            self._add_replica(group)
        if group.scaling is not None:
            numbers = range(first, first + group.most)
            num_engines = group.replica.num_engines
            self._scaled.append(ScaledGroup(group.name, group.scaling, numbers, group.replicas, num_engines))
            for number in numbers[group.replicas :]:
                for one in (*self._members[number], *self._parts[number]):
                    one.is_up = False

    def _add_replica(self, group: ReplicaGroup) -> None:
        """Add the engines of a replica: for each pipeline stage, its ranks."""
        part = group.replica
        self._pool_of.append(self._decoders if group.role is Role.DECODE else self._entrance)
        self._replica_of += [len(self._parts)] * part.num_engines
        first_engine = len(self._replicas)
        stages = None if part.pipeline is None else PipelineStages(part.pipeline)
        own_stages = stages if part.ranks == 1 else None
        steppers: list[Stepper] = []
        for _ in range(part.num_engines // part.ranks):
            first = len(self._replicas)
            ranks = [
                Replica(number, self._setup, self._tracker, self._samples, part, own_stages)
                for number in range(first, first + part.ranks)
            ]
            for rank in ranks:
                rank.totals.group = group.name
            self._replicas += ranks
            stepper = ranks[0] if part.ranks == 1 else LockStep(ranks, self._setup.depth, stages)
            self._steppers += [stepper] * part.ranks
            steppers.append(stepper)
        self._parts.append(steppers)
        self._members.append(self._replicas[first_engine:])

    def _advance(self, stepper: Stepper) -> None:
        if stepper.next_at != self._now or not stepper.is_up:
            return  # an outdated entry: the stepper's next_at has changed
        ended = stepper.advance()
        if stepper.next_at != inf:
            heappush(self._heap, (stepper.next_at, _REPLICA, stepper.number))
        for entry in ended:
            self._ended(entry)
        if self._tracker.reserved:
            self._begin_transfers()
        if self._draining:
            self._stop_drained(self._replica_of[stepper.number])

    def _note_up(self) -> None:
        """Note which engines may get requests."""
        for pool in (self._entrance, self._decoders):
            pool.up = []
        for engine, number in zip(self._replicas, self._replica_of, strict=True):
            if engine.is_up and number not in self._draining:
                self._pool_of[number].up.append(engine)

    def _close(self) -> SimulatedRun:
        for entry in () if self._gave_up else list(self._tracker.open.values()):  # all replicas failed for good
            self._tracker.end(entry, max(self._now, entry.at), FinishReason.ERROR, entry.emitted)
        if self._followers and not self._gave_up:
            names = [index for later in self._followers.values() for index, _ in later]
            raise ConfigError(f"arrival {min(names)} of the workload follows one that never arrived")
        for replica in self._replicas:
            replica.close()
        lifetimes = [life for scaled in self._scaled for life in scaled.lifetimes]
        self._count_held(lifetimes)
        return SimulatedRun(
            self._tracker.outcomes,
            [one.totals for one in self._replicas],
            self._tracker.last_end,
            self._samples,
            self._gave_up,
            lifetimes,
            self._transferred,
        )

    def _count_held(self, lifetimes: list[ReplicaLifetime]) -> None:
        """Count the seconds in which the devices of scaled replicas were held, from the first arrival to the end."""
        first, last = min(self._tracker.outcomes.arrivals, default=0.0), self._tracker.last_end
        for number in (number for scaled in self._scaled for number in scaled.numbers):
            lives = [life for life in lifetimes if life.replica == number]
            held = sum(max(0.0, min(life.end, last) - max(life.begin, first)) for life in lives)
            for engine in self._members[number]:
                engine.totals.up_s = held

    # --- arrivals

    def _timed(self, workload: Iterable[Arrival]) -> Iterator[tuple[int, Arrival]]:
        """Yield the arrivals that follow no request; register each other one under the request that it follows."""
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
        """Register a request under the one that it follows; if that one has ended, schedule the arrival."""
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
                f"arrival {index} of the workload follows {leader}, and arrives at {ended + arrival.time} s, which "
                f"is past at {self._now} s; sort those that follow by their earliest times of arrival"
            )

    def _pull(self) -> None:
        """Add the workload's next arrival to the heap."""
        entry = next(self._stream, None)
        if entry is None:
            return
        index, arrival = entry
        if arrival.time < self._last_arrival:
            raise ConfigError(
                f"arrival {index} of the workload arrives at {arrival.time} s, after one at {self._last_arrival} s; "
                "sort it by time"
            )
        self._last_arrival = arrival.time
        self._enter(index, arrival, arrival.time)

    def _enter(self, index: int, arrival: Arrival, at: float) -> None:
        self._arriving[index] = arrival
        heappush(self._heap, (at, _ARRIVAL, index))

    def _arrive(self, index: int) -> None:
        arrival = self._arriving.pop(index)
        self._send(self._tracker.begin(index, arrival, self._now))
        if arrival.follows is None:
            self._pull()

    def _send(self, entry: SimulatedRequest) -> None:
        """Submit a request to a replica, or store the request if no replica is up."""
        pool = self._entrance if entry.source < 0 else self._decoders
        if not pool.up:
            pool.unrouted.append(entry)
            return
        self._replicas[pool.router.choose(entry.arrival, pool.up).number].bind(entry)
        if self._transfers is not None and entry.source < 0:
            self._plan_handover(entry)
        if self._hop is None:
            self._deliver(entry)
        else:
            entry.back_s = self._hop.draw(self._hop_rng)
            self._begin_hop(entry, self._hop.draw(self._hop_rng))

    def _deliver(self, entry: SimulatedRequest) -> None:
        """Give a request to the replica that it is bound to."""
        stepper = self._steppers[entry.replica]
        before = stepper.next_at
        self._replicas[entry.replica].submit(entry, self._now)
        stepper.wake(self._now)
        if stepper.next_at != before:
            heappush(self._heap, (stepper.next_at, _REPLICA, stepper.number))

    def _begin_hop(self, entry: SimulatedRequest, seconds: float) -> None:
        self._crossing[entry.index] = entry
        heappush(self._heap, (self._now + seconds, _HOP, entry.index))

    def _end_hop(self, index: int) -> None:
        """Handle a request that reaches its engine, or whose end reaches the router."""
        entry = self._crossing.pop(index)
        if entry.name in self._tracker.open:
            self._deliver(entry)
        else:
            self._note_end(entry)
            if self._draining:
                self._stop_drained(self._replica_of[entry.replica])

    def _ended(self, entry: SimulatedRequest) -> None:
        """Tell the router of an end, or of a request that is to be handed over."""
        if self._hop is None:
            self._note_end(entry)
        else:
            self._begin_hop(entry, entry.back_s)

    def _note_end(self, entry: SimulatedRequest) -> None:
        """Schedule the requests that follow this one, strictly after its end; or hand this one over."""
        self._replicas[entry.replica].release(entry)
        if entry.handover_at and entry.handed != NEVER:
            entry.source, entry.handover_at = entry.replica, 0
            self._send(entry)
            return
        if entry.source >= 0 and entry.reserved == NEVER:  # the decode replica has refused it
            self._note_moved(entry.source, entry, has_arrived=False)
        if entry.index >= len(self._ends):
            self._ends.extend([NEVER] * (entry.index + 1 - len(self._ends)))
        self._ends[entry.index] = self._now
        for index, arrival in self._followers.pop(entry.index, ()):
            self._enter(index, arrival, max(self._now + arrival.time, nextafter(self._now, inf)))

    # --- failures

    def _fail(self, number: int) -> None:
        """Fail or restart a replica. Number n is failure n; number n + len(failures) is the restart after failure n."""
        failures = self._setup.failures
        failure = failures[number % len(failures)]
        steppers = self._parts[failure.replica]
        if number >= len(failures):
            self._make_ready(failure.replica)
            return
        if not steppers[0].is_up:
            return
        may_restart = failure.restart_s is not None
        for scaled in self._scaled:
            if failure.replica in scaled.numbers:
                self._draining.pop(failure.replica, None)
                may_restart = scaled.fail(failure.replica, self._now, failure.restart_s)
        lost = sorted(
            (entry for stepper in steppers for entry in stepper.fail(self._now)),
            key=lambda entry: (entry.at, entry.index),
        )
        self._note_up()
        if failure.restart_s is not None and may_restart:
            heappush(self._heap, (self._now + failure.restart_s, _FAILURE, number + len(failures)))
            for engine, stepper in zip(self._replicas, self._steppers, strict=True):
                engine.totals.down_s += failure.restart_s if stepper in steppers else 0.0
        for entry in lost:
            self._send(entry)

    def _make_ready(self, number: int) -> None:
        """Start a replica whose start-up ends now, unless the start was given up meanwhile."""
        if not all(scaled.make_ready(number, self._now) for scaled in self._scaled if number in scaled.numbers):
            return
        for stepper in self._parts[number]:
            stepper.restart(self._now)
        self._note_up()
        pool = self._pool_of[number]
        unrouted, pool.unrouted = pool.unrouted, []
        for entry in unrouted:
            self._send(entry)

    # --- requests that are handed over

    def _plan_handover(self, entry: SimulatedRequest) -> None:
        """Set after which token a prefill replica hands a request over; none if that token is its last one."""
        arrival, count = entry.arrival, entry.emitted + 1
        if arrival.choices:
            raise ConfigError(
                f"arrival {entry.index} has {len(arrival.choices)} choices; prefill and decode replicas serve one "
                "choice of each request"
            )
        is_last = count >= arrival.output_tokens or arrival.prompt_tokens + count >= self._handover_end
        entry.handover_at = 0 if is_last else count

    def _begin_transfers(self) -> None:
        """Begin the transfers of requests that have blocks at their decode replica now."""
        reserved, self._tracker.reserved = self._tracker.reserved, []
        for entry, num_cached in reserved:
            assert self._transfers is not None
            tokens = entry.arrival.prompt_tokens + entry.emitted - 1 - num_cached
            if tokens < 1:  # all is cached there
                self._note_moved(entry.source, entry, has_arrived=False)
                continue
            transfer = self._transfers.begin(entry.source, entry.replica, tokens, entry.handed, self._now)
            self._moving[entry.index] = entry, transfer
            heappush(self._heap, (transfer.ends, _TRANSFER, entry.index))

    def _end_transfer(self, index: int) -> None:
        entry, transfer = self._moving.pop(index)
        self._transferred.append(transfer)
        self._note_moved(transfer.source, entry, has_arrived=False)
        self._note_moved(transfer.target, entry, has_arrived=True)

    def _note_moved(self, number: int, entry: SimulatedRequest, has_arrived: bool) -> None:
        """Tell an engine that a request's KV has left or has arrived."""
        stepper = self._steppers[number]
        before = stepper.next_at
        self._replicas[number].note_moved(entry, self._now, has_arrived)
        stepper.wake(self._now)
        if stepper.next_at != before:
            heappush(self._heap, (stepper.next_at, _REPLICA, stepper.number))

    # --- scaling

    def _scale(self, number: int) -> None:
        """Look at the load of a scaled group. A number beyond those of the groups is of a replica that is ready now."""
        if number >= len(self._scaled):
            self._make_ready(number - len(self._scaled))
            return
        scaled = self._scaled[number]
        started, drained = scaled.decide(self._now, self._load_of(scaled))
        for replica in started:
            heappush(self._heap, (self._now + scaled.rule.start_s, _SCALING, len(self._scaled) + replica))
        self._draining |= dict.fromkeys(drained, scaled)
        if drained:
            self._note_up()
        for replica in drained:
            self._stop_drained(replica)
        heappush(self._heap, (self._now + scaled.rule.every_s, _SCALING, number))

    def _load_of(self, scaled: ScaledGroup) -> float:
        """Return the load of a group's ready replicas, and of requests that wait for one, in replicas at the target."""
        ready = [self._members[number] for number in scaled.with_status(ReplicaStatus.READY)]
        unrouted = self._pool_of[scaled.numbers[0]].unrouted
        if scaled.rule.metric == "requests":
            num_open = sum(engine.num_open for engines in ready for engine in engines)
            return (num_open + len(unrouted)) / scaled.rule.target
        shares = [sum(map(self._pool_share, engines)) / len(engines) for engines in ready]
        return max(sum(shares) / scaled.rule.target, 1.0 if unrouted else 0.0)

    def _pool_share(self, engine: Replica) -> float:
        """Return the share of an engine's KV pool that requests hold."""
        stepper = self._steppers[engine.number]
        before, share = stepper.next_at, engine.pool_share(self._now)
        if stepper.next_at != before:
            heappush(self._heap, (stepper.next_at, _REPLICA, stepper.number))
        return share

    def _stop_drained(self, number: int) -> None:
        """Stop a replica if it drains, has no request any more, and is idle."""
        scaled, steppers = self._draining.get(number), self._parts[number]
        is_busy = any(engine.num_open for engine in self._members[number])
        if scaled is None or is_busy or any(stepper.next_at != inf for stepper in steppers):
            return
        for stepper in steppers:
            stepper.stop(self._now)
        del self._draining[number]
        scaled.stop(number, self._now)
