"""Send an answer, whole or as a stream of events; requests with the same Idempotency-Key share one execution.

Owns: a stream's keep-alives, error and end, and cutting a client that does not read.
Does not: generate (generation does) or encode (each API's encoder does).
Invariant: a stream that a client can still read ends as its format requires, never with a bare cut.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import OctavoError
from octavo.frontend.outputs import MAX_SLICE
from octavo.server.api.encoders import ENCODERS
from octavo.server.context import Context, context_of
from octavo.server.encoding import AnswerEncoder, Choice
from octavo.server.generation import GenerationRequest, start
from octavo.server.http.auth import KEY
from octavo.server.http.body import OFF_LOOP_BYTES, off_loop
from octavo.server.http.connection import CUT
from octavo.server.http.errors import ApiError, bad_field, from_exception
from octavo.server.http.keys import KeyInfo
from octavo.server.http.lifecycle import ClientGoneError
from octavo.server.http.middleware import CLIENT_CLOSED_REQUEST
from octavo.server.idempotency import Begun, IdempotentRequest, RetryKey, key_of
from octavo.server.resumable_stream import ResumableStream

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta

RETRY_NOTE = "With a header `Idempotency-Key` the request runs once, however often it is sent."
RESUME_NOTE = f"{RETRY_NOTE} With `Last-Event-ID` beside it, its stream continues after that event."
LOOK_S = 0.25  # between checks of a client that does not read
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_log = logging.getLogger(__name__)


class DeltaSource(Protocol):
    """A source of deltas: a Generation or a ResumableStream."""

    @property
    def name(self) -> str:
        """The request's name in the log."""
        ...

    @property
    def unread_bytes(self) -> int:
        """Approximate bytes that this reader has not read."""
        ...

    def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield (index, delta) until every choice has ended. Raises ApiError."""
        ...

    async def collect(self) -> list[Choice]:
        """Return every choice, whole. Raises ApiError."""
        ...

    async def close(self) -> None:
        """Stop reading. Idempotent."""
        ...


async def reply(request: Request, asked: GenerationRequest) -> Response:
    """Answer: generate, or read the run of the same Idempotency-Key. Raises ApiError."""
    context = context_of(request)
    source: DeltaSource
    encoder: AnswerEncoder
    if "idempotency-key" in request.headers or "last-event-id" in request.headers:
        source = encoder = await _resume(request, context, asked)
    else:
        source, spec = await start(request, asked)
        encoder = ENCODERS[spec.kind](spec, context.text.tokenizer)
        if asked.prepare is not None:
            asked.prepare(encoder)
    if asked.stream:
        return EventStream(source, encoder, context)
    return await _whole(request, source, encoder)


async def _resume(request: Request, context: Context, asked: GenerationRequest) -> ResumableStream:
    """Return a reader of the Idempotency-Key's run, which continues without this connection. Raises ApiError."""
    key, event = key_of(request)
    assert key is not None  # an event alone is refused
    if asked.params.prompt_logprobs is not None:
        message = "answers with log-probabilities of the prompt are not kept; leave Idempotency-Key or those out"
        raise bad_field("Idempotency-Key", message)
    if event is not None and not asked.stream:
        raise bad_field("Last-Event-ID", "Last-Event-ID goes with a stream; set stream to true")
    if event is not None and not asked.can_continue:
        raise bad_field("Last-Event-ID", "streams of this endpoint cannot be continued; leave Last-Event-ID out")
    holder: KeyInfo = request.scope[KEY]
    return await open_run(request, context, asked, RetryKey(holder.tenant, key, await body_hash(asked), event))


async def open_run(request: Request, context: Context, asked: GenerationRequest, retry: RetryKey) -> ResumableStream:
    """Return a reader of the key's run, started if there is none; the run needs no connection. Raises ApiError."""

    async def begin(run: IdempotentRequest) -> Begun:
        generation, spec = await start(request, asked, run)
        return Begun(generation, spec, generation.num_choices)

    stream = await context.runs.replay(retry, begin)
    if asked.prepare is not None:
        asked.prepare(stream.encoder)
    return stream


async def body_hash(asked: GenerationRequest) -> bytes:
    """Return a hash of the endpoint and the given fields, independent of the JSON's formatting."""

    def digest() -> bytes:
        return hashlib.sha256(
            asked.id_prefix.encode() + b"\n" + asked.body.model_dump_json(exclude_unset=True).encode()
        ).digest()

    is_long = asked.num_characters + asked.num_ids > OFF_LOOP_BYTES
    return await off_loop(digest) if is_long else digest()


async def _whole(request: Request, source: DeltaSource, encoder: AnswerEncoder) -> Response:
    context = context_of(request)
    try:
        choices = await context.lifecycle.supervise(source.collect(), request.receive)
    except ClientGoneError:
        context.metrics.failed("client_disconnected")
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except (ApiError, OctavoError) as error:
        raise from_exception(error) from None
    finally:
        await source.close()
    return Response(await _encoded(encoder, choices), media_type="application/json")


async def _encoded(encoder: AnswerEncoder, choices: Sequence[Choice]) -> bytes:
    """Return the answer as JSON; it is encoded on another thread if it has many log-probabilities."""

    def encode() -> bytes:
        return msgspec.json.encode(encoder.whole(choices))

    deltas = (delta for choice in choices for delta in choice.deltas)
    num_entries = sum(
        len(delta.logprobs or ()) + len(delta.prompt_logprobs[1] if delta.prompt_logprobs is not None else ())
        for delta in deltas
    )
    return encode() if num_entries <= MAX_SLICE else await off_loop(encode)


class SlowReaderError(Exception):
    """The client has not read for too long."""


def _too_slow() -> ApiError:
    return ApiError(408, "the client did not read what was sent to it", code="slow_reader")


class EventStream(Response):
    """The response that streams one answer."""

    def __init__(self, source: DeltaSource, encoder: AnswerEncoder, context: Context) -> None:
        self._format = encoder.stream_format
        super().__init__(headers=_HEADERS, media_type=self._format.media_type)
        del self.headers["content-length"]
        self._source = source
        self._encoder = encoder
        self._lifecycle = context.lifecycle
        self._limits = context.limits
        self._metrics = context.metrics
        self._num_writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, and close its source in every case."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._lifecycle.supervise(self._write_all(send), receive)
            except (ClientGoneError, SlowReaderError, OSError):
                raise
            except Exception as error:  # the route's shell: the client gets an error event, the log the details
                if not isinstance(error, (ApiError, OctavoError)):
                    _log.exception("request %s failed in mid-stream", self._source.name)
                failure = from_exception(error)
                self._metrics.failed(failure.code)
                await self._write(send, self._format.error(failure))
            if self._format.done:
                await self._write(send, self._format.done)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGoneError, OSError):
            self._metrics.failed("client_disconnected")
        except SlowReaderError:
            self._metrics.failed("slow_reader")
            cut = scope.get(CUT)
            if cut is not None:
                cut(self._format.error(_too_slow()) + self._format.done)
        finally:
            await self._source.close()

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

    async def _write(self, send: Send, data: bytes) -> None:
        """Send; while the client does not read, check every LOOK_S how much waits for it. Raises SlowReaderError.

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
            if stalled_s >= self._limits.stall_timeout_s or self._source.unread_bytes > self._limits.max_unread_bytes:
                raise SlowReaderError

    async def _keep_alive(self, send: Send) -> None:
        """Write a keep-alive after each `keep_alive_s` without a write."""
        while True:
            seen = self._num_writes
            await asyncio.sleep(self._limits.keep_alive_s)
            if self._num_writes == seen and self._format.keep_alive:
                await send({"type": "http.response.body", "body": self._format.keep_alive, "more_body": True})
