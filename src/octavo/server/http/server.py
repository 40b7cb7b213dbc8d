"""Run the application: one socket, signals, drain.

Owns: SIGINT and SIGTERM. The first signal drains the server; the second ends all open requests.
Does not: open the socket, or know routes or engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from octavo.config import WebConfig
from octavo.server.http.connection import BoundedConnection, connection_class
from octavo.server.http.lifecycle import Lifecycle
from octavo.server.http.listener import BACKLOG, tls_options

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CONNECTION_GRACE_S = 2  # for connections still open after the drain


class HttpServer:
    """A server of one application on an open socket, in the running event loop."""

    def __init__(
        self,
        app: Starlette,
        listener: socket.socket,
        lifecycle: Lifecycle,
        drain_timeout_s: float,
        web: WebConfig | None = None,
    ) -> None:
        context = app.state.context
        web = web or WebConfig()
        uploads = {prefix + path for path in app.state.endpoints.upload_paths for prefix in ("", web.root_path)}
        connection = connection_class(
            context.limits, context.metrics.failed, lambda: bool(context.keys.keys), frozenset(uploads)
        )
        config = uvicorn.Config(
            app,
            http=connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=CONNECTION_GRACE_S,
            **tls_options(web),
        )
        self._server = _Server(config, connection)
        self._listener = listener
        self._lifecycle = lifecycle
        self._drain_timeout_s = drain_timeout_s
        self._context = context
        self._ending: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until a signal or `stop`. Open requests get the drain time; a second signal ends them at once."""
        loop = asyncio.get_running_loop()
        signals = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        warming = asyncio.create_task(self._context.prompts.warm_up())
        try:
            await self._server.serve([self._listener])
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            if self._ending is not None:
                await self._ending
            await self._context.runs.close()  # runs in the journal stay open there, for the next server
            await self._context.mcp.close()
            await self._context.sandbox.close()
            await self._context.images.close()
            await warming

    def stop(self) -> None:
        """Drain, then stop the server. A second call ends all open requests. Call in the event loop's thread."""
        if self._ending is None:
            self._lifecycle.refuse()
            self._ending = asyncio.ensure_future(self._drain())
        else:
            self._lifecycle.stop()

    async def _drain(self) -> None:
        try:
            await self._lifecycle.drain(self._drain_timeout_s)
        finally:
            self._server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, connection_class: type[BoundedConnection]) -> None:
        super().__init__(config)
        self._connection_class = connection_class

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a shorter TLS handshake timeout than asyncio's: unfinished handshakes are not counted."""
        config, make, state = self.config, self._connection_class, self.server_state
        options: dict[str, Any] = {"backlog": BACKLOG}
        if config.ssl is not None:
            options |= {"ssl": config.ssl, "ssl_handshake_timeout": make.table.limits.handshake_timeout_s}

        def connection() -> BoundedConnection:
            return make(config=config, server_state=state, app_state={})

        loop = asyncio.get_running_loop()
        self.servers = [await loop.create_server(connection, sock=listener, **options) for listener in sockets or ()]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to HttpServer."""
        yield
