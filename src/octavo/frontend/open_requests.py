"""The open requests of a front end, which outlive its engines.

Owns: each request, the ids received for it, its reader, and the engine that it is bound to. This is the ledger: an
output is accepted if its request is bound to that epoch and its position is next; another engine resumes the requests
of a lost one. A request that was in a dead engine's batch ALONE_AFTER times without a token is resumed alone; after
MAX_CRASHES times it is failed. Does not: start, watch or end engines (engine_supervisor does).
Invariants: ids are appended first, then the observer is called, then the reader is woken. A choice's ids have no gap
and no duplicate. A slow reader gets larger outputs, never a queue of them. A submit is answered once. A request that
was cancelled or has expired is sent to no other engine. An engine on which a suspect runs alone gets no other request.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from octavo.core.plan import Event, EventKind, Events
from octavo.core.request import FinishError, FinishReason, Request
from octavo.engine.client import ENDS, Accepted, TokenOutput, finished
from octavo.errors import (
    DuplicateRequestError,
    EngineDeadError,
    ErrorKind,
    InvalidRequestError,
    OctavoError,
    QueueFullError,
    RequestError,
    kind_of,
)
from octavo.executors.protocol import Fingerprint
from octavo.frontend.open_request import (
    BoundEngine,
    EngineLink,
    EngineRouter,
    LedgerObserver,
    OpenRequest,
    Rejections,
    settle,
    without,
)
from octavo.media.item import MediaItem

_LOG = logging.getLogger(__name__)
ALONE_AFTER = 2  # engines that died with a request in their batch, without a token for it, before it runs alone
MAX_CRASHES = 3  # engines that died with a request in their batch, without a token for it, before it is failed
SUSPECT_WAIT_S = 3.0  # how long a suspect waits for an engine that begins, before another engine is emptied for it
MAX_MEDIA_BYTES = 1 << 30  # of all open requests together
MAX_UNREAD = 1024  # ended requests that were not read to the end; beyond this the oldest is dropped
_States = dict[str, OpenRequest]  # by the request's id


class OpenRequests:
    """All open requests of one front end, oldest first, and the ended requests not yet read. For one event loop.

    `epoch` is that of the engine that began last. `resumes`: an engine that dies is replaced, and requests that it did
    not answer wait for the next engine. Without a `router` the first of the current engines gets each request.
    """

    def __init__(
        self,
        epoch: int = 0,
        max_unread: int = MAX_UNREAD,
        now: Callable[[], float] = time.monotonic,
        observer: LedgerObserver | None = None,
        resumes: bool = True,
        router: EngineRouter | None = None,
    ) -> None:
        self.epoch = epoch
        self.rejections = Rejections()
        self.num_resumed = 0
        self.num_moved = 0
        self.num_inexact = 0  # requests that an engine with another fingerprint continued
        self.num_failed_suspects = 0
        self._router = router
        self._engines: dict[int, BoundEngine] = {}  # by epoch
        self._held: dict[str, OpenRequest] = {}  # bound to no engine, oldest first
        self._suspect_since: float | None = None  # when a suspect began to wait although there is an engine
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
    def num_held(self) -> int:
        """Open requests that are bound to no engine."""
        return len(self._held)

    @property
    def engines(self) -> tuple[BoundEngine, ...]:
        """The current engines, in the order in which they began."""
        return tuple(self._engines.values())

    # --- requests are submitted, read and dropped

    async def submit(self, request: Request, media: tuple[MediaItem, ...] = ()) -> Accepted:
        """Record a request, send it, and wait for the answer of this engine or a later one.

        Raises RequestError, or EngineDeadError if no engine will follow. Cancelling this task cancels the request.
        """
        state, name = self.add(request, media), request.request_id
        state.answer = asyncio.get_running_loop().create_future()
        try:
            self._send_or_hold(state)
            return await state.answer
        except BaseException:
            if self.get(name) is state:
                if state.engine is not None:
                    state.engine.link.post_cancel((name,))
                self.forget(name)
            raise
        finally:
            state.answer = None

    def add(self, request: Request, media: tuple[MediaItem, ...] = ()) -> OpenRequest:
        """Record a request before the engine sees it. Raises DuplicateRequestError; a seed must be set."""
        name = request.request_id
        if request.params.seed is None:
            raise InvalidRequestError("the request has no seed; set one, so that it can be repeated exactly", "seed")
        if name in self._open:
            raise DuplicateRequestError(f"request id {name!r} is in use; choose another", "request_id")
        if media:
            self._check_media(media)
        if self._ended.pop(name, None) is not None and self._observer is not None:
            self._observer.forgotten(name)
        state = self._open[name] = OpenRequest(request, media)
        state.epoch = self.epoch
        if self._observer is not None:
            self._observer.opened(state)
        return state

    def _check_media(self, media: tuple[MediaItem, ...]) -> None:
        """Refuse media beyond the bound of all open requests together. Raises QueueFullError."""
        held = sum(len(item.data) for state in self._open.values() for item in state.media)
        size = sum(len(item.data) for item in media)
        if held and held + size > MAX_MEDIA_BYTES:
            raise QueueFullError(f"open requests hold {held} bytes of media, and this one has {size}; try again later")

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
        state = self._open.pop(request_id, None)
        is_known = state or self._ended.pop(request_id, None)
        if is_known and self._observer is not None:
            self._observer.forgotten(request_id)
        if state is not None:
            self._release(state)

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
        engine = self._engines.get(epoch)
        if engine is None:
            self.rejections.stale_epochs += 1
            return
        bound = engine.requests
        touched: _States = {}
        scores = events.scores
        if scores:
            scores = tuple(score for score in scores if score[0] in bound and bound[score[0]].add_scores(*score[1:]))
        for request_id, pooled in events.pooled:
            if (state := bound.get(request_id)) is not None:
                state.pooled = pooled
        rejected = self._append_tokens(bound, events, touched)
        decisions = self._take_decisions(engine, events.decisions, touched) if events.decisions else ()
        if self._observer is not None:
            kept = without(events, rejected) if rejected else events
            self._tell(replace(kept, scores=scores, decisions=decisions))
        for state in touched.values():
            if state.end is not None and state.is_abandoned:
                self.forget_ended(state)
            state.wake()
        if engine.suspect is not None and engine.suspect.has_progress:
            engine.suspect = None
        if self._held and engine.is_open and engine.suspect is None:
            self._send_held()

    def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> int:
        """End requests, or one choice of them, at once if no engine has them; return how many are open here."""
        sent, count = dict[BoundEngine, list[str]](), 0
        for name in tuple(request_ids):
            state = self._open.get(name)
            if state is None:
                continue
            count += 1
            if state.engine is not None:
                state.requested_ends.setdefault(choice, reason)  # the engine may die before it receives this
                sent.setdefault(state.engine, []).append(name)
            else:
                self.end(name, reason, choice=choice)
        for engine, names in sent.items():
            engine.link.post_cancel(names, reason, choice)
        return count

    def expire(self, now: float) -> None:
        """End the requests that no engine has and whose deadline or queue timeout has passed."""
        for name, state in tuple(self._held.items()):
            request = state.request
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
        self._keep_ended(state, end)
        self._tell(Events(0, end.time, decisions=(end,)))
        if state.is_abandoned:
            self.forget_ended(state)
        state.wake()
        max_tokens = state.max_tokens or state.request.params.max_tokens or 1
        settle(state.answer, Accepted(end.request_id, max_tokens, capped=False))
        if self._held:
            self._send_held()

    def end_all(self, reason: FinishReason, refusal: OctavoError) -> None:
        """End every open request, and refuse unanswered submits, because no engine will follow."""
        self._engines.clear()
        for state in self:
            settle(state.answer, refusal)
            self.end(state.request.request_id, reason, FinishError(kind_of(refusal), str(refusal)))

    # --- engines begin and are lost

    def begin_epoch(self, link: EngineLink, number: int = 0, fingerprint: Fingerprint | None = None) -> BoundEngine:
        """Add a current engine, of the replica with this number, and send held requests: crash suspects first."""
        if link.epoch in self._engines:
            raise ValueError(f"epoch {link.epoch} does not follow {self.epoch}, it is current")
        self.epoch = max(self.epoch, link.epoch)
        engine = self._engines[link.epoch] = BoundEngine(link, number, fingerprint or Fingerprint())
        self._send_held()
        return engine

    def lose_engine(self, batch: Iterable[str], epoch: int | None = None) -> list[OpenRequest]:
        """Handle the death of an engine (None: the only one) with these requests in its batch; return its requests.

        Count a crash for each request of the batch without progress, fail requests with MAX_CRASHES, and end cancelled
        requests. All others are sent to other engines, or held until one begins.
        """
        engine = self._engines.pop(next(iter(self._engines), 0) if epoch is None else epoch, None)
        if engine is None:
            return []
        names, lost = frozenset(batch), list(engine.requests.values())
        for state in lost:
            engine.release(state)
            if state.has_progress:
                state.num_crashes = 0
            elif state.request.request_id in names:
                state.num_crashes += 1
            state.begin_engine()
        self._held = {name: state for name, state in self._open.items() if state.engine is None}
        for state in lost:
            self._end_lost(state)
        self._send_held()
        return lost

    def _end_lost(self, state: OpenRequest) -> None:
        """End a request of a lost engine that killed too many engines, or that was cancelled."""
        name = state.request.request_id
        if state.num_crashes >= MAX_CRASHES:
            self.num_failed_suspects += 1
            _LOG.error("request %s ends: the last %d engines that ran it died in its step", name, MAX_CRASHES)
            what = f"the engine died {MAX_CRASHES} times with this request in its batch, the last time with it alone"
            self.end(name, FinishReason.ERROR, FinishError(ErrorKind.STEP_FAILED, what))
        for choice, reason in tuple(state.requested_ends.items()):
            self.end(name, reason, choice=choice)
        state.requested_ends.clear()

    def move_requests(self, engine: BoundEngine) -> int:
        """Cancel all requests of a current engine there, and send them to others; return their number.

        What is not taken by another open engine is held. Frames that the engine still sends for them are dropped.
        """
        moved = list(engine.requests.values())
        if moved:
            engine.link.post_cancel(tuple(engine.requests))
        for state in moved:
            engine.release(state)
            engine.leaving.add(state.request.request_id)
            self._held[state.request.request_id] = state
            state.begin_engine()
            for choice, reason in tuple(state.requested_ends.items()):
                self.end(state.request.request_id, reason, choice=choice)
            state.requested_ends.clear()
        engine.is_fresh = True
        self.num_moved += len(moved)
        self._send_held()
        return len(moved)

    def set_open(self, engine: BoundEngine, is_open: bool) -> None:
        """Send new requests to this engine, or no longer."""
        engine.is_open = is_open
        self._send_held()

    def place_suspects(self, now: float) -> None:
        """Empty an engine for suspects that have waited SUSPECT_WAIT_S. Call this often while requests are held."""
        idle = [engine for engine in self._engines.values() if engine.is_open and engine.suspect is None]
        if not idle or not any(state.num_crashes >= ALONE_AFTER for state in self._held.values()):
            self._suspect_since = None
        elif self._suspect_since is None:
            self._suspect_since = now
        elif now - self._suspect_since > SUSPECT_WAIT_S:
            self._suspect_since = None
            self.move_requests(min(idle, key=lambda engine: engine.num_open))

    # --- held requests are sent

    def _send_or_hold(self, state: OpenRequest) -> None:
        engine = self._choose(state)
        if engine is None:
            self._held[state.request.request_id] = state
        else:
            self._send(engine, state)

    def _send_held(self) -> None:
        """Send the held requests that an engine may have: suspects first, then oldest first."""
        for name, state in sorted(self._held.items(), key=lambda item: item[1].num_crashes < ALONE_AFTER):
            if self._held.get(name) is state and (chosen := self._choose(state)) is not None:
                del self._held[name]
                self._send(chosen, state)

    def _choose(self, state: OpenRequest) -> BoundEngine | None:
        """Return the engine for a request, None if it has to be held. A suspect gets a fresh or an empty engine.

        A request with ids stays with engines of the same fingerprint if there are any.
        """
        name = state.request.request_id
        engines = [
            engine
            for engine in self._engines.values()
            if engine.is_open and engine.suspect is None and name not in engine.leaving
        ]
        if state.num_crashes >= ALONE_AFTER:
            fresh = [engine for engine in engines if engine.is_fresh or not engine.requests]
            return min(fresh, key=lambda engine: engine.num_open, default=None)
        if len(engines) > 1 and state.num_sends and state.has_ids:
            engines = [engine for engine in engines if engine.fingerprint == state.fingerprint] or engines
        if not engines:
            return None
        return engines[0] if self._router is None else self._router.choose(state.request, engines)

    def _send(self, engine: BoundEngine, state: OpenRequest) -> None:
        """Bind a request and send it in its resumed form. The engine answers later, or never if it dies first."""
        end = state.implied_end()
        if end is not None:
            self.finish(state, end)
            return
        engine.bind(state)
        if state.num_crashes >= ALONE_AFTER:
            engine.suspect = state
        else:
            engine.is_fresh = False
        if state.num_sends:
            self.num_resumed += 1
        elif state.epoch:
            state.epoch = engine.epoch
        state.num_sends += 1
        if state.fingerprint != engine.fingerprint:
            if state.num_sends > 1 and state.is_exact and state.has_ids:
                state.is_exact = False
                self.num_inexact += 1
            state.fingerprint = engine.fingerprint
        try:
            answer = engine.link.send(state.resumed(), state.media)
        except OctavoError as error:
            self._refused(state, error)
            return
        answer.add_done_callback(partial(self._answered, engine, state))
        if state.starts_over:  # it starts over, and would run the ended choices again
            for choice in state.ended_choices:
                engine.link.post_cancel((state.request.request_id,), FinishReason.STOP, choice)

    def _answered(self, engine: BoundEngine, state: OpenRequest, answer: asyncio.Future[Accepted]) -> None:
        if answer.cancelled() or (state.engine is not engine and state.end is None):  # lost, or moved meanwhile
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

    def _release(self, state: OpenRequest) -> None:
        """Unbind a request that ended or was dropped, or remove it from the held ones; send what waited for it."""
        if state.engine is not None:
            state.engine.release(state)
        self._held.pop(state.request.request_id, None)
        if self._held:
            self._send_held()

    def _tell(self, events: Events) -> None:
        if self._observer is not None and not events.is_empty:
            self._observer.appended(events)

    def _append_tokens(self, bound: _States, events: Events, touched: _States) -> list[int]:
        """Append tokens of bound requests; return the indexes of rejected ones."""
        logprobs, now = events.logprobs, self._now()
        rejected: list[int] = []
        columns = zip(events.request_ids, events.choices, events.positions, events.token_ids, strict=True)
        for index, (request_id, choice, position, token_id) in enumerate(columns):
            state = bound.get(request_id)
            page = None if state is None else state.pages.get(choice) or state.page(choice)
            if state is None or page is None:
                self._count_foreign(request_id, state)
                rejected.append(index)
                continue
            state.has_progress = True
            expected = len(page.ids)
            if position != expected or page.end is not None:
                self.rejections.count(position, expected)
                rejected.append(index)
                continue
            page.ids.append(token_id)
            if state.has_logprobs:
                page.logprobs.append(None if logprobs is None else logprobs[index])
            if state.first_at is None:
                state.first_at = now
            touched[request_id] = state
        return rejected

    def _count_foreign(self, request_id: str, state: OpenRequest | None) -> None:
        if state is None and request_id in self._open:
            self.rejections.moved += 1
        else:
            self.rejections.unknown += 1

    def _take_decisions(self, engine: BoundEngine, decisions: Iterable[Event], touched: _States) -> tuple[Event, ...]:
        """Apply decisions about an engine's requests in order; return those that were accepted."""
        kept, bound = [], engine.requests
        for event in decisions:
            state = bound.get(event.request_id)
            is_end = event.kind in ENDS
            if state is None:
                if is_end:
                    self._count_foreign(event.request_id, None)
                    if event.kind == EventKind.FINISHED:
                        engine.leaving.discard(event.request_id)
                continue
            if event.kind == EventKind.CHOICE_FINISHED and not state.end_choice(event):
                self.rejections.late += 1
                continue
            if event.kind == EventKind.FINISHED:
                self._keep_ended(state, event)
            elif not is_end:
                state.note(event)
            if is_end:
                touched[event.request_id] = state
            kept.append(event)
        return tuple(kept)

    def _keep_ended(self, state: OpenRequest, end: Event) -> None:
        """Move an open request to the ended ones."""
        del self._open[end.request_id]
        self._held.pop(end.request_id, None)
        if state.engine is not None:
            state.engine.release(state)
        state.finish(end)
        if self._router is not None:
            self._router.ended(end.request_id, sum(len(page.ids) for page in state.pages.values()), state.first_at)
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
