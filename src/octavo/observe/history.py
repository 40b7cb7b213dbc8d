"""History: the one fold of a scheduler's events, into histories of requests and records of steps.

Owns: RequestHistory (one request from its arrival to its end), StepRecord (what one step changed), and how many are
kept. Does not: decide, or make texts, tables, frames and traces; its readers do.
It is an EventSink: a live loop, a replay and a simulation feed it alike.
Invariants: histories are bounded in number, ended ones in age; one keeps its first and last events and counts those
between; the seconds of its phases add up to its end minus its arrival. A step costs O(its decisions and what changed
since the step before): most requests get a token in every step, so a request keeps only the steps at which an
unbroken run of tokens began and ended. A StepRecord names arrays of the plan, which are never written again.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import sub
from typing import NamedTuple

from octavo.core.plan import Event, EventKind, Events, StepFailure, StepPlan, StepResult, WaitReason
from octavo.core.request import FinishReason, Request
from octavo.core.scheduler import Scheduler
from octavo.core.views import Gauges
from octavo.observe.forecast import AnswerLengths, StepTimeModel
from octavo.observe.metrics.rings import RecordRing
from octavo.observe.metrics.series import FINE_SECONDS, Histogram
from octavo.observe.step_times import StepTimes

NUM_FIRST = 16  # events kept from the beginning of a request
NUM_LAST = 48  # and from its end
TOKEN_STEPS = 65_536  # steps whose times are kept; a request that began before them has no quantiles of its gaps
PHASES = ("earlier", "queue", "prefill", "decode", "preempted", "recompute")
_EARLIER, _QUEUE, _PREFILL, _DECODE, _PREEMPTED, _RECOMPUTE = range(len(PHASES))


class RequestHistory:
    """One request. It is in `phase` since `phase_since`; `phase_s` are the seconds of each phase before that.

    Token steps are numbers of steps in which any request got a token; -1: none yet. `last_token_step` and
    `last_token_at` are those of its last run of tokens that is over.
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
        if request.emitted_token_ids:  # an engine before this one began it
            self.phase = _EARLIER
            self.enter(_QUEUE, now)

    def enter(self, phase: int, now: float) -> None:
        """Begin another phase."""
        if now > self.phase_since:
            self.phase_s[self.phase] += now - self.phase_since
            self.phase_since = now
        self.phase = phase

    def keep(self, event: Event) -> None:
        """Keep an event; chunks that follow each other are one."""
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

    def drop_events(self) -> None:
        """Keep only the numbers."""
        self.first_events, self.last_events = [], deque(maxlen=0)

    @property
    def ended_at(self) -> float:
        """When it ended; it has."""
        assert self.end is not None
        return self.end.time

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
        """Mean seconds between its tokens, once it has ended; None where it has fewer than two."""
        num_gaps = self.last_token_step - self.first_token_step
        for left, entered in zip(self.run_breaks[::2], self.run_breaks[1::2], strict=True):
            num_gaps -= entered - left - 1
        if self.first_token_at is None or not num_gaps:
            return None
        return (self.last_token_at - self.first_token_at) / num_gaps

    def gaps(self, times: Sequence[float], first: int) -> list[float]:
        """Return the seconds between its tokens in ascending order, from the times of token steps from `first` on.

        Empty where there are none, or its first times are gone.
        """
        begin, gaps = self.first_token_step, list[float]()
        if begin < first or begin == self.last_token_step:
            return gaps
        for left, entered in zip(self.run_breaks[::2], self.run_breaks[1::2], strict=True):
            run = times[begin - first : left - first + 1]
            gaps += map(sub, run[1:], run)
            gaps.append(times[entered - first] - times[left - first])
            begin = entered
        run = times[begin - first : self.last_token_step - first + 1]
        gaps += map(sub, run[1:], run)
        gaps.sort()
        return gaps


class TakenSlot(NamedTuple):
    """A sequence that took a slot."""

    slot: int
    request_id: str
    choice: int
    num_prompt_tokens: int


class StepRecord(NamedTuple):
    """What one step did and changed, or what happened in a time without steps (`slots` is None then).

    `timing` is its number in the step times, -1 where it has none; `computed` its seconds of prepare, forward and
    sample. `is_decode`: every row is one token. `num_outputs` tokens were given out. `moved` are blocks swapped out,
    loaded back and copied. `gauges` are as of its commit. `arrivals` and `decisions` are those since the record before.
    """

    step: int
    begin: float
    end: float
    idle_s: float
    timing: int
    computed: tuple[float, float, float]
    slots: array[int] | None
    starts: array[int]
    counts: array[int]
    num_drafts: array[int]
    num_tokens: int
    num_kv_read: int
    is_decode: bool
    num_outputs: int
    taken: tuple[TakenSlot, ...]
    freed: array[int]
    moved: tuple[int, int, int]
    gauges: Gauges
    arrivals: tuple[RequestHistory, ...]
    decisions: tuple[Event, ...]
    failure: str | None


_NO_INTS: array[int] = array("i")


def make_up(counts: array[int], num_drafts: array[int], num_tokens: int) -> tuple[int, int, int]:
    """Return rows of more than one token, rows without any, and tokens of the former; drafts make no prefill row."""
    if num_drafts:
        prefills = [count for count, drafts in zip(counts, num_drafts, strict=True) if count > 1 and not drafts]
        return len(prefills), counts.count(0), sum(prefills)
    ones, forks = counts.count(1), counts.count(0)
    return len(counts) - ones - forks, forks, num_tokens - ones


class OpenSlots:
    """Which sequence has which slot, which requests are open, and the gauges, after all records applied so far."""

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
        """Go on to after a record."""
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
    """How many requests were last deferred for which reason, as the decisions say; O(1) a decision."""

    def __init__(self) -> None:
        self._reason_of: dict[str, WaitReason] = {}
        self._counts = [0] * len(WaitReason)
        self._shown: dict[str, int] | None = {}

    def decided(self, decisions: Sequence[Event]) -> None:
        """Follow decisions, in order."""
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
        """Return requests per reason, without those that never had one. The same object until something changes."""
        if self._shown is None:
            self._shown = {reason.name.lower(): self._counts[reason] for reason in WaitReason if self._counts[reason]}
        return self._shown


class RequestFigures:
    """Histograms over all requests since the start or a reset, and the last `size` that ended."""

    def __init__(self, size: int) -> None:
        self.queue_s, self.ttft_s = Histogram(FINE_SECONDS), Histogram(FINE_SECONDS)
        self.gap_s, self.e2e_s = Histogram(FINE_SECONDS), Histogram(FINE_SECONDS)
        self.choice_ends: Counter[str] = Counter()
        self.num_ended = 0
        self.ended: deque[RequestHistory] = deque(maxlen=size)
        self.token_times = RecordRing("<d", TOKEN_STEPS)  # of each token step; never reset: histories number them

    def reset(self) -> None:
        """Forget ended requests and histograms."""
        self.ended.clear()
        self.choice_ends.clear()
        self.num_ended = 0
        for histogram in (self.queue_s, self.ttft_s, self.gap_s, self.e2e_s):
            histogram.reset()


class History:
    """Histories of requests by id, and a StepRecord for each step, given to readers in order.

    All methods belong to the thread that steps. `now` is the scheduler's clock; without it, the last event's time.
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
        self.figures = figures
        self.step_times = StepTimeModel()
        self.answer_lengths = AnswerLengths()
        self.waits = WaitCounts()
        self.open: dict[str, RequestHistory] = {}
        self.ended: OrderedDict[str, RequestHistory] = OrderedDict()
        self.last_time = 0.0
        self._now = now
        self._max_ended = max_ended
        self._max_age_s = max_age_s
        self._num_ended: Counter[str] = Counter()  # by tenant
        self._awaiting: set[str] = set()  # requests that run and have no token since they began, or began again
        self._ends: list[RequestHistory] = []  # decided, but the tokens of their step are not noted yet
        self._token_ids: Sequence[str] = ()  # requests of the last token step, and each once; with figures only
        self._token_names: set[str] = set()
        self._last_token_time = 0.0
        self._last_end: float | None = None
        self._arrivals: list[RequestHistory] = []
        self._decisions: list[Event] = []
        self._readers: list[Callable[[StepRecord], object]] = []

    def add_reader(self, read: Callable[[StepRecord], object]) -> None:
        """Give each record to this function from now on."""
        self._readers.append(read)

    # --- the fold

    def admitted(self, request: Request) -> None:
        """A request was admitted."""
        self.settle()  # an id may be used again at once
        self._forget(request.request_id)
        now = 0.0
        if request.emitted_token_ids:
            now = self.last_time if self._now is None else self._now()
        history = self.open[request.request_id] = RequestHistory(request, now)
        self._arrivals.append(history)

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Decisions were made, each reported exactly once."""
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
                self._awaiting.discard(request.request_id)
                request.enter(_PREEMPTED, event.time)
                request.num_preemptions += event.by is not None  # else a row or step failed
                request.num_recomputed_tokens += event.num_tokens
            elif kind == EventKind.CHOICE_FINISHED or kind == EventKind.FINISHED:
                self._end(request, event)

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """A plan was committed."""
        if isinstance(outcome, StepResult):
            self.step_times.add(plan, events.time)
        if events.request_ids:
            if self.figures is not None:
                self._note_runs(self.figures, events.request_ids, events.time)
            elif self._awaiting:
                for name in self._awaiting.intersection(events.request_ids):  # in any order: each is by itself
                    self._got_token(self.open[name], events.time)
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
        """Report what happened since the last step, if anything, as a record without a step."""
        self.last_time = max(self.last_time, now)
        if self._readers and (self._arrivals or self._decisions):
            none, news = _NO_INTS, (tuple(self._arrivals), tuple(self._decisions))
            record = StepRecord(
                -1, now, now, 0.0, -1, (0.0, 0.0, 0.0), None, none, none, none, 0, 0, True, 0, (), none, (0, 0, 0),
                self.scheduler.gauges(), *news, None,
            )  # fmt: skip
            for read in self._readers:
                read(record)
        self._arrivals, self._decisions = [], []

    def settle(self) -> None:
        """Close histories that ended; beyond the bound the tenant with the most loses its oldest."""
        for request in self._ends:
            name = request.request_id
            request.enter(request.phase, request.ended_at)
            self._awaiting.discard(name)
            self.open.pop(name, None)
            self._forget(name)
            self.ended[name] = request
            self._num_ended[request.tenant] += 1
            if self.figures is not None:
                if name in self._token_names:
                    self._leave_run(self.figures, request)
                self.figures.e2e_s.observe(max(0.0, request.ended_at - request.arrival))
                self.figures.num_ended += 1
                self.figures.ended.append(request)
        self._ends.clear()
        while len(self.ended) > self._max_ended:
            most = max(self._num_ended, key=self._num_ended.__getitem__)
            self._forget(next(name for name, request in self.ended.items() if request.tenant == most))

    def drop_old(self, now: float) -> None:
        """Forget requests that ended too long ago."""
        self.settle()
        while self.ended and now - next(iter(self.ended.values())).ended_at > self._max_age_s:
            self._forget(next(iter(self.ended)))

    def _start(self, request: RequestHistory, event: Event) -> None:
        """It runs: for the first time, or again."""
        is_back = request.first_token_at is not None or request.phase_s[_EARLIER] > 0
        request.enter(_RECOMPUTE if is_back else _PREFILL, event.time)
        self._awaiting.add(request.request_id)
        figures = self.figures
        if figures is not None and request.request_id in self._token_names:  # its next token begins another run
            self._leave_run(figures, request)
        if event.kind == EventKind.ADMITTED and request.admitted_at is None:
            request.admitted_at, request.cached_tokens = event.time, event.cached_tokens
            if figures is not None:
                figures.queue_s.observe(max(0.0, event.time - request.arrival))

    def _end(self, request: RequestHistory, event: Event) -> None:
        """One of its choices ended, or all that were left."""
        reason = FinishReason.ERROR if event.finish_reason is None else event.finish_reason
        if event.num_tokens > 0 and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.answer_lengths.add(event.num_tokens)
        if event.kind == EventKind.FINISHED:
            request.end = event
            self._ends.append(request)
        elif self.figures is not None:
            self.figures.choice_ends[reason.name.lower()] += 1

    def _got_token(self, request: RequestHistory, now: float) -> None:
        """A request that awaited a token has one."""
        self._awaiting.remove(request.request_id)
        request.enter(_DECODE, now)
        if request.first_token_at is None:
            request.first_token_at = now

    def _note_runs(self, figures: RequestFigures, ids: Sequence[str], now: float) -> None:
        """Requests got tokens (one entry a token): follow their runs, and count the gaps between their tokens."""
        step = figures.token_times.num_added
        figures.token_times.add(now)
        if ids == self._token_ids:
            num_going_on = len(self._token_names)
        else:
            before, names = self._token_names, set(ids)
            entered = names.difference(before)
            num_going_on = len(names) - len(entered)
            for name in entered:  # in any order: each is by itself
                if (request := self.open.get(name)) is not None:
                    self._enter_run(figures, request, step, now)
            if num_going_on < len(before):
                for name in before.difference(names):
                    if (request := self.open.get(name)) is not None:
                        request.last_token_step, request.last_token_at = step - 1, self._last_token_time
            self._token_ids, self._token_names = ids, names
        if num_going_on:
            figures.gap_s.observe(now - self._last_token_time, num_going_on)
        self._last_token_time = now

    def _enter_run(self, figures: RequestFigures, request: RequestHistory, step: int, now: float) -> None:
        """A request has a token, and had none in the token step before."""
        if request.request_id in self._awaiting:
            self._got_token(request, now)
        if request.first_token_step < 0:
            request.first_token_step = step
            request.first_token_at = now
            figures.ttft_s.observe(max(0.0, now - request.arrival))
        else:
            request.run_breaks += (request.last_token_step, step)
            figures.gap_s.observe(now - request.last_token_at)

    def _leave_run(self, figures: RequestFigures, request: RequestHistory) -> None:
        """A request of the last token step ends, or is computed anew."""
        request.last_token_step = figures.token_times.num_added - 1
        request.last_token_at = self._last_token_time
        self._token_names.remove(request.request_id)
        self._token_ids = ()

    def _forget(self, name: str) -> None:
        request = self.ended.pop(name, None)
        if request is not None:
            request.drop_events()
            self._num_ended[request.tenant] -= 1
            if not self._num_ended[request.tenant]:
                del self._num_ended[request.tenant]

    # --- records

    def _record(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> StepRecord:
        computed, failure = (0.0, 0.0, 0.0), None
        if isinstance(outcome, StepResult):
            timings = outcome.timings
            computed = timings.prepare_s, timings.forward_s, timings.sample_s
        else:
            failure = outcome.message
        taken: tuple[TakenSlot, ...] = ()
        if plan.new_sequences:
            taken = tuple(
                [TakenSlot(new.slot, new.request_id, new.choice, new.num_prompt) for new in plan.new_sequences]
            )
        begin, last_end, num_tokens = plan.now, self._last_end, plan.num_query_tokens
        return StepRecord(
            plan.step,
            begin,
            events.time,
            0.0 if last_end is None else max(0.0, begin - last_end),
            -1 if self.times is None or failure is not None else self.times.num_steps,
            computed,
            plan.slots,
            plan.starts,
            plan.counts,
            plan.num_drafts,
            num_tokens,
            plan.num_kv_read,
            plan.is_fast_path and num_tokens == len(plan.slots),
            len(events.token_ids),
            taken,
            plan.freed_slots,
            (len(plan.swap_outs) // 3, len(plan.host_loads) // 3, len(plan.copies) // 3),
            self.scheduler.gauges(),
            tuple(self._arrivals),
            tuple(self._decisions),
            failure,
        )
