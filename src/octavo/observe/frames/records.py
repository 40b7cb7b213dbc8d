"""What frames are made of: one light record a step, taken while the engine steps and made a frame when somebody asks.

Owns: the record, who came and what was decided between two of them, who waits for what. Does not: make JSON (encode).
Invariants: a record names arrays of the plan, which nobody writes to any more, and copies the rest; taking one is
O(what changed), not O(rows).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from octavo.core.plan import Event, EventKind, Events, StepFailure, StepPlan, StepResult, WaitReason
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.views import Gauges

Arrival = tuple[str, float, str, int, int, int | None]  # name, arrival, tenant, prompt tokens, priority, max_tokens
Taken = tuple[int, str, int, int]  # slot, request, choice, prompt tokens
Sums = tuple[int, int, int, int]  # requests finished, preemptions, prompt tokens looked up in the cache, found there


class PartTimes(Protocol):
    """Seconds of the parts of steps, as engine.step_times.StepTimes keeps them."""

    @property
    def num_steps(self) -> int:
        """The number that the step now being told will have."""
        ...

    def get(self, number: int) -> Sequence[float] | None:
        """Seconds of schedule, prepare, forward, sample, emit, and the whole; None when not known (any more)."""
        ...


class Record(NamedTuple):
    """One step, or the decisions of a time without steps (`slots` is None then).

    `is_plain`: every row is one token. `gauges`: sequences that run, requests that wait, swapped ones, host blocks in
    use, drafted tokens accepted so far. `sums`: totals since the scheduler began.
    """

    step: int
    time: float
    end: float
    idle_s: float
    timing: int
    computed: tuple[float, float, float]
    slots: array[int] | None
    starts: array[int]
    counts: array[int]
    drafts: array[int]
    num_tokens: int
    is_plain: bool
    given: int
    taken: tuple[Taken, ...]
    freed: array[int]
    moved: tuple[int, int, int]
    gauges: tuple[int, int, int, int, int]
    sums: Sums
    used: tuple[int, ...]
    cached: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    decisions: tuple[Event, ...]
    failure: str | None


_NO_INTS: array[int] = array("i")


class Waiting:
    """How many were last told to wait for what, as the decisions say; O(1) a decision."""

    def __init__(self) -> None:
        self._told: dict[str, WaitReason] = {}
        self._counts = [0] * len(WaitReason)

    def decided(self, decisions: Sequence[Event]) -> None:
        """Follow decisions, in order."""
        for event in decisions:
            kind = event.kind
            if kind == EventKind.CHUNKED or kind == EventKind.CHOICE_FINISHED:
                continue
            old = self._told.pop(event.request_id, None)
            if old is not None:
                self._counts[old] -= 1
            if kind == EventKind.DEFERRED and event.reason is not None:
                self._told[event.request_id] = event.reason
                self._counts[event.reason] += 1

    def by_reason(self, num_waiting: int) -> dict[str, int]:
        """Waiting requests per reason; those never told one stand behind others."""
        counts = {reason.name.lower(): self._counts[reason] for reason in WaitReason if self._counts[reason]}
        rest = num_waiting - sum(counts.values())
        if rest > 0:
            counts["behind"] = counts.get("behind", 0) + rest
        return counts


class Recorder:
    """Takes the records of one scheduler."""

    def __init__(self, scheduler: Scheduler, times: PartTimes | None = None) -> None:
        self._scheduler = scheduler
        self.times = times
        self.waiting = Waiting()
        self.last_time = 0.0
        self._last_end: float | None = None
        self._arrivals: list[Arrival] = []
        self._decisions: list[Event] = []

    @property
    def has_news(self) -> bool:
        """Whether somebody came or something was decided since the last record."""
        return bool(self._arrivals or self._decisions)

    def admitted(self, request: Request) -> None:
        """A request was taken."""
        most, arrival = request.params.max_tokens, round(request.arrival, 6)
        asked = request.request_id, arrival, request.tenant, request.num_prompt_tokens, request.priority, most
        self._arrivals.append(asked)

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Follow decisions."""
        self.waiting.decided(decisions)
        self._decisions.extend(decisions)

    def step(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> Record:
        """The record of a step."""
        begun, end, last_end = plan.now, events.time, self._last_end
        self._last_end = self.last_time = end
        computed, failure = (0.0, 0.0, 0.0), None
        if isinstance(outcome, StepResult):
            timings = outcome.timings
            computed = timings.prepare_s, timings.forward_s, timings.sample_s
        else:
            failure = outcome.message
        gauges = self._scheduler.gauges()
        taken: tuple[Taken, ...] = ()
        if plan.new_sequences:
            taken = tuple([(new.slot, new.request_id, new.choice, new.num_prompt) for new in plan.new_sequences])
        arrivals, decisions = self._take_news()
        return Record(
            plan.step,
            begun,
            end,
            0.0 if last_end is None else max(0.0, begun - last_end),
            -1 if self.times is None or failure is not None else self.times.num_steps,
            computed,
            plan.slots,
            plan.starts,
            plan.counts,
            plan.num_drafts,
            plan.num_query_tokens,
            plan.is_fast_path and plan.num_query_tokens == len(plan.slots),
            len(events.token_ids),
            taken,
            plan.freed_slots,
            (len(plan.swap_outs) // 3, len(plan.host_loads) // 3, len(plan.copies) // 3),
            (
                gauges.num_running,
                gauges.num_waiting,
                gauges.num_swapped,
                gauges.host_blocks_used,
                gauges.num_accepted_tokens,
            ),
            _sums(gauges),
            gauges.blocks_used,
            gauges.blocks_cached,
            arrivals,
            decisions,
            failure,
        )

    def note(self, now: float) -> Record:
        """The record of what came and was decided since the last one, without a step."""
        arrivals, decisions = self._take_news()
        self.last_time = max(self.last_time, now)
        gauges = self._scheduler.gauges()
        nothing, none = (0, 0, 0, 0, gauges.num_accepted_tokens), _NO_INTS
        rest = arrivals, decisions, None
        return Record(
            -1,
            now,
            now,
            0.0,
            -1,
            (0.0,) * 3,
            None,
            none,
            none,
            none,
            0,
            True,
            0,
            (),
            none,
            (0,) * 3,
            nothing,
            _sums(gauges),
            (),
            (),
            *rest,
        )

    def _take_news(self) -> tuple[tuple[Arrival, ...], tuple[Event, ...]]:
        arrivals, decisions = tuple(self._arrivals), tuple(self._decisions)
        if arrivals or decisions:
            self._arrivals, self._decisions = [], []
        return arrivals, decisions


def _sums(gauges: Gauges) -> Sums:
    return gauges.num_finished, gauges.num_preemptions, gauges.queried_tokens, gauges.hit_tokens


class Places:
    """Who has which slot, which requests are open, and the totals, after all records applied so far."""

    def __init__(self) -> None:
        self.sums: Sums = (0, 0, 0, 0)
        self.slots: dict[int, Taken] = {}
        self.open: dict[str, Arrival] = {}

    def copy(self) -> Places:
        """As it is now."""
        places = Places()
        places.slots, places.open, places.sums = dict(self.slots), dict(self.open), self.sums
        return places

    def apply(self, record: Record) -> None:
        """Go on behind a record."""
        self.sums = record.sums
        for arrival in record.arrivals:
            self.open[arrival[0]] = arrival
        for slot in record.freed:
            self.slots.pop(slot, None)
        for taken in record.taken:
            self.slots[taken[0]] = taken
        for event in record.decisions:
            if event.kind == EventKind.FINISHED:
                self.open.pop(event.request_id, None)
