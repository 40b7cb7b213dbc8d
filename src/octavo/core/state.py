"""Everything the scheduler knows between two calls, and the moves that keep it whole.

Owns: requests, queues, cache, slots, plans in flight, the event log; finish and preempt, the two ways out
of the running list. Does not: compose plans (planning) or read results (committing).
Invariants: see invariants.check.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from math import ceil

from octavo.core.budget import Budget
from octavo.core.kv.cache import KVCache, Publication
from octavo.core.limits import Limits
from octavo.core.plan import Event, EventKind, StepPlan, WaitReason
from octavo.core.policy import Judge, create_policy
from octavo.core.queues import Deadlines, RunningList, WaitingQueue, rerank
from octavo.core.request import FinishReason, RequestState, Sequence, Status


@dataclass(slots=True)
class Flight:
    """One plan on its way: the sequences of its rows, and what it made findable before it ran."""

    plan: StepPlan
    rows: list[Sequence]
    published: list[Publication]


@dataclass(slots=True)
class Totals:
    """Counters since the start: steps committed, tokens computed, sampled and recomputed, and so on."""

    num_steps: int = 0
    num_failed_steps: int = 0
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_admitted: int = 0
    num_swapped_out_tokens: int = 0
    num_swapped_in_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_forks: int = 0
    num_copies: int = 0
    num_adopted_blocks: int = 0  # full blocks given up for an equal one that was there before
    num_bypasses: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {reason.name.lower(): 0 for reason in FinishReason})


class State:
    """The scheduler's memory."""

    __slots__ = (
        "cache",
        "deadlines",
        "events",
        "finished_ids",
        "flight",
        "free_slots",
        "freed_slots",
        "is_draining",
        "is_paused",
        "judge",
        "limits",
        "next_order",
        "policy",
        "preempted_ids",
        "requests",
        "running",
        "sequence_budget",
        "step",
        "token_budget",
        "totals",
        "waiting",
    )

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.policy = create_policy(limits.policy, limits)
        self.judge = Judge(self.policy)
        self.cache = KVCache(limits)
        self.requests: dict[str, RequestState] = {}
        self.waiting = WaitingQueue()
        self.running = RunningList()
        self.deadlines = Deadlines()
        self.token_budget = Budget(limits.max_batch_tokens)
        self.sequence_budget = Budget(limits.max_sequences)
        self.flight: deque[Flight] = deque()
        self.free_slots = list(range(limits.max_sequences - 1, -1, -1))
        self.freed_slots: array[int] = array("i")  # to be told to the executor with the next plan
        self.finished_ids: list[str] = []
        self.preempted_ids: list[str] = []
        self.events: list[Event] = []
        self.totals = Totals()
        self.step = 0
        self.next_order = 0
        self.is_paused = False
        self.is_draining = False

    @property
    def headroom_blocks(self) -> int:
        """Blocks that an admission must leave free."""
        share = self.policy.headroom if self.limits.headroom is None else self.limits.headroom
        return ceil(share * min(self.limits.num_blocks) - 1e-9)  # 0.07 * 100 is 7.000000000000001

    def finish(
        self,
        request: RequestState,
        now: float,
        reason: FinishReason,
        stop_id: int | None = None,
        message: str | None = None,
    ) -> None:
        """End a request: everything it holds is free at once, and the one terminal event is written."""
        if request.status == Status.RUNNING:
            self._leave_running(request)
            self.finished_ids.append(request.name)
        else:
            request.status = Status.FINISHED
            self.waiting.remove(request)
            if request.first_scheduled_at is not None:
                self.finished_ids.append(request.name)
        request.status = Status.FINISHED
        del self.requests[request.name]
        self.totals.finished[reason.name.lower()] += 1
        outputs = sum(sequence.num_committed - sequence.num_prompt for sequence in request.sequences)
        self.events.append(
            Event(
                EventKind.FINISHED,
                request.name,
                now,
                self.step,
                num_tokens=outputs,
                cached_tokens=request.cached_tokens,
                finish_reason=reason,
                stop_token_id=stop_id,
                message=message,
            )
        )

    def preempt(self, request: RequestState, now: float, by: str | None, reason: WaitReason | None) -> None:
        """Put a running request back at its place in the waiting order; its outputs and counters stay."""
        computed = sum(sequence.num_scheduled for sequence in request.sequences)
        self._leave_running(request)
        request.status = Status.WAITING
        request.is_decoding = False
        request.num_preemptions += 1
        request.deferred_version = -1
        request.wait_reason = -1
        rerank(request, self.judge)
        self.waiting.add(request)
        self.preempted_ids.append(request.name)
        self.totals.num_preemptions += 1
        self.events.append(
            Event(
                EventKind.PREEMPTED,
                request.name,
                now,
                self.step,
                reason=reason,
                num_tokens=computed,
                by=by,
            )
        )

    def start_decoding(self, request: RequestState) -> None:
        """The request caught up with its known tokens: its policy may rank it anew."""
        request.is_decoding = True
        if self.judge.rank(request) != request.rank:
            self.running.remove(request)
            rerank(request, self.judge)
            self.running.add(request)

    def enter_running(self, request: RequestState) -> None:
        """Give the request's sequences their slots and its place among the running."""
        request.status = Status.RUNNING
        for sequence in request.sequences:
            sequence.slot = self.free_slots.pop()
        self.sequence_budget.take(len(request.sequences))
        rerank(request, self.judge)
        self.running.add(request)

    def _leave_running(self, request: RequestState) -> None:
        self.running.remove(request)
        self.sequence_budget.give_back(len(request.sequences))
        for sequence in request.sequences:
            self.cache.release(sequence)
            self.freed_slots.append(sequence.slot)
            self.free_slots.append(sequence.slot)
            sequence.slot = -1
