"""The ledger: what was asked and every id that came back, per request, on the front end's side.

Owns: the append (an output counts iff its epoch is current and its position is next), and what a later epoch needs to
resume. Append first, then hand out. Does not: wait, or know sockets; one request's record is in entry.
Invariants: a choice's ids have no gap and no duplicate; a slow reader costs no more than the ids themselves; an
observer is told of what was accepted, in order, before anybody reads it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from octavo.core.request import FinishError, FinishReason, Request
from octavo.engine.delivery import ChoiceEnd, Delivery, End
from octavo.errors import DuplicateRequestError, InvalidRequestError
from octavo.frontend.entry import Entry

MAX_UNREAD = 1024  # ended entries that nobody has read to the end; the oldest is dropped beyond


class LedgerObserver(Protocol):
    """Told of every change, in the ledger's thread, in order."""

    def opened(self, request: Request) -> None:
        """A request was recorded; no engine has seen it yet."""
        ...

    def appended(self, delivery: Delivery) -> None:
        """This was accepted, and nothing else of what came with it. Ends that were made here are among it."""
        ...

    def forgotten(self, request_id: str) -> None:
        """A request was dropped: refused by the engine, or read to its end."""
        ...


@dataclass(slots=True)
class Rejections:
    """What was dropped and counted."""

    stale_epochs: int = 0  # deliveries of an engine that was given up
    duplicates: int = 0  # ids at a position already held
    gaps: int = 0  # ids beyond the next position
    late: int = 0  # ids and ends of choices that have ended
    unknown: int = 0  # ids and ends of requests not open here, or of no choice of theirs
    unread: int = 0  # ended entries dropped because nobody read them


class Ledger:
    """All open requests of one front end, oldest first, and the ended ones not yet read."""

    def __init__(
        self,
        epoch: int = 0,
        max_unread: int = MAX_UNREAD,
        now: Callable[[], float] = time.monotonic,
        observer: LedgerObserver | None = None,
    ) -> None:
        self.epoch = epoch
        self._now = now
        self._observer = observer
        self.rejections = Rejections()
        self._open: dict[str, Entry] = {}
        self._ended: dict[str, Entry] = {}
        self._max_unread = max_unread

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_unread(self) -> int:
        """Ended requests that nobody has read to the end."""
        return len(self._ended)

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._open.values()))

    def add(self, request: Request) -> Entry:
        """Record a request before the engine sees it. Raises DuplicateRequestError; a seed must be set."""
        if request.params.seed is None:
            raise InvalidRequestError("the request has no seed; set one, so that it can be repeated exactly", "seed")
        if request.request_id in self._open:
            raise DuplicateRequestError(f"request id {request.request_id!r} is in use; choose another", "request_id")
        if self._ended.pop(request.request_id, None) is not None and self._observer is not None:
            self._observer.forgotten(request.request_id)
        entry = Entry(request)
        entry.epoch = self.epoch
        self._open[request.request_id] = entry
        if self._observer is not None:
            self._observer.opened(request)
        return entry

    def restore(self, entry: Entry) -> None:
        """Put in an entry of an earlier front end, open or ended; the observer knows it.

        Raises DuplicateRequestError.
        """
        name = entry.request.request_id
        if name in self._open or name in self._ended:
            raise DuplicateRequestError(f"request id {name!r} is in use; choose another", "request_id")
        (self._open if entry.end is None else self._ended)[name] = entry

    def get(self, request_id: str) -> Entry | None:
        """The entry of an open, or of an ended and unread request."""
        return self._open.get(request_id) or self._ended.get(request_id)

    def get_open(self, request_id: str) -> Entry | None:
        """The entry of an open request."""
        return self._open.get(request_id)

    def forget(self, request_id: str) -> None:
        """Drop an entry: refused by the engine, or read to its end."""
        is_known = self._open.pop(request_id, None) or self._ended.pop(request_id, None)
        if is_known and self._observer is not None:
            self._observer.forgotten(request_id)

    def forget_entry(self, entry: Entry) -> None:
        """Drop this very entry; one that reuses its id stays."""
        if self._ended.get(entry.request.request_id) is entry:
            self.forget(entry.request.request_id)

    def abandon(self, entry: Entry) -> None:
        """Whoever read it is gone: once it has ended it need not be kept. A later reader holds the entry itself."""
        entry.is_abandoned = True
        if entry.end is not None:
            self.forget_entry(entry)

    def accept(self, epoch: int, delivery: Delivery) -> list[Entry]:
        """Append a delivery; return the entries with news. What does not fit is dropped and counted."""
        if epoch != self.epoch:
            self.rejections.stale_epochs += 1
            return []
        touched: dict[str, Entry] = {}
        for start in delivery.starts:
            if (entry := self._open.get(start.request_id)) is not None and entry.start is None:
                entry.start = start
        scores = delivery.scores
        if scores:
            scores = tuple(
                score for score in scores if score[0] in self._open and self._open[score[0]].add_scores(*score[1:])
            )
        for request_id, pooled in delivery.pooled:
            if (entry := self._open.get(request_id)) is not None:
                entry.pooled = pooled
        rejected = self._accept_tokens(delivery, touched)
        choice_ends = self._accept_choice_ends(delivery.choice_ends, touched) if delivery.choice_ends else ()
        ends = self._accept_ends(delivery.ends, touched) if delivery.ends else ()
        if self._observer is not None:
            kept = without(delivery, rejected) if rejected else delivery
            self._tell(replace(kept, scores=scores, choice_ends=choice_ends, ends=ends))
        for end in ends:
            self._forget_abandoned(touched[end.request_id])
        return list(touched.values())

    def end(
        self, request_id: str, reason: FinishReason, error: FinishError | None = None, choice: int | None = None
    ) -> list[Entry]:
        """End a request here, or one choice of it; the engine has nothing to say. Returns the entry, if it changed."""
        entry = self._open.get(request_id)
        if entry is None:
            return []
        if choice is not None and not entry.is_last(choice):
            end = ChoiceEnd(request_id, choice, reason, error=error)
            if entry.request.params.beam_width or not entry.end_choice(end):
                return []
            self._tell(Delivery(choice_ends=(end,)))
            return [entry]
        return self.finish(entry, End(request_id, reason, error=error))

    def finish(self, entry: Entry, end: End) -> list[Entry]:
        """End an open request here."""
        del self._open[end.request_id]
        self._finish(entry, end)
        self._tell(Delivery(ends=(end,)))
        self._forget_abandoned(entry)
        return [entry]

    def end_all(self, reason: FinishReason, error: FinishError) -> list[Entry]:
        """End every open request here: the engine will not."""
        return [entry for open_entry in self for entry in self.end(open_entry.request.request_id, reason, error)]

    def advance(self, epoch: int) -> list[Request]:
        """Begin a new epoch; return the open requests, oldest first, as they resume (see Entry.resumed)."""
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} does not follow {self.epoch}")
        self.epoch = epoch
        for entry in self._open.values():
            entry.has_progress = False
        return [entry.resumed() for entry in self._open.values()]

    def _tell(self, delivery: Delivery) -> None:
        if self._observer is not None and not delivery.is_empty:
            self._observer.appended(delivery)

    def _accept_tokens(self, delivery: Delivery, touched: dict[str, Entry]) -> list[int]:
        """Append tokens; return the places of those that were not."""
        logprobs, now = delivery.logprobs, self._now()
        rejected: list[int] = []
        columns = zip(delivery.request_ids, delivery.choices, delivery.positions, delivery.token_ids, strict=True)
        for index, (request_id, choice, position, token_id) in enumerate(columns):
            entry = self._open.get(request_id)
            page = None if entry is None else entry.pages.get(choice) or entry.page(choice)
            if entry is None or page is None:
                self.rejections.unknown += 1
                rejected.append(index)
                continue
            entry.has_progress = True
            expected = len(page.ids)
            if position != expected or entry.is_closed(choice, page):
                self._count(position, expected)
                rejected.append(index)
                continue
            entry.append(page, token_id, None if logprobs is None else logprobs[index])
            if entry.first_at is None:
                entry.first_at = now
            touched[request_id] = entry
        return rejected

    def _count(self, position: int, expected: int) -> None:
        if position < expected:
            self.rejections.duplicates += 1
        elif position > expected:
            self.rejections.gaps += 1
        else:
            self.rejections.late += 1

    def _accept_choice_ends(self, ends: Iterable[ChoiceEnd], touched: dict[str, Entry]) -> tuple[ChoiceEnd, ...]:
        kept = []
        for end in ends:
            entry = self._open.get(end.request_id)
            if entry is None:
                self.rejections.unknown += 1
            elif entry.end_choice(end):
                touched[end.request_id] = entry
                kept.append(end)
            else:
                self.rejections.late += 1
        return tuple(kept)

    def _accept_ends(self, ends: Iterable[End], touched: dict[str, Entry]) -> tuple[End, ...]:
        kept = []
        for end in ends:
            entry = self._open.pop(end.request_id, None)
            if entry is None:
                self.rejections.unknown += 1
                continue
            self._finish(entry, end)
            touched[end.request_id] = entry
            kept.append(end)
        return tuple(kept)

    def _forget_abandoned(self, entry: Entry) -> None:
        if entry.is_abandoned:
            self.forget_entry(entry)

    def _finish(self, entry: Entry, end: End) -> None:
        entry.finish(end)
        self._ended[entry.request.request_id] = entry
        if len(self._ended) > self._max_unread:
            self.forget(next(iter(self._ended)))
            self.rejections.unread += 1


def without(delivery: Delivery, places: Iterable[int]) -> Delivery:
    """A delivery without the tokens at these places."""
    dropped = frozenset(places)
    kept = [index for index in range(len(delivery.request_ids)) if index not in dropped]
    logprobs = delivery.logprobs
    return replace(
        delivery,
        request_ids=[delivery.request_ids[index] for index in kept],
        choices=array("i", [delivery.choices[index] for index in kept]),
        positions=array("i", [delivery.positions[index] for index in kept]),
        token_ids=array("i", [delivery.token_ids[index] for index in kept]),
        logprobs=None if logprobs is None else [logprobs[index] for index in kept],
    )
