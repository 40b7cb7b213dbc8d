"""EngineClient for an engine loop in this process.

Owns: passing calls from the engine's thread to the event loop's thread, with one wake-up for all calls of a step.
Does not: replace an engine that dies.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

from octavo.core.request import FinishReason, Request
from octavo.engine.client import Accepted, Verb
from octavo.engine.loop import EngineLoop
from octavo.frontend.open_request import settle
from octavo.frontend.open_requests import OpenRequests
from octavo.media.item import MediaItem

JOIN_POLL_S = 0.005
_EPOCH = 1  # an engine in this process has no successor


class LocalClient:
    """Client of an EngineLoop in this process; starts the loop at the first request."""

    def __init__(self, engine: EngineLoop) -> None:
        self.epoch = _EPOCH
        self.adapters: dict[int, str] = {}
        self.requests = OpenRequests(resumes=False)
        self.requests.begin_epoch(self)
        self.outputs, self.cancel = self.requests.outputs, self.requests.cancel
        self._engine = engine
        self._pending: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()  # calls for the event loop
        self._is_woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakeup = LoopWakeup(self._drain)
        engine.attach(partial(self._hand_over, self.requests.accept, _EPOCH))

    async def submit(self, request: Request, media: tuple[MediaItem, ...] = ()) -> Accepted:
        """Submit a request. Raises RequestError, EngineDeadError. If this task is cancelled, so is the request."""
        self._bind()
        return await self.requests.submit(request, media)

    def send(self, request: Request, media: tuple[MediaItem, ...] = ()) -> asyncio.Future[Accepted]:
        """See EngineLink."""
        return self._call(partial(self._engine.submit, media=media), request)

    def post_cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        """See EngineLink."""
        self._engine.cancel(request_ids, reason, choice)

    async def statistics(self) -> Mapping[str, object]:
        """Return engine counters and gauges as plain JSON values."""
        return cast(Mapping[str, object], await self.control("statistics"))

    async def control(self, verb: Verb, argument: str = "") -> object:
        """See EngineClient."""
        self._bind()
        return await self._call(self._engine.control, verb, argument)

    async def close(self) -> None:
        """Stop the engine; every open request is answered first. Idempotent."""
        self._engine.stop()
        while not self._engine.join(0):  # polled, because no waiting thread can be started at the interpreter's end
            await asyncio.sleep(JOIN_POLL_S)
        self._drain()
        if self._loop is not None and not self._loop.is_closed():
            self._wakeup.detach(self._loop)
        self._loop = None

    def _bind(self) -> None:
        """Attach to the running event loop; a new loop (a second asyncio.run) may replace a closed one."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            assert self._loop is None or self._loop.is_closed(), "one client serves one event loop"
            self._loop = loop
            self._is_woken = False
            self._wakeup.attach(loop)
        self._engine.start()

    def _call(self, verb: Callable[..., None], *arguments: object) -> asyncio.Future[Any]:
        """Call a verb of the engine; the future has its answer."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        verb(*arguments, partial(self._hand_over, settle, answer))
        return answer

    def _hand_over(self, action: Callable[..., object], *arguments: Any) -> None:
        """Queue a call for the event loop, from any thread; one wake-up serves all pending calls."""
        self._pending.append((action, arguments))
        if self._is_woken or self._loop is None:
            return
        self._is_woken = True
        if not self._loop.is_closed():
            self._wakeup.wake()
        else:  # the event loop was closed over open requests: no reader is left
            self._pending.clear()
            self._engine.cancel([entry.request.request_id for entry in self.requests])

    def _drain(self) -> None:
        # Reset first: a call queued from here on is either made by the loop below or causes another wake-up.
        self._is_woken = False
        while self._pending:
            action, arguments = self._pending.popleft()
            action(*arguments)


class LoopWakeup:
    """Wakes an event loop from any thread; the loop calls `callback` once after one or more wakes.

    asyncio's own wake-up releases the interpreter's lock. The woken thread may then keep the lock for a switch interval
    of 5 ms, while the step thread waits; a whole step may take 10 ms.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        self._write = ctypes.PyDLL(None).write  # PyDLL keeps the lock; the pipe's end never blocks
        self._write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
        self._close = weakref.finalize(self, _close, self._reading, self._writing)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call back in this loop from now on. Call this in the loop's thread."""
        loop.add_reader(self._reading, self._readable)

    def detach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop calling back in this loop. Idempotent."""
        loop.remove_reader(self._reading)

    def wake(self) -> None:
        """Wake the loop. If the pipe is full, the loop is already awake."""
        self._write(self._writing, b"!", 1)

    def _readable(self) -> None:
        os.read(self._reading, 4096)
        self._callback()


def _close(*ends: int) -> None:
    for end in ends:
        os.close(end)
