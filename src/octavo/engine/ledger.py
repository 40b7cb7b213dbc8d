"""The ledger: what was asked and every id that came back, per request, on the front end's side.

Owns: the append (an output counts iff its epoch is current and its position is next), the reader's place in
it, and what a later epoch needs to resume. Append first, then hand out. Does not: wait, or know sockets.
Invariants: a choice's ids have no gap and no duplicate; a slow reader costs no more than the ids themselves; a choice
has one end and takes nothing after it, and the last one to end does so with its request.
"""

from __future__ import annotations

import time
from array import array
from asyncio import Future
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from octavo.core.plan import TokenLogprobs
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.engine.client import TokenOutput
from octavo.engine.delivery import ChoiceEnd, Delivery, End
from octavo.errors import DuplicateRequestError, InvalidRequestError

MAX_UNREAD = 1024  # ended entries that nobody has read to the end; the oldest is dropped beyond


def num_choices(params: SamplingParams) -> int:
    """Choices that the engine gives: of a beam search those asked for, else all that are made."""
    return params.n if params.beam_width else params.num_sequences


class Page:
    """One choice: its ids, those read so far, and its end. `logprobs` are those of the ids not yet read."""

    __slots__ = ("end", "ids", "is_told", "logprobs", "num_read")

    def __init__(self, ids: array[int] | None = None) -> None:
        self.ids: array[int] = array("i", ids or ())
        self.num_read = len(self.ids)
        self.logprobs: list[TokenLogprobs | None] = []
        self.end: ChoiceEnd | None = None
        self.is_told = False  # the reader has the end

    @property
    def has_news(self) -> bool:
        """Whether the reader lacks something of it."""
        return self.num_read < len(self.ids) or (self.end is not None and not self.is_told)


class Entry:
    """One request: as sent (its seed set), a page per choice, and its end. Pages are made as their choices turn up.

    `waiter` and `final_only` belong to whoever reads (see channels).
    """

    __slots__ = (
        "_has_logprobs", "_num_choices", "_num_ended", "_scores", "_scores_from", "end", "final_only", "first_at",
        "is_read", "pages", "request", "waiter",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.pages: dict[int, Page] = {0: Page(request.emitted_token_ids)}
        self.end: End | None = None
        self.is_read = False
        self.waiter: Future[None] | None = None
        self.final_only = False
        self.first_at: float | None = None
        self._num_choices = num_choices(request.params)
        self._num_ended = 0
        self._has_logprobs = request.params.num_logprobs is not None
        self._scores: list[TokenLogprobs] = []
        self._scores_from = 0

    @property
    def has_news(self) -> bool:
        """Whether take() would give anything."""
        if self.end is not None:
            return not self.is_read
        return any(page.has_news for page in self.pages.values())

    def page(self, choice: int) -> Page | None:
        """The page of a choice; None when the request has no such choice."""
        if choice not in self.pages and 0 <= choice < self._num_choices:
            self.pages[choice] = Page()
        return self.pages.get(choice)

    def append(self, page: Page, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Add the next id of a choice."""
        page.ids.append(token_id)
        if self._has_logprobs:
            page.logprobs.append(logprobs)

    def end_choice(self, end: ChoiceEnd) -> bool:
        """End one choice; False where it cannot: ended or unknown, or the last, which ends with its request."""
        page = self.page(end.choice)
        if page is None or page.end is not None or self._num_ended + 1 >= self._num_choices:
            return False
        page.end = end
        self._num_ended += 1
        return True

    def finish(self, end: End) -> None:
        """End the request, and with it every choice that has not ended."""
        self.end = end
        for choice in range(self._num_choices):
            page = self.page(choice)
            assert page is not None
            if page.end is None:
                page.end = ChoiceEnd(end.request_id, choice, end.finish_reason, end.stop_token_id, end.message)

    def add_scores(self, first: int, entries: tuple[TokenLogprobs, ...]) -> None:
        """Add log-probabilities of prompt positions from `first` on; chunks arrive in order."""
        if not self._scores:
            self._scores_from = first
        self._scores.extend(entries)

    def take(self) -> list[TokenOutput]:
        """Everything since the last take, one output per choice: snapshots; once ended, the last one is final."""
        outputs = [self._snapshot(choice) for choice in sorted(self.pages) if self.pages[choice].has_news]
        if outputs and self._scores:
            outputs[0] = replace(outputs[0], prompt_logprobs=(self._scores_from, tuple(self._scores)))
            self._scores = []
        end = self.end
        if end is not None:
            outputs[-1] = replace(
                outputs[-1],
                is_final=True,
                cached_tokens=end.cached_tokens,
                num_preemptions=end.num_preemptions,
                queue_s=end.queue_s,
            )
            self.is_read = True
        return outputs

    def _snapshot(self, choice: int) -> TokenOutput:
        page = self.pages[choice]
        start, end = page.num_read, page.end
        page.num_read = len(page.ids)
        page.is_told = end is not None
        logprobs, page.logprobs = page.logprobs, []
        return TokenOutput(
            self.request.request_id,
            choice,
            start,
            page.ids[start:],
            tuple(logprobs) if logprobs else None,
            finish_reason=None if end is None else end.finish_reason,
            stop_token_id=None if end is None else end.stop_token_id,
            message=None if end is None else end.message,
            first_at=self.first_at,
        )


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
        self._accept_choice_ends(delivery, touched)
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

        Requests of several sequences start anew: the ids that come again are those held here, and are dropped.
        """
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} does not follow {self.epoch}")
        self.epoch = epoch
        return [
            e.request
            if e.request.params.num_sequences > 1 or e.request.params.beam_width
            else replace(e.request, emitted_token_ids=e.pages[0].ids[:] or None)
            for e in self._open.values()
        ]

    def _accept_tokens(self, delivery: Delivery, touched: dict[str, Entry]) -> None:
        logprobs, now = delivery.logprobs, self._now()
        columns = zip(delivery.request_ids, delivery.choices, delivery.positions, delivery.token_ids, strict=True)
        for index, (request_id, choice, position, token_id) in enumerate(columns):
            entry = self._open.get(request_id)
            if entry is None:
                self.rejections.unknown += 1
                continue
            page = entry.pages.get(choice) or entry.page(choice)
            if page is None:
                self.rejections.unknown += 1
                continue
            expected = len(page.ids)
            if position < expected:
                self.rejections.duplicates += 1
                continue
            if page.end is not None:
                self.rejections.late += 1
                continue
            if position > expected:
                self.rejections.gaps += 1
                continue
            entry.append(page, token_id, None if logprobs is None else logprobs[index])
            if entry.first_at is None:
                entry.first_at = now
            touched[request_id] = entry

    def _accept_choice_ends(self, delivery: Delivery, touched: dict[str, Entry]) -> None:
        for end in delivery.choice_ends:
            entry = self._open.get(end.request_id)
            if entry is None:
                self.rejections.unknown += 1
            elif entry.end_choice(end):
                touched[end.request_id] = entry
            else:
                self.rejections.late += 1

    def _finish(self, entry: Entry, end: End) -> None:
        entry.finish(end)
        self._ended[entry.request.request_id] = entry
        if len(self._ended) > self._max_unread:
            del self._ended[next(iter(self._ended))]
            self.rejections.unread += 1
