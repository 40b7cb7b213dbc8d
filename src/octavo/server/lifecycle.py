"""Lifecycle: whether the server takes work, and how open work ends.

Owns: the phase, the count of open requests, the signal that ends them. Does not: know HTTP or the engine.
A server that failed stays failed: draining it changes nothing for its clients.
Invariant: work under `supervise` ends in one of four ways: done, its own error, ClientGoneError, ServerStoppingError;
in every one of them its task has ended before `supervise` returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TypeVar

from starlette.types import Receive

from octavo.server.faults import RETRY_ENGINE_S, ApiError, draining_error

T = TypeVar("T")


class ServerPhase(Enum):
    """What the server is doing."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class ClientGoneError(Exception):
    """The client closed the connection."""


class ServerStoppingError(ApiError):
    """The drain time is over."""

    def __init__(self) -> None:
        super().__init__(503, draining_error().message, code="draining", retry_after_s=RETRY_ENGINE_S)


class Lifecycle:
    """Counts open requests and ends them when told.

    `engine_trouble` says why the engine makes no progress, or None; without it, whoever asks must probe the engine.
    `on_answered` is called once, when the first work under `supervise` was done.
    """

    def __init__(
        self,
        phase: ServerPhase = ServerPhase.READY,
        *,
        engine_trouble: Callable[[], str | None] | None = None,
        on_answered: Callable[[], object] | None = None,
    ) -> None:
        self.phase = phase
        self.num_open = 0
        self.engine_trouble = engine_trouble
        self._on_answered = on_answered
        self._is_stopping = False
        self._stops: set[asyncio.Future[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def refusal(self) -> ApiError | None:
        """Why new work is refused now, or None."""
        if self.phase is ServerPhase.READY:
            return None
        if self.phase is ServerPhase.LOADING:
            return ApiError(503, "the model is loading", code="loading", retry_after_s=RETRY_ENGINE_S)
        if self.phase is ServerPhase.DRAINING:
            return draining_error()
        return ApiError(503, "the engine failed", code="engine_unavailable", retry_after_s=RETRY_ENGINE_S)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Count one request as open."""
        self.num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if self.num_open == 0:
                self._idle.set()

    def fail(self) -> None:
        """The engine is gone for good: refuse new work from now on."""
        self.phase = ServerPhase.FAILED

    def refuse(self) -> None:
        """Refuse new work from now on; open work goes on."""
        if self.phase is not ServerPhase.FAILED:
            self.phase = ServerPhase.DRAINING

    async def drain(self, timeout_s: float, grace_s: float = 2.0) -> int:
        """Refuse new work, let open work finish, end the rest after `timeout_s`; give their number."""
        self.refuse()
        if await self._is_idle_within(timeout_s):
            return 0
        num_left = self.num_open
        self.stop()
        await self._is_idle_within(grace_s)
        return num_left

    def stop(self) -> None:
        """End all open work now; each request is answered with an error. Idempotent."""
        self.refuse()
        self._is_stopping = True
        for stop in self._stops:
            if not stop.done():
                stop.set_result(None)

    async def _is_idle_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def supervise(self, work: Coroutine[object, object, T], receive: Receive) -> T:
        """Run `work` until it ends, the client goes or the server stops."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(receive))
        stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_stopping:
            stop.set_result(None)
        self._stops.add(stop)
        try:
            await asyncio.wait((task, gone, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                result = task.result()
                if self._on_answered is not None:
                    self._on_answered()
                    self._on_answered = None
                return result
            raise ServerStoppingError if stop.done() else ClientGoneError
        finally:
            self._stops.discard(stop)
            for each in (task, gone, stop):
                each.cancel()
            await asyncio.gather(task, gone, stop, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
