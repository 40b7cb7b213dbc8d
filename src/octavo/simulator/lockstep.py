"""LockStep: the data-parallel ranks of a model with experts, which step together.

Owns: when the steps of a group begin and end. Does not: schedule (each rank has its own scheduler), or price a step.
Ranks meet in each layer's experts, because the tokens of all ranks are spread over the experts of all. So all ranks
begin and end each step together, it takes as long as that of the slowest rank, and a rank without a plan computes one
dummy token while another rank has a plan. If no rank has one, the group is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from octavo.core.plan import StepPlan
from octavo.simulator.cost_model import StepShape, shape_of
from octavo.simulator.outcomes import SimulatedRequest
from octavo.simulator.pipeline import PipelineStages, Stepper
from octavo.simulator.replica import Replica, StepInFlight

DUMMY_TOKENS = 1  # what a rank without a plan computes


class LockStep(Stepper):
    """A group of ranks. Every rank makes its plans at the group's turns. Ranks fail and restart together."""

    def __init__(self, ranks: Sequence[Replica], depth: int, stages: PipelineStages | None = None) -> None:
        assert len(ranks) > 1, "a group of one rank is a Replica"
        super().__init__(ranks[0].number, stages)
        self._ranks = ranks
        self._depth = depth
        self._flight: deque[list[tuple[Replica, StepInFlight]]] = deque()

    def fail(self, at: float) -> list[SimulatedRequest]:
        """Drop the state of all ranks; return their open requests, in order of arrival."""
        lost = [entry for rank in self._ranks for entry in rank.fail(at)]
        self._drop()
        return sorted(lost, key=lambda entry: (entry.at, entry.index))

    def stop(self, at: float) -> None:
        """Drop all state of ranks without open requests."""
        for rank in self._ranks:
            rank.stop(at)
        self._drop()

    def _drop(self) -> None:
        self.is_up = False
        self._flight.clear()
        self._clear()

    def restart(self, at: float) -> None:
        """Restart all ranks with empty caches."""
        for rank in self._ranks:
            rank.restart(at)
        super().restart(at)

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
        self._end_turn(now, self._flight[0][0][1].end if self._flight else None, wake_at)
        return ended

    def _launch(self, plans: Sequence[StepPlan], peers: Sequence[tuple[int, ...]], now: float) -> None:
        """Queue one plan of each rank on the devices."""
        flights = [
            (rank, rank.price(plan, of_others))
            for rank, plan, of_others in zip(self._ranks, plans, peers, strict=True)
            if not plan.is_empty
        ]
        step_s = max(flight.step_s + flight.drafting_s for _, flight in flights)
        end = self._compute(now, step_s, max(max(of_others) for of_others in peers))
        for _, flight in flights:
            flight.end = end
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
