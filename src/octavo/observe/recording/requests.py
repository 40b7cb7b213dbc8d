"""The requests of a recording with their outcomes, as a workload.

Owns: RecordedRequest; collecting requests during a replay; reading them, and what a replay counts, from the records
alone where these tell what became of each request (PlainRecording), which must equal the replay
(tests/observe/recording/test_requests.py). Does not: replay (replaying), or read steps (columns).
A plan that continues the rows of the plan before, and its result, cost O(1): tokens are added when the rows change.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from octavo.core.limits import check_feasible
from octavo.core.plan import ROW_CARRY, ROW_SAMPLE
from octavo.core.request import FinishReason, Request, Span, Want
from octavo.core.request_state import Status
from octavo.core.scheduler import Scheduler
from octavo.core.tap import AdmitCall
from octavo.errors import RequestError
from octavo.observe.history import History, RequestHistory
from octavo.observe.recording.columns import ColumnsReader, StepColumns
from octavo.observe.recording.format import (
    ADMIT,
    CANCEL,
    COMMIT,
    CONTROL,
    END_CHOICE,
    PLAN,
    CallDecoder,
    Header,
    RowDeltas,
)
from octavo.observe.recording.reader import Recording
from octavo.observe.recording.replaying import OpenedBefore, Replayed, ReplayReport, check_equal, replay

_PLAIN_RESULT = frozenset(("token_ids", "logprobs"))
MAX_ON_THE_WAY_S = 3600.0  # from the front end to the engine; a longer time means another clock


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request. Times are seconds since the first arrival of all; None if the event did not happen.

    `arrival` is its arrival at the server, `taken` its admission by the engine, between two steps. `output_tokens` has
    one number for each choice. `keys` are those of the prompt's full blocks, `output_keys` the later ones of the first
    choice, beginning with the block that holds the prompt's end; one for each `key_tokens` tokens. `segment_index` is
    that of its segment. `is_resumed`: it was open in an earlier engine process, which generated its first
    `emitted_tokens` outputs. `was_open`: it was open when the recording began in the middle of an engine's life; then
    it is resumed if it had outputs, and `emitted_tokens` are those that every choice had.
    """

    name: str
    segment_index: int
    arrival: float
    prompt_tokens: int
    output_tokens: tuple[int, ...]
    tenant: str = ""
    priority: int = 0
    keys: tuple[bytes, ...] = ()
    output_keys: tuple[bytes, ...] = ()
    key_tokens: int = 0
    max_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    ttft_objective: float | None = None
    tpot_objective: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    end: float | None = None
    finish_reason: FinishReason | None = None
    taken: float = 0.0
    emitted_tokens: int = 0
    is_resumed: bool = False
    was_open: bool = False
    spans: tuple[Span, ...] = ()
    adapter_id: int = 0

    @classmethod
    def of(
        cls, call: AdmitCall, segment_index: int, origin: float, key_tokens: int, keys: Sequence[bytes], **known: Any
    ) -> RecordedRequest:
        """Return an admitted request with all its keys, and what else is `known`; `origin` is the time zero."""
        request = call.request
        num_prompt_keys = request.num_prompt_tokens // key_tokens
        return cls(
            request.request_id,
            segment_index,
            arrival_of(call) - origin,
            request.num_prompt_tokens,
            tenant=request.tenant,
            priority=request.priority,
            keys=tuple(keys[:num_prompt_keys]),
            output_keys=tuple(keys[num_prompt_keys:]),
            key_tokens=key_tokens,
            ttft_objective=request.ttft_objective,
            tpot_objective=request.tpot_objective,
            taken=call.now - origin,
            spans=request.spans,
            adapter_id=request.adapter_id,
            **known,
        )

    @property
    def n(self) -> int:
        """Choices, or beams."""
        return len(self.output_tokens)

    @property
    def earlier_tokens(self) -> int:
        """Outputs of each choice from before a recording that begins in the middle of an engine's life."""
        return self.emitted_tokens if self.was_open and self.is_resumed else 0


class _Gathered:
    """The data of a request collected while its segment is replayed, beside its history."""

    def __init__(self, call: AdmitCall, max_tokens: int, history: RequestHistory, was_open: bool = False) -> None:
        params, emitted = call.request.params, len(call.request.emitted_token_ids or ())
        self.call = call
        self.max_tokens = max_tokens
        self.history = history
        self.keys: list[bytes] = []
        self.was_open = was_open
        self.num_emitted = emitted
        self.num_outputs = [emitted] * (params.n if params.beam_width else params.num_sequences)

    def request(self, segment_index: int, origin: float, key_tokens: int) -> RecordedRequest:
        """Return the request, with times relative to `origin`."""
        request, history, end = self.call.request, self.history, self.history.end

        def at(now: float | None) -> float | None:
            return None if now is None else now - origin

        return RecordedRequest.of(
            self.call,
            segment_index,
            origin,
            key_tokens,
            self.keys,
            output_tokens=tuple(self.num_outputs),
            max_tokens=self.max_tokens,
            cached_tokens=history.cached_tokens,
            num_preemptions=history.num_preemptions,
            first_scheduled=at(history.admitted_at),
            first_token=at(history.first_token_at),
            end=None if end is None else end.time - origin,
            finish_reason=None if end is None else end.finish_reason,
            emitted_tokens=self.num_emitted,
            is_resumed=request.emitted_token_ids is not None,
            was_open=self.was_open,
        )


def arrival_of(call: AdmitCall) -> float:
    """Return when a request arrived at the server: its own time if that is plausible, else its admission's."""
    arrival = call.request.arrival
    return arrival if call.now - MAX_ON_THE_WAY_S <= arrival <= call.now else call.now


_NO_OWNERS: tuple[list[str], array[int]] = [], array("i")


class RequestCollector:
    """Collects the requests of a recording with their outcomes during a replay.

    `at_end` is called with each segment's scheduler in its last state.
    """

    def __init__(self, at_end: Callable[[Scheduler], object] | None = None) -> None:
        self._at_end = at_end
        self._origin: float | None = None  # time zero: the first arrival, or the begin in the middle of a life
        self._ended: list[tuple[int, Header, _Gathered]] = []  # of earlier segments
        self._index = -1

    def begin(self, scheduler: Scheduler, header: Header) -> History:
        """Begin a segment; return the sink of its replay."""
        self._end()
        self._index, self._header = self._index + 1, header
        if self._origin is None and header.has_state:
            self._origin = header.start
        self._history = History(scheduler, max_ended=0)
        self._gathered: dict[int, _Gathered] = {}  # by order of arrival at the engine
        self._newest: dict[str, _Gathered] = {}  # by id, which may be used again
        self._next_order = 0
        self._owners: tuple[list[str], array[int]] = _NO_OWNERS  # of the tokens of the last steps
        self._num_same = 0  # steps whose tokens are not counted yet
        return self._history

    def take(self, made: Replayed) -> None:
        """Add a replayed call that the history has."""
        call = made.recorded.call
        if made.events is not None:
            owners = made.events.request_ids, made.events.choices
            if owners != self._owners:
                self._count_tokens()
                self._owners = owners
            self._num_same += 1
        elif isinstance(call, AdmitCall):
            self._count_tokens()
            name = call.request.request_id
            one = _Gathered(call, made.max_tokens, self._history.open[name])
            self._newest[name] = self._gathered[self._next_order] = one
            self._next_order += 1
            self._origin = arrival_of(call) if self._origin is None else self._origin
        elif made.opened is not None:
            self._gathered, self._next_order = _gather_open(made.opened, self._history)
            self._newest = {one.call.request.request_id: one for one in self._gathered.values()}
        for run in getattr(call, "keys", ()):
            found = self._gathered.get(run.order)
            if found is not None and not run.choice and run.first == len(found.keys):  # of the first choice, in order
                found.keys.extend(run.keys)

    def _count_tokens(self) -> None:
        """Count the tokens of the last steps, which had the same owners."""
        names, choices = self._owners
        for name, choice in zip(names, choices, strict=True):
            self._newest[name].num_outputs[choice] += self._num_same
        self._owners, self._num_same = _NO_OWNERS, 0

    def _end(self) -> None:
        """End the segment, if there is one."""
        if self._index < 0:
            return
        self._count_tokens()
        if self._at_end is not None:
            self._at_end(self._history.scheduler)
        self._ended += [(self._index, self._header, one) for one in self._gathered.values()]
        self._gathered = {}

    def requests(self) -> list[RecordedRequest]:
        """Return the requests of all segments in order of arrival, once."""
        self._end()
        origin = self._origin or 0.0
        found = [one.request(index, origin, header.key_tokens) for index, header, one in self._ended]
        return sorted(found, key=lambda one: one.arrival)


def arrivals(recording: Recording) -> list[RecordedRequest]:
    """Return the requests of all segments in order of arrival; replays the recording to find their outcomes.

    Raises RecordingError if the replay differs, and replay's errors.
    """
    requests = RequestCollector()
    check_equal(recording, replay(recording, requests.begin, add_call=requests.take))
    return requests.requests()


def _gather_open(opened: OpenedBefore, history: History) -> tuple[dict[int, _Gathered], int]:
    """Return the requests that were open when a segment began, by order of arrival, and the next order."""
    found, saved = {}, opened.saved
    requests = {request.request_id: request for request in opened.requests}
    for request, one in zip(saved.requests, saved.progress, strict=True):
        if one.status == Status.FINISHED:
            continue
        call = AdmitCall(opened.now, requests[request.request_id])
        entry = _Gathered(call, int(one.values["max_tokens"] or 0), history.open[request.request_id], was_open=True)
        for number in one.sequences:
            sequence, choice = saved.sequences[number], int(saved.sequences[number].values["choice"] or 0)
            if one.beams is None:
                entry.num_outputs[choice] = OpenedBefore.num_outputs(saved, number)
                entry.num_emitted = min(entry.num_emitted, entry.num_outputs[choice])
            if not choice:
                entry.keys = list(sequence.keys)
        found[int(one.values["order"] or 0)] = entry
    return found, int(saved.values["next_order"] or 0)


# --- without a replay


class _NeedsReplayError(Exception):
    """Only the scheduler can tell what became of a request: it has several choices, failed, timed out, ..."""


def read_requests(recording: Recording) -> list[RecordedRequest]:
    """Return the requests of all segments in order of arrival, as a workload.

    Raises RecordingError, and the errors of a replay if one is needed.
    """
    found = read_plain(recording)
    return arrivals(recording) if found is None else found.requests


@dataclass(slots=True)
class PlainRecording:
    """What the records alone tell: the requests in order of arrival, and counts as the recorded scheduler had them.

    The report has what was recorded, of which nothing is compared. `num_steps` were committed.
    """

    requests: list[RecordedRequest]
    report: ReplayReport
    num_steps: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0


def read_plain(recording: Recording, columns: StepColumns | None = None) -> PlainRecording | None:
    """Read the recording without a scheduler, and add its steps to `columns`; None if it needs a replay.

    The requests and counts are those of a replay. Raises RecordingError.
    """
    if any(segment.header.has_state for segment in recording.segments):
        return None
    found = PlainRecording([], ReplayReport())
    origin: float | None = None
    for index, segment in enumerate(recording.segments):
        reader, steps = _SegmentReader(segment.header, found), None
        try:
            if columns is None:
                segment.read(reader.take)
            else:
                steps = ColumnsReader(segment.header, columns)
                segment.read(reader.take, steps.take)
                steps.end()
            entries = reader.close()
        except _NeedsReplayError:
            return None
        found.report.ends.append(segment.end_reason)
        if origin is None:
            origin = arrival_of(entries[0].call) if entries else segment.header.clock
        found.requests += [one.request(index, origin, segment.header.key_tokens) for one in entries]
    found.requests.sort(key=lambda one: one.arrival)
    report = found.report
    report.num_segments, report.num_requests = len(recording.segments), len(found.requests)
    report.num_tokens = sum(one.output_tokens[0] for one in found.requests)
    report.num_left = report.num_plans
    return found


class _Entry:
    """A request and what is known of it so far."""

    __slots__ = (
        "cached_tokens", "call", "end", "finish_reason", "first_scheduled", "first_token", "keys", "limit",
        "max_tokens", "num_outputs", "num_preemptions", "stop_ids",
    )  # fmt: skip

    def __init__(self, call: AdmitCall, max_tokens: int, room: int) -> None:
        request = call.request
        self.call = call
        self.max_tokens = max_tokens
        self.limit = min(max_tokens, room)  # most outputs
        self.stop_ids = frozenset(
            (*(() if request.params.ignore_eos else request.eos_token_ids), *request.params.stop_token_ids)
        )
        self.keys: list[bytes] = []
        self.num_outputs = self.num_preemptions = self.cached_tokens = 0
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.end: float | None = None
        self.finish_reason: FinishReason | None = None

    def finish(self, now: float, reason: FinishReason) -> None:
        """End the request, unless it has ended."""
        if self.end is None:
            self.end, self.finish_reason = now, reason

    def request(self, segment_index: int, origin: float, key_tokens: int) -> RecordedRequest:
        """Return the request, with times relative to `origin`."""
        times = {
            name: None if time is None else time - origin
            for name, time in (
                ("first_scheduled", self.first_scheduled), ("first_token", self.first_token), ("end", self.end)
            )
        }  # fmt: skip
        return RecordedRequest.of(
            self.call,
            segment_index,
            origin,
            key_tokens,
            self.keys,
            output_tokens=(self.num_outputs,),
            max_tokens=self.max_tokens,
            cached_tokens=self.cached_tokens,
            num_preemptions=self.num_preemptions,
            finish_reason=self.finish_reason,
            **times,
        )


class _SegmentReader:
    """Reads the records of one segment. Raises _NeedsReplayError for what it cannot tell."""

    def __init__(self, header: Header, found: PlainRecording) -> None:
        self._found = found
        self._limits = header.limits
        self._may_swap = any(header.limits.host_blocks)
        self._first: float | None = None  # the first call's time, and the last's
        self._now = 0.0
        self._decoder = CallDecoder(header)
        self._rows = RowDeltas()
        self._entries: list[_Entry] = []  # by order of arrival at the engine
        self._newest: dict[str, _Entry] = {}  # by id, which may be used again
        self._owners: dict[int, _Entry] = {}  # by slot
        self._sampling: list[_Entry] = []  # of the last plan; the same list as long as plans continue
        self._flight: deque[list[_Entry]] = deque()
        self._run: list[_Entry] = []  # the rows that sampled in the last commits, not counted yet
        self._run_length, self._run_begin, self._run_end = 0, 0.0, 0.0
        self._stops: set[int] = set()  # every id that may end a request so far
        self._deadlines: list[tuple[float, int, bool]] = []  # heap of (time, order, whether it is of the queue)
        self._takers: dict[int, Callable[[Any], None]] = {
            ADMIT: self._admit, PLAN: self._plan, COMMIT: self._commit, CANCEL: self._cancel,
            END_CHOICE: self._end_choice, CONTROL: self._control,
        }  # fmt: skip

    def take(self, records: list[Any]) -> None:
        """Add the next records."""
        self._found.report.num_calls += len(records)
        times = [record[1] for record in records if record[0] != CONTROL]
        if times:
            self._first, self._now = times[0] if self._first is None else self._first, times[-1]
        takers = self._takers
        for record in records:
            take = takers.get(record[0])
            if take is None:
                raise _NeedsReplayError
            take(record)

    def _add_keys(self, runs: Any) -> None:
        for order, choice, first, keys in runs:
            entry = self._entries[order]
            if not choice and first == len(entry.keys):  # in order
                entry.keys.extend(keys)

    def _cancel(self, record: Any) -> None:
        for name in record[2]:
            self._end(name, record[1], FinishReason(record[3]))

    def _end_choice(self, record: Any) -> None:
        if not record[3]:
            self._end(record[2], record[1], FinishReason(record[4]))

    def _control(self, record: Any) -> None:
        """Do nothing: pauses and smaller steps change when tokens come, not which."""

    def close(self) -> list[_Entry]:
        """Return the requests in order of admission."""
        self._settle()
        self._found.report.seconds += self._now - (self._first or 0.0)
        return self._entries

    def _admit(self, record: Any) -> None:
        call = self._decoder.decode(record).call
        assert isinstance(call, AdmitCall)
        request = call.request
        if not _is_plain(request):
            raise _NeedsReplayError
        try:
            most = check_feasible(request, self._limits).max_tokens
        except RequestError:
            raise _NeedsReplayError from None
        room = self._limits.max_model_len - request.num_prompt_tokens
        entry = self._newest[request.request_id] = _Entry(call, most, room)
        for time, is_queue in ((request.deadline, False), (request.queue_until, True)):
            if time is not None:
                heappush(self._deadlines, (time, len(self._entries), is_queue))
        self._entries.append(entry)
        self._stops |= entry.stop_ids
        self._add_keys(record[4])

    def _plan(self, record: Any) -> None:
        if self._deadlines and self._deadlines[0][0] <= record[1]:
            self._check_deadlines(record[1])
        if record[9]:
            self._add_keys(record[9])
        if not record[4]:  # its digest: it is empty
            return
        columns, values, entering = record[5:8]
        self._found.report.num_plans += 1
        self._rows.advance(columns)
        if "num_drafts" in values:
            raise _NeedsReplayError
        if "preempted_ids" in values:
            self._preempt(values["preempted_ids"])
        if "finished_ids" in values:
            self._check_ended(values["finished_ids"])
        if entering:
            self._enter(record[1], entering)
        if columns is not None:
            rows = self._rows.rows()
            if rows.flags and max(rows.flags) > ROW_SAMPLE | ROW_CARRY:
                raise _NeedsReplayError
            pairs = zip(rows.slots, rows.flags, strict=True)
            self._sampling = [self._owners[slot] for slot, flags in pairs if flags & ROW_SAMPLE]
        self._flight.append(self._sampling)

    def _preempt(self, names: list[str]) -> None:
        if self._flight:  # its rows are void, and their tokens are sampled again
            raise _NeedsReplayError
        for name in names:
            self._newest[name].num_preemptions += 1

    def _enter(self, now: float, entering: list[list[Any]]) -> None:
        """Start requests, or start them again. What a request found in the cache precedes its first row."""
        rows, found = self._rows.rows(), self._found
        start_of = dict(zip(rows.slots, rows.starts, strict=True))
        for slot, name, choice, *_ in entering:
            entry = self._owners[slot] = self._newest[name]
            is_back = entry.first_scheduled is not None
            if choice or slot not in start_of or (is_back and self._may_swap):
                raise _NeedsReplayError
            start = start_of[slot]
            if is_back:
                self._settle()
            else:
                entry.first_scheduled, entry.cached_tokens = now, start
            found.queried_tokens += entry.call.request.num_prompt_tokens + entry.num_outputs
            found.hit_tokens += start

    def _commit(self, record: Any) -> None:
        now, values, failure = record[1], record[5], record[6]
        if failure is not None or not self._flight or not values.keys() <= _PLAIN_RESULT:
            raise _NeedsReplayError
        self._found.num_steps += 1
        if record[7]:
            self._add_keys(record[7])
        rows, ids = self._flight.popleft(), values.get("token_ids") or ()
        if len(ids) != len(rows):
            raise _NeedsReplayError
        if rows is not self._run:
            self._settle()
            self._run = rows
        if self._stops.isdisjoint(ids):
            if not self._run_length:
                self._run_begin = now
            self._run_length += 1
            self._run_end = now
            return
        self._settle()
        for entry, token in zip(rows, ids, strict=True):
            is_stop = token in entry.stop_ids and entry.num_outputs >= entry.call.request.params.min_tokens
            self._add(entry, 1, now, now, FinishReason.STOP if is_stop else FinishReason.LENGTH)
            if is_stop:
                entry.finish(now, FinishReason.STOP)

    def _check_deadlines(self, now: float) -> None:
        """Check that no request is open whose deadline, or queue timeout, has passed."""
        self._settle()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, is_queue = heappop(self._deadlines)
            entry = self._entries[order]
            if entry.end is None and not (is_queue and entry.first_scheduled is not None):
                raise _NeedsReplayError

    def _check_ended(self, names: list[str]) -> None:
        """Check that the requests which a plan reports as ended are known to have ended."""
        self._settle()
        if any(self._newest[name].end is None for name in names):
            raise _NeedsReplayError

    def _settle(self) -> None:
        """Count the tokens of the last commits."""
        if self._run_length:
            for entry in self._run:
                self._add(entry, self._run_length, self._run_begin, self._run_end)
            self._run_length = 0

    @staticmethod
    def _add(
        entry: _Entry, num_tokens: int, first: float, last: float, at_limit: FinishReason = FinishReason.LENGTH
    ) -> None:
        """Add tokens of the times `first` to `last`; rows in flight of a request that has ended are void."""
        if entry.end is not None:
            return
        if not entry.num_outputs:
            entry.first_token = first
        entry.num_outputs += num_tokens
        if entry.num_outputs > entry.limit:
            raise _NeedsReplayError
        if entry.num_outputs == entry.limit:
            entry.finish(last, at_limit)

    def _end(self, name: str, now: float, reason: FinishReason) -> None:
        self._settle()
        entry = self._newest.get(name)
        if entry is not None:
            entry.finish(now, reason)


def _is_plain(request: Request) -> bool:
    """Return True if a request has one choice, generates tokens, and begins here."""
    params = request.params
    return (
        request.wants == Want.SAMPLE
        and params.num_sequences == 1
        and not params.beam_width
        and params.max_tokens != 0
        and request.emitted_token_ids is None
    )
