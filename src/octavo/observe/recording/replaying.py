"""Replays a recording: the same calls to a scheduler of today, whose plans must have the same digests.

Owns: the comparison, and feeding watchers. Does not: simulate other settings (octavo.simulator does).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from octavo.core.limits import Limits
from octavo.core.plan import Event, Events, StepPlan, StepResult
from octavo.core.request import FinishError, Request
from octavo.core.scheduler import Scheduler
from octavo.errors import ErrorKind, InvariantError, RequestError
from octavo.observe.recording.calls import Admit, Call, Cancel, Commit, Control, EndChoice, Header, KeyRun, Plan
from octavo.observe.recording.differences import differences
from octavo.observe.recording.errors import RecordingError
from octavo.observe.recording.reader import Recording, Segment
from octavo.observe.recording.stand_in import DivergenceError, RecordedInputs
from octavo.observe.sink import EventSink

MakeSink = Callable[[Scheduler, Header], EventSink]  # called for each segment, with its scheduler
AddTimes = Callable[[tuple[float, ...]], object]  # as engine.step_times.StepTimes.add


@dataclass(frozen=True, slots=True)
class Difference:
    """The first plan that came out otherwise: `lines` say where, expected against got."""

    life: int
    step: int
    now: float
    lines: tuple[str, ...]


@dataclass(slots=True)
class ReplayReport:
    """What a replay did: plans compared, and the first difference, if there was one.

    `seconds` are those between the first and the last call of each segment. `ends` has how each segment ended.
    """

    num_segments: int = 0
    num_calls: int = 0
    num_requests: int = 0
    num_plans: int = 0  # that were not empty: their digests were compared
    num_equal: int = 0
    num_failed_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    ends: list[str] = field(default_factory=list)
    difference: Difference | None = None

    @property
    def is_equal(self) -> bool:
        """Whether every plan was the recorded one."""
        return self.difference is None


class Gathers(EventSink, Protocol):
    """A watcher that is also told when requests arrived, their keys, and tokens in front of decisions."""

    def arrived(self, request: Request, max_tokens: int, now: float) -> None:
        """A request was taken."""
        ...

    def keyed(self, runs: tuple[KeyRun, ...]) -> None:
        """Sequences got block keys."""
        ...

    def tokens(self, events: Events) -> None:
        """A commit gave tokens."""
        ...


class _Nobody:
    """An EventSink that does not look."""

    def admitted(self, request: object) -> None:
        """Nothing."""

    def decided(self, decisions: object) -> None:
        """Nothing."""

    def stepped(self, plan: object, outcome: object, events: object) -> None:
        """Nothing."""


class _UnequalError(Exception):
    """Lines that say how a plan differs."""

    def __init__(self, *lines: str) -> None:
        super().__init__()
        self.lines = lines


class Replay:
    """One segment's replay: `run` makes the calls, one after the other."""

    def __init__(self, segment: Segment, report: ReplayReport, make_sink: MakeSink | None) -> None:
        header = segment.header
        limits: Limits = header.limits
        self._inputs = RecordedInputs(header.has_text)
        self.scheduler = Scheduler(limits, source=self._inputs)
        self.report = report
        self.add_times: AddTimes | None = None
        self._segment = segment
        self._has_text = header.has_text
        self._sink: EventSink = _Nobody() if make_sink is None else make_sink(self.scheduler, header)
        self._gatherer: Gathers | None = None
        self._flight: deque[tuple[StepPlan, Plan]] = deque()
        self._owners: dict[int, str] = {}
        self._pending: tuple[float, ...] | None = None  # times of a step whose delivery is not over
        self._now = 0.0
        self._step = 0

    def gather(self, gatherer: Gathers) -> None:
        """Watch with one that is told more than a live engine tells."""
        self._gatherer = self._sink = gatherer

    def run(self, life: int) -> None:
        """Make all calls; at the first difference note it and stop."""
        first = None
        try:
            for call in self._segment.calls():
                self._now = getattr(call, "now", self._now)
                first = self._now if first is None else first
                self._make(call)
                self.report.num_calls += 1
        except _UnequalError as unequal:
            self.report.difference = Difference(life, self._step, self._now, unequal.lines)
        except DivergenceError as divergence:
            self.report.difference = Difference(life, self._step, self._now, (str(divergence),))
        except InvariantError as error:
            self.report.difference = Difference(life, self._step, self._now, (f"the scheduler refuses: {error}",))
        self._tell_times(self._now)
        self.report.seconds += self._now - (first or 0.0)
        self.report.ends.append(self._segment.end_reason)

    def _make(self, call: Call) -> None:
        scheduler = self.scheduler
        if isinstance(call, Plan):
            self._plan(call)
        elif isinstance(call, Commit):
            self._commit(call)
        elif isinstance(call, Admit):
            self._admit(call)
        elif isinstance(call, Cancel):
            error = None if call.message is None else FinishError(ErrorKind.ENGINE, call.message)  # kinds are not kept
            scheduler.cancel(call.request_ids, call.now, call.reason, error)
            self._decided(scheduler.take_events())
        elif isinstance(call, EndChoice):
            scheduler.end_choice(call.request_id, call.choice, call.now, call.reason)
            self._decided(scheduler.take_events())
        elif isinstance(call, Control):
            self._control(call)

    def _control(self, call: Control) -> None:
        if call.verb == "limit_step":
            self.scheduler.limit_step(call.num_tokens)
        elif call.verb in ("pause", "resume", "drain", "reset_prefix_cache"):
            getattr(self.scheduler, call.verb)()
        else:
            raise RecordingError(f"{self._segment.path} has the unknown verb {call.verb!r}")

    def _admit(self, call: Admit) -> None:
        self._inputs.begin(call.keys)
        self._inputs.is_blind = call.is_blind
        try:
            admission = self.scheduler.admit(call.request, call.now)
        except RequestError as error:
            raise _UnequalError(f"request {call.request.request_id} was taken, and is refused now: {error}") from None
        self._inputs.end()
        self.report.num_requests += 1
        if self._gatherer is not None:
            self._gatherer.arrived(call.request, admission.max_tokens, call.now)
            self._gatherer.keyed(call.keys)
        self._sink.admitted(call.request)

    def _plan(self, call: Plan) -> None:
        self._tell_times(call.now)
        self._step = call.plan.step
        self._inputs.begin(call.keys, call.plan)
        plan = self.scheduler.plan(call.now, call.only)
        if plan.is_empty:
            if call.digest:
                raise _UnequalError(*differences(call.plan, plan, self._owners))
        else:
            self._compare(call, plan)
        self._inputs.end()
        if self._gatherer is not None:
            self._gatherer.keyed(call.keys)
        self._decided(plan.events)

    def _compare(self, call: Plan, plan: StepPlan) -> None:
        self.report.num_plans += 1
        if plan.digest(self._has_text) != call.digest:
            raise _UnequalError(*differences(call.plan, plan, self._owners))
        self.report.num_equal += 1
        for new in plan.new_sequences:
            self._owners[new.slot] = new.request_id
        self._flight.append((plan, call))

    def _commit(self, call: Commit) -> None:
        self._step = call.step
        if not self._flight or self._flight[0][0].step != call.step:
            raise _UnequalError(f"step {call.step} is committed, and not the oldest in flight")
        plan, planned = self._flight.popleft()
        self._inputs.begin(call.keys)
        events = self.scheduler.commit(plan, call.outcome, call.now)
        self._inputs.end()
        if isinstance(call.outcome, StepResult):
            self._keep_times(planned, call, call.outcome)
            self.report.num_tokens += len(events.request_ids)
        else:
            self._flight.clear()
            self.report.num_failed_steps += 1
        if self._gatherer is not None:
            self._gatherer.keyed(call.keys)
            self._gatherer.tokens(events)
        self._decided(events.decisions)
        self._sink.stepped(plan, call.outcome, events)

    def _decided(self, decisions: tuple[Event, ...]) -> None:
        if decisions:
            self._sink.decided(decisions)

    def _keep_times(self, planned: Plan, call: Commit, outcome: StepResult) -> None:
        parts = outcome.timings
        schedule = planned.planned - planned.now + call.committed - call.now
        self._pending = schedule, parts.prepare_s, parts.forward_s, parts.sample_s, call.committed, planned.now

    def _tell_times(self, now: float) -> None:
        """A step is over when the next plan is begun: until then its tokens were delivered."""
        if self._pending is not None and self.add_times is not None:
            *parts, committed, begun = self._pending
            self.add_times((*parts, now - committed, now - begun))
        self._pending = None


def replay(recording: Recording, make_sink: MakeSink | None = None, add_times: AddTimes | None = None) -> ReplayReport:
    """Replay all segments, telling a watcher what a live engine's would hear; ends at the first difference.

    `add_times` gets each step's seconds in its parts (schedule, prepare, forward, sample, emit, all) once they are
    known: behind the watcher's `stepped`, in front of the next. Raises RecordingError; ConfigError for a policy that
    is not installed here.
    """
    report = ReplayReport()
    for life, segment in enumerate(recording.segments):
        one = Replay(segment, report, make_sink)
        one.add_times = add_times
        one.run(life)
        report.num_segments += 1
        if report.difference is not None:
            break
    return report
