"""What a journal's records add up to: runs with their requests, the ids that came, and their ends.

Owns: applying records in order, giving a run back as records. Does not: read or write files, or decide what is kept.
The running journal and its recovery share this code: what was applied while running is what a restart finds.
Invariants: a choice's ids have no gap; a request whose records have a gap keeps the ids before it and stays open, so
that it is resumed and never answered with a hole; applying a record twice changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec

from octavo.core.plan import TokenLogprobs
from octavo.core.request import Request
from octavo.engine.wire import Submit, WireError
from octavo.errors import RequestError
from octavo.frontend.journal_records import (
    Appended,
    Began,
    ChoiceEnded,
    Ended,
    Forgotten,
    Opened,
    Record,
    Started,
    core_logprobs,
    wire_logprobs,
)
from octavo.frontend.open_request import OpenRequest, finished, num_choices

_SNAPSHOT_TOKENS = 4096  # of one record: with 20 log-probabilities each it is far below the size cap
_REQUEST_BYTES = 512  # roughly, without its ids
_TOKEN_BYTES = 16
_LOGPROB_BYTES = 24


@dataclass(slots=True)
class HeldPage:
    """One choice: its ids, their log-probabilities where asked for, its end if it came before the request's."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    end: ChoiceEnded | None = None


@dataclass(slots=True)
class HeldRequest:
    """One request of a run. `first_at` and `ended_at` are on the monotonic clock."""

    run: int
    index: int
    number: int
    request: Request
    pages: dict[int, HeldPage] = field(default_factory=dict)
    start: Started | None = None
    end: Ended | None = None
    first_at: float | None = None
    ended_at: float = 0.0
    is_cut: bool = False  # records of it are missing: what follows counts no more
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
        num_tokens = sum(len(page.ids) for page in self.pages.values())
        return _REQUEST_BYTES + 4 * self.request.num_prompt_tokens + per_token * num_tokens

    def page(self, choice: int) -> HeldPage | None:
        """The page of a choice; None when the request has no such choice."""
        if choice not in self.pages and 0 <= choice < num_choices(self.request.params):
            self.pages[choice] = HeldPage()
        return self.pages.get(choice)

    def entry(self) -> OpenRequest:
        """The ledger's entry for it, with nothing read: open requests are resumed from it."""
        name = self.request.request_id
        entry = OpenRequest(self.request)
        entry.first_at = self.first_at
        for choice, held in self.pages.items():
            page = entry.page(choice)
            if page is not None:
                page.ids, page.logprobs = held.ids[:], held.logprobs[:]
        for held in self.pages.values():
            if (over := held.end) is not None:
                stop = over.stop_token_id
                entry.end_choice(finished(name, over.finish_reason, over.error, choice=over.choice, stop_token_id=stop))
        if self.start is not None:
            entry.queue_s, entry.cached_tokens = self.start.queue_s, self.start.cached_tokens
        if self.end is not None:
            end = finished(name, self.end.finish_reason, self.end.error, stop_token_id=self.end.stop_token_id)
            entry.finish(replace(end, cached_tokens=self.end.cached_tokens))
        return entry

    def append(self, choice: int, position: int, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Take the next id of a choice; False for one that is held already, or cannot be placed."""
        page = self.pages.get(choice) or self.page(choice)
        if page is None or self.is_cut or self.end is not None:
            return False
        ids = page.ids
        if position != len(ids):
            self.is_cut |= position > len(ids)
            return False
        ids.append(token_id)
        if self.has_logprobs:
            page.logprobs.append(logprobs)
        return True


@dataclass(slots=True)
class HeldRun:
    """One HTTP request with a key, and what came of it. `num_before` are the tokens that the last life began with."""

    began: Began
    requests: dict[int, HeldRequest] = field(default_factory=dict)
    num_before: int = 0

    @property
    def num_tokens(self) -> int:
        """Ids of all its choices."""
        return sum(len(page.ids) for held in self.requests.values() for page in held.pages.values())

    @property
    def is_whole(self) -> bool:
        """Whether all of its requests were opened: only then it can be resumed."""
        return len(self.requests) == self.began.num_requests

    @property
    def is_ended(self) -> bool:
        """Whether nothing of it is open."""
        return self.is_whole and all(held.end is not None for held in self.requests.values())

    @property
    def num_bytes(self) -> int:
        """Roughly what its records take."""
        own = len(self.began.facts) + len(self.began.key) + _REQUEST_BYTES
        return own + sum(held.num_bytes for held in self.requests.values())

    def copied(self) -> HeldRun:
        """A copy that stays as it is while this one goes on."""
        requests = {}
        for index, held in self.requests.items():
            pages = {c: HeldPage(p.ids[:], p.logprobs[:], p.end) for c, p in held.pages.items()}
            requests[index] = replace(held, pages=pages)
        return HeldRun(self.began, requests, self.num_before)

    def records(self) -> Iterator[Record]:
        """The records that make it anew. Raises WireError for a request that is too large."""
        yield self.began
        for held in self.requests.values():
            yield Opened(self.began.run, held.index, held.number, Submit.of(0, held.request))
            for choice, page in held.pages.items():
                yield from _tokens(held, choice, page)
            choice_ends = tuple(page.end for page in held.pages.values() if page.end is not None)
            ends = () if held.end is None else (held.end,)
            starts = () if held.start is None else (held.start,)
            if choice_ends or ends or starts:
                yield Appended(held.ended_at, b"", b"", b"", b"", None, choice_ends, ends, starts)


def _tokens(held: HeldRequest, choice: int, page: HeldPage) -> Iterator[Appended]:
    for start in range(0, len(page.ids), _SNAPSHOT_TOKENS):
        ids = page.ids[start : start + _SNAPSHOT_TOKENS]
        yield Appended(
            held.first_at or 0.0,
            (array("i", [held.number]) * len(ids)).tobytes(),
            (array("i", [choice]) * len(ids)).tobytes(),
            array("i", range(start, start + len(ids))).tobytes(),
            ids.tobytes(),
            wire_logprobs(page.logprobs[start : start + _SNAPSHOT_TOKENS]) if page.logprobs else None,
        )


class JournalState:
    """All runs of a journal, oldest first. `num_faults` counts records that could not be placed."""

    def __init__(self) -> None:
        self.runs: dict[int, HeldRun] = {}
        self.requests: dict[int, HeldRequest] = {}
        self.num_faults = 0

    @property
    def num_bytes(self) -> int:
        """Roughly what the records of all runs take."""
        return sum(run.num_bytes for run in self.runs.values())

    def apply(self, record: Record, shift_s: float = 0.0) -> None:
        """Take one record, its times moved by `shift_s`."""
        if isinstance(record, Began):
            self.runs.setdefault(record.run, HeldRun(msgspec.structs.replace(record, at=record.at + shift_s)))
        elif isinstance(record, Opened):
            self._open(record, shift_s)
        elif isinstance(record, Appended):
            self._append(record, shift_s)
        elif isinstance(record, Forgotten):
            self.drop(record.run)

    def add(self, held: HeldRequest) -> None:
        """Add a request to its run."""
        self.runs[held.run].requests[held.index] = held
        self.requests[held.number] = held

    def drop(self, run: int) -> None:
        """Forget a run. Idempotent."""
        dropped = self.runs.pop(run, None)
        for held in dropped.requests.values() if dropped is not None else ():
            self.requests.pop(held.number, None)

    def distrust(self) -> None:
        """Records may be missing from here on: what is open keeps what it has and takes nothing more."""
        for held in self.requests.values():
            held.is_cut |= held.end is None

    def begin_life(self) -> None:
        """A life of the server began with this: what comes from here on is its own work."""
        for run in self.runs.values():
            run.num_before = run.num_tokens

    def outlive(self, most: int) -> list[int]:
        """Another life takes over: count those without a token since the last began; give the runs that had `most`."""
        spent = []
        for number, run in self.runs.items():
            if not run.is_ended:
                lives = run.began.lives + 1 if run.num_tokens == run.num_before else 0
                run.began = msgspec.structs.replace(run.began, lives=lives)
                spent += [number] if lives > most else []
        return spent

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
            self.distrust()
            return
        for row, (number, choice, position, token_id) in enumerate(rows):
            held = self.requests.get(number)
            if held is None:
                continue
            logprobs = None if record.logprobs is None else core_logprobs(record.logprobs[row])
            if held.append(choice, position, token_id, logprobs) and held.first_at is None:
                held.first_at = at
        for start in record.starts:
            held = self.requests.get(start.number)
            if held is not None and held.start is None:
                held.start = start
        for choice_end in record.choice_ends:
            self.end_choice(choice_end)
        for end in record.ends:
            self.end(end, at)

    def end_choice(self, end: ChoiceEnded) -> None:
        """End one choice."""
        held = self.requests.get(end.number)
        page = None if held is None or held.is_cut or held.end is not None else held.page(end.choice)
        if page is not None and page.end is None:
            page.end = end

    def end(self, end: Ended, at: float) -> None:
        """End a request."""
        held = self.requests.get(end.number)
        if held is not None and not held.is_cut and held.end is None:
            held.end, held.ended_at = end, at
