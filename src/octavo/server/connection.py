"""BoundedConnection: an HTTP/1.1 connection that is bounded in time, size and number, whatever is sent over it.

Owns: the bounds that the parser has not: on heads, on bodies that nobody reads, on what surrounds a body (chunk sizes,
extensions, trailers), on pipelined requests, on connections.
Does not: bound a body that is read (limits does) or say when an answer is too slow (stream does).
Invariant: a connection without a request in hand is cut within a bounded time, or sooner when its place is needed.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.server.faults import RETRY_ENGINE_S, ApiError
from octavo.server.limits import UPLOADS, HttpLimits

CUT = "octavo.cut"  # in a request's scope: ends an answer that its client does not read
LINGER_S = 5.0  # that a closed connection's client gets to read what is left
_OVERHEAD = 8  # bytes around a body for each byte of it: one-byte chunks have five
_UNREAD_BYTES = 1 << 20  # beyond the largest body, before a connection that sends on is cut
_HEADERS = 4  # times as many as get an answer, before a connection is cut; trailers count too
_OTHER_FILES = 256  # sockets of the engine, pipes, model files
_PHRASES = {400: b"Bad Request", 503: b"Service Unavailable"}
_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)  # the library warns of every malformed request, so anybody could fill a log


class BoundedConnection(HttpToolsProtocol):
    """Closes a connection that keeps to no bound. `bounded` makes the class for one server."""

    limits = HttpLimits()
    places: dict[BoundedConnection, None]  # of this server's connections, those without a request, longest first
    note: Callable[[str], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _log
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._body_bytes = 0  # of this message
        self._other_bytes = 0  # of this message: all that is not its body
        self._num_headers = 0  # of this message, trailers included
        self._fed_bytes = 0  # of bodies, in this reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a head, if there is a place."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            oldest = next(iter(self.places), None)
            if oldest is None:
                self._refuse(ApiError(503, "too many connections", code="too_many_connections",
                                      retry_after_s=RETRY_ENGINE_S))  # fmt: skip
                return
            oldest._cut("idle_connection")
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_timer()
        if self._writing is not None:
            self._writing.cancel()
        self.places.pop(self, None)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Expect the rest of a head; between requests uvicorn's own keep-alive time counts."""
        if self._timer is None:
            self._expect_head()
        if self._is_answering:
            self.places.pop(self, None)
        self._body_bytes = self._other_bytes = self._num_headers = 0
        super().on_message_begin()
        cast(dict[str, object], self.scope)[CUT] = self.cut_answer

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count it: each costs time, however short."""
        self._num_headers += 1
        if self._num_headers > _HEADERS * self.limits.max_headers:
            raise ValueError("too many headers")  # stops the parser; answered like any malformed request
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Expect the body."""
        self.places.pop(self, None)
        self._expect_body()
        super().on_headers_complete()
        if len(self.pipeline) > self.limits.max_pipelined:
            raise ValueError("too many pipelined requests")  # stops the parser; answered like any malformed request

    def on_body(self, body: bytes) -> None:
        """Count it."""
        self._body_bytes += len(body)
        self._fed_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The message is here."""
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Give the place up to whoever needs it, while there is no next request."""
        super().on_response_complete()
        if not self.pipeline and not self.transport.is_closing():
            self.places[self] = None

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and count."""
        if self.transport.is_closing():
            return
        self._fed_bytes = 0
        super().data_received(data)
        self._other_bytes += len(data) - self._fed_bytes
        if self._other_bytes > self.limits.max_head_bytes + _OVERHEAD * self._body_bytes:
            self._cut("head_too_large")
        elif self._body_bytes > max(self.limits.max_body_bytes, self._max_upload) + _UNREAD_BYTES:
            self._cut("body_too_large")

    @property
    def _max_upload(self) -> int:
        """Bytes of a file that may be sent here; its route reads it in pieces, and bounds it."""
        return self.limits.max_upload_bytes if self.scope.get("path") == UPLOADS else 0

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(ApiError(400, "this is no request in HTTP/1.1 that can be read", code="invalid_http"))

    def pause_writing(self) -> None:
        """The client reads slower than it is answered: not for ever."""
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.limits.stall_timeout_s + LINGER_S, self._abort)

    def resume_writing(self) -> None:
        """It reads."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def cut_answer(self, last: bytes) -> None:
        """End an answer whose client does not read; `last` is what it finds at the end, should it read on soon."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self.transport.is_closing():
            return
        self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if cycle.chunked_encoding else last)
        cycle.response_complete = True
        cycle.message_event.set()
        self._close()

    def _abort(self) -> None:
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        self.places.pop(self, None)
        self.places[self] = None
        self._stop_timer()
        self._timer = self.loop.call_later(self.limits.head_timeout_s, self._cut, "head_timeout")

    def _expect_body(self) -> None:
        self._stop_timer()
        seconds = self.limits.body_timeout_s + self.limits.body_grace_s
        self._timer = self.loop.call_later(seconds, self._give_up_body)

    def _give_up_body(self) -> None:
        if self.pipeline:  # it is not read before the requests before it are answered
            self._expect_body()
        else:
            self._cut("body_timeout")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, refusal: ApiError) -> None:
        """Answer without the application, and close."""
        self.note(refusal.code)
        body = msgspec.json.encode(refusal.body())
        headers = {**refusal.headers(), "content-type": "application/json", "content-length": str(len(body))}
        lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
        head = b"HTTP/1.1 %d %s\r\n" % (refusal.status, _PHRASES[refusal.status])
        self.transport.write(head + lines + b"connection: close\r\n\r\n" + body)
        self._close()

    def _cut(self, why: str) -> None:
        if not self.transport.is_closing():
            self.note(why)
        self._close()

    def _close(self) -> None:
        self._stop_timer()
        self.places.pop(self, None)
        if not self.transport.is_closing():
            self.transport.close()
            self.loop.call_later(LINGER_S, self._abort)  # it would wait for ever for a client that does not read


def bounded(limits: HttpLimits, note: Callable[[str], None]) -> type[BoundedConnection]:
    """The class of one server's connections. `note` is told why a connection was refused or cut.

    There are never more of them than leave files to the process for everything else.
    """
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_files != resource.RLIM_INFINITY:
        most = max(num_files - _OTHER_FILES, num_files // 2)
        limits = replace(limits, max_connections=min(limits.max_connections, most))
    return type("Connection", (BoundedConnection,), {"limits": limits, "places": {}, "note": staticmethod(note)})
