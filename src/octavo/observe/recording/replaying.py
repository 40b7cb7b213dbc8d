"""Replays a recording: the same calls to a scheduler of today, whose plans must have the same digests.

Owns: driving the scheduler, the comparison, its words, and feeding sinks.
Does not: simulate other settings (octavo.simulator does).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.tap import AdmitCall, CancelCall, CommitCall, ControlCall, EndChoiceCall, KeyRun, PlanCall
from octavo.errors import InvariantError, RequestError
from octavo.observe.recording.format import Header, RecordedCall, RecordingError
from octavo.observe.recording.reader import Recording, Segment
from octavo.observe.sink import EventSink

MakeSink = Callable[[Scheduler, Header], EventSink]  # called for each segment, with its scheduler
AddTimes = Callable[[tuple[float, ...]], object]  # as engine.step_times.StepTimes.add
MAX_LINES = 12


class DivergenceError(Exception):
    """The replay decides otherwise than the recording; `lines` say where, expected against got."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.lines = lines


@dataclass(frozen=True, slots=True)
class Difference:
    """The first plan that differed: `lines` say where, expected against got."""

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

    def count(self, recorded: RecordedCall, made: Replayed) -> None:
        """Count a call that came out as recorded."""
        call = recorded.call
        self.num_calls += 1
        if isinstance(call, AdmitCall):
            self.num_requests += 1
        elif isinstance(call, PlanCall):
            self.num_equal += bool(recorded.digest)
        elif isinstance(call, CommitCall):
            self.num_failed_steps += isinstance(call.outcome, StepFailure)
            self.num_tokens += 0 if made.events is None else len(made.events.request_ids)


class RecordedInputs:
    """An InputSource: the keys of the call that is being replayed, and without text the drafts of its plan.

    Keys are asked for in the order in which the live scheduler made them, for the same sequences.
    """

    def __init__(self, has_text: bool) -> None:
        self.has_drafts = not has_text
        self._is_blind = False  # the request that is being admitted had no ids in the live engine either
        self._due: deque[KeyRun] = deque()
        self._drafts: dict[int, array[int]] = {}

    def begin(self, call: AdmitCall | PlanCall | CommitCall, is_blind: bool) -> None:
        """Take in what the next call will ask for."""
        self._due.extend(call.keys)
        if isinstance(call, AdmitCall):
            self._is_blind = is_blind
        elif isinstance(call, PlanCall):
            self._drafts = {}
            plan, at = call.plan, 0
            for slot, count in zip(plan.slots, plan.num_drafts, strict=False):
                if count:
                    self._drafts[slot] = plan.draft_token_ids[at : at + count]
                at += count

    def end(self) -> None:
        """Check that the call asked for all its keys. Raises DivergenceError."""
        if self._due:
            run = self._due[0]
            raise DivergenceError(f"keys from block {run.first} on of request number {run.order} were not asked for")

    def keys(self, order: int, choice: int, first: int) -> Iterable[bytes]:
        """Return what the live sequence got: nothing, where that had no keys for so many blocks."""
        if self._due and self._due[0][:3] == (order, choice, first):
            return self._due.popleft().keys
        return ()

    def can_draft(self, request: Request) -> bool:
        """Return what the live engine's drafter did."""
        return not self._is_blind

    def drafts(self, request_id: str, slot: int, most: int) -> array[int]:
        """Return the recorded drafts. Raises DivergenceError where there is no room for them."""
        drafts = self._drafts.get(slot, array("i"))
        if len(drafts) > max(0, most):
            raise DivergenceError(f"{request_id} had {len(drafts)} drafts, and has room for {most}")
        return drafts


class Replayed(NamedTuple):
    """What came of one call: decisions; of an admission its max_tokens; of a commit its plan and events.

    `planned` is when the live engine had made the plan.
    """

    decisions: tuple[Event, ...] = ()
    max_tokens: int = 0
    plan: StepPlan | None = None
    planned: float = 0.0
    events: Events | None = None

    def feed(self, sink: EventSink, recorded: RecordedCall) -> None:
        """Tell a sink what it would have heard of the live call."""
        call = recorded.call
        if isinstance(call, AdmitCall):
            sink.admitted(call.request)
        if self.decisions:
            sink.decided(self.decisions)
        if isinstance(call, CommitCall) and self.plan is not None and self.events is not None:
            sink.stepped(self.plan, call.outcome, self.events)


class Replayer:
    """Makes one segment's calls on a scheduler of its own, and compares each plan."""

    def __init__(self, segment: Segment) -> None:
        self.step = 0  # of the last plan or commit
        self._path = segment.path
        self._has_text = segment.header.has_text
        self._inputs = RecordedInputs(self._has_text)
        self.scheduler = Scheduler(segment.header.limits, source=self._inputs)
        self._flight: deque[tuple[StepPlan, float]] = deque()
        self._owners: dict[int, str] = {}

    def make(self, recorded: RecordedCall) -> Replayed:
        """Make one call. Raises DivergenceError where it turns out otherwise."""
        scheduler, call = self.scheduler, recorded.call
        if isinstance(call, PlanCall | CommitCall | AdmitCall):
            self._inputs.begin(call, recorded.is_blind)
            try:
                made = self._make_step(call, recorded)
            except InvariantError as error:
                raise DivergenceError(f"the scheduler refuses: {error}") from None
            self._inputs.end()
            return made
        if isinstance(call, CancelCall):
            scheduler.cancel(call.request_ids, call.now, call.reason, call.error)
        elif isinstance(call, EndChoiceCall):
            scheduler.end_choice(call.request_id, call.choice, call.now, call.reason)
        elif isinstance(call, ControlCall):
            self._control(call)
            return Replayed()
        return Replayed(scheduler.take_events())

    def _make_step(self, call: AdmitCall | PlanCall | CommitCall, recorded: RecordedCall) -> Replayed:
        if isinstance(call, PlanCall):
            return self._plan(call, recorded)
        return self._commit(call) if isinstance(call, CommitCall) else self._admit(call)

    def _control(self, call: ControlCall) -> None:
        if call.verb == "limit_step":
            self.scheduler.limit_step(call.num_tokens)
        elif call.verb in ("pause", "resume", "drain", "reset_prefix_cache"):
            getattr(self.scheduler, call.verb)()
        else:
            raise RecordingError(f"{self._path} has the unknown verb {call.verb!r}")

    def _admit(self, call: AdmitCall) -> Replayed:
        try:
            return Replayed(max_tokens=self.scheduler.admit(call.request, call.now).max_tokens)
        except RequestError as error:
            name = call.request.request_id
            raise DivergenceError(f"request {name} was taken, and is refused now: {error}") from None

    def _plan(self, call: PlanCall, recorded: RecordedCall) -> Replayed:
        self.step = call.plan.step
        plan = self.scheduler.plan(call.now, call.only)
        if (b"" if plan.is_empty else plan.digest(self._has_text)) != recorded.digest:
            raise DivergenceError(*differences(call.plan, plan, self._owners))
        for new in plan.new_sequences:
            self._owners[new.slot] = new.request_id
        if not plan.is_empty:
            self._flight.append((plan, recorded.done))
        return Replayed(plan.events, plan=plan)

    def _commit(self, call: CommitCall) -> Replayed:
        self.step = call.step
        if not self._flight or self._flight[0][0].step != call.step:
            raise DivergenceError(f"step {call.step} is committed, and not the oldest in flight")
        plan, planned = self._flight.popleft()
        events = self.scheduler.commit(plan, call.outcome, call.now)
        if not isinstance(call.outcome, StepResult):
            self._flight.clear()
        return Replayed(events.decisions, plan=plan, planned=planned, events=events)


class _StepClock:
    """Gives the seconds of each step's parts to `add_times`, once its tokens were delivered: at the next plan."""

    def __init__(self, add_times: AddTimes) -> None:
        self._add_times = add_times
        self._pending: tuple[float, ...] = ()

    def committed(self, begun: float, planned: float, commit: CommitCall, committed: float) -> None:
        """Keep the times of a step that gave a result: of its plan (`begun`, `planned`) and its commit."""
        if isinstance(commit.outcome, StepResult):
            schedule, parts = planned - begun + committed - commit.now, commit.outcome.timings
            self._pending = schedule, parts.prepare_s, parts.forward_s, parts.sample_s, committed, begun

    def flush(self, now: float) -> None:
        """Give the times of the last step, whose delivery ended now."""
        if self._pending:
            *parts, committed, begun = self._pending
            self._add_times((*parts, now - committed, now - begun))
            self._pending = ()


def _replay_segment(
    segment: Segment, life: int, report: ReplayReport, make_sink: MakeSink | None, clock: _StepClock | None
) -> None:
    """Make all calls of a segment; at the first difference note it and stop."""
    replayer = Replayer(segment)
    sink = None if make_sink is None else make_sink(replayer.scheduler, segment.header)
    first, now = None, 0.0
    try:
        for recorded in segment.calls():
            call = recorded.call
            now = getattr(call, "now", now)
            first = now if first is None else first
            if isinstance(call, PlanCall):
                report.num_plans += bool(recorded.digest)
                if clock is not None:
                    clock.flush(now)
            made = replayer.make(recorded)
            report.count(recorded, made)
            if clock is not None and isinstance(call, CommitCall) and made.plan is not None:
                clock.committed(made.plan.now, made.planned, call, recorded.done)
            if sink is not None:
                made.feed(sink, recorded)
    except DivergenceError as divergence:
        report.difference = Difference(life, replayer.step, now, divergence.lines)
    if clock is not None:
        clock.flush(now)
    report.num_segments += 1
    report.seconds += now - (first or 0.0)
    report.ends.append(segment.end_reason)


def replay(recording: Recording, make_sink: MakeSink | None = None, add_times: AddTimes | None = None) -> ReplayReport:
    """Replay all segments, telling a sink what a live engine would; ends at the first difference.

    `add_times` gets each step's seconds in its parts (schedule, prepare, forward, sample, emit, all) once they are
    known: after the sink's `stepped`, before the next. Raises RecordingError; ConfigError for a policy that is not
    installed here.
    """
    report, clock = ReplayReport(), None if add_times is None else _StepClock(add_times)
    for life, segment in enumerate(recording.segments):
        _replay_segment(segment, life, report, make_sink, clock)
        if report.difference is not None:
            break
    return report


# --- differences in words ------------------------------------------------------------------------------------

_FLAT = {
    "edits": ("slot, group, index, block", 4),
    "copies": ("group, source, destination", 3),
    "swap_outs": ("group, device block, host block", 3),
    "host_loads": ("group, host block, device block", 3),
    "freed_slots": ("slot", 1),
    "id_edits": ("slot, position, id", 3),
}


def differences(expected: StepPlan, got: StepPlan, owners: Mapping[int, str]) -> tuple[str, ...]:
    """Lines that say what differs, the rows first; `owners` are the requests in the slots before these plans."""
    lines: list[str] = []
    if expected.step != got.step:
        lines.append(f"step: expected {expected.step}, got {got.step}")
    was, now = _slots_entered(expected), _slots_entered(got)
    for name in dict.fromkeys((*was, *now)):
        if was.get(name) != now.get(name):
            lines.append(f"{name} enters: expected {was.get(name, 'not')}, got {now.get(name, 'not')}")
    names = {**owners, **{new.slot: new.request_id for new in (*expected.new_sequences, *got.new_sequences)}}
    lines += _row_differences(expected, got, names)
    for name, (parts, width) in _FLAT.items():
        lines += _first_difference(f"{name} ({parts})", getattr(expected, name), getattr(got, name), width)
    for name in ("finished_ids", "preempted_ids", "encode_jobs", "encoder_frees"):
        theirs, ours = getattr(expected, name), getattr(got, name)
        if name.startswith("encode"):
            theirs, ours = len(theirs), len(ours)
        if ours != theirs:
            lines.append(f"{name}: expected {theirs}, got {ours}")
    if not lines:
        lines.append("all columns that are recorded are equal: ids, sampling parameters or media differ")
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"... and {len(lines) - MAX_LINES} more"]
    return tuple(lines)


def _slots_entered(plan: StepPlan) -> dict[str, str]:
    return {
        f"{new.request_id} choice {new.choice}" if new.choice else new.request_id: f"slot {new.slot}"
        for new in plan.new_sequences
    }


def _row_differences(expected: StepPlan, got: StepPlan, names: Mapping[int, str]) -> list[str]:
    was, now = _by_slot(expected), _by_slot(got)
    lines = [
        f"row of {names.get(slot, '?')} (slot {slot}): expected {was.get(slot, 'none')}, got {now.get(slot, 'none')}"
        for slot in dict.fromkeys((*was, *now))
        if was.get(slot) != now.get(slot)
    ]
    if not lines and expected.slots != got.slots:
        lines.append(f"order of rows by slot: expected {expected.slots.tolist()}, got {got.slots.tolist()}")
    return lines


def _by_slot(plan: StepPlan) -> dict[int, str]:
    return {
        row.slot: f"positions {row.start} to {row.start + row.count}, flags {row.flags}, {len(row.drafts)} drafts"
        for row in plan.rows()
    }


def _first_difference(what: str, expected: array[int], got: array[int], width: int) -> list[str]:
    def entries(column: array[int]) -> list[list[int]]:
        return [column[at : at + width].tolist() for at in range(0, len(column), width)]

    for number, (was, now) in enumerate(zip_longest(entries(expected), entries(got))):
        if was != now:
            return [f"{what}: entry {number}: expected {was or 'none'}, got {now or 'none'}"]
    return []
