"""BoundedConnection: an HTTP/1.1 connection that is bounded in time, size and number.

Owns: the checks that the parser (llhttp, by httptools) does not make: the time for heads and bodies, the bytes around a
body, the accepted framing and Host, `Upgrade` (ignored); and which connection is cut when there are too many.
Does not: bound a body that the application reads (body does), find keys (auth does) or end slow answers (reply does).
Invariants: a connection without a request is cut within a bounded time, or sooner when there are too many. A request
with a whole body and a valid key is not cut. No byte of a body is parsed as a head.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import resource
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.server.http.errors import RETRY_ENGINE_S, ApiError
from octavo.server.http.limits import HttpLimits

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, HTTPScope

CUT = "octavo.cut"  # in a request's scope: ends an answer that its client does not read
ON_AUTH = "octavo.on_auth"  # in a request's scope: called with True if the request has a valid key, or with False
LINGER_S = 5.0  # time in which the client of a closed connection may read the rest
_OVERHEAD = 8  # allowed other bytes per byte of a body: one-byte chunks need five
_UNREAD_BYTES = 1 << 20  # allowed beyond the largest body; a connection that sends more is cut
_HEADERS = 4  # this multiple of `max_headers` closes the connection; trailers count too
_OTHER_FILES = 256  # reserved for the engine's sockets, pipes and model files
_UNAUTHENTICATED_SHARE = 8  # unauthenticated connections up to 1/8 of the bound are cut last
_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 503: b"Service Unavailable"}
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")  # RFC 9112, section 3.2: host [":" port], or empty
_AUTHORITY = re.compile(rb"^[A-Za-z]+://([^/?#]*).*", re.DOTALL)  # of a URL in absolute form
_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)  # uvicorn warns of each malformed request, so any client could fill the log
ConnectionSet = dict["BoundedConnection", None]  # an ordered set, oldest first


class ConnectionTable:
    """The connections of one server, in groups: the group says which connections are cut first.

    With keys, a connection is unauthenticated until one of its requests has a valid key. Unauthenticated connections
    are cut first if they exceed 1/8 of the bound, then idle connections, then those with an unfinished body, then other
    unauthenticated ones. Without keys, all connections without a whole request are one group, oldest first: otherwise
    new connections would be cut before those that withhold their bodies.
    A connection whose request was read whole is in no group, unless it is unauthenticated.
    """

    def __init__(self, limits: HttpLimits, note: Callable[[str], None], has_keys: Callable[[], bool]) -> None:
        self.limits = limits
        self.note = note
        self.has_keys = has_keys
        self.num_open = 0
        self.unauthenticated: ConnectionSet = {}
        self.idle: ConnectionSet = {}
        self.receiving: ConnectionSet = {}
        self.bodies: ConnectionSet = {}  # unauthenticated connections with an unfinished body

    def make_room(self) -> bool:
        """Cut a connection if there are too many; return False if every connection has a whole request."""
        if self.num_open <= self.limits.max_connections:
            return True
        spare = len(self.unauthenticated) > self.limits.max_connections // _UNAUTHENTICATED_SHARE
        for group in (self.unauthenticated if spare else {}, self.idle, self.receiving, self.unauthenticated):
            oldest = next(iter(group), None)
            if oldest is not None:
                oldest.evict("idle_connection")
                return True
        return False

    def add_body(self, connection: BoundedConnection) -> None:
        """Count an unauthenticated connection's unfinished body. Above the bound, cut the oldest such connection."""
        self.bodies[connection] = None
        if len(self.bodies) > self.limits.max_unauthenticated_bodies:
            next(iter(self.bodies)).evict("too_many_bodies")

    def move(self, connection: BoundedConnection, group: ConnectionSet | None) -> None:
        """Move a connection to `group`, or out of all groups. In its present group, it keeps its position."""
        for other in (self.unauthenticated, self.idle, self.receiving):
            if other is not group:
                other.pop(connection, None)
        if group is not None:
            group.setdefault(connection)

    def remove(self, connection: BoundedConnection) -> None:
        """Remove a closing connection."""
        self.num_open -= 1
        self.move(connection, None)
        self.bodies.pop(connection, None)


class BoundedConnection(HttpToolsProtocol):
    """An HTTP/1.1 connection that closes if it exceeds a bound. `connection_class` makes one server's class."""

    table: ConnectionTable
    upload_paths: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _log
        self.limits = self.table.limits
        self._is_open = False
        self._has_key = False  # a request on this connection had a valid key
        self._is_receiving = False  # between the end of a head and the end of its body
        self._is_upgrade = False  # the current head has `Upgrade`
        self._cycles: deque[RequestResponseCycle] = deque()  # requests without a complete answer, oldest first
        self._pending: tuple[RequestResponseCycle, ASGI3Application] | None = None  # a request that waits to be started
        self._refusal = ""  # why the current head is refused
        self._timer: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._num_messages = 0
        self._body_bytes = 0  # of the current message
        self._other_bytes = 0  # of the current message, without its body
        self._num_headers = 0  # of the current message, including trailers
        self._parsed_body_bytes = 0  # of all bodies in the data being parsed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for a head; refuse the connection if there are too many."""
        super().connection_made(transport)
        self._is_open = True
        self.table.num_open += 1
        if self.table.make_room():
            self._start_head_timer()
        else:
            self._refuse(ApiError(503, "too many connections", code="too_many_connections",
                                  retry_after_s=RETRY_ENGINE_S))  # fmt: skip

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the table and break reference cycles, because the garbage collector's pauses delay other requests."""
        self._release()
        for timer in (self._writing, self._lingering):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self.scope = cast("HTTPScope", {})
        self.cycle = cast(RequestResponseCycle, None)

    def on_message_begin(self) -> None:
        """Start the timer for the rest of the head. Between requests, uvicorn's own keep-alive timer runs."""
        self._is_upgrade = False
        self._refusal = ""
        self._body_bytes = self._other_bytes = self._num_headers = 0
        if self._timer is None:
            self._start_head_timer()
        super().on_message_begin()
        scope = cast(dict[str, object], self.scope)
        scope[CUT] = self.cut_answer
        self._num_messages += 1
        scope[ON_AUTH] = partial(self._on_auth, self._num_messages)  # a number: a reference to the scope makes a cycle

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, since each one costs time however short it is. Trailers are counted and dropped."""
        self._num_headers += 1
        if self._num_headers > _HEADERS * self.limits.max_headers:
            raise ValueError("too many headers")  # stops the parser; answered like any malformed request
        if not self._is_receiving:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the head, start the request, and start the timer for the body."""
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._is_upgrade = True  # `_feed` handles it
            return
        self._refusal = self._head_fault()
        if self._refusal or len(self._cycles) > self.limits.max_pipelined:
            raise ValueError("refused")  # stops the parser
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        self._is_receiving = True
        self._regroup()
        self._start_body_timer(is_unauthenticated=self.table.has_keys())  # until `_on_auth` is called

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Hold a request until all received data is parsed and, without keys, until its body has arrived.

        So a request costs only its parsing if its body never arrives, or if other requests follow without end. With
        keys, the request is started at once, because its key decides how long its body may take.
        """
        self._pending = (cycle, app)

    def _start_pending(self) -> None:
        if self._pending is None:
            return
        cycle, app = self._pending
        is_whole = not cycle.more_body or len(cycle.body) > HIGH_WATER_LIMIT
        if is_whole or cycle.waiting_for_100_continue or self._max_upload or self.table.has_keys():
            self._pending = None
            super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """Count the bytes of a body."""
        self._body_bytes += len(body)
        self._parsed_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer for the body."""
        if self._is_upgrade:
            return
        self._stop_timer()
        self._is_receiving = False
        self.table.bodies.pop(self, None)
        self._regroup()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request. If an answered request's body is unfinished, treat the body as one without a key."""
        if self._cycles:
            self._cycles.popleft()
        super().on_response_complete()
        self._start_pending()  # the next request of a pipeline
        if self.table.has_keys() and not self._has_key and self._is_receiving and not self._cycles:
            self.table.add_body(self)
        self._regroup()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and bound the bytes of the current message."""
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._parsed_body_bytes = 0
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse_http()
            return
        self._start_pending()
        self._other_bytes += len(data) - self._parsed_body_bytes
        if self._other_bytes > self.limits.max_head_bytes + _OVERHEAD * self._body_bytes:
            self._cut("head_too_large")
        elif self._body_bytes > max(self.limits.max_body_bytes, self._max_upload) + _UNREAD_BYTES:
            self._cut("body_too_large")

    def _feed(self, data: bytes) -> None:
        """Feed the parser. A head with `Upgrade` is fed again to a new parser, without `Upgrade`.

        The parser stops after a head with `Upgrade`, and would parse the body as a request. Servers may ignore
        `Upgrade` (RFC 9110, section 7.8). curl and Java's HttpClient request h2c each time, and expect to be ignored.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does, for pipelines
            self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        """Return the current head without `Upgrade`."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() != b"upgrade") or b"keep-alive"
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join((*lines, b"", b""))

    def _head_fault(self) -> str:
        """Return a fault of the head that proxies might interpret differently; "" if there is none."""
        version = self.parser.get_http_version()
        hosts = [value for name, value in self.headers if name == b"host"]
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if version not in ("1.0", "1.1") or self.parser.get_method() == b"CONNECT":
            return "this server speaks HTTP/1.1 and HTTP/1.0, without CONNECT"
        if len(hosts) != 1 and (hosts or version == "1.1"):
            return f"give one Host header, got {len(hosts)}"
        if hosts and not _HOST.fullmatch(hosts[0]):
            return "the Host header is not a host with an optional port"
        if codings and (version == "1.0" or len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
            return "Transfer-Encoding may only be chunked, in HTTP/1.1"
        if not self.url.startswith(b"/") and hosts and _AUTHORITY.sub(rb"\1", self.url) != hosts[0]:
            return "the URL names another host than the Host header"
        return ""

    @property
    def _max_upload(self) -> int:
        """The most bytes that a file uploaded to this path may have; the path's handler reads it in parts."""
        return self.limits.max_upload_bytes if self.scope.get("path") in self.upload_paths else 0

    def _refuse_http(self) -> None:
        """Refuse a request that is not valid HTTP."""
        reason = self._refusal or "this is no request in HTTP/1.1 that can be read"
        self._refuse(ApiError(400, reason, code="invalid_http"))

    def pause_writing(self) -> None:
        """Start the timer for a client that does not read its answer."""
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.limits.stall_timeout_s + LINGER_S, self._abort)

    def resume_writing(self) -> None:
        """Stop the timer, since the client reads again."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def cut_answer(self, last: bytes) -> None:
        """End an answer whose client does not read. `last` ends the answer, if the client reads on within LINGER_S."""
        cycle = self._cycles[0] if self._cycles else None
        if cycle is None or self.transport.is_closing():
            return
        self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if cycle.chunked_encoding else last)
        self._close()

    def evict(self, reason: str) -> None:
        """Close the connection at once to make room."""
        self.table.note(reason)
        self._release()
        self._abort()

    def _abort(self) -> None:
        self.transport.abort()

    def _on_auth(self, message: int, has_key: bool) -> None:
        """Record if a request has a valid key: its body then gets more time, and the connection is kept longer."""
        is_current = self._is_receiving and message == self._num_messages
        if not self.table.has_keys() or not self._is_open:
            return
        if has_key:
            self._has_key = True
            self._regroup()
            if is_current:
                self._start_body_timer(is_unauthenticated=False)
        elif is_current:
            self.table.add_body(self)

    def _regroup(self) -> None:
        """Move the connection to the group that fits its state."""
        table = self.table
        group: ConnectionSet | None
        if not self._is_open:
            return
        if table.has_keys() and not self._has_key:
            group = table.unauthenticated
        elif self._is_receiving:
            group = table.receiving if table.has_keys() else table.idle
        else:
            group = None if self._cycles else table.idle
        table.move(self, group)

    def _start_head_timer(self) -> None:
        self.table.idle.pop(self, None)  # move to the end: the longest idle connection comes first
        self._regroup()
        self._stop_timer()
        self._timer = self.loop.call_later(_spread(self.limits.head_timeout_s), self._cut, "head_timeout")

    def _start_body_timer(self, is_unauthenticated: bool) -> None:
        self._stop_timer()
        limits = self.limits
        seconds = limits.unauthenticated_body_timeout_s if is_unauthenticated else limits.body_timeout_s
        seconds += 0.0 if is_unauthenticated or self._pending is not None else limits.body_grace_s
        self._timer = self.loop.call_later(_spread(seconds), self._on_body_timeout, is_unauthenticated)

    def _on_body_timeout(self, is_unauthenticated: bool) -> None:
        if len(self._cycles) > 1:  # the body is not read until the earlier requests are answered
            self._start_body_timer(is_unauthenticated)
        elif self._cycles:
            self._refuse(ApiError(408, "the body did not arrive in time", code="body_timeout"))
        else:
            self._cut("body_timeout")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, refusal: ApiError) -> None:
        """Answer the current request without the application, and close. If an earlier answer is due, only close."""
        num_due = len(self._cycles)
        if num_due != self._is_receiving or (num_due and self._cycles[0].response_started):
            self._cut(refusal.code)
            return
        self.table.note(refusal.code)
        body = msgspec.json.encode(refusal.body())
        headers = {**refusal.headers(), "content-type": "application/json", "content-length": str(len(body))}
        lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
        head = b"HTTP/1.1 %d %s\r\n" % (refusal.status, _PHRASES[refusal.status])
        self.transport.write(head + lines + b"connection: close\r\n\r\n" + body)
        self._close()

    def _cut(self, reason: str) -> None:
        if not self.transport.is_closing():
            self.table.note(reason)
        self._close()

    def _close(self) -> None:
        self._release()
        if not self.transport.is_closing():
            self.transport.close()
            self._lingering = self.loop.call_later(LINGER_S, self._abort)  # close() waits until the client reads

    def _release(self) -> None:
        """Leave the table, and mark every request on this connection as disconnected.

        uvicorn marks only the newest request; an older one would write to the closed transport, which raises an error.
        """
        self._stop_timer()
        if self._is_open:
            self._is_open = False
            self.table.remove(self)
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self._cycles.clear()
        self.pipeline.clear()
        self._pending = None


def _spread(seconds: float) -> float:
    """Return a time-out that is longer by up to a fifth.

    Otherwise connections that were opened together would be cut together, and an attacker would reconnect them at once:
    a hundred in one iteration of the event loop delayed other requests by 5 ms.
    """
    return seconds * random.uniform(1.0, 1.2)


def connection_class(
    limits: HttpLimits,
    note: Callable[[str], None],
    has_keys: Callable[[], bool] = bool,
    upload_paths: frozenset[str] = frozenset(),
) -> type[BoundedConnection]:
    """Return the class of one server's connections. `note` is called with the reason of each refusal or cut.

    The number of connections is bounded so that the process has open files left for everything else.
    """
    limits = replace(limits, max_connections=max_connections(limits))
    return type(
        "Connection",
        (BoundedConnection,),
        {"table": ConnectionTable(limits, note, has_keys), "upload_paths": upload_paths},
    )


def max_connections(limits: HttpLimits) -> int:
    """Return the bound on connections, which leaves some of the files that this process may open."""
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_files == resource.RLIM_INFINITY:
        return limits.max_connections
    return min(limits.max_connections, max(num_files - _OTHER_FILES, num_files // 2))
