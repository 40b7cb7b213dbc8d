"""EventStream: a response of events, written as the deltas come.

Owns: headers, when to keep alive, the error and the end, giving up on a reader that does not read.
Does not: shape events.
Invariant: a stream that a client can still read ends as its framing says, never with a bare cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import OctavoError
from octavo.observe.metrics.requests import RequestMetrics
from octavo.server.connection import CUT
from octavo.server.encoding import AnswerEncoder
from octavo.server.faults import ApiError, draining_error, from_exception, internal_error
from octavo.server.lifecycle import ClientGoneError, Lifecycle, ServerStoppingError
from octavo.server.limits import HttpLimits

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta

LOOK_S = 0.25  # while a client does not read
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_log = logging.getLogger(__name__)


class DeltaSource(Protocol):
    """Where the deltas come from."""

    @property
    def name(self) -> str:
        """For the log."""
        ...

    @property
    def unread_bytes(self) -> int:
        """Roughly what is held because this reader has not taken it."""
        ...

    def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield (index, delta) until every choice has ended. Raises ApiError."""
        ...

    async def close(self) -> None:
        """Nobody reads any more. Idempotent."""
        ...


class SlowReaderError(Exception):
    """The client has not read for too long."""


def _too_slow() -> ApiError:
    return ApiError(408, "the client did not read what was sent to it", code="slow_reader")


class EventStream(Response):
    """Streams one generation."""

    def __init__(
        self,
        source: DeltaSource,
        shape: AnswerEncoder,
        lifecycle: Lifecycle,
        limits: HttpLimits,
        metrics: RequestMetrics,
    ) -> None:
        super().__init__(headers=_HEADERS, media_type=shape.stream_format.media_type)
        del self.headers["content-length"]
        self._source = source
        self._shape = shape
        self._format = shape.stream_format
        self._lifecycle = lifecycle
        self._limits = limits
        self._metrics = metrics
        self._num_writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; whatever happens, the engine's side is closed."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            error = await self._run(receive, send)
            if error is not None:
                self._metrics.failed(error.code)
                await self._write(send, self._format.error(error))
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

    async def _run(self, receive: Receive, send: Send) -> ApiError | None:
        """Write the deltas; give the error that ended them, if one did."""
        try:
            await self._lifecycle.supervise(self._write_all(send), receive)
        except ServerStoppingError:
            return draining_error()
        except (ApiError, OctavoError) as error:
            return from_exception(error)
        except (ClientGoneError, SlowReaderError, OSError):
            raise
        except Exception:  # the route's shell: the client is told, the log has the story
            _log.exception("request %s failed in mid-stream", self._source.name)
            return internal_error()
        return None

    async def _write_all(self, send: Send) -> None:
        ticker = asyncio.create_task(self._keep_alive(send))
        try:
            first = self._shape.head
            if first:
                await self._write(send, first)
            async with aclosing(self._source.deltas()) as deltas:
                async for index, delta in deltas:
                    chunk = self._shape.chunk(index, delta)
                    if chunk:
                        await self._write(send, chunk)
            last = self._shape.last()
            if last:
                await self._write(send, last)
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)

    async def _write(self, send: Send, data: bytes) -> None:
        """Send; while the client does not read, look now and then how much waits for it. Raises SlowReaderError.

        A send that waits has not written anything yet, so it can be given up and tried again.
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
        """Write a comment whenever nothing was written for a while."""
        while True:
            seen = self._num_writes
            await asyncio.sleep(self._limits.keep_alive_s)
            if self._num_writes == seen and self._format.keep_alive:
                await send({"type": "http.response.body", "body": self._format.keep_alive, "more_body": True})
