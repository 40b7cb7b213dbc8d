"""LockStep: the data-parallel ranks of a model with experts, which step together.

Owns: when the steps of a group begin and end. Does not: schedule (each rank has its own scheduler), or price a step.
Ranks meet in each layer's experts, because the tokens of all ranks are spread over the experts of all. So all ranks
begin and end each step together, it takes as long as that of the slowest rank, and a rank without a plan computes one
dummy token while another rank has a plan. If no rank has one, the group is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from octavo.core.plan import StepPlan
from octavo.simulator.cost_model import StepShape, shape_of
from octavo.simulator.outcomes import SimulatedRequest
from octavo.simulator.pipeline import PipelineStages
from octavo.simulator.replica import MIN_WAIT_S, Replica, StepInFlight

DUMMY_TOKENS = 1  # what a rank without a plan computes


class LockStep:
    """A group of ranks, stepped together. Its caller calls `advance` at `next_at`, as with a Replica.

    Every rank makes its plans at the group's turns. Ranks of a group fail and restart together.
    """

    def __init__(self, ranks: Sequence[Replica], depth: int, stages: PipelineStages | None = None) -> None:
        assert len(ranks) > 1, "a group of one rank is a Replica"
        self.number = ranks[0].number
        self.next_at = inf
        self._ranks = ranks
        self._depth = depth
        self._stages = stages
        self._start()

    def _start(self) -> None:
        self._flight: deque[list[tuple[Replica, StepInFlight]]] = deque()
        self._is_retiring = False
        self._is_idle, self._idle_since = True, 0.0
        self._free_at = 0.0
        self.next_at = inf

    @property
    def is_up(self) -> bool:
        """True unless the group has failed."""
        return self._ranks[0].is_up

    def wake(self, at: float) -> None:
        """Note that a rank got a request at `at`."""
        if self._is_idle:
            self._is_idle, self.next_at = False, max(at, self._idle_since)

    def fail(self, at: float) -> list[SimulatedRequest]:
        """Drop the state of all ranks; return their open requests, in order of arrival."""
        lost = [entry for rank in self._ranks for entry in rank.fail(at)]
        self._start()
        return sorted(lost, key=lambda entry: (entry.at, entry.index))

    def stop(self, at: float) -> None:
        """Drop all state of ranks without open requests."""
        for rank in self._ranks:
            rank.stop(at)
        self._start()

    def restart(self, at: float) -> None:
        """Restart all ranks with empty caches."""
        for rank in self._ranks:
            rank.restart(at)
        self._idle_since = at

    def advance(self) -> list[SimulatedRequest]:
        """Run the turn or the commits that are due at `next_at`; return the requests that ended."""
        return self._retire() if self._is_retiring else self._turn()

    def _turn(self) -> list[SimulatedRequest]:
        """Let every rank admit its queued requests, then plan steps up to the depth."""
        now, self._is_idle = self.next_at, False
        ended = [entry for rank in self._ranks for entry in rank.admit_queued(now)]
        shapes: list[StepShape | None] = [None] * len(self._ranks)  # of the first step
        wake_at = None
        while len(self._flight) < self._depth:
            plans = []
            for rank in self._ranks:
                plan, ended_now = rank.plan(now)
                ended += ended_now
                plans.append(plan)
            if all(plan.is_empty for plan in plans):
                wake_at = min((plan.wake_at for plan in plans if plan.wake_at is not None), default=None)
                break
            peers = _peer_tokens(plans)
            if not any(shapes):
                shapes = [shape_of(plan, peers[place]) if plan.slots else None for place, plan in enumerate(plans)]
            self._launch(plans, peers, now)
        for rank, shape in zip(self._ranks, shapes, strict=True):
            rank.sample_plan(shape)
        if self._flight:
            self._is_retiring = True
            self.next_at = max(now, self._flight[0][0][1].end)
        else:
            self._is_idle, self._idle_since = True, now
            self.next_at = inf if wake_at is None else max(wake_at, now + MIN_WAIT_S)
        return ended

    def _launch(self, plans: Sequence[StepPlan], peers: Sequence[tuple[int, ...]], now: float) -> None:
        """Queue one plan of each rank on the devices."""
        flights = [
            (rank, rank.price(plan, of_others))
            for rank, plan, of_others in zip(self._ranks, plans, peers, strict=True)
            if not plan.is_empty
        ]
        step_s = max(flight.step_s + flight.drafting_s for _, flight in flights)
        begin, most_tokens = max(now, self._free_at), max(max(of_others) for of_others in peers)
        self._free_at = begin + step_s if self._stages is None else self._stages.run(begin, step_s, most_tokens)
        for _, flight in flights:
            flight.end = self._free_at
            if flight.plan.slots:
                flight.step_s = step_s - flight.drafting_s  # a rank waits for the slowest one
        self._flight.append(flights)

    def _retire(self) -> list[SimulatedRequest]:
        """Commit the oldest step of every rank, and advance by the slowest host."""
        now, flights = self.next_at, self._flight.popleft()
        ended = [entry for rank, flight in flights for entry in rank.commit(flight, now)]
        self._is_retiring = False
        self.next_at = now + max(flight.host_s for _, flight in flights)
        return ended


def _peer_tokens(plans: Sequence[StepPlan]) -> list[tuple[int, ...]]:
    """Return, for each plan, the tokens of the others. Without a plan, a rank computes dummy tokens."""
    tokens = [max(DUMMY_TOKENS, plan.num_query_tokens) for plan in plans]
    return [(*tokens[:place], *tokens[place + 1 :]) for place in range(len(tokens))]
