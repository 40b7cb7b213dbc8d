"""OpenRequest: one request of the front end, with the ids received for each choice and the ends; and BoundEngine.

Owns: the pages (one per choice), the reader's position in each page, the prompt scores received, and the Request that
resumes this one on a later engine; the requests bound to one engine; the interfaces of the ledger's links, router and
observer. Does not: choose engines, or accept what they send (see open_requests).
Invariants: a choice has one end and accepts no id after it. A prompt score is stored once. The figures of the first
admission (queue time, cached tokens) do not change under later engines. A request is bound to at most one engine.
"""

from __future__ import annotations

import sys
from array import array
from asyncio import Future, get_running_loop
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from octavo.core.plan import Event, EventKind, Events, TokenLogprobs
from octavo.core.request import FinishReason, Request, SamplingParams, Want
from octavo.engine.client import Accepted, TokenOutput, finished
from octavo.executors.protocol import Fingerprint
from octavo.media.item import MediaItem

MAX_PREEMPTIONS = 32  # most preemptions of one request whose times are stored
_UNKNOWN = Fingerprint()


def num_choices(params: SamplingParams) -> int:
    """Return the number of choices that the engine outputs: `n` for a beam search, else all generated choices."""
    return params.n if params.beam_width else params.num_sequences


@dataclass(slots=True, eq=False)
class Page:
    """One choice: its ids, how many of them were read, and its end. `logprobs` belong to the unread ids only."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    num_read: int = 0
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    end: Event | None = None
    is_end_read: bool = False

    @property
    def has_news(self) -> bool:
        """True if the reader has not read all ids and the end."""
        return self.num_read < len(self.ids) or (self.end is not None and not self.is_end_read)


class OpenRequest:
    """One request: as it was submitted (with a seed), its pages and its end. Each page is created when it is needed.

    `starts_over`: in a later epoch the request begins at its first token, because it has several sequences, or
    mirostat's bound, which an engine cannot compute from ids.
    `epoch` is the epoch of its arrival; 0 if an earlier front end accepted the request. `has_progress`: the request got
    a token in this epoch, even one that was already known. `num_crashes` counts the engines that died with the request
    in their batch since its last token. `requested_ends` maps a choice (None = the whole request) to the reason of its
    cancellation, which an engine that died may not have received. `engine` is the engine that the request is bound to;
    None while it is held. `num_sends` counts the engines that it was sent to. `fingerprint` is that of the engines that
    generated its ids; `is_exact` is False once an engine with another one continues them. `queue_s` and
    `cached_tokens` describe the first admission; before it they are None and 0. `max_tokens` is the engine's decision;
    before it, 0. `media` has the images of the request's spans, until its end. `answer` is the future of the submit
    call. `waiter` is the reader's future: for any output or, with `final_only`, for the end.
    """

    __slots__ = (
        "_num_choices", "_num_ended", "_out_since", "_scores", "_scores_from", "answer", "cached_tokens", "end",
        "engine", "epoch", "final_only", "fingerprint", "first_at", "has_logprobs", "has_progress",
        "is_abandoned", "is_exact", "is_read", "max_tokens", "media", "next_score", "num_crashes", "num_sends", "pages",
        "pooled", "preempted", "queue_s", "request", "requested_ends", "starts_over", "waiter",
    )  # fmt: skip

    def __init__(self, request: Request, media: tuple[MediaItem, ...] = ()) -> None:
        emitted = array("i", request.emitted_token_ids or ())
        self.request = request
        self.media = media
        self.epoch = 0
        self.pages: dict[int, Page] = {0: Page(emitted, len(emitted))}
        self.queue_s: float | None = None
        self.cached_tokens = 0
        self.preempted: tuple[tuple[float, float], ...] = ()
        self.end: Event | None = None
        self.is_read = False
        self.is_abandoned = False  # it no longer has a reader
        self.answer: Future[Accepted] | None = None
        self.waiter: Future[None] | None = None
        self.final_only = False
        self.first_at: float | None = None
        self.has_progress = False
        self.engine: BoundEngine | None = None
        self.num_sends = 0
        self.fingerprint = _UNKNOWN
        self.is_exact = True
        self.num_crashes = 0
        self.max_tokens = 0
        self.requested_ends: dict[int | None, FinishReason] = {}
        self.next_score = request.score_from
        self.pooled: bytes | None = None
        self.has_logprobs = request.params.num_logprobs is not None
        params = request.params
        self.starts_over = params.num_sequences > 1 or params.beam_width > 0 or params.mirostat > 0
        self._num_choices = num_choices(request.params)
        self._num_ended = 0  # choices
        self._out_since: float | None = None
        self._scores: list[TokenLogprobs] = []
        self._scores_from = 0

    @property
    def has_ids(self) -> bool:
        """True if an id was received for some choice."""
        return any(page.ids for page in self.pages.values())

    @property
    def ended_choices(self) -> list[int]:
        """Choices that have ended."""
        return [choice for choice, page in self.pages.items() if page.end is not None]

    @property
    def num_unread(self) -> int:
        """Number of tokens that its reader has not read."""
        return sum(len(page.ids) - page.num_read for page in self.pages.values())

    def page(self, choice: int) -> Page | None:
        """Return the page of a choice; None if the request has no such choice."""
        if choice not in self.pages and 0 <= choice < self._num_choices:
            self.pages[choice] = Page()
        return self.pages.get(choice)

    def note(self, event: Event) -> None:
        """Apply a decision other than an end: the request was admitted, preempted, or resumed."""
        if event.kind == EventKind.ADMITTED and self.queue_s is None:
            self.queue_s = max(0.0, event.time - self.request.arrival)
            self.cached_tokens = event.cached_tokens
        elif event.kind == EventKind.PREEMPTED:
            self._out_since = event.time
        elif event.kind == EventKind.RESUMED:
            self._note_return(event.time)

    def _note_return(self, time: float) -> None:
        if self._out_since is not None and len(self.preempted) < MAX_PREEMPTIONS:
            arrival = self.request.arrival
            self.preempted += ((self._out_since - arrival, time - arrival),)
        self._out_since = None

    def end_choice(self, end: Event) -> bool:
        """End one choice; return False if the choice has ended before, or is unknown.

        Usually the last choice ends with the request. An engine that starts a request over does not know which choices
        have ended, and may end the last open choice before the request; the reader gets both ends together.
        """
        page = self.page(end.choice)
        if page is None or page.end is not None:
            return False
        page.end = end
        self._num_ended += 1
        return True

    def is_last(self, choice: int) -> bool:
        """Return True if this choice is open and all others have ended."""
        page = self.page(choice)
        return page is not None and page.end is None and self._num_ended + 1 >= self._num_choices

    def finish(self, end: Event) -> None:
        """End the request and every choice that is still open, and drop its media."""
        self.end, self.media = end, ()
        if self._out_since is not None:
            self._note_return(end.time)
        for choice in range(self._num_choices):
            page = self.pages.setdefault(choice, Page())
            page.end = page.end or end

    def add_scores(self, first: int, entries: tuple[TokenLogprobs, ...]) -> bool:
        """Add log-probabilities of prompt positions from `first` on, in order; return False if none was new.

        Scores that were received before are left out, and so are scores after a gap.
        """
        known = self.next_score - first
        if known < 0 or known >= len(entries):
            return False
        if not self._scores:
            self._scores_from = self.next_score
        self._scores.extend(entries[known:])
        self.next_score = first + len(entries)
        return True

    def begin_engine(self) -> None:
        """Reset the state that belongs to one engine: progress and preemptions."""
        self.has_progress = False
        self.preempted, self._out_since = (), None

    def resumed(self) -> Request:
        """Return the request for the next engine, with the ids received so far and without scores already received.

        A request that starts over gives none: the engine generates the known ids again.
        """
        request = self.request
        if self.queue_s is None and not self.pages[0].ids and self.next_score == request.score_from:
            return request
        emitted = request.emitted_token_ids if self.starts_over else self.pages[0].ids[:] or None
        wants, score_from = request.wants, request.score_from
        if wants & Want.SCORE and self.next_score > score_from:
            score_from = self.next_score
            if score_from >= request.num_prompt_tokens and wants != Want.SCORE:
                wants &= ~Want.SCORE
        return replace(
            request,
            emitted_token_ids=emitted,
            wants=wants,
            score_from=score_from,
            queue_timeout=request.queue_timeout if self.queue_s is None else None,
        )

    def implied_end(self) -> Event | None:
        """Return the end that the received ids imply, or None. An engine would refuse to resume a request with one."""
        request, params, ids = self.request, self.request.params, self.pages[0].ids
        if self.starts_over or not ids:
            return None
        last, eos = ids[-1], () if params.ignore_eos else request.eos_token_ids
        if len(ids) > params.min_tokens and (last in eos or last in params.stop_token_ids):
            stop_id = last if last in params.stop_token_ids else None
            return finished(request.request_id, FinishReason.STOP, stop_token_id=stop_id)
        if len(ids) >= (params.max_tokens or self.max_tokens or len(ids) + 1):
            return finished(request.request_id, FinishReason.LENGTH)
        return None

    def take(self, max_ids: int = sys.maxsize) -> list[TokenOutput]:
        """Return the unread outputs, one per choice, each with at most `max_ids` ids. The request's last is final."""
        end, pages = self.end, self.pages
        if end is None and self._num_ended == self._num_choices:
            return []  # wait for the request's end, so that one output remains to be the final one
        outputs, is_all_read = list[TokenOutput](), True
        for choice in sorted(pages):
            page = pages[choice]
            if not page.has_news:
                continue
            start = page.num_read
            page.num_read = min(start + max_ids, len(page.ids))
            choice_end = page.end if page.num_read == len(page.ids) else None
            page.is_end_read = choice_end is not None
            ids, logprobs = page.ids[start : page.num_read], None
            if page.logprobs and ids:
                logprobs = tuple(page.logprobs[: len(ids)])
                del page.logprobs[: len(ids)]
            output = TokenOutput(self.request.request_id, choice, start, ids, logprobs, first_at=self.first_at)
            if choice_end is not None:
                output.finish_reason, output.error = choice_end.finish_reason, choice_end.error
            outputs.append(output)
            is_all_read = is_all_read and not page.has_news
        if outputs and self._scores:
            outputs[0] = replace(outputs[0], prompt_logprobs=(self._scores_from, tuple(self._scores)))
            self._scores = []
        if end is not None and outputs and is_all_read:
            cached_tokens = end.cached_tokens if self.queue_s is None else self.cached_tokens
            outputs[-1] = replace(
                outputs[-1],
                is_final=True,
                cached_tokens=min(cached_tokens, self.request.num_prompt_tokens),
                queue_s=self.queue_s or 0.0,
                preempted=self.preempted,
                pooled=self.pooled,
            )
            self.is_read = True
        return outputs

    def wait(self, final_only: bool) -> Future[None]:
        """Return a future that is done when there are outputs to take; with `final_only`, when the request ends."""
        assert self.waiter is None or self.waiter.done(), "a request has one reader"
        self.final_only = final_only
        self.waiter = get_running_loop().create_future()
        return self.waiter

    def wake(self) -> None:
        """Wake the reader; with `final_only` only if the request has ended."""
        waiter = self.waiter
        if waiter is not None and not waiter.done() and (self.end is not None or not self.final_only):
            waiter.set_result(None)


class EngineLink(Protocol):
    """The connection to a current engine, whose number is `epoch`."""

    epoch: int

    def send(self, request: Request, media: tuple[MediaItem, ...] = ()) -> Future[Accepted]:
        """Send a request with its media; return a future of the engine's answer, or of the error that ended the engine.

        Raises InvalidRequestError if the request is too large to be sent, or EngineDeadError.
        """

    def post_cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        """End requests, or one choice of them, without waiting."""


class BoundEngine:
    """A current engine, and the requests bound to it, oldest first. A router chooses among these.

    `number` is its replica's. `load` is the number of prompt tokens of its requests. `is_open`: it gets requests.
    `suspect` is the crash suspect that runs alone, until it has a token or its end. `is_fresh`: only suspects were sent
    since the engine began or was emptied. `leaving` has the requests moved to other engines that it has not yet ended.
    """

    def __init__(self, link: EngineLink, number: int = 0, fingerprint: Fingerprint = _UNKNOWN) -> None:
        self.link = link
        self.epoch = link.epoch
        self.number = number
        self.fingerprint = fingerprint
        self.requests: dict[str, OpenRequest] = {}
        self.leaving: set[str] = set()
        self.load = 0
        self.is_open = True
        self.is_fresh = True
        self.suspect: OpenRequest | None = None

    @property
    def num_open(self) -> int:
        """Number of requests bound to this engine."""
        return len(self.requests)

    def bind(self, state: OpenRequest) -> None:
        """Bind a held request to this engine."""
        assert state.engine is None, "a request is bound to one engine"
        state.engine = self
        self.requests[state.request.request_id] = state
        self.load += state.request.num_prompt_tokens

    def release(self, state: OpenRequest) -> None:
        """Undo bind()."""
        del self.requests[state.request.request_id]
        self.load -= state.request.num_prompt_tokens
        state.engine = None
        if self.suspect is state:
            self.suspect = None


@dataclass(slots=True)
class Rejections:
    """Counts of dropped events and requests."""

    stale_epochs: int = 0  # events of an engine that was given up
    duplicates: int = 0  # ids at a position already held
    gaps: int = 0  # ids beyond the next position
    late: int = 0  # ids and ends of choices that have ended
    unknown: int = 0  # ids and ends of requests not open here, or of no choice of theirs
    moved: int = 0  # ids and ends of requests bound to another engine by now
    unread: int = 0  # ended requests dropped because they were not read

    def count(self, position: int, expected: int) -> None:
        """Count an id at a position other than the expected one, or after the end of its choice."""
        if position < expected:
            self.duplicates += 1
        elif position > expected:
            self.gaps += 1
        else:
            self.late += 1


class LedgerObserver(Protocol):
    """Observer of every change, called in the event loop's thread, in order."""

    def opened(self, state: OpenRequest) -> None:
        """Handle a new request, before it is sent to an engine."""

    def appended(self, events: Events) -> None:
        """Handle accepted events: those of an engine without the rejected parts, and ends made by the front end."""

    def forgotten(self, request_id: str) -> None:
        """Handle a dropped request: refused by the engine, or read to its end."""


class EngineRouter(Protocol):
    """Chooses the engines of requests."""

    def choose(self, request: Request, targets: Sequence[BoundEngine]) -> BoundEngine:
        """Return one of these engines, of which there is at least one, for a new, moved or resumed request."""

    def ended(self, request_id: str, num_output_tokens: int, first_at: float | None) -> None:
        """Handle the end of a request; `first_at` is when this front received its first token."""


def settle(answer: Future[Any] | None, value: object) -> None:
    """Set a pending future's result or exception; do nothing if it is done or None."""
    if answer is None or answer.done():
        return
    if isinstance(value, Exception):
        answer.set_exception(value)
        answer.exception()  # marked as retrieved: its waiter may have been cancelled meanwhile
    else:
        answer.set_result(value)


def without(events: Events, places: Iterable[int]) -> Events:
    """Return the events without the tokens at these indexes."""
    dropped = frozenset(places)
    kept = [index for index in range(len(events.request_ids)) if index not in dropped]
    logprobs = events.logprobs
    return replace(
        events,
        request_ids=[events.request_ids[index] for index in kept],
        choices=array("i", [events.choices[index] for index in kept]),
        positions=array("i", [events.positions[index] for index in kept]),
        token_ids=array("i", [events.token_ids[index] for index in kept]),
        logprobs=None if logprobs is None else [logprobs[index] for index in kept],
    )
