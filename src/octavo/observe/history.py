"""History: the only fold of a scheduler's events, into histories of requests and records of steps.

Owns: RequestHistory (one request from its arrival to its end), StepRecord (what one step changed), and how many are
stored. Does not: decide, or make texts, tables, frames and traces (the history's readers do).
Also owns the EventSink, to which a live loop, a replay and a simulation report; History is one.
Invariants: ended histories are bounded in number and age. A history stores its first and last events and counts those
between; the seconds of its phases add up to its end minus its arrival. A step costs O(decisions and changed rows):
most requests get a token in every step, so a history stores only the steps at which an unbroken run of tokens begins
and ends. A StepRecord references the plan's arrays, which are never changed again.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, starmap
from operator import attrgetter, sub
from typing import NamedTuple, Protocol

from octavo.core.plan import Event, EventKind, Events, StepFailure, StepPlan, StepResult, StepTimings, WaitReason
from octavo.core.request import FinishReason, Request
from octavo.core.scheduler import Scheduler
from octavo.core.snapshots import Gauges
from octavo.observe.series import FINE_SECONDS, Histogram, StepTimeModel, StepTimes

_LOG = logging.getLogger(__name__)
NUM_FIRST = 16  # first events of a request that are stored
NUM_LAST = 48  # last events of a request that are stored
TOKEN_STEPS = 65_536  # steps whose times are stored; a request that began before them has no quantiles of its gaps
NUM_ANSWERS = 256  # answers whose lengths are stored
PHASES = ("earlier", "queue", "prefill", "decode", "preempted", "recompute")  # earlier: in an engine before this one
_EARLIER, _QUEUE, _PREFILL, _DECODE, _PREEMPTED, _RECOMPUTE = range(len(PHASES))


class EventSink(Protocol):
    """A receiver of events, called in the engine's thread, in order; must be quick, and copy data that it keeps."""

    def admitted(self, request: Request) -> None:
        """Handle an admitted request."""

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Handle decisions of plans and commits, each reported exactly once."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Handle a committed plan."""


class RequestHistory:
    """One request. It has been in `phase` since `phase_since`; `phase_s` has the seconds of each phase before that.

    A token step is a step in which any request got a token; token steps are numbered, and -1 means none yet.
    `last_token_step` and `last_token_at` are the end of the request's last finished run of tokens.
    """

    __slots__ = ("admitted_at", "arrival", "cached_tokens", "end", "first_events", "first_token_at",
                 "first_token_step", "last_events", "last_token_at", "last_token_step", "max_tokens", "num_events",
                 "num_preemptions", "num_prompt_tokens", "num_recomputed_tokens", "phase", "phase_s", "phase_since",
                 "priority", "request_id", "run_breaks", "tenant")  # fmt: skip

    def __init__(self, request: Request, now: float) -> None:
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.priority = request.priority
        self.arrival = self.phase_since = request.arrival
        self.num_prompt_tokens = request.num_prompt_tokens
        self.max_tokens = request.params.max_tokens
        self.phase = _QUEUE
        self.phase_s = [0.0] * len(PHASES)
        self.first_events: list[Event] = []
        self.last_events: deque[Event] = deque(maxlen=NUM_LAST)
        self.num_events = 0
        self.admitted_at: float | None = None
        self.cached_tokens = self.num_preemptions = self.num_recomputed_tokens = 0
        self.first_token_at: float | None = None
        self.last_token_at = 0.0
        self.first_token_step = self.last_token_step = -1
        self.run_breaks: list[int] = []  # flat (last step of a run, first step of the next)
        self.end: Event | None = None
        if request.emitted_token_ids:
            self.phase = _EARLIER
            self.enter(_QUEUE, now)

    def enter(self, phase: int, now: float) -> None:
        """Begin a phase."""
        if now > self.phase_since:
            self.phase_s[self.phase] += now - self.phase_since
            self.phase_since = now
        self.phase = phase

    def keep(self, event: Event) -> None:
        """Store an event; consecutive chunks become one event."""
        kept: list[Event] | deque[Event] = self.last_events if self.last_events else self.first_events
        before = kept[-1] if kept else None
        if event.kind == EventKind.CHUNKED and before is not None and before.kind == EventKind.CHUNKED:
            kept[-1] = replace(event, num_tokens=before.num_tokens + event.num_tokens)
            return
        self.num_events += 1
        if len(self.first_events) < NUM_FIRST:
            self.first_events.append(event)
        else:
            self.last_events.append(event)

    @property
    def queue_s(self) -> float | None:
        """Seconds to its first admission; None before that."""
        return None if self.admitted_at is None else max(0.0, self.admitted_at - self.arrival)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to its first token; None before that."""
        return None if self.first_token_at is None else self.first_token_at - self.arrival

    @property
    def mean_gap_s(self) -> float | None:
        """Mean seconds between its tokens, once it has ended; None for fewer than two."""
        num_gaps = self.last_token_step - self.first_token_step
        for left, entered in zip(self.run_breaks[::2], self.run_breaks[1::2], strict=True):
            num_gaps -= entered - left - 1
        if self.first_token_at is None or not num_gaps:
            return None
        return (self.last_token_at - self.first_token_at) / num_gaps

    def gaps(self, times: Sequence[float], first: int) -> list[float]:
        """Return the seconds between the request's tokens, ascending. `times` are those of token steps from `first` on.

        The list is empty if the request has fewer than two tokens, or began before `first`.
        """
        gaps = list[float]()
        if self.first_token_step < first:
            return gaps
        bounds = [self.first_token_step, *self.run_breaks, self.last_token_step]
        for index, (begin, end) in enumerate(pairwise(bounds)):
            if index % 2:  # between two runs
                gaps.append(times[end - first] - times[begin - first])
            else:
                run = times[begin - first : end - first + 1]
                gaps += map(sub, run[1:], run)
        return sorted(gaps)


class TakenSlot(NamedTuple):
    """A sequence that took a slot."""

    slot: int
    request_id: str
    choice: int
    num_prompt_tokens: int


_TAKEN_SLOT = attrgetter("slot", "request_id", "choice", "num_prompt")  # of a NewSequence
_NO_INTS: array[int] = array("i")


class StepRecord(NamedTuple):
    """The record of one step or, if `slots` is None, of the events of a time without steps.

    `arrivals` and `decisions` are those since the previous record. `gauges` are as of the commit. `timing` is the
    step's number in StepTimes, or -1. `computed` has the seconds of prepare, forward and sample. `prefill` has three
    counts: prefill rows (more than one token), fork rows (no token), and the tokens of the prefill rows. `num_outputs`
    tokens were generated. `moved` counts the blocks swapped out, loaded back and copied.
    """

    begin: float
    end: float
    gauges: Gauges
    arrivals: tuple[RequestHistory, ...]
    decisions: tuple[Event, ...]
    step: int = -1
    idle_s: float = 0.0
    timing: int = -1
    computed: tuple[float, float, float] = (0.0, 0.0, 0.0)
    slots: array[int] | None = None
    starts: array[int] = _NO_INTS
    counts: array[int] = _NO_INTS
    num_drafts: array[int] = _NO_INTS
    num_tokens: int = 0
    num_kv_read: int = 0
    prefill: tuple[int, int, int] = (0, 0, 0)
    num_outputs: int = 0
    taken: tuple[TakenSlot, ...] = ()
    freed: array[int] = _NO_INTS
    moved: tuple[int, int, int] = (0, 0, 0)
    failure: str | None = None


def count_prefill(plan: StepPlan) -> tuple[int, int, int]:
    """Count a plan's prefill rows (more than one token), its fork rows (no token), and the prefill rows' tokens.

    A row with drafts is no prefill row.
    """
    counts, num_tokens = plan.counts, plan.num_query_tokens
    if plan.num_drafts:
        prefills = [count for count, drafts in zip(counts, plan.num_drafts, strict=True) if count > 1 and not drafts]
        return len(prefills), counts.count(0), sum(prefills)
    if plan.is_fast_path and num_tokens == len(counts):
        return 0, 0, 0
    num_ones, num_forks = counts.count(1), counts.count(0)
    return len(counts) - num_ones - num_forks, num_forks, num_tokens - num_ones


class OpenSlots:
    """The sequence in each slot, the open requests and the gauges, after all records applied so far."""

    def __init__(self) -> None:
        self.gauges: Gauges | None = None
        self.slots: dict[int, TakenSlot] = {}
        self.open: dict[str, RequestHistory] = {}

    def copy(self) -> OpenSlots:
        """Return a copy."""
        other = OpenSlots()
        other.slots, other.open, other.gauges = dict(self.slots), dict(self.open), self.gauges
        return other

    def apply(self, record: StepRecord) -> None:
        """Apply the next record."""
        self.gauges = record.gauges
        for request in record.arrivals:
            self.open[request.request_id] = request
        for slot in record.freed:
            self.slots.pop(slot, None)
        for taken in record.taken:
            self.slots[taken.slot] = taken
        for event in record.decisions:
            if event.kind == EventKind.FINISHED:
                self.open.pop(event.request_id, None)


class WaitCounts:
    """The number of waiting requests by the reason of their last deferral. O(1) for each decision."""

    def __init__(self) -> None:
        self._reason_of: dict[str, WaitReason] = {}
        self._counts = [0] * len(WaitReason)
        self._shown: dict[str, int] | None = {}

    def decided(self, decisions: Sequence[Event]) -> None:
        """Apply decisions, in order."""
        for event in decisions:
            name, kind = event.request_id, event.kind
            if kind == EventKind.CHUNKED or kind == EventKind.CHOICE_FINISHED:
                continue
            old = self._reason_of.pop(name, None)
            if old is not None:
                self._counts[old] -= 1
                self._shown = None
            if kind == EventKind.DEFERRED and event.reason is not None:
                self._reason_of[name] = event.reason
                self._counts[event.reason] += 1
                self._shown = None

    def by_reason(self) -> dict[str, int]:
        """Return the number of requests per reason; the same object until a number changes."""
        if self._shown is None:
            self._shown = {reason.name.lower(): self._counts[reason] for reason in WaitReason if self._counts[reason]}
        return self._shown


class RequestFigures:
    """Histograms over all requests since the start or the last reset, and the last `size` ended requests."""

    def __init__(self, size: int = 0) -> None:
        self.queue_s, self.ttft_s = Histogram(FINE_SECONDS), Histogram(FINE_SECONDS)
        self.gap_s, self.e2e_s = Histogram(FINE_SECONDS), Histogram(FINE_SECONDS)
        self.choice_ends: Counter[str] = Counter()
        self.num_ended = 0
        self.ended: deque[RequestHistory] = deque(maxlen=size)

    def reset(self) -> None:
        """Drop ended requests and histograms."""
        self.ended.clear()
        self.choice_ends.clear()
        self.num_ended = 0
        for histogram in (self.queue_s, self.ttft_s, self.gap_s, self.e2e_s):
            histogram.reset()


class History:
    """Histories of requests by id, and a StepRecord for each step, passed to readers in order.

    All methods belong to the engine's thread. `now` is the scheduler's clock; without it the last event's time is used.
    `num_token_steps` is never reset, because histories refer to token steps by number. `token_times` has the times of
    the last token steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        times: StepTimes | None = None,
        *,
        now: Callable[[], float] | None = None,
        max_ended: int = 1024,
        max_age_s: float = 600.0,
        figures: RequestFigures | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.times = times
        self.figures = figures or RequestFigures()
        self.step_times = StepTimeModel()
        self.answer_lengths: deque[int] = deque(maxlen=NUM_ANSWERS)  # of the last answers that ended by stop or length
        self.waits = WaitCounts()
        self.open: dict[str, RequestHistory] = {}
        self.ended: OrderedDict[str, RequestHistory] = OrderedDict()
        self.last_time = 0.0
        self._now = now
        self._max_ended = max_ended
        self._max_age_s = max_age_s
        self._num_ended: Counter[str] = Counter()  # by tenant
        self._ends: list[RequestHistory] = []  # requests that ended in a step whose tokens are not counted yet
        self.num_token_steps = 0
        self.token_times: deque[float] = deque(maxlen=TOKEN_STEPS)
        self._token_ids: Sequence[str] = ()  # requests of the last token step, one entry per token; then as a set
        self._token_names: set[str] = set()
        self._last_end: float | None = None
        self._arrivals: list[RequestHistory] = []
        self._decisions: list[Event] = []
        self._readers: list[Callable[[StepRecord], object]] = []

    def add_reader(self, read: Callable[[StepRecord], object]) -> None:
        """Pass each record to this function from now on."""
        self._readers.append(read)

    # --- the fold

    def admitted(self, request: Request) -> None:
        """Begin the history of an admitted request."""
        self.settle()  # an id may be used again at once
        if request.request_id in self.ended:
            self._drop(request.request_id)
        now = self.last_time if self._now is None or not request.emitted_token_ids else self._now()
        history = self.open[request.request_id] = RequestHistory(request, now)
        self._arrivals.append(history)

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Apply decisions, each reported exactly once."""
        self.waits.decided(decisions)
        self._decisions += decisions
        for event in decisions:
            request = self.open.get(event.request_id)
            if request is None or request.end is not None:
                continue
            request.keep(event)
            kind = event.kind
            if kind == EventKind.ADMITTED or kind == EventKind.RESUMED:
                self._start(request, event)
            elif kind == EventKind.PREEMPTED:  # a swap is reported beside it
                request.enter(_PREEMPTED, event.time)
                request.num_preemptions += event.by is not None  # else a row or step failed
                request.num_recomputed_tokens += event.num_tokens
            elif kind == EventKind.CHOICE_FINISHED or kind == EventKind.FINISHED:
                self._end(request, event)

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Apply a committed plan."""
        if isinstance(outcome, StepResult):
            self.step_times.add(plan, events.time)
        if events.request_ids:
            self._note_runs(events.request_ids, events.time)
        if self._ends:
            self.settle()
        if self._readers:
            record = self._record(plan, outcome, events)
            for read in self._readers:
                read(record)
        self._last_end = self.last_time = events.time
        if self._arrivals or self._decisions:
            self._arrivals, self._decisions = [], []

    def flush(self, now: float) -> None:
        """Report the events since the last step, if there are any, as a record without a step."""
        self.last_time = max(self.last_time, now)
        if self._readers and (self._arrivals or self._decisions):
            record = StepRecord(now, now, self.scheduler.gauges(), tuple(self._arrivals), tuple(self._decisions))
            for read in self._readers:
                read(record)
        self._arrivals, self._decisions = [], []

    def settle(self) -> None:
        """Close the histories of ended requests; over the bound, drop the oldest of the tenant that has the most."""
        figures = self.figures
        for request in self._ends:
            name, end = request.request_id, request.end
            assert end is not None
            request.enter(request.phase, end.time)
            self.open.pop(name, None)
            self.ended[name] = request
            self._num_ended[request.tenant] += 1
            if name in self._token_names:
                self._leave_run(request)
            figures.e2e_s.observe(max(0.0, end.time - request.arrival))
            figures.num_ended += 1
            figures.ended.append(request)
        self._ends.clear()
        while len(self.ended) > self._max_ended:
            most = max(self._num_ended, key=self._num_ended.__getitem__)
            self._drop(next(name for name, request in self.ended.items() if request.tenant == most))

    def drop_old(self, now: float) -> None:
        """Drop requests that ended too long ago."""
        self.settle()
        while self.ended:
            name, request = next(iter(self.ended.items()))
            if request.end is None or now - request.end.time <= self._max_age_s:
                break
            self._drop(name)

    def _start(self, request: RequestHistory, event: Event) -> None:
        """Record that a request runs, for the first time or again."""
        is_back = request.first_token_at is not None or request.phase_s[_EARLIER] > 0
        request.enter(_RECOMPUTE if is_back else _PREFILL, event.time)
        if request.request_id in self._token_names:  # its next token begins another run
            self._leave_run(request)
        if event.kind == EventKind.ADMITTED and request.admitted_at is None:
            request.admitted_at, request.cached_tokens = event.time, event.cached_tokens
            self.figures.queue_s.observe(max(0.0, event.time - request.arrival))

    def _end(self, request: RequestHistory, event: Event) -> None:
        """Record the end of one choice, or of the request with its last choices."""
        reason = FinishReason.ERROR if event.finish_reason is None else event.finish_reason
        if event.num_tokens > 0 and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.answer_lengths.append(event.num_tokens)
        if event.kind == EventKind.FINISHED:
            request.end = event
            self._ends.append(request)
        else:
            self.figures.choice_ends[reason.name.lower()] += 1

    def _note_runs(self, ids: Sequence[str], now: float) -> None:
        """Update the token runs of requests, and count the gaps between tokens; `ids` has one request id per token."""
        last_time = self.token_times[-1] if self.token_times else now
        if ids == self._token_ids:
            num_continued = len(self._token_names)
        else:
            before, names = self._token_names, set(ids)
            entered = names.difference(before)
            num_continued = len(names) - len(entered)
            for name in entered:  # in any order: they are independent
                if (request := self.open.get(name)) is not None:
                    self._enter_run(request, now)
            if num_continued < len(before):
                for name in before.difference(names):
                    if (request := self.open.get(name)) is not None:
                        request.last_token_step, request.last_token_at = self.num_token_steps - 1, last_time
            self._token_ids, self._token_names = ids, names
        if num_continued:
            self.figures.gap_s.observe(now - last_time, num_continued)
        self.num_token_steps += 1
        self.token_times.append(now)

    def _enter_run(self, request: RequestHistory, now: float) -> None:
        """Record a request's token if the request had no token in the previous token step."""
        if request.phase in (_PREFILL, _RECOMPUTE):
            request.enter(_DECODE, now)
        if request.first_token_at is None:
            request.first_token_step = self.num_token_steps
            request.first_token_at = now
            self.figures.ttft_s.observe(max(0.0, now - request.arrival))
        else:
            request.run_breaks += (request.last_token_step, self.num_token_steps)
            self.figures.gap_s.observe(now - request.last_token_at)

    def _leave_run(self, request: RequestHistory) -> None:
        """End the token run of a request of the last token step: the request ended, or is computed again."""
        request.last_token_step, request.last_token_at = self.num_token_steps - 1, self.token_times[-1]
        self._token_names.remove(request.request_id)
        self._token_ids = ()

    def _drop(self, name: str) -> None:
        """Drop an ended request's history; readers that still reference it see its numbers, but not its events."""
        request = self.ended.pop(name)
        request.first_events, request.last_events = [], deque(maxlen=0)
        self._num_ended[request.tenant] -= 1
        if not self._num_ended[request.tenant]:
            del self._num_ended[request.tenant]

    # --- records

    def _record(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> StepRecord:
        if isinstance(outcome, StepResult):
            timings, failure = outcome.timings, None
        else:
            timings, failure = StepTimings(), outcome.message
        return StepRecord(
            plan.now,
            events.time,
            self.scheduler.gauges(),
            tuple(self._arrivals),
            tuple(self._decisions),
            plan.step,
            0.0 if self._last_end is None else max(0.0, plan.now - self._last_end),
            -1 if self.times is None or failure is not None else self.times.num_steps,
            (timings.prepare_s, timings.forward_s, timings.sample_s),
            plan.slots,
            plan.starts,
            plan.counts,
            plan.num_drafts,
            plan.num_query_tokens,
            plan.num_kv_read,
            count_prefill(plan),
            len(events.token_ids),
            tuple(starmap(TakenSlot, map(_TAKEN_SLOT, plan.new_sequences))),
            plan.freed_slots,
            (len(plan.swap_outs) // 3, len(plan.host_loads) // 3, len(plan.copies) // 3),
            failure,
        )


def guarded_reader(name: str, read: Callable[[StepRecord], object]) -> Callable[[StepRecord], None]:
    """Return a reader that is switched off, with one entry in the log, once it raises: it must not end an engine."""
    is_on = True

    def guarded(record: StepRecord) -> None:
        nonlocal is_on
        if is_on:
            try:
                read(record)
            except Exception:  # the instrument shell
                _LOG.exception("%s failed and is switched off", name)
                is_on = False

    return guarded
