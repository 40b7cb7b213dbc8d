"""The open requests of a front end, which outlive its engines.

Owns: each request, the ids received for it, its reader, and whether an engine has it. This is the ledger: an output is
accepted if its epoch is current and its position is next; a later engine resumes the open requests. A request that was
in a dead engine's batch ALONE_AFTER times without a token is resumed alone; after MAX_CRASHES times it is failed.
Does not: start, watch or end engines (engine_supervisor does), or define one request's record (open_request does).
Invariants: ids are appended first, then the observer is called, then the reader is woken. A choice's ids have no gap
and no duplicate. A slow reader gets larger outputs, never a queue of them. A submit is answered once. A request that
was cancelled or has expired is sent to no other engine. While a suspect runs alone, no other request is sent.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from octavo.core.plan import Event, EventKind, Events
from octavo.core.request import FinishError, FinishReason, Request
from octavo.engine.client import Accepted, TokenOutput
from octavo.engine.outbox import ENDS, finished
from octavo.errors import (
    DuplicateRequestError,
    EngineDeadError,
    ErrorKind,
    InvalidRequestError,
    OctavoError,
    RequestError,
    kind_of,
)
from octavo.frontend.open_request import OpenRequest

_LOG = logging.getLogger(__name__)
ALONE_AFTER = 2  # engines that died with a request in their batch, without a token for it, before it runs alone
MAX_CRASHES = 3  # engines that died with a request in their batch, without a token for it, before it is failed
MAX_UNREAD = 1024  # ended requests that were not read to the end; beyond this the oldest is dropped


class EngineLink(Protocol):
    """The connection to the current engine, whose number is `epoch`."""

    epoch: int

    def send(self, request: Request) -> asyncio.Future[Accepted]:
        """Send a request; return a future of the engine's answer, or of the error that ended the engine.

        Raises InvalidRequestError if the request is too large to be sent, or EngineDeadError.
        """
        ...

    def post_cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        """End requests, or one choice of them, without waiting."""
        ...


class LedgerObserver(Protocol):
    """Observer of every change, called in the event loop's thread, in order."""

    def opened(self, state: OpenRequest) -> None:
        """Handle a new request, before it is sent to an engine."""
        ...

    def appended(self, events: Events) -> None:
        """Handle accepted events: those of an engine without the rejected parts, and ends made by the front end."""
        ...

    def forgotten(self, request_id: str) -> None:
        """Handle a dropped request: refused by the engine, or read to its end."""
        ...


@dataclass(slots=True)
class Rejections:
    """Counts of dropped events and requests."""

    stale_epochs: int = 0  # events of an engine that was given up
    duplicates: int = 0  # ids at a position already held
    gaps: int = 0  # ids beyond the next position
    late: int = 0  # ids and ends of choices that have ended
    unknown: int = 0  # ids and ends of requests not open here, or of no choice of theirs
    unread: int = 0  # ended requests dropped because they were not read


class OpenRequests:
    """All open requests of one front end, oldest first, and the ended requests not yet read. For one event loop.

    `engine` is the current engine, or None. `resumes`: an engine that dies is replaced, and requests that it did not
    answer wait for the next engine.
    """

    def __init__(
        self,
        epoch: int = 0,
        max_unread: int = MAX_UNREAD,
        now: Callable[[], float] = time.monotonic,
        observer: LedgerObserver | None = None,
        resumes: bool = True,
    ) -> None:
        self.epoch = epoch
        self.engine: EngineLink | None = None
        self.rejections = Rejections()
        self.num_resumed = 0
        self.num_failed_suspects = 0
        self._held: dict[str, OpenRequest] = {}  # not yet sent to the engine: suspects first, then oldest first
        self._suspect: OpenRequest | None = None  # the suspect that was sent, until it has a token or its end
        self._now = now
        self._observer = observer
        self._resumes = resumes
        self._open: dict[str, OpenRequest] = {}
        self._ended: dict[str, OpenRequest] = {}
        self._max_unread = max_unread

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(tuple(self._open.values()))

    @property
    def num_unread(self) -> int:
        """Ended requests that were not read to the end."""
        return len(self._ended)

    def get(self, request_id: str) -> OpenRequest | None:
        """Return an open request, or one that ended and was not read."""
        return self._open.get(request_id) or self._ended.get(request_id)

    def get_open(self, request_id: str) -> OpenRequest | None:
        """Return an open request."""
        return self._open.get(request_id)

    @property
    def is_holding(self) -> bool:
        """True while other requests are held back because a suspect runs alone."""
        return self._suspect is not None

    def has_engine(self, request_id: str) -> bool:
        """Return True if this request was sent to the current engine, which therefore has to end it."""
        return self.engine is not None and request_id not in self._held

    # --- requests are submitted, read and dropped

    async def submit(self, request: Request) -> Accepted:
        """Record a request, send it, and wait for the answer of this engine or a later one.

        Raises RequestError, or EngineDeadError if no engine will follow. Cancelling this task cancels the request.
        """
        state, name = self.add(request), request.request_id
        state.answer = asyncio.get_running_loop().create_future()
        try:
            self._send_or_hold(state)
            return await state.answer
        except BaseException:
            if self.get(name) is state:
                if self.engine is not None and self.has_engine(name):
                    self.engine.post_cancel((name,))
                self.forget(name)
                self._release(name)
            raise
        finally:
            state.answer = None

    def add(self, request: Request) -> OpenRequest:
        """Record a request before the engine sees it. Raises DuplicateRequestError; a seed must be set."""
        name = request.request_id
        if request.params.seed is None:
            raise InvalidRequestError("the request has no seed; set one, so that it can be repeated exactly", "seed")
        if name in self._open:
            raise DuplicateRequestError(f"request id {name!r} is in use; choose another", "request_id")
        if self._ended.pop(name, None) is not None and self._observer is not None:
            self._observer.forgotten(name)
        state = self._open[name] = OpenRequest(request)
        state.epoch = self.epoch
        if self._observer is not None:
            self._observer.opened(state)
        return state

    def restore(self, state: OpenRequest) -> None:
        """Add a request of an earlier front end, ended or to be resumed; the observer already knows it.

        Raises DuplicateRequestError.
        """
        name = state.request.request_id
        if self.get(name) is not None:
            raise DuplicateRequestError(f"request id {name!r} is in use; choose another", "request_id")
        (self._open if state.end is None else self._ended)[name] = state
        if state.end is None:
            self._send_or_hold(state)

    def forget(self, request_id: str) -> None:
        """Drop a request: refused by the engine, or read to its end."""
        is_known = self._open.pop(request_id, None) or self._ended.pop(request_id, None)
        if is_known and self._observer is not None:
            self._observer.forgotten(request_id)

    def forget_ended(self, state: OpenRequest) -> None:
        """Drop this request if it has ended, but not another one that reuses its id."""
        if self._ended.get(state.request.request_id) is state:
            self.forget(state.request.request_id)

    def abandon(self, state: OpenRequest) -> None:
        """Drop a request that has lost its reader, once it has ended. Another reader keeps its own reference."""
        state.is_abandoned = True
        if state.end is not None:
            self.forget_ended(state)

    def outputs(self, request_id: str, final_only: bool = False, max_ids: int = sys.maxsize) -> OutputReader:
        """Return the outputs of one request, for one reader. Raises RequestError at once if it is not open here."""
        state = self.get(request_id)
        if state is None:
            raise RequestError(f"no request {request_id!r} is open here, or it was read to its end", "request_id")
        return OutputReader(self, state, final_only, max_ids)

    # --- what engines send

    def accept(self, epoch: int, events: Events) -> None:
        """Append events and wake their readers. Events that are not accepted are dropped and counted."""
        if epoch != self.epoch:
            self.rejections.stale_epochs += 1
            return
        touched: dict[str, OpenRequest] = {}
        scores = events.scores
        if scores:
            scores = tuple(
                score for score in scores if score[0] in self._open and self._open[score[0]].add_scores(*score[1:])
            )
        for request_id, pooled in events.pooled:
            if (state := self._open.get(request_id)) is not None:
                state.pooled = pooled
        rejected = self._append_tokens(events, touched)
        decisions = self._take_decisions(events.decisions, touched) if events.decisions else ()
        if self._observer is not None:
            kept = without(events, rejected) if rejected else events
            self._tell(replace(kept, scores=scores, decisions=decisions))
        for state in touched.values():
            if state.end is not None and state.is_abandoned:
                self.forget_ended(state)
            state.wake()
        if self._suspect is not None:
            self._send_held()

    def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> int:
        """End requests, or one choice of them, at once if no engine has them; return how many are open here."""
        sent, count = [], 0
        for name in tuple(request_ids):
            state = self._open.get(name)
            if state is None:
                continue
            count += 1
            if self.has_engine(name):
                state.requested_ends.setdefault(choice, reason)  # the engine may die before it receives this
                sent.append(name)
            else:
                self.end(name, reason, choice=choice)
        if sent and self.engine is not None:
            self.engine.post_cancel(sent, reason, choice)
        return count

    def expire(self, now: float) -> None:
        """End the requests that no engine has and whose deadline or queue timeout has passed."""
        for state in self:
            request, name = state.request, state.request.request_id
            if self.has_engine(name):
                continue
            if request.deadline is not None and now >= request.deadline:
                late = f"deadline passed {now - request.deadline:.3f} s ago"
                self.end(name, FinishReason.TIMEOUT, FinishError(ErrorKind.DEADLINE, late))
            elif state.queue_s is None and request.queue_until is not None and now >= request.queue_until:
                late = f"queue_timeout of {request.queue_timeout} s passed before the request could start"
                self.end(name, FinishReason.TIMEOUT, FinishError(ErrorKind.QUEUE_TIMEOUT, late))

    def end(
        self, request_id: str, reason: FinishReason, error: FinishError | None = None, choice: int | None = None
    ) -> None:
        """End a request, or one choice of it, without the engine."""
        state = self._open.get(request_id)
        if state is None:
            return
        if choice is None or state.is_last(choice):
            self.finish(state, finished(request_id, reason, error, time=self._now()))
            return
        end = finished(request_id, reason, error, choice=choice, time=self._now())
        if not state.request.params.beam_width and state.end_choice(end):
            self._tell(Events(0, end.time, decisions=(end,)))
            state.wake()

    def finish(self, state: OpenRequest, end: Event) -> None:
        """End an open request with this event, without the engine."""
        del self._open[end.request_id]
        self._keep_ended(state, end)
        self._tell(Events(0, end.time, decisions=(end,)))
        if state.is_abandoned:
            self.forget_ended(state)
        state.wake()
        max_tokens = state.max_tokens or state.request.params.max_tokens or 1
        settle(state.answer, Accepted(end.request_id, max_tokens, capped=False))
        self._release(end.request_id)

    def end_all(self, reason: FinishReason, refusal: OctavoError) -> None:
        """End every open request, and refuse unanswered submits, because no engine will follow."""
        self.engine = None
        for state in self:
            settle(state.answer, refusal)
            self.end(state.request.request_id, reason, FinishError(kind_of(refusal), str(refusal)))

    # --- engines follow one another

    def begin_epoch(self, engine: EngineLink) -> int:
        """Send all open requests to a new engine: crash suspects first, then oldest first; return their number."""
        if engine.epoch <= self.epoch:
            raise ValueError(f"epoch {engine.epoch} does not follow {self.epoch}")
        self.epoch = engine.epoch
        self.engine = engine
        for state in self._open.values():
            state.begin_epoch()
        self.num_resumed += len(self._open)
        suspects_first = sorted(self._open.items(), key=lambda item: item[1].num_crashes < ALONE_AFTER)
        self._held, self._suspect = dict(suspects_first), None
        self._send_held()
        return len(self._open)

    def lose_engine(self, batch: Iterable[str]) -> None:
        """Handle the death of the engine with these requests in its batch.

        Count a crash for each of them without progress, fail requests with MAX_CRASHES, and end cancelled requests.
        """
        self.engine = self._suspect = None
        self._held.clear()
        names = frozenset(batch)
        for state in self:
            name = state.request.request_id
            if state.has_progress:
                state.num_crashes = 0
            elif name in names:
                state.num_crashes += 1
            if state.num_crashes >= MAX_CRASHES:
                self.num_failed_suspects += 1
                _LOG.error("request %s ends: the last %d engines that ran it died in its step", name, MAX_CRASHES)
                what = (
                    f"the engine died {MAX_CRASHES} times with this request in its batch, the last time with it alone"
                )
                self.end(name, FinishReason.ERROR, FinishError(ErrorKind.STEP_FAILED, what))
            for choice, reason in tuple(state.requested_ends.items()):
                self.end(name, reason, choice=choice)
            state.requested_ends.clear()

    def _send_or_hold(self, state: OpenRequest) -> None:
        if self._suspect is not None:
            self._held[state.request.request_id] = state
        elif self.engine is not None:
            self._send(self.engine, state)

    def _send_held(self) -> None:
        """Send the held requests. A suspect runs alone: stop after sending one until it has a token or its end."""
        while self.engine is not None:
            suspect = self._suspect
            if (
                suspect is not None
                and not suspect.has_progress
                and self.get_open(suspect.request.request_id) is suspect
            ):
                return
            self._suspect = None
            if not self._held:
                return
            state = self._held.pop(next(iter(self._held)))
            if state.num_crashes >= ALONE_AFTER:
                self._suspect = state
            self._send(self.engine, state)

    def _send(self, engine: EngineLink, state: OpenRequest) -> None:
        """Send a request in its resumed form. The engine answers later, or never if it dies first."""
        end = state.implied_end()
        if end is not None:
            self.finish(state, end)
            return
        try:
            answer = engine.send(state.resumed())
        except OctavoError as error:
            self._refused(state, error)
            return
        answer.add_done_callback(partial(self._answered, state))
        if state.has_several:  # it starts over, and would run the ended choices again
            for choice in state.ended_choices:
                engine.post_cancel((state.request.request_id,), FinishReason.STOP, choice)

    def _answered(self, state: OpenRequest, answer: asyncio.Future[Accepted]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if error is not None:
            self._refused(state, error)
            return
        state.max_tokens = answer.result().max_tokens
        settle(state.answer, answer.result())

    def _refused(self, state: OpenRequest, error: BaseException) -> None:
        """Handle a refusal by the engine: a waiting submit raises the error, a resumed request ends with it."""
        if self._resumes and isinstance(error, EngineDeadError):
            return  # the supervisor notices the engine's death, and the next engine gets the request
        if state.answer is not None and not state.answer.done():
            state.answer.set_exception(error)
        elif self.get_open(state.request.request_id) is state:
            self.end(state.request.request_id, FinishReason.ERROR, FinishError(kind_of(error), str(error)))

    def _release(self, name: str) -> None:
        """Remove an ended or dropped request from the held requests, and send the requests that waited for it."""
        self._held.pop(name, None)
        if self._suspect is not None:
            self._send_held()

    def _tell(self, events: Events) -> None:
        if self._observer is not None and not events.is_empty:
            self._observer.appended(events)

    def _append_tokens(self, events: Events, touched: dict[str, OpenRequest]) -> list[int]:
        """Append tokens; return the indexes of rejected ones."""
        logprobs, now = events.logprobs, self._now()
        rejected: list[int] = []
        columns = zip(events.request_ids, events.choices, events.positions, events.token_ids, strict=True)
        for index, (request_id, choice, position, token_id) in enumerate(columns):
            state = self._open.get(request_id)
            page = None if state is None else state.pages.get(choice) or state.page(choice)
            if state is None or page is None:
                self.rejections.unknown += 1
                rejected.append(index)
                continue
            state.has_progress = True
            expected = len(page.ids)
            if position != expected or page.end is not None:
                self._count(position, expected)
                rejected.append(index)
                continue
            page.ids.append(token_id)
            if state.has_logprobs:
                page.logprobs.append(None if logprobs is None else logprobs[index])
            if state.first_at is None:
                state.first_at = now
            touched[request_id] = state
        return rejected

    def _count(self, position: int, expected: int) -> None:
        if position < expected:
            self.rejections.duplicates += 1
        elif position > expected:
            self.rejections.gaps += 1
        else:
            self.rejections.late += 1

    def _take_decisions(self, decisions: Iterable[Event], touched: dict[str, OpenRequest]) -> tuple[Event, ...]:
        """Apply decisions in order; return those that were accepted."""
        kept = []
        for event in decisions:
            state = self._open.get(event.request_id)
            is_end = event.kind in ENDS
            if state is None:
                self.rejections.unknown += is_end
                continue
            if event.kind == EventKind.CHOICE_FINISHED and not state.end_choice(event):
                self.rejections.late += 1
                continue
            if event.kind == EventKind.FINISHED:
                del self._open[event.request_id]
                self._keep_ended(state, event)
            elif not is_end:
                state.note(event)
            if is_end:
                touched[event.request_id] = state
            kept.append(event)
        return tuple(kept)

    def _keep_ended(self, state: OpenRequest, end: Event) -> None:
        state.finish(end)
        self._ended[end.request_id] = state
        if len(self._ended) > self._max_unread:
            self.forget(next(iter(self._ended)))
            self.rejections.unread += 1


class OutputReader(AsyncIterator[TokenOutput]):
    """Reads one request's outputs, with at most `max_ids` new ids each. Deleting the reader abandons the request."""

    def __init__(self, requests: OpenRequests, state: OpenRequest, final_only: bool, max_ids: int) -> None:
        self._requests = requests
        self._state = state
        self._final_only = final_only
        self._max_ids = max_ids
        self._taken: deque[TokenOutput] = deque()

    async def __anext__(self) -> TokenOutput:
        state = self._state
        while not self._taken:
            if state.is_read:
                raise StopAsyncIteration
            if state.end is not None or not self._final_only:
                self._taken.extend(state.take(self._max_ids))
            if not self._taken:
                await state.wait(self._final_only)
        output = self._taken.popleft()
        if output.is_final:
            self._requests.forget_ended(state)
        return output

    def __del__(self) -> None:
        if self._taken or not self._state.is_read:
            self._requests.abandon(self._state)

    @property
    def num_unread(self) -> int:
        """Number of tokens that the reader has not read."""
        return self._state.num_unread


def settle(answer: asyncio.Future[Any] | None, value: object) -> None:
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
