"""Send an answer, whole or as a stream of events; requests with the same Idempotency-Key share one execution.

Owns: a stream's keep-alives, its error event and its end; cutting a client that does not read; restoring an earlier
server's runs from the journal: open requests continue, finished answers serve retries.
Does not: generate (generation does), encode (each API's encoder does), or keep runs (idempotency does).
Invariants: a stream that its client can still read ends as its format requires, never with a bare cut. A finished
answer is never computed again, and is decoded when its first reader needs the text. A run that cannot be restored is
removed from the journal, so that a retry starts it again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.core.request import FinishReason
from octavo.engine.client import Accepted, TokenOutput
from octavo.errors import OctavoError
from octavo.frontend.journal import Journal
from octavo.frontend.journal_state import JournaledRequest, JournaledRun
from octavo.frontend.open_request import OpenRequest
from octavo.frontend.outputs import TextDelta
from octavo.frontend.sessions import MAX_SLICE, OutputClient, Session
from octavo.server.admission import AdmissionRequest
from octavo.server.context import Context
from octavo.server.encoding import ENCODERS, REASONS, AnswerEncoder, AnswerSpec, Choice
from octavo.server.feed import Feed, Watcher
from octavo.server.generation import Generation, GenerationRequest, failure_of, start
from octavo.server.http.auth import KEY
from octavo.server.http.body import OFF_LOOP_BYTES, json_response, off_loop
from octavo.server.http.connection import CUT
from octavo.server.http.errors import ApiError, bad_field, from_exception
from octavo.server.http.keys import KeyInfo
from octavo.server.http.lifecycle import MARK, ClientGoneError, Lifecycle, ServerStoppingError
from octavo.server.http.limits import HttpLimits
from octavo.server.idempotency import GenerationSource, IdempotentRequest, RetryKey, StartedRun, key_of
from octavo.server.resumable_stream import ResumableStream

RETRY_NOTE = "With a header `Idempotency-Key` the request runs once, however often it is sent."
RESUME_NOTE = f"{RETRY_NOTE} With `Last-Event-ID` beside it, its stream continues after that event."
LOOK_S = 0.25  # seconds between two checks of a client that does not read
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_log = logging.getLogger(__name__)


class Readable(Protocol):
    """What a stream is written from."""

    @property
    def name(self) -> str:
        """The request's name in log messages."""

    @property
    def unread_bytes(self) -> int:
        """The approximate bytes that wait for this reader."""

    async def close(self) -> None:
        """Stop reading. Idempotent."""


class DeltaSource(Readable, Protocol):
    """A source of deltas: a Generation or a ResumableStream."""

    def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield (choice index, delta) until every choice has ended. Raises ApiError."""

    async def collect(self) -> list[Choice]:
        """Wait for the end and return all choices. Raises ApiError."""


async def reply(request: Request, wanted: GenerationRequest) -> Response:
    """Answer a request: generate, or read the run of its Idempotency-Key. Raises ApiError."""
    context = wanted.context
    source: DeltaSource
    encoder: AnswerEncoder
    if "idempotency-key" in request.headers or "last-event-id" in request.headers:
        source = encoder = await _resume(request, wanted)
    else:
        source, spec = await start(request, wanted)
        encoder = ENCODERS[spec.kind](spec, context.text.tokenizer)
        if wanted.prepare is not None:
            wanted.prepare(encoder)
    if wanted.stream:
        return EventStream(source, encoder, context)
    return json_response(await _encoded(encoder, await collect(request, context, source)))


async def _resume(request: Request, wanted: GenerationRequest) -> ResumableStream:
    """Return a reader of the Idempotency-Key's run, which does not need this connection. Raises ApiError."""
    key, event = key_of(request)
    assert key is not None  # key_of refuses a Last-Event-ID without a key
    if wanted.params.prompt_logprobs is not None:
        message = "answers with log-probabilities of the prompt are not kept; leave Idempotency-Key or those out"
        raise bad_field("Idempotency-Key", message)
    if event is not None and not wanted.stream:
        raise bad_field("Last-Event-ID", "Last-Event-ID goes with a stream; set stream to true")
    if event is not None and not wanted.can_continue:
        raise bad_field("Last-Event-ID", "streams of this endpoint cannot be continued; leave Last-Event-ID out")
    holder: KeyInfo = request.scope[KEY]
    return await open_run(request, wanted, RetryKey(holder.tenant, key, await body_hash(wanted), event))


async def open_run(request: Request, wanted: GenerationRequest, retry: RetryKey) -> ResumableStream:
    """Return a reader of the key's run, and start the run if there is none. Raises ApiError.

    The run needs no connection.
    """

    async def begin(run: IdempotentRequest) -> StartedRun:
        generation, spec = await start(request, wanted, run)
        return StartedRun(generation, spec, generation.num_choices, wanted.context.text.tokenizer)

    stream = await wanted.context.runs.replay(retry, begin)
    if wanted.prepare is not None:
        wanted.prepare(stream.encoder)
    return stream


async def body_hash(wanted: GenerationRequest) -> bytes:
    """Return a hash of the endpoint and the fields that the client sent, independent of the JSON's formatting."""

    def digest() -> bytes:
        return hashlib.sha256(
            wanted.id_prefix.encode() + b"\n" + wanted.body.model_dump_json(exclude_unset=True).encode()
        ).digest()

    is_long = wanted.num_characters + wanted.num_ids > OFF_LOOP_BYTES
    return await off_loop(digest) if is_long else digest()


async def collect(request: Request, context: Context, source: DeltaSource) -> list[Choice]:
    """Wait for all choices while the client is connected, and close the source. Raises ApiError, ClientGoneError."""
    try:
        return await context.lifecycle.supervise(source.collect(), request.receive)
    except (ApiError, OctavoError) as error:
        raise from_exception(error) from None
    finally:
        await source.close()


async def _encoded(encoder: AnswerEncoder, choices: Sequence[Choice]) -> bytes:
    """Return the answer as JSON. An answer with many log-probabilities is encoded on another thread."""

    def encode() -> bytes:
        return msgspec.json.encode(encoder.whole(choices))

    deltas = (delta for choice in choices for delta in choice.deltas)
    num_entries = sum(
        len(delta.logprobs or ()) + len(delta.prompt_logprobs[1] if delta.prompt_logprobs is not None else ())
        for delta in deltas
    )
    return encode() if num_entries <= MAX_SLICE else await off_loop(encode)


class SlowReaderError(Exception):
    """The client did not read its stream for too long, or too much of the stream is unread."""


class StreamedResponse(Response, ABC):
    """A response written in parts. A connection whose client does not read is cut."""

    def __init__(self, media_type: str, lifecycle: Lifecycle, limits: HttpLimits) -> None:
        super().__init__(headers=_HEADERS, media_type=media_type)
        del self.headers["content-length"]
        self._lifecycle = lifecycle
        self._limits = limits
        self._last_event = b""  # the last part of every stream, including a failed one
        self._num_writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all parts, and call `_close` in every case."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._lifecycle.supervise(self._write_all(send), receive)
            except (ClientGoneError, SlowReaderError, OSError):
                raise
            except Exception as error:  # any other error ends the stream as its format requires
                if event := self._failure_event(error):
                    await self._write(send, event)
            if self._last_event:
                await self._write(send, self._last_event)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGoneError, OSError):
            self._note("client_disconnected")
        except SlowReaderError:
            self._note("slow_reader")
            cut = scope.get(CUT)
            if cut is not None:
                cut(self._slow_event())
        finally:
            await self._close()

    @abstractmethod
    async def _write_all(self, send: Send) -> None:
        """Write all parts with `_write`."""

    def _failure_event(self, error: Exception) -> bytes:
        """Return the part that ends a failed stream."""
        raise error

    def _slow_event(self) -> bytes:
        """Return the part that ends a stream whose client does not read."""
        return b""

    @abstractmethod
    def _is_behind(self) -> bool:
        """Return True if more is unread than the limits allow."""

    def _note(self, code: str) -> None:
        """Count a client that left or did not read."""

    @abstractmethod
    async def _close(self) -> None:
        """Release the source of the parts."""

    async def _write(self, send: Send, data: bytes) -> None:
        """Send `data`; while the client does not read, check every LOOK_S how much is unread. Raises SlowReaderError.

        A send that times out has not written anything yet, so it can be retried.
        """
        self._num_writes += 1
        message = {"type": "http.response.body", "body": data, "more_body": True}
        stalled_s = 0.0
        while True:
            look_s = min(LOOK_S, self._limits.stall_timeout_s)
            try:
                async with asyncio.timeout(look_s):
                    await send(message)
                return
            except TimeoutError:
                stalled_s += look_s
            if stalled_s >= self._limits.stall_timeout_s or self._is_behind():
                raise SlowReaderError


class AnswerStream(StreamedResponse):
    """A response that streams one answer in the format of an API."""

    def __init__(self, source: Readable, encoder: AnswerEncoder, context: Context) -> None:
        self._format = encoder.stream_format
        super().__init__(self._format.media_type, context.lifecycle, context.limits)
        self._source = source
        self._encoder = encoder
        self._metrics = context.metrics
        self._last_event = self._format.done

    def _failure_event(self, error: Exception) -> bytes:
        """Return the error event. The client gets the error; the log has the details."""
        if not isinstance(error, (ApiError, OctavoError)):
            _log.exception("request %s failed in mid-stream", self._source.name)
        failure = from_exception(error)
        self._metrics.failed(failure.code)
        return self._format.error(failure)

    def _slow_event(self) -> bytes:
        """Return the error event and the end of the stream."""
        slow = ApiError(408, "the client did not read what was sent to it", code="slow_reader")
        return self._format.error(slow) + self._format.done

    def _is_behind(self) -> bool:
        return self._source.unread_bytes > self._limits.max_unread_bytes

    def _note(self, code: str) -> None:
        self._metrics.failed(code)

    async def _close(self) -> None:
        await self._source.close()


class EventStream(AnswerStream):
    """The response that streams the deltas of one answer."""

    _source: DeltaSource

    async def _write_all(self, send: Send) -> None:
        ticker = asyncio.create_task(self._keep_alive(send))
        try:
            if head := self._encoder.head:
                await self._write(send, head)
            async with aclosing(self._source.deltas()) as deltas:
                async for index, delta in deltas:
                    if chunk := self._encoder.chunk(index, delta):
                        await self._write(send, chunk)
            if last := self._encoder.last():
                await self._write(send, last)
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)

    async def _keep_alive(self, send: Send) -> None:
        """Write a keep-alive whenever `keep_alive_s` passed without a write."""
        while True:
            seen = self._num_writes
            await asyncio.sleep(self._limits.keep_alive_s)
            if self._num_writes == seen and self._format.keep_alive:
                await send({"type": "http.response.body", "body": self._format.keep_alive, "more_body": True})


class FeedResponse(StreamedResponse):
    """The response that sends a watcher's events until the client or the server ends the stream."""

    def __init__(self, feed: Feed, watcher: Watcher) -> None:
        super().__init__("text/event-stream", feed.lifecycle, feed.limits)
        self.headers["x-content-type-options"] = "nosniff"
        self._feed = feed
        self._watcher = watcher

    async def _write_all(self, send: Send) -> None:
        watcher = self._watcher
        while not (watcher.is_over or watcher.is_slow):
            if data := watcher.take():
                await self._write(send, data)
                continue
            try:
                async with asyncio.timeout(self._limits.keep_alive_s):
                    await watcher.has_events.wait()
            except TimeoutError:
                watcher.put(b": keep-alive\n\n")
        if watcher.is_slow:
            raise SlowReaderError

    def _failure_event(self, error: Exception) -> bytes:
        """Return nothing if the server stops: watchers do not keep a server from draining. Else raise the error."""
        if isinstance(error, ServerStoppingError):
            return b""
        raise error

    def _is_behind(self) -> bool:
        return self._watcher.is_slow

    async def _close(self) -> None:
        self._feed.leave(self._watcher)


RestoreEntries = Callable[[Iterable[OpenRequest]], None]


def restore_runs(context: Context, journal: Journal, restore: RestoreEntries) -> tuple[int, int]:
    """Continue the journal's open runs in the engine, and keep its ended runs; return the number of each.

    Call in the event loop, before anything is served. `restore` is EngineSupervisor.restore, for the runs of `context`;
    those of other models continue in their engines, if `load_models_of` could load them. A run whose model is served no
    more is kept as one that failed. Raises EngineDeadError.
    """
    runs = context.runs
    runs.journal = journal
    runs.start_sweeping()
    open_runs: list[tuple[Context, JournaledRun, AnswerSpec]] = []
    num_kept = 0
    latest = {(journaled.began.tenant, journaled.began.key): journaled for journaled in journal.recovered}
    for journaled in journal.recovered:
        spec = _read_spec(journaled)
        # Once a run is dropped, its key may be used again: the journal can have several runs of a key.
        is_latest = latest[journaled.began.tenant, journaled.began.key] is journaled
        if spec is None or not is_latest or not _is_worth_keeping(journaled):
            journal.forget(journaled.began.run)
        elif (owner := _owner(context, spec)) is None:
            runs.keep(_lost_run(context, journaled, spec))
        elif journaled.is_ended:
            runs.keep(_ended_run(owner, journaled, spec))
            num_kept += 1
        elif owner.served is None or owner.served.is_usable:
            open_runs.append((owner, journaled, spec))
    for owner in context.each_model:
        own = [request.state for each, run, _ in open_runs if each is owner for request in _requests(run)]
        if own:
            (restore if owner is context or owner.served is None else owner.served.restore)(own)
    for owner, journaled, spec in open_runs:
        run = _new_run(journaled)
        runs.keep(run)
        runs.start(run, _started(owner, _generation(owner, journaled), journaled, spec))
    return len(open_runs), num_kept


async def load_models_of(context: Context, journal: Journal) -> Callable[[], None]:
    """Load the models of the journal's open runs; return the function that releases them after `restore_runs`.

    The runs of a model that cannot be loaded now stay in the journal, for the next server process.
    """
    specs = [spec for run in journal.recovered if not run.is_ended and (spec := _read_spec(run)) is not None]
    owners = {owner.model: owner for spec in specs if (owner := _owner(context, spec)) is not None}
    releases = []
    for owner in owners.values():
        if owner.served is not None:
            try:
                releases.append(await owner.served.acquire())
            except OctavoError as error:
                _log.error("journal: the open requests of model %s wait for the next server: %s", owner.model, error)

    def release() -> None:
        for each in releases:
            each()

    return release


def _owner(context: Context, spec: AnswerSpec) -> Context | None:
    """Return the Context of the model of a journaled answer; None if that model is served no more."""
    if not context.by_name:
        return context
    found = context.by_name.get(spec.identity[2])
    return found if found is not None and found.served is not None and found.served.files == spec.files else None


def _lost_run(context: Context, journaled: JournaledRun, spec: AnswerSpec) -> IdempotentRequest:
    """Return an ended run that answers each retry with why it cannot continue."""
    name = spec.identity[2]
    now = "another model has this name" if name in context.by_name else "it is no longer served"
    message = f"this request began with model {name} of {spec.files}, and now {now}; send it with another key"
    run = _new_run(journaled)
    run.ended_at = time.monotonic()

    def refuse() -> StartedRun:
        raise ApiError(409, message, code="nothing_to_resume", param="model")

    run.restore_source = refuse
    return run


def _read_spec(journaled: JournaledRun) -> AnswerSpec | None:
    try:
        return msgspec.msgpack.decode(journaled.began.facts, type=AnswerSpec)
    except msgspec.MsgspecError:
        _log.warning("journal: request %s was written by another version and is left out", journaled.began.run)
        return None


def _requests(journaled: JournaledRun) -> list[JournaledRequest]:
    return [journaled.requests[index] for index in sorted(journaled.requests)]


def _is_worth_keeping(journaled: JournaledRun) -> bool:
    """Return True unless a request of the run failed in a way that may be retried."""
    for request in journaled.requests.values():
        end = request.end
        if end is None or end.finish_reason is None or end.finish_reason in REASONS:
            continue
        if not failure_of(end.finish_reason, end.error).is_final:
            return False
    return True


def _new_run(journaled: JournaledRun) -> IdempotentRequest:
    began = journaled.began
    run = IdempotentRequest(RetryKey(began.tenant, began.key, began.body_hash))
    run.number = began.run
    return run


def _ended_run(context: Context, journaled: JournaledRun, spec: AnswerSpec) -> IdempotentRequest:
    run = _new_run(journaled)
    run.ended_at = max(each.ended_at or 0.0 for each in journaled.requests.values())
    run.num_bytes = journaled.num_bytes
    run.restore_source = lambda: _started(context, _StoredAnswer(context, journaled), journaled, spec)
    return run


def _started(context: Context, source: GenerationSource, journaled: JournaledRun, spec: AnswerSpec) -> StartedRun:
    num_choices = sum(each.request.params.n for each in journaled.requests.values())
    return StartedRun(source, spec, num_choices, context.text.tokenizer)


def _sessions(context: Context, journaled: JournaledRun, client: OutputClient) -> list[Session]:
    sessions = []
    for request in (each.request for each in _requests(journaled)):
        accepted = Accepted(request.request_id, request.params.max_tokens or 0, False)
        # An event id may name any token.
        sessions.append(Session(client, request, accepted, context.text.tokenizer, max_slice=1))
    return sessions


def _generation(context: Context, journaled: JournaledRun) -> Generation:
    """Return the Generation of an open run. Its new ticket is not checked: an earlier server admitted the run."""
    requests = [each.request for each in _requests(journaled)]
    first = requests[0]
    wanted = AdmissionRequest(priority=first.priority, num_prompts=len(requests), width=first.params.num_sequences)
    ticket = context.admission.readmit(wanted)
    closing = ExitStack()
    closing.callback(ticket.leave)
    if context.served is not None:
        closing.callback(context.served.enter())
    names = [request.request_id for request in requests]
    closing.callback(context.request_index.add(first.tenant, names[0].partition(MARK)[0], names))
    return Generation(
        name=first.request_id,
        params=first.params,
        prompt_lengths=[request.num_prompt_tokens for request in requests],
        arrival=first.arrival,
        sessions=_sessions(context, journaled, context.sessions.client),
        metrics=context.metrics,
        ticket=ticket,
        closing=closing,
    )


class _StoredOutputs:
    """The stored outputs of requests that have ended."""

    def __init__(self, entries: Mapping[str, OpenRequest]) -> None:
        self._entries = entries

    async def outputs(
        self, request_id: str, final_only: bool = False, max_ids: int = sys.maxsize
    ) -> AsyncIterator[TokenOutput]:
        """Yield all outputs of a request."""
        while outputs := self._entries[request_id].take(max_ids):
            for output in outputs:
                yield output

    def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> int:
        """Do nothing: the requests have ended."""
        return 0


class _StoredAnswer:
    """The deltas of a run that has ended; metrics do not count them again."""

    def __init__(self, context: Context, journaled: JournaledRun) -> None:
        self._held = _requests(journaled)
        entries = {each.request.request_id: each.state for each in self._held}
        self._sessions = _sessions(context, journaled, _StoredOutputs(entries))

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield (choice index, delta), one request after the other. Raises ApiError if a request failed."""
        for number, (journaled, session) in enumerate(zip(self._held, self._sessions, strict=True)):
            async for delta in session:
                if delta.usage is not None:
                    usage = replace(delta.usage, e2e_s=(journaled.ended_at or 0.0) - journaled.request.arrival)
                    delta = replace(delta, usage=usage)
                if delta.finish_reason is not None and delta.finish_reason not in REASONS:
                    raise failure_of(delta.finish_reason, delta.error)
                yield number * journaled.request.params.n + delta.choice, delta

    async def close(self) -> None:
        """Do nothing: the requests have ended."""
