"""BoundedConnection: an HTTP/1.1 connection whose request heads are bounded in time and size.

Owns: the two bounds, which the parser itself has not. Does not: bound bodies (limits does) or answers (stream does).
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 64 * 1024  # beyond the app's own limit, so that an honest client still gets its 431


class BoundedConnection(HttpToolsProtocol):
    """Closes a connection whose next request head is too slow or endless."""

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a head."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the head."""
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Expect the rest of a head; between requests uvicorn's own keep-alive time counts."""
        if self._head_timer is None:
            self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is here."""
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and count what is still the head afterwards."""
        super().data_received(data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._give_up()

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._end_head()
        if not self.transport.is_closing():
            self.transport.close()
