"""JournalState: what a journal's records add up to: runs with their requests, the ids received, and their ends.

Owns: applying records and events in order, giving a run back as records, reading a journal's folder at the start.
Does not: write files, or decide what is kept.
The running journal and its recovery share this code: a restart finds what was applied while running.
Invariants: a choice's ids have no gap; a request whose records have a gap keeps the ids before it and stays open, so
that it is resumed and never answered with a hole; applying a record twice changes nothing.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path

import msgspec

from octavo.core.plan import Event, EventKind, Events, TokenLogprobs
from octavo.core.request import FinishReason, Request
from octavo.engine.outbox import finished
from octavo.engine.wire import Submit, WireError
from octavo.errors import ErrorKind, RequestError
from octavo.frontend.journal_files import (
    VERSION,
    Appended,
    Began,
    BootClock,
    Contents,
    EndedChoice,
    EndedRequest,
    Forgotten,
    Opened,
    Record,
    StartedRequest,
    core_logprobs,
    delete_segment,
    numbered,
    packed_logprobs,
    read_segment,
)
from octavo.frontend.open_request import OpenRequest, num_choices

_UNFINISHED = re.compile(r"journal-\d{8}\.tmp")
_SNAPSHOT_TOKENS = 4096  # of one record: with 20 log-probabilities each it is far below the size cap
_REQUEST_BYTES = 512  # roughly, without its ids
_TOKEN_BYTES = 16
_LOGPROB_BYTES = 24


@dataclass(slots=True)
class HeldChoice:
    """One choice: its ids, their log-probabilities where requested, its end if it ended before the request."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    end: EndedChoice | None = None


@dataclass(slots=True)
class HeldRequest:
    """One request of a run. `first_at` and `ended_at` are on the monotonic clock."""

    run: int
    index: int
    number: int
    request: Request
    choices: dict[int, HeldChoice] = field(default_factory=dict)
    start: StartedRequest | None = None
    end: EndedRequest | None = None
    first_at: float | None = None
    ended_at: float = 0.0
    has_gap: bool = False  # records of it are missing: later ones are ignored
    has_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_logprobs = self.request.params.num_logprobs is not None

    @property
    def num_bytes(self) -> int:
        """Roughly what its records take."""
        params = self.request.params
        per_token = _TOKEN_BYTES
        if params.num_logprobs is not None:
            per_token += _LOGPROB_BYTES * (params.num_logprobs + 1)
        num_tokens = sum(len(held.ids) for held in self.choices.values())
        return _REQUEST_BYTES + 4 * self.request.num_prompt_tokens + per_token * num_tokens

    def choice(self, index: int) -> HeldChoice | None:
        """Return a choice; None when the request has no such choice."""
        if index not in self.choices and 0 <= index < num_choices(self.request.params):
            self.choices[index] = HeldChoice()
        return self.choices.get(index)

    def as_open_request(self) -> OpenRequest:
        """Return it as an OpenRequest of which nothing was read: open requests are resumed from it."""
        name = self.request.request_id
        opened = OpenRequest(self.request)
        opened.first_at = self.first_at
        for index, held in self.choices.items():
            page = opened.page(index)
            if page is not None:
                page.ids, page.logprobs = held.ids[:], held.logprobs[:]
        for held in self.choices.values():
            if (end := held.end) is not None:
                opened.end_choice(
                    finished(name, end.finish_reason, end.error, choice=end.choice, stop_token_id=end.stop_token_id)
                )
        if self.start is not None:
            opened.queue_s, opened.cached_tokens = self.start.queue_s, self.start.cached_tokens
        if self.end is not None:
            last = finished(name, self.end.finish_reason, self.end.error, stop_token_id=self.end.stop_token_id)
            opened.finish(replace(last, cached_tokens=self.end.cached_tokens))
        return opened

    def append(self, choice: int, position: int, token_id: int, logprobs: TokenLogprobs | None, at: float) -> bool:
        """Append the next id of a choice; return False for one that is held already, or cannot be placed."""
        held = self.choices.get(choice) or self.choice(choice)
        if held is None or self.has_gap or self.end is not None:
            return False
        ids = held.ids
        if position != len(ids):
            self.has_gap |= position > len(ids)
            return False
        ids.append(token_id)
        if self.has_logprobs:
            held.logprobs.append(logprobs)
        if self.first_at is None:
            self.first_at = at
        return True


@dataclass(slots=True)
class HeldRun:
    """One HTTP request with a key, and its requests. `num_before`: the tokens at the start of this server process."""

    began: Began
    requests: dict[int, HeldRequest] = field(default_factory=dict)
    num_before: int = 0

    @property
    def num_tokens(self) -> int:
        """Ids of all its choices."""
        return sum(len(choice.ids) for held in self.requests.values() for choice in held.choices.values())

    @property
    def is_whole(self) -> bool:
        """Return True if all of its requests were opened: only then it can be resumed."""
        return len(self.requests) == self.began.num_requests

    @property
    def is_ended(self) -> bool:
        """Return True if none of its requests is open."""
        return self.is_whole and all(held.end is not None for held in self.requests.values())

    @property
    def num_bytes(self) -> int:
        """Roughly what its records take."""
        own = len(self.began.facts) + len(self.began.key) + _REQUEST_BYTES
        return own + sum(held.num_bytes for held in self.requests.values())

    def copy(self) -> HeldRun:
        """Return a copy that does not change with this run."""
        requests = {}
        for index, held in self.requests.items():
            choices = {i: HeldChoice(c.ids[:], c.logprobs[:], c.end) for i, c in held.choices.items()}
            requests[index] = replace(held, choices=choices)
        return HeldRun(self.began, requests, self.num_before)

    def records(self) -> Iterator[Record]:
        """Yield the records that make it anew. Raises WireError for a request that is too large."""
        yield self.began
        for held in self.requests.values():
            yield Opened(self.began.run, held.index, held.number, Submit.of(0, held.request))
            for index, choice in held.choices.items():
                yield from _token_records(held, index, choice)
            choice_ends = tuple(choice.end for choice in held.choices.values() if choice.end is not None)
            ends = () if held.end is None else (held.end,)
            starts = () if held.start is None else (held.start,)
            if choice_ends or ends or starts:
                yield Appended(held.ended_at, b"", b"", b"", b"", None, choice_ends, ends, starts)


def _token_records(held: HeldRequest, index: int, choice: HeldChoice) -> Iterator[Appended]:
    for start in range(0, len(choice.ids), _SNAPSHOT_TOKENS):
        ids = choice.ids[start : start + _SNAPSHOT_TOKENS]
        yield Appended(
            held.first_at or 0.0,
            (array("i", [held.number]) * len(ids)).tobytes(),
            (array("i", [index]) * len(ids)).tobytes(),
            array("i", range(start, start + len(ids))).tobytes(),
            ids.tobytes(),
            packed_logprobs(choice.logprobs[start : start + _SNAPSHOT_TOKENS]) if choice.logprobs else None,
        )


class JournalState:
    """All runs of a journal, oldest first. `num_faults` counts records that could not be placed."""

    def __init__(self) -> None:
        self.runs: dict[int, HeldRun] = {}
        self.requests: dict[int, HeldRequest] = {}
        self.open: dict[str, HeldRequest] = {}  # those without an end, by request id
        self.num_faults = 0

    @property
    def num_bytes(self) -> int:
        """Roughly what the records of all runs take."""
        return sum(run.num_bytes for run in self.runs.values())

    def add(self, held: HeldRequest) -> None:
        """Add a request to its run."""
        self.runs[held.run].requests[held.index] = held
        self.requests[held.number] = held
        self.open[held.request.request_id] = held

    def drop(self, run: int) -> None:
        """Forget a run. Idempotent."""
        dropped = self.runs.pop(run, None)
        for held in dropped.requests.values() if dropped is not None else ():
            self.requests.pop(held.number, None)
            self._close(held)

    def _close(self, held: HeldRequest) -> None:
        if self.open.get(held.request.request_id) is held:
            del self.open[held.request.request_id]

    def stop_open(self) -> None:
        """Take nothing more for open requests, since records may be missing from here on."""
        for held in self.requests.values():
            held.has_gap |= held.end is None

    def begin_process(self) -> None:
        """Note that a server process began with this state: later tokens are its own."""
        for run in self.runs.values():
            run.num_before = run.num_tokens

    def count_restart(self, most: int) -> list[int]:
        """Count a restart for runs that got no token since the last one; return those that had more than `most`."""
        spent = []
        for number, run in self.runs.items():
            if not run.is_ended:
                num_restarts = run.began.num_restarts + 1 if run.num_tokens == run.num_before else 0
                run.began = msgspec.structs.replace(run.began, num_restarts=num_restarts)
                spent += [number] if num_restarts > most else []
        return spent

    # --- events, while the journal is written

    def record_of(self, events: Events, at: float) -> Appended | None:
        """Apply what the events say of journaled requests; return it as a record, None where it is nothing."""
        numbers, choices, positions, token_ids = (array("i") for _ in range(4))
        logprobs: list[TokenLogprobs | None] = []
        entries = events.logprobs if events.logprobs is not None else repeat(None)
        columns = zip(
            events.request_ids, events.choices, events.positions, events.token_ids, entries, strict=False
        )  # the last may be without an end
        for request_id, choice, position, token_id, entry in columns:
            held = self.open.get(request_id)
            if held is not None and held.append(choice, position, token_id, entry, at):
                numbers.append(held.number)
                choices.append(choice)
                positions.append(position)
                token_ids.append(token_id)
                logprobs.append(entry if held.has_logprobs else None)
        starts, choice_ends, ends = self._apply_decisions(events.decisions, at)
        if not (numbers or choice_ends or ends or starts):
            return None
        return Appended(
            at,
            numbers.tobytes(),
            choices.tobytes(),
            positions.tobytes(),
            token_ids.tobytes(),
            None if events.logprobs is None else packed_logprobs(logprobs),
            tuple(choice_ends),
            tuple(ends),
            tuple(starts),
        )

    def _apply_decisions(
        self, decisions: tuple[Event, ...], at: float
    ) -> tuple[list[StartedRequest], list[EndedChoice], list[EndedRequest]]:
        """Return the first admissions and the ends among the decisions, applied."""
        starts: list[StartedRequest] = []
        choice_ends: list[EndedChoice] = []
        ends: list[EndedRequest] = []
        for event in decisions:
            held = self.open.get(event.request_id)
            if held is None:
                continue
            kind = None if event.error is None else event.error.kind
            if event.kind == EventKind.ADMITTED and held.start is None:
                queue_s = max(0.0, event.time - held.request.arrival)
                held.start = StartedRequest(held.number, queue_s, event.cached_tokens)
                starts.append(held.start)
            elif event.kind == EventKind.CHOICE_FINISHED:
                assert event.finish_reason is not None
                choice_end = EndedChoice(
                    held.number, event.choice, event.finish_reason, event.stop_token_id, event.message, kind
                )
                choice_ends.append(choice_end)
                self._end_choice(choice_end)
            elif event.kind == EventKind.FINISHED:
                assert event.finish_reason is not None
                if event.finish_reason is FinishReason.ERROR and kind is ErrorKind.ENGINE_DEAD:
                    continue  # no engine is left: it stays open, for the next server process
                queue_s = 0.0 if held.start is None else held.start.queue_s
                end = EndedRequest(
                    held.number, event.finish_reason, event.stop_token_id, event.cached_tokens, 0, queue_s,
                    event.message, kind,
                )  # fmt: skip
                ends.append(end)
                self._end(end, at)
                self._close(held)
        return starts, choice_ends, ends

    # --- records, when the journal is read

    def apply(self, record: Record, shift_s: float = 0.0) -> None:
        """Apply one record, its times moved by `shift_s`."""
        if isinstance(record, Began):
            self.runs.setdefault(record.run, HeldRun(msgspec.structs.replace(record, at=record.at + shift_s)))
        elif isinstance(record, Opened):
            self._open(record, shift_s)
        elif isinstance(record, Appended):
            self._append(record, shift_s)
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
        self.add(HeldRequest(record.run, record.index, record.number, request))

    def _append(self, record: Appended, shift_s: float) -> None:
        at = record.at + shift_s
        try:
            columns = [array("i", c) for c in (record.numbers, record.choices, record.positions, record.token_ids)]
            rows = list(zip(*columns, strict=True))
            if record.logprobs is not None and len(record.logprobs) != len(rows):
                raise ValueError("log-probabilities of another length")
        except ValueError:
            self.num_faults += 1
            self.stop_open()
            return
        for row, (number, choice, position, token_id) in enumerate(rows):
            held = self.requests.get(number)
            if held is not None:
                logprobs = None if record.logprobs is None else core_logprobs(record.logprobs[row])
                held.append(choice, position, token_id, logprobs, at)
        for start in record.starts:
            held = self.requests.get(start.number)
            if held is not None and held.start is None:
                held.start = start
        for choice_end in record.choice_ends:
            self._end_choice(choice_end)
        for end in record.ends:
            self._end(end, at)

    def _end_choice(self, end: EndedChoice) -> None:
        held = self.requests.get(end.number)
        choice = None if held is None or held.has_gap or held.end is not None else held.choice(end.choice)
        if choice is not None and choice.end is None:
            choice.end = end

    def _end(self, end: EndedRequest, at: float) -> None:
        held = self.requests.get(end.number)
        if held is not None and not held.has_gap and held.end is None:
            held.end, held.ended_at = end, at
            self._close(held)


@dataclass(slots=True)
class Recovery:
    """What a folder held: the state, warnings for the log, and the first number that is free."""

    state: JournalState = field(default_factory=JournalState)
    warnings: list[str] = field(default_factory=list)
    next_number: int = 1


def recover(folder: Path, model: str, clock: BootClock) -> Recovery:
    """Read every segment that was not replaced. Raises OSError when the folder cannot be read."""
    result = Recovery()
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            delete_segment(path)
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
            f"{result.state.num_faults} records do not fit what came before them and are left out; requests that they "
            "belong to keep what they had, and are computed again from there"
        )
    return result


def _apply_segment(path: Path, read: Contents, result: Recovery, here: tuple[str, BootClock], *, is_last: bool) -> None:
    model, clock = here
    head = read.head
    if head is not None and head.version == VERSION and head.model == model:
        shift_s = clock.shift_from(head)
        for record in read.records[1:]:
            result.state.apply(record, shift_s)
        if head.supersedes:
            result.state.begin_process()
    elif head is not None:
        result.warnings.append(
            f"{path.name} is of version {head.version} and model {head.model!r}, this server of version {VERSION} and "
            f"model {model!r}; what it holds is left out"
        )
    if read.damage is not None:
        lost = read.num_bytes - read.num_read
        what = "a torn tail is cut" if read.is_torn else "a damaged record ends this segment"
        result.warnings.append(f"{path.name}: {what}, {lost} bytes are lost ({read.damage})")
        if not (is_last and read.is_torn):
            result.state.stop_open()
