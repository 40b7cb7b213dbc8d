"""The ledger: what was asked and every id that came back, per request, on the front end's side.

Owns: the append (an output counts iff its epoch is current and its position is next), the reader's place in
it, and what a later epoch needs to resume. Append first, then hand out. Does not: wait, or know sockets.
Invariants: an entry's ids have no gap and no duplicate; a slow reader costs no more than the ids themselves;
after its end an entry takes nothing.
"""

from __future__ import annotations

import time
from array import array
from asyncio import Future
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from octavo.core.plan import TokenLogprobs
from octavo.core.request import FinishReason, Request
from octavo.engine.client import TokenOutput
from octavo.engine.delivery import Delivery, End
from octavo.errors import DuplicateRequestError, InvalidRequestError

MAX_UNREAD = 1024  # ended entries that nobody has read to the end; the oldest is dropped beyond


class Entry:
    """One request's page: the request as sent (its seed set), ids per choice, and its end.

    `waiter` and `final_only` belong to whoever reads (see channels).
    """

    __slots__ = (
        "_has_logprobs",
        "_logprobs",
        "_read",
        "_scores",
        "_scores_from",
        "emitted",
        "end",
        "final_only",
        "first_at",
        "is_read",
        "request",
        "waiter",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.emitted: dict[int, array[int]] = {0: array("i", request.emitted_token_ids or ())}
        self.end: End | None = None
        self.is_read = False
        self.waiter: Future[None] | None = None
        self.final_only = False
        self.first_at: float | None = None
        self._has_logprobs = request.params.logprobs is not None
        self._read: dict[int, int] = {0: len(self.emitted[0])}
        self._logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self._scores: list[TokenLogprobs] = []
        self._scores_from = 0

    @property
    def has_news(self) -> bool:
        """Whether take() would give anything."""
        if self.end is not None:
            return not self.is_read
        return any(self._read[choice] < len(ids) for choice, ids in self.emitted.items())

    def append(self, choice: int, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Add the next id of a choice."""
        self.emitted[choice].append(token_id)
        if self._has_logprobs:
            self._logprobs.setdefault(choice, []).append(logprobs)

    def next_position(self, choice: int) -> int:
        """Index of the id that would be appended."""
        if choice not in self.emitted:
            self.emitted[choice] = array("i")
            self._read[choice] = 0
        return len(self.emitted[choice])

    def add_scores(self, first: int, entries: tuple[TokenLogprobs, ...]) -> None:
        """Add log-probabilities of prompt positions from `first` on; chunks arrive in order."""
        if not self._scores:
            self._scores_from = first
        self._scores.extend(entries)

    def take(self) -> list[TokenOutput]:
        """Everything since the last take, one output per choice: snapshots, the end on the last one."""
        outputs = [self._snapshot(choice) for choice, ids in self.emitted.items() if self._read[choice] < len(ids)]
        if self.end is not None and not outputs:
            outputs = [self._snapshot(0)]
        if outputs and self._scores:
            outputs[0] = replace(outputs[0], prompt_logprobs=(self._scores_from, tuple(self._scores)))
            self._scores = []
        if self.end is not None:
            outputs[-1] = _with_end(outputs[-1], self.end)
            self.is_read = True
        return outputs

    def _snapshot(self, choice: int) -> TokenOutput:
        start, ids = self._read[choice], self.emitted[choice]
        self._read[choice] = len(ids)
        logprobs = self._logprobs.pop(choice, None)
        return TokenOutput(
            self.request.request_id,
            choice,
            start,
            ids[start:],
            tuple(logprobs) if logprobs is not None else None,
            first_at=self.first_at,
        )


def _with_end(output: TokenOutput, end: End) -> TokenOutput:
    return replace(
        output,
        finish_reason=end.finish_reason,
        stop_token_id=end.stop_token_id,
        cached_tokens=end.cached_tokens,
        num_preemptions=end.num_preemptions,
        queue_s=end.queue_s,
        message=end.message,
    )


@dataclass(slots=True)
class Rejections:
    """What was dropped and counted."""

    stale_epochs: int = 0  # deliveries of an engine that was given up
    duplicates: int = 0  # ids at a position already held
    gaps: int = 0  # ids beyond the next position
    unknown: int = 0  # ids and ends of requests not open here
    unread: int = 0  # ended entries dropped because nobody read them


class Ledger:
    """All open requests of one front end, oldest first, and the ended ones not yet read."""

    def __init__(self, epoch: int = 0, max_unread: int = MAX_UNREAD, now: Callable[[], float] = time.monotonic) -> None:
        self.epoch = epoch
        self._now = now
        self.rejections = Rejections()
        self._open: dict[str, Entry] = {}
        self._ended: dict[str, Entry] = {}
        self._max_unread = max_unread

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._open.values()))

    def add(self, request: Request) -> Entry:
        """Record a request before the engine sees it. Raises DuplicateRequestError; a seed must be set."""
        if request.params.seed is None:
            raise InvalidRequestError("the request has no seed; set one, so that it can be repeated exactly", "seed")
        if request.request_id in self._open:
            raise DuplicateRequestError(f"request id {request.request_id!r} is in use; choose another", "request_id")
        self._ended.pop(request.request_id, None)
        entry = Entry(request)
        self._open[request.request_id] = entry
        return entry

    def get(self, request_id: str) -> Entry | None:
        """The entry of an open, or of an ended and unread request."""
        return self._open.get(request_id) or self._ended.get(request_id)

    def forget(self, request_id: str) -> None:
        """Drop an entry: refused by the engine, or read to its end."""
        self._open.pop(request_id, None)
        self._ended.pop(request_id, None)

    def forget_entry(self, entry: Entry) -> None:
        """Drop this very entry; one that reuses its id stays."""
        if self._ended.get(entry.request.request_id) is entry:
            del self._ended[entry.request.request_id]

    def accept(self, epoch: int, delivery: Delivery) -> list[Entry]:
        """Append a delivery; return the entries with news. What does not fit is dropped and counted."""
        if epoch != self.epoch:
            self.rejections.stale_epochs += 1
            return []
        touched: dict[str, Entry] = {}
        for request_id, first, entries in delivery.scores:
            if (entry := self._open.get(request_id)) is not None:
                entry.add_scores(first, entries)
        self._accept_tokens(delivery, touched)
        for end in delivery.ends:
            ended = self._open.pop(end.request_id, None)
            if ended is None:
                self.rejections.unknown += 1
                continue
            self._finish(ended, end)
            touched[end.request_id] = ended
        return list(touched.values())

    def end_all(self, reason: FinishReason, message: str) -> list[Entry]:
        """End every open request here: the engine will not."""
        entries = list(self._open.values())
        self._open.clear()
        for entry in entries:
            self._finish(entry, End(entry.request.request_id, reason, message=message))
        return entries

    def advance(self, epoch: int) -> list[Request]:
        """Begin a new epoch; return the open requests, oldest first, as they resume behind what was emitted.

        Only requests of one choice resume from their ids.
        """
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} does not follow {self.epoch}")
        self.epoch = epoch
        return [replace(e.request, emitted_token_ids=e.emitted[0][:] or None) for e in self._open.values()]

    def _accept_tokens(self, delivery: Delivery, touched: dict[str, Entry]) -> None:
        logprobs, now = delivery.logprobs, self._now()
        columns = zip(delivery.request_ids, delivery.choices, delivery.positions, delivery.token_ids, strict=True)
        for index, (request_id, choice, position, token_id) in enumerate(columns):
            entry = self._open.get(request_id)
            if entry is None:
                self.rejections.unknown += 1
                continue
            expected = entry.next_position(choice)
            if position != expected:
                if position < expected:
                    self.rejections.duplicates += 1
                else:
                    self.rejections.gaps += 1
                continue
            entry.append(choice, token_id, None if logprobs is None else logprobs[index])
            if entry.first_at is None:
                entry.first_at = now
            touched[request_id] = entry

    def _finish(self, entry: Entry, end: End) -> None:
        entry.end = end
        self._ended[entry.request.request_id] = entry
        if len(self._ended) > self._max_unread:
            del self._ended[next(iter(self._ended))]
            self.rejections.unread += 1
