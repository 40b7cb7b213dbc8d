"""Running the application: one socket, signals, drain.

Owns: opening the socket (before a model loads, so that a taken port is known at once), who may reach it,
what SIGINT and SIGTERM do: the first drains, the second ends what is open.
Does not: know routes or engines, or print (the announcement is a callback).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from octavo.errors import ConfigError
from octavo.server.app import create_app
from octavo.server.connection import BoundedConnection
from octavo.server.lifecycle import Lifecycle

if TYPE_CHECKING:
    from octavo.config import Config, ServingConfig
    from octavo.engine.sessions import Sessions
    from octavo.server.context import EngineStatistics
    from octavo.text.text_model import TextModel

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048
CONNECTION_GRACE_S = 2  # for connections that are still open after the drain


async def serve(
    config: Config,
    sessions: Sessions,
    text: TextModel,
    engine_statistics: EngineStatistics,
    *,
    listener: socket.socket | None = None,
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal ends it; `on_listening` gets the URL. Raises ConfigError."""
    with contextlib.closing(listener or open_socket(config.serving)) as bound:
        lifecycle = Lifecycle()
        app = create_app(sessions, text, config, engine_statistics, lifecycle=lifecycle)
        server = HttpServer(app, bound, lifecycle, config.serving.drain_timeout_s)
        if on_listening is not None:
            on_listening(url_of(bound))
        await server.run()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The fastest event loop there is here; for asyncio.Runner(loop_factory=...)."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # not on every platform

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def open_socket(serving: ServingConfig) -> socket.socket:
    """Bind and listen. Raises ConfigError for an exposed address without a key, or one that cannot be had."""
    if not (is_loopback(serving.host) or serving.api_key or serving.insecure):
        raise ConfigError(
            f"--host is {serving.host!r} and there is no --api-key, so anyone who reaches this address could use it; "
            "give --api-key, or --insecure if that is meant"
        )
    if not all(serving.api_key):
        raise ConfigError("an --api-key is empty, so a client without one would get in; give a key")
    family = socket.AF_INET6 if ":" in serving.host else socket.AF_INET
    try:
        listener = socket.create_server((serving.host, serving.port), family=family, backlog=BACKLOG)
    except OSError as error:
        message = f"cannot listen on --host {serving.host!r}, --port {serving.port} ({error.strerror or error})"
        raise ConfigError(f"{message}; give an address of this machine and a free port, or --port 0 for any") from None
    listener.setblocking(False)
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(listener: socket.socket) -> str:
    """Where clients on this machine reach the server."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer:
    """Serves one application on an open socket until stopped, in the running event loop."""

    def __init__(self, app: FastAPI, listener: socket.socket, lifecycle: Lifecycle, drain_timeout_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=CONNECTION_GRACE_S,
        )
        self._server = _Server(config)
        self._listener = listener
        self._lifecycle = lifecycle
        self._drain_timeout_s = drain_timeout_s
        self._ending: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until a signal or stop(). Open requests get the drain time; a second signal takes it from them."""
        loop = asyncio.get_running_loop()
        signals = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            await self._server.serve([self._listener])
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            if self._ending is not None:
                await self._ending

    def stop(self) -> None:
        """Drain and end; called again, end what is open now. Call in the event loop's thread."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._drain())
        else:
            self._lifecycle.stop()

    async def _drain(self) -> None:
        try:
            await self._lifecycle.drain(self._drain_timeout_s)
        finally:
            self._server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to HttpServer."""
        yield
