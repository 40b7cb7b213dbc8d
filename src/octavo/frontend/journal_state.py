"""JournalState: the runs of a journal, each with its requests as OpenRequests.

Owns: which requests are journaled; events as records; applying records; reading a journal's folder at the start.
Does not: write files, or decide which runs are kept.
While the journal is written, OpenRequests (the ledger) changes the requests and this module only reads them. A restart
rebuilds the requests from the records, with the same methods that the ledger uses.
Invariants: a choice's ids have no gap. A request whose records have a gap keeps the ids before the gap and stays open,
so that it is resumed and its answer has no gap. Applying a record twice changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from octavo.core.plan import Event, EventKind, Events, TokenLogprobs
from octavo.core.request import Request
from octavo.engine.client import ENDS
from octavo.engine.wire import Submit, WireError
from octavo.errors import ErrorKind, RequestError
from octavo.frontend.journal_files import (
    READABLE,
    VERSION,
    Began,
    BootClock,
    Contents,
    Forgotten,
    LoggedEvents,
    Opened,
    Record,
    delete_unfinished,
    numbered,
    read_segment,
)
from octavo.frontend.journal_format1 import LoggedEventsV1
from octavo.frontend.open_request import OpenRequest, Page, without

_RECORDED = ENDS | {EventKind.ADMITTED}
_SNAPSHOT_TOKENS = 4096  # most tokens of one record: with 20 log-probabilities each it is far below the size cap
_REQUEST_BYTES = 512  # roughly the bytes of a request without its ids
_TOKEN_BYTES = 16
_LOGPROB_BYTES = 24


@dataclass(slots=True, eq=False)
class JournaledRequest:
    """One request of a run. Its ids and ends are in `state`, the same object that the ledger has.

    Records refer to the request by `number`. `logprobs` has the log-probabilities of all ids by choice, if requested: a
    copy, because a reader removes them from `state`. `ended_at` is on the monotonic clock, and None while the request
    is open in the journal.
    """

    run: int
    index: int
    number: int
    state: OpenRequest
    logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    ended_at: float | None = None
    has_gap: bool = False  # some of the request's records are missing, so later ones are ignored

    @property
    def request(self) -> Request:
        """The request as it was submitted."""
        return self.state.request

    @property
    def end(self) -> Event | None:
        """The request's end, or None while the request is open in the journal."""
        return None if self.ended_at is None else self.state.end

    @property
    def num_tokens(self) -> int:
        """The number of ids of all the request's choices."""
        return sum(len(page.ids) for page in self.state.pages.values())

    @property
    def num_bytes(self) -> int:
        """Roughly what its records take."""
        num_logprobs = self.request.params.num_logprobs
        per_token = _TOKEN_BYTES if num_logprobs is None else _TOKEN_BYTES + _LOGPROB_BYTES * (num_logprobs + 1)
        media_bytes = sum(len(item.data) for item in self.state.media)
        return _REQUEST_BYTES + 4 * self.request.num_prompt_tokens + media_bytes + per_token * self.num_tokens

    def append(self, choice: int, position: int, token_id: int, entry: TokenLogprobs | None, at: float) -> None:
        """Append the next id of a choice from a record; ignore an id that is known already, or comes after a gap."""
        page = self.state.page(choice)
        if page is None or self.has_gap or self.ended_at is not None or position != len(page.ids):
            self.has_gap |= page is not None and position > len(page.ids)
            return
        page.ids.append(token_id)
        if self.state.has_logprobs:
            page.logprobs.append(entry)
            self.add_logprobs(choice, entry)
        if self.state.first_at is None:
            self.state.first_at = at

    def add_logprobs(self, choice: int, entry: TokenLogprobs | None) -> None:
        """Store the log-probabilities of a choice's newest id."""
        self.logprobs.setdefault(choice, []).append(entry)

    def records(self) -> Iterator[Record]:
        """Yield the records that rebuild the request. Raises WireError for a request that is too large."""
        state, name = self.state, self.request.request_id
        # Block keys are left out: they take more space than the ids, from which they can be computed.
        submit = Submit.of(0, replace(self.request, block_keys=None), state.media)
        yield Opened(self.run, self.index, self.number, submit)
        for choice, page in state.pages.items():
            yield from self._token_records(choice, page)
        decisions = [page.end for page in state.pages.values() if page.end and page.end.kind is not EventKind.FINISHED]
        if state.queue_s is not None:
            time = self.request.arrival + state.queue_s
            decisions.append(Event(EventKind.ADMITTED, name, time, 0, cached_tokens=state.cached_tokens))
        if self.end is not None:
            decisions.append(self.end)
        if decisions:
            yield LoggedEvents(self.ended_at or 0.0, decisions=tuple(decisions))

    def _token_records(self, choice: int, page: Page) -> Iterator[LoggedEvents]:
        logprobs = self.logprobs.get(choice)
        for start in range(0, len(page.ids), _SNAPSHOT_TOKENS):
            ids = page.ids[start : start + _SNAPSHOT_TOKENS]
            yield LoggedEvents(
                self.state.first_at or 0.0,
                (array("i", [self.number]) * len(ids)).tobytes(),
                (array("i", [choice]) * len(ids)).tobytes(),
                array("i", range(start, start + len(ids))).tobytes(),
                ids.tobytes(),
                logprobs and logprobs[start : start + len(ids)],
            )


@dataclass(slots=True, eq=False)
class JournaledRun:
    """One HTTP request with a key, and its requests. `num_before`: its tokens when this server process started."""

    began: Began
    requests: dict[int, JournaledRequest] = field(default_factory=dict)
    num_before: int = 0

    @property
    def num_tokens(self) -> int:
        """The number of ids of all the run's requests."""
        return sum(request.num_tokens for request in self.requests.values())

    @property
    def is_whole(self) -> bool:
        """True if all requests of the run were opened; a run that is not whole cannot be resumed."""
        return len(self.requests) == self.began.num_requests

    @property
    def is_ended(self) -> bool:
        """True if the run is whole and all its requests have ended."""
        return self.is_whole and all(request.ended_at is not None for request in self.requests.values())

    @property
    def num_bytes(self) -> int:
        """Roughly what its records take."""
        own = len(self.began.facts) + len(self.began.key) + _REQUEST_BYTES
        return own + sum(request.num_bytes for request in self.requests.values())

    def records(self) -> Iterator[Record]:
        """Yield the records that rebuild the run. Raises WireError for a request that is too large."""
        yield self.began
        for request in self.requests.values():
            yield from request.records()


class JournalState:
    """All runs of a journal, oldest first. `num_faults` counts records that could not be applied."""

    def __init__(self) -> None:
        self.runs: dict[int, JournaledRun] = {}
        self.requests: dict[int, JournaledRequest] = {}
        self.open: dict[str, JournaledRequest] = {}  # requests without an end, by request id
        self.num_faults = 0

    @property
    def num_bytes(self) -> int:
        """Roughly what the records of all runs take."""
        return sum(run.num_bytes for run in self.runs.values())

    def add(self, request: JournaledRequest) -> None:
        """Add a request to its run."""
        self.runs[request.run].requests[request.index] = request
        self.requests[request.number] = request
        self.open[request.request.request_id] = request

    def drop(self, run: int) -> None:
        """Forget a run. Idempotent."""
        dropped = self.runs.pop(run, None)
        for request in dropped.requests.values() if dropped is not None else ():
            del self.requests[request.number]
            self.close(request)

    def close(self, request: JournaledRequest) -> None:
        """Accept no more records of a request."""
        if self.open.get(request.request.request_id) is request:
            del self.open[request.request.request_id]

    def stop_open(self) -> None:
        """Accept no more records of open requests, because some of their records may be missing from here on."""
        for request in self.open.values():
            request.has_gap = True

    def begin_process(self) -> None:
        """Record each run's tokens as a server process begins, to see whether the process adds tokens."""
        for run in self.runs.values():
            run.num_before = run.num_tokens

    def count_restart(self, most: int) -> list[int]:
        """Count a restart for each open run without a token since the last; return the runs with more than `most`."""
        spent = []
        for number, run in self.runs.items():
            if not run.is_ended:
                num_restarts = run.began.num_restarts + 1 if run.num_tokens == run.num_before else 0
                run.began = msgspec.structs.replace(run.began, num_restarts=num_restarts)
                spent += [number] if num_restarts > most else []
        return spent

    # --- events, while the journal is written

    def record_of(self, events: Events, at: float) -> LoggedEvents | None:
        """Return the part of the events about journaled requests as a record, or None if no part is."""
        found = [self.open.get(name) for name in events.request_ids]
        if None in found:
            events = without(events, [index for index, request in enumerate(found) if request is None])
        requests = [request for request in found if request is not None]
        if events.logprobs is not None:
            for request, choice, entry in zip(requests, events.choices, events.logprobs, strict=True):
                if request.state.has_logprobs:
                    request.add_logprobs(choice, entry)
        decisions = (
            tuple(event for event in events.decisions if self._take_decision(event, at)) if events.decisions else ()
        )
        if not (requests or decisions):
            return None
        return LoggedEvents(
            at,
            array("i", [request.number for request in requests]).tobytes(),
            events.choices.tobytes(),
            events.positions.tobytes(),
            events.token_ids.tobytes(),
            events.logprobs,
            decisions,
        )

    def _take_decision(self, event: Event, at: float) -> bool:
        """Apply a decision about a journaled request; return False if the decision is not recorded."""
        request = self.open.get(event.request_id)
        if request is None or event.kind not in _RECORDED:
            return False
        if event.kind is EventKind.FINISHED:
            self.close(request)
            if event.error is not None and event.error.kind is ErrorKind.ENGINE_DEAD:
                return False  # no engine is left, so the request stays open on disk for the next server process
            request.ended_at = at
        return True

    # --- records, when the journal is read

    def apply(self, record: Record, shift_s: float = 0.0) -> None:
        """Apply one record, its times moved by `shift_s`."""
        if isinstance(record, Began):
            self.runs.setdefault(record.run, JournaledRun(msgspec.structs.replace(record, at=record.at + shift_s)))
        elif isinstance(record, Opened):
            self._open(record, shift_s)
        elif isinstance(record, LoggedEvents):
            self._append(record, record.logprobs, record.at + shift_s)
            for event in record.decisions:
                self._decide(replace(event, time=event.time + shift_s), record.at + shift_s)
        elif isinstance(record, LoggedEventsV1):
            self._append(record, record.token_logprobs(), record.at + shift_s)
            for event in record.decisions(self._request):
                self._decide(event, record.at + shift_s)
        elif isinstance(record, Forgotten):
            self.drop(record.run)

    def _open(self, record: Opened, shift_s: float) -> None:
        run = self.runs.get(record.run)
        if run is None or not 0 <= record.index < run.began.num_requests:
            self.num_faults += 1
            return
        if record.number in self.requests or record.index in run.requests:
            return
        try:
            request = record.submit.request()
        except (WireError, RequestError):
            self.num_faults += 1
            return
        if shift_s:
            deadline = None if request.deadline is None else request.deadline + shift_s
            request = replace(request, arrival=request.arrival + shift_s, deadline=deadline)
        self.add(JournaledRequest(record.run, record.index, record.number, OpenRequest(request, record.submit.media)))

    def _append(
        self, record: LoggedEvents | LoggedEventsV1, logprobs: list[TokenLogprobs | None] | None, at: float
    ) -> None:
        try:
            columns = [array("i", c) for c in (record.numbers, record.choices, record.positions, record.token_ids)]
            entries = [None] * len(columns[0]) if logprobs is None else logprobs
            rows = list(zip(*columns, entries, strict=True))
        except ValueError:
            self.num_faults += 1
            self.stop_open()
            return
        for number, choice, position, token_id, entry in rows:
            if (request := self.requests.get(number)) is not None:
                request.append(choice, position, token_id, entry, at)

    def _request(self, number: int) -> Request | None:
        request = self.requests.get(number)
        return None if request is None else request.request

    def _decide(self, event: Event, at: float) -> None:
        request = self.open.get(event.request_id)
        if request is None or request.has_gap:
            return
        if event.kind in ENDS and event.finish_reason is None:
            self.num_faults += 1
            request.has_gap = True
        elif event.kind is EventKind.ADMITTED:
            request.state.note(event)
        elif event.kind is EventKind.CHOICE_FINISHED:
            request.state.end_choice(event)
        elif event.kind is EventKind.FINISHED:
            request.state.finish(event)
            request.ended_at = at
            self.close(request)


@dataclass(slots=True)
class Recovery:
    """The contents of a journal's folder: the state, warnings for the log, and the first free segment number."""

    state: JournalState = field(default_factory=JournalState)
    warnings: list[str] = field(default_factory=list)
    next_number: int = 1


def recover(folder: Path, model: str, clock: BootClock) -> Recovery:
    """Read every segment that was not replaced. Raises OSError if the folder cannot be read."""
    result = Recovery()
    delete_unfinished(folder)
    segments: list[tuple[int, Path, Contents]] = []
    first = 0
    for number, path in numbered(folder):
        read, warning = read_segment(path)
        result.warnings += [] if warning is None else [warning]
        result.next_number = number + 1
        if read.head is not None:
            first = max(first, read.head.supersedes)
        segments.append((number, path, read))
    for number, path, read in segments:
        if number >= first:
            _apply_segment(path, read, result, (model, clock), is_last=number == segments[-1][0])
    if result.state.num_faults:
        result.warnings.append(
            f"{result.state.num_faults} records do not fit those before them and are left out; requests that they "
            "belong to keep their earlier ids, and are computed again from there"
        )
    return result


def _apply_segment(path: Path, read: Contents, result: Recovery, here: tuple[str, BootClock], *, is_last: bool) -> None:
    model, clock = here
    head = read.head
    if head is not None and head.version in READABLE and head.model == model:
        shift_s = clock.shift_from(head)
        for record in read.records[1:]:
            result.state.apply(record, shift_s)
        if head.supersedes:
            result.state.begin_process()
    elif head is not None:
        result.warnings.append(
            f"{path.name} is of version {head.version} and model {head.model!r}, this server of version {VERSION} and "
            f"model {model!r}; its requests are left out"
        )
    if read.damage is not None:
        lost = read.num_bytes - read.num_read
        what = "a torn tail is cut" if read.is_torn else "a damaged record ends this segment"
        result.warnings.append(f"{path.name}: {what}, {lost} bytes are lost ({read.damage})")
        if not (is_last and read.is_torn):
            result.state.stop_open()
