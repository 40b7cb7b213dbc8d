"""Replay a recording: make the same calls on a new scheduler, whose plans must have the same digests.

Owns: calling the scheduler, the comparison, its messages, reporting to sinks. Does not: collect requests
(requests), or simulate other settings (octavo.simulator does).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from octavo.core.plan import Event, EventKind, Events, NewSequence, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.request_state import Status
from octavo.core.saved_state import SavedState
from octavo.core.scheduler import Scheduler
from octavo.core.tap import AdmitCall, CancelCall, CommitCall, ControlCall, EndChoiceCall, KeyRun, KVCall, PlanCall
from octavo.errors import ConfigError, InvariantError, RequestError
from octavo.observe.history import EventSink
from octavo.observe.recording.format import Header, RecordedCall, RecordingError, StateRecord
from octavo.observe.recording.reader import RecordedStep, Recording, Segment, StepPairs

MakeSink = Callable[[Scheduler, Header], EventSink]  # called for each segment, with its scheduler
AddStep = Callable[[RecordedStep], object]
MAX_LINES = 12
T = TypeVar("T")


class DivergenceError(Exception):
    """The replay's decisions differ from the recording's; `lines` name the place, expected against got."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.lines = lines


@dataclass(frozen=True, slots=True)
class Difference:
    """The first plan that differed: `lines` name the place, expected against got."""

    segment_index: int
    step: int
    now: float
    lines: tuple[str, ...]


@dataclass(slots=True)
class ReplayReport:
    """The result of a replay: plans compared, and the first difference, if there was one.

    `seconds` are those between the first and the last call of each segment. `ends` has each segment's end reason.
    """

    num_segments: int = 0
    num_calls: int = 0
    num_requests: int = 0  # that were admitted
    num_open: int = 0  # that were open when the recording began, in the middle of an engine's life
    num_plans: int = 0  # that were not empty: their digests were compared, up to the first difference
    num_equal: int = 0
    num_left: int = 0  # that were not compared, because the replay was to end before them
    num_failed_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    ends: list[str] = field(default_factory=list)
    difference: Difference | None = None

    @property
    def is_equal(self) -> bool:
        """Return True if every plan was equal to the recorded one."""
        return self.difference is None

    def count(self, made: Replayed) -> None:
        """Count a call whose outcome was as recorded."""
        call = made.recorded.call
        if isinstance(call, StateRecord):
            self.num_open += 0 if made.opened is None else len(made.opened.requests)
            return
        self.num_calls += 1
        self.num_equal += bool(made.recorded.digest)
        self.num_requests += isinstance(call, AdmitCall)
        self.num_failed_steps += isinstance(call, CommitCall) and isinstance(call.outcome, StepFailure)
        self.num_tokens += 0 if made.events is None else len(made.events.request_ids)


class RecordedInputs:
    """An InputSource of the replayed call: its keys, and the drafts of its plan if they cannot be computed.

    They can be if prompt lookup made them and the recording has token ids from the engine's start on.

    The live scheduler made keys in the same order, for the same sequences.
    """

    def __init__(self, header: Header) -> None:
        limits = header.limits
        self.has_drafts = not header.has_text or header.has_state or limits.has_draft_model or limits.has_paced_lookup
        self._has_no_ids = False  # the live engine had no ids of the request that is being admitted either
        self._due: deque[KeyRun] = deque()
        self._drafts: dict[int, array[int]] = {}

    def begin(self, recorded: RecordedCall) -> None:
        """Set the inputs of a call."""
        call = recorded.call
        self._due.extend(getattr(call, "keys", ()))
        self._has_no_ids = recorded.has_no_ids
        if isinstance(call, PlanCall):
            self._drafts, plan, begin = {}, call.plan, 0
            for slot, count in zip(plan.slots, plan.num_drafts, strict=False):
                self._drafts[slot] = plan.draft_token_ids[begin : begin + count]
                begin += count

    def end(self) -> None:
        """Check that the call used all its keys. Raises DivergenceError."""
        if self._due:
            run = self._due[0]
            raise DivergenceError(f"keys from block {run.first} on of request number {run.order} were not requested")

    def keys(self, order: int, choice: int, first: int) -> Iterable[bytes]:
        """Return the keys that the live sequence had from block `first` on; () if it had none."""
        if self._due and self._due[0][:3] == (order, choice, first):
            return self._due.popleft().keys
        return ()

    def can_draft(self, request: Request) -> bool:
        """Return True if the live engine's drafter could draft for the request."""
        return not self._has_no_ids

    def drafts(self, request_id: str, slot: int, most: int) -> array[int]:
        """Return the recorded drafts. Raises DivergenceError if there is no room for them."""
        drafts = self._drafts.get(slot, array("i"))
        if len(drafts) > max(0, most):
            raise DivergenceError(f"{request_id} had {len(drafts)} drafts, and has room for {most}")
        return drafts


@dataclass(frozen=True, slots=True)
class OpenedBefore:
    """The requests that were open when a segment began; those with outputs are resumed with them.

    `saved` is the state.
    """

    now: float
    saved: SavedState
    requests: tuple[Request, ...]

    @classmethod
    def of(cls, now: float, saved: SavedState) -> OpenedBefore:
        """Return the open requests of a state."""
        requests = []
        for request, one in zip(saved.requests, saved.progress, strict=True):
            outputs = [cls.num_outputs(saved, number) for number in one.sequences]
            if one.status != Status.FINISHED:
                emitted = array("i", bytes(4 * max(outputs))) if any(outputs) else request.emitted_token_ids
                requests.append(replace(request, emitted_token_ids=emitted))
        return cls(now, saved, tuple(requests))

    @staticmethod
    def num_outputs(saved: SavedState, number: int) -> int:
        """Return the output tokens of a sequence."""
        values = saved.sequences[number].values
        return int(values["num_committed"] or 0) - int(values["num_prompt"] or 0)

    def report_to(self, sink: EventSink) -> None:
        """Report the requests, and their slots as a step without rows."""
        for request in self.requests:
            sink.admitted(request)
        saved, events, entered = self.saved, list[Event](), list[NewSequence]()
        step = int(saved.values["step"] or 0) - 1
        for request, one in zip(saved.requests, saved.progress, strict=True):
            began, name = one.values["first_scheduled_at"], request.request_id
            if isinstance(began, (int, float)) and one.status != Status.FINISHED:
                cached = int(one.values["cached_tokens"] or 0)
                events.append(Event(EventKind.ADMITTED, name, began, step, cached_tokens=cached))
                if one.status == Status.WAITING:
                    events.append(Event(EventKind.PREEMPTED, name, self.now, step))
        for sequence in saved.sequences:
            owner, values = saved.requests[sequence.request], sequence.values
            slot, choice = int(values["slot"] or 0), int(values["choice"] or 0)
            if slot >= 0:
                entered.append(NewSequence(slot, owner.request_id, choice, owner.num_prompt_tokens, None, owner.params))
        plan = StepPlan(step, self.now, new_sequences=tuple(entered))
        sink.stepped(plan, StepResult(array("i")), Events(step, self.now, decisions=tuple(events)))


class Replayed(NamedTuple):
    """A replayed call and its decisions. An admission also has its max_tokens, a commit its plan and events.

    The state with which a segment begins has the requests that were `opened` before.
    """

    recorded: RecordedCall
    decisions: tuple[Event, ...] = ()
    max_tokens: int = 0
    plan: StepPlan | None = None
    events: Events | None = None
    opened: OpenedBefore | None = None

    def report_to(self, sink: EventSink) -> None:
        """Report to a sink as the live call did."""
        call = self.recorded.call
        if isinstance(call, AdmitCall):
            sink.admitted(call.request)
        if self.opened is not None:
            self.opened.report_to(sink)
        if self.decisions:
            sink.decided(self.decisions)
        if isinstance(call, CommitCall) and self.plan is not None and self.events is not None:
            sink.stepped(self.plan, call.outcome, self.events)


class Replayer:
    """Replays one segment's calls on a scheduler of its own, and compares each plan with the recorded one."""

    def __init__(self, segment: Segment, segment_index: int = 0) -> None:
        self.step = 0  # of the last plan or commit
        self.began: float | None = None
        self.now = 0.0
        self.num_plans = 0  # that were not empty
        self._segment, self._segment_index = segment, segment_index
        self._has_text = segment.header.has_text
        self._inputs = RecordedInputs(segment.header)
        self.scheduler = Scheduler(segment.header.limits, source=self._inputs)
        self._flight: deque[StepPlan] = deque()
        self._owners: dict[int, str] = {}
        self._has_begun = False

    def play(self, sink: EventSink | None = None, add_step: AddStep | None = None) -> Iterator[Replayed]:
        """Replay all calls, reporting to a sink. Raises DivergenceError at the first whose outcome differs."""
        pairs = StepPairs(self._segment_index)
        for recorded in self._segment.calls():
            self.now = getattr(recorded.call, "now", self.now)
            self.began = self.now if self.began is None else self.began
            if add_step is not None and (ended := pairs.take(recorded)) is not None:
                add_step(ended)
            self._inputs.begin(recorded)
            try:
                made = self._make(recorded)
            except InvariantError as error:
                raise DivergenceError(f"the scheduler refuses: {error}") from None
            self._inputs.end()
            self._has_begun = True
            if sink is not None:
                made.report_to(sink)
            yield made
        if add_step is not None and (ended := pairs.end()) is not None:
            add_step(ended)

    def _make(self, recorded: RecordedCall) -> Replayed:
        scheduler, call = self.scheduler, recorded.call
        match call:
            case StateRecord():
                return self._begin(call, recorded)
            case AdmitCall():
                return self._admit(call, recorded)
            case PlanCall():
                return self._plan(call, recorded)
            case CommitCall():
                return self._commit(call, recorded)
            case CancelCall():
                scheduler.cancel(call.request_ids, call.now, call.reason, call.error)
            case EndChoiceCall():
                scheduler.end_choice(call.request_id, call.choice, call.now, call.reason)
            case KVCall("expect_kv" | "receive_kv" | "keep_kv" | "release_kv"):
                numbers = (call.num_tokens,) if call.num_tokens else ()  # of expect_kv
                getattr(scheduler, call.verb)(call.request_id, *numbers)
                return Replayed(recorded)
            case ControlCall("limit_step"):
                scheduler.limit_step(call.num_tokens)
                return Replayed(recorded)
            case ControlCall("pause" | "resume" | "drain" | "reset_prefix_cache"):
                getattr(scheduler, call.verb)()
                return Replayed(recorded)
            case _:
                raise RecordingError(f"{self._segment.path} has the unknown call {call!r}")
        return Replayed(recorded, scheduler.take_events())

    def _begin(self, call: StateRecord, recorded: RecordedCall) -> Replayed:
        """Continue from the state with which the segment begins. A later one says nothing new."""
        if call.saved is None or self._has_begun:
            return Replayed(recorded)
        saved = call.saved.without_totals()  # so that they count what the recording has
        try:
            self._flight.extend(self.scheduler.restore(saved))
        except (InvariantError, ConfigError, LookupError, TypeError, ValueError) as error:
            raise RecordingError(
                f"{self._segment.path} begins with a state that this Octavo cannot continue ({error}); it was recorded "
                f"by {self._segment.header.octavo or 'an unknown version'}"
            ) from None
        self._owners = {int(one.values["slot"] or 0): saved.requests[one.request].request_id for one in saved.sequences}
        return Replayed(recorded, opened=OpenedBefore.of(call.now, saved))

    def _admit(self, call: AdmitCall, recorded: RecordedCall) -> Replayed:
        try:
            return Replayed(recorded, max_tokens=self.scheduler.admit(call.request, call.now).max_tokens)
        except RequestError as error:
            name = call.request.request_id
            raise DivergenceError(f"request {name} was admitted, and is refused now: {error}") from None

    def _plan(self, call: PlanCall, recorded: RecordedCall) -> Replayed:
        self.step = call.plan.step
        self.num_plans += bool(recorded.digest)
        plan = self.scheduler.plan(call.now, call.only)
        if (b"" if plan.is_empty else plan.digest(self._has_text)) != recorded.digest:
            raise DivergenceError(*differences(call.plan, plan, self._owners))
        for new in plan.new_sequences:
            self._owners[new.slot] = new.request_id
        if not plan.is_empty:
            self._flight.append(plan)
        return Replayed(recorded, plan.events, plan=plan)

    def _commit(self, call: CommitCall, recorded: RecordedCall) -> Replayed:
        self.step = call.step
        if not self._flight or self._flight[0].step != call.step:
            raise DivergenceError(f"step {call.step} is committed, and not the oldest in flight")
        plan = self._flight.popleft()
        events = self.scheduler.commit(plan, call.outcome, call.now)
        if not isinstance(call.outcome, StepResult):
            self._flight.clear()
        return Replayed(recorded, events.decisions, plan=plan, events=events)


def replay(
    recording: Recording,
    make_sink: MakeSink | None = None,
    add_step: AddStep | None = None,
    add_call: Callable[[Replayed], object] | None = None,
    max_plans: int | None = None,
) -> ReplayReport:
    """Replay all segments, reporting to a sink as a live engine would; ends at the first difference.

    `max_plans` ends it after so many plans that were equal; then the report is of the calls up to there.
    `add_step` is called with each step once its times are known: after the sink's `stepped`, before the next.
    `add_call` is called with each call after the sink.
    Raises RecordingError; ConfigError for a policy that is not installed here.
    """
    report = ReplayReport()
    for index, segment in enumerate(recording.segments):
        replayer = Replayer(segment, index)
        sink = None if make_sink is None else make_sink(replayer.scheduler, segment.header)
        try:
            for made in replayer.play(sink, add_step):
                report.count(made)
                if add_call is not None:
                    add_call(made)
                if report.num_equal == max_plans:
                    break
        except DivergenceError as divergence:
            report.difference = Difference(index, replayer.step, replayer.now, divergence.lines)
        report.num_segments += 1
        report.num_plans += replayer.num_plans
        report.seconds += replayer.now - (replayer.began or 0.0)
        report.ends.append(segment.end_reason)
        if report.difference is not None or report.num_equal == max_plans:
            break
    return report


def check_equal(recording: Recording, report: ReplayReport) -> None:
    """Raise RecordingError if a replay of the recording differed."""
    if report.difference is not None:
        segment = recording.segments[report.difference.segment_index]
        raise RecordingError(
            f"{segment.path} does not replay to the same decisions from step {report.difference.step} on "
            f"({report.difference.lines[0]}); use the Octavo that recorded it ({segment.header.octavo or 'unknown'})"
        )


# --- differences in words ------------------------------------------------------------------------------------

_COLUMNS = {
    "edits": ("slot, group, index, block", 4),
    "copies": ("group, source, destination", 3),
    "swap_outs": ("group, device block, host block", 3),
    "host_loads": ("group, host block, device block", 3),
    "freed_slots": ("slot", 1),
    "id_edits": ("slot, position, id", 3),
}


def differences(expected: StepPlan, got: StepPlan, owners: Mapping[int, str]) -> tuple[str, ...]:
    """Return lines that name the differences, the rows first; `owners` are the requests in the slots before."""
    names = {**owners, **{new.slot: new.request_id for new in (*expected.new_sequences, *got.new_sequences)}}
    lines = _differing("step", {"": expected.step}, {"": got.step})
    lines += _differing("{} enters", _entering(expected), _entering(got), "not")
    rows = _differing("row of {}", _rows(expected, names), _rows(got, names))
    lines += rows or _differing("order of rows by slot", {"": expected.slots.tolist()}, {"": got.slots.tolist()})
    for name, (parts, width) in _COLUMNS.items():
        was, now = _split(getattr(expected, name), width), _split(getattr(got, name), width)
        lines += _differing(f"{name} ({parts}): entry {{}}", was, now)[:1]
    for name in ("finished_ids", "preempted_ids"):
        lines += _differing(name, {"": getattr(expected, name)}, {"": getattr(got, name)})
    for name in ("encode_jobs", "encoder_frees"):
        lines += _differing(name, {"": len(getattr(expected, name))}, {"": len(getattr(got, name))})
    if not lines:
        lines.append("all columns that are recorded are equal: ids, sampling parameters or media differ")
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"... and {len(lines) - MAX_LINES} more"]
    return tuple(lines)


def _differing(what: str, expected: Mapping[T, object], got: Mapping[T, object], absent: str = "none") -> list[str]:
    """Return a line for each key whose values differ."""
    return [
        f"{what.format(key)}: expected {expected.get(key, absent)}, got {got.get(key, absent)}"
        for key in dict.fromkeys((*expected, *got))
        if expected.get(key) != got.get(key)
    ]


def _entering(plan: StepPlan) -> dict[str, str]:
    return {
        f"{new.request_id} choice {new.choice}" if new.choice else new.request_id: f"slot {new.slot}"
        for new in plan.new_sequences
    }


def _rows(plan: StepPlan, names: Mapping[int, str]) -> dict[str, str]:
    return {
        f"{names.get(row.slot, '?')} (slot {row.slot})": f"positions {row.start} to {row.start + row.count}, "
        f"flags {row.flags}, {len(row.drafts)} drafts"
        for row in plan.rows()
    }


def _split(column: array[int], width: int) -> dict[int, list[int]]:
    return {at // width: column[at : at + width].tolist() for at in range(0, len(column), width)}
