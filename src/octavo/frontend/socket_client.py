"""One connection to an engine process: frames out, frames in.

Owns: the connection, and the answers awaited. Events go to `receive`. Does not: keep requests (open_requests), or start
and end the process (engine_process).
Invariants: when the connection ends, every question is answered with an error; frames of another epoch, and malformed
ones, are dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from octavo.core.plan import Events
from octavo.core.request import FinishReason, Request
from octavo.engine import wire
from octavo.engine.client import Accepted, Verb
from octavo.errors import EngineDeadError, EngineError, InvalidRequestError, OctavoError
from octavo.executors.protocol import Capacity
from octavo.frontend.open_requests import settle

_READ_BYTES = 1 << 18

Receive = Callable[[int, Events], None]  # gets the epoch and what came


class SocketClient:
    """One connection to one engine process; lives in one event loop."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        epoch: int,
        receive: Receive,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.epoch = epoch
        self.num_malformed = 0
        self.num_stale = 0
        self._receive = receive
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[object]] = {}
        self._submits: dict[str, asyncio.Future[Accepted]] = {}
        self._asked_at: dict[str | int, float] = {}  # what has no answer yet, oldest first
        self._ready: asyncio.Future[Capacity] = loop.create_future()
        self._end: OctavoError | None = None
        self._is_closing = False
        self._reading = loop.create_task(self._read_all(), name="octavo-reader")

    @classmethod
    async def connect(cls, path: Path, epoch: int, receive: Receive) -> SocketClient:
        """Connect to a listening engine. Raises OSError."""
        reader, writer = await asyncio.open_unix_connection(str(path))
        return cls(reader, writer, epoch, receive)

    async def ready(self) -> Capacity:
        """Wait until the engine is open. Raises whatever kept it from opening, or EngineDeadError."""
        return await asyncio.shield(self._ready)

    @property
    def is_alive(self) -> bool:
        """Whether the connection is open."""
        return self._end is None

    async def ended(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the connection, at most so long."""
        await asyncio.wait({self._reading}, timeout=timeout_s)

    @property
    def unanswered(self) -> tuple[str, ...]:
        """Requests that were sent and neither taken nor refused; those at the connection's end, once it has ended."""
        return tuple(self._submits)

    @property
    def asked_at(self) -> float | None:
        """When the oldest question without an answer was asked, on the monotonic clock."""
        return next(iter(self._asked_at.values()), None)

    def send(self, request: Request) -> asyncio.Future[Accepted]:
        """Send a request; the future has the engine's answer, or what ended the engine.

        Raises InvalidRequestError when no frame holds it, EngineDeadError.
        """
        self._check_alive()
        frame = _frame_of(wire.Submit.of(self.epoch, request))
        answer: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self._submits[request.request_id] = answer
        self._asked_at[request.request_id] = time.monotonic()
        self._post(frame)
        return answer

    def post_cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        """End requests, or one choice of them, in whatever state, without waiting."""
        if self.is_alive:
            self._post(wire.frame(wire.CancelRequests(self.epoch, tuple(request_ids), reason, choice)))

    def post_order(self, verb: Verb) -> None:
        """Give an order whose answer says nothing, without waiting."""
        if self.is_alive:
            self._post(wire.frame(wire.Ask(self.epoch, next(self._numbers), verb, "")))

    async def statistics(self) -> Mapping[str, object]:
        """Engine counters and gauges as plain JSON values."""
        return cast(Mapping[str, object], await self.control("statistics"))

    async def control(self, verb: Verb, argument: str = "") -> object:
        """See EngineClient."""
        number = next(self._numbers)
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._asked_at[number] = time.monotonic()
        try:
            await self._write(wire.frame(wire.Ask(self.epoch, number, verb, argument)))
            return await answer
        finally:
            _unasked(self._answered(self._answers, number))

    async def close(self) -> None:
        """Let the engine answer its requests, then end the connection. Idempotent."""
        if not self._is_closing:
            self._is_closing = True
            with contextlib.suppress(EngineDeadError):
                await self._write(wire.frame(wire.Close(self.epoch)))
        await self.ended()

    def abandon(self) -> None:
        """End the connection at once."""
        self._writer.close()

    def _answered(self, waiting: dict[Any, asyncio.Future[Any]], key: str | int) -> asyncio.Future[Any] | None:
        """Nothing is awaited under this key any more; the future that was."""
        self._asked_at.pop(key, None)
        return waiting.pop(key, None)

    def _post(self, frame: bytes) -> None:
        """Write without waiting. A connection that has just broken takes nothing; its end answers every request soon.

        uvloop calls that an error, asyncio does not.
        """
        with contextlib.suppress(RuntimeError):
            self._writer.write(frame)

    async def _write(self, frame: bytes) -> None:
        self._check_alive()
        self._post(frame)
        try:
            await self._writer.drain()
        except (ConnectionError, RuntimeError) as error:
            raise EngineDeadError(f"the engine process ended: {error}") from None

    def _check_alive(self) -> None:
        if self._end is not None:
            raise EngineDeadError(str(self._end))

    async def _read_all(self) -> None:
        splitter = wire.FrameSplitter()
        reason = "its connection ended"
        try:
            while data := await self._reader.read(_READ_BYTES):
                for body in splitter.feed(data):
                    self._handle(body)
        except (OSError, wire.WireError) as error:
            reason = str(error)
        finally:
            self._finish(reason)
            self._writer.close()

    def _handle(self, body: bytes) -> None:
        """Act on one frame."""
        try:
            message = wire.decode_from_engine(body)
            events = message.events() if isinstance(message, wire.Outputs) else None
        except wire.WireError:
            self.num_malformed += 1
            return
        if message.epoch != self.epoch:
            self.num_stale += 1
        elif events is not None:
            self._receive(message.epoch, events)
        elif isinstance(message, wire.Took):
            settle(self._answered(self._submits, message.accepted.request_id), message.accepted)
        elif isinstance(message, wire.Answer):
            settle(self._answered(self._answers, message.number), message.value)
        elif isinstance(message, wire.ErrorReply):
            self._fail(message)
        elif isinstance(message, wire.Ready):
            settle(
                self._ready, message.capacity if message.version == wire.VERSION else _other_version(message.version)
            )

    def _fail(self, message: wire.ErrorReply) -> None:
        if message.request_id is not None:
            settle(self._answered(self._submits, message.request_id), message.error())
        elif message.number is not None:
            settle(self._answered(self._answers, message.number), message.error())
        elif self._ready.done():
            self._finish(message.message)
        else:
            self._end = message.error()
            settle(self._ready, self._end)
            self._ready.exception()  # marked as retrieved: only the one that starts the engine awaits it

    def _finish(self, reason: str) -> None:
        """Answer all that waits: the connection ended."""
        if self._end is None:
            self._end = EngineDeadError(
                "the engine was stopped" if self._is_closing else f"the engine process ended: {reason}"
            )
        waiting: tuple[asyncio.Future[Any], ...] = (self._ready, *self._submits.values(), *self._answers.values())
        for answer in waiting:
            settle(answer, self._end)
        self._asked_at.clear()
        if not self._ready.cancelled():
            self._ready.exception()


def _other_version(version: int) -> EngineError:
    return EngineError(f"the engine process speaks version {version} of the protocol, this one {wire.VERSION}")


def _frame_of(message: wire.Submit) -> bytes:
    try:
        return wire.frame(message)
    except wire.WireError as error:
        raise InvalidRequestError(f"the request is too large: {error}", "prompt") from None


def _unasked(answer: asyncio.Future[Any] | None) -> None:
    """This answer is no longer awaited: mark an error in it as retrieved."""
    if answer is not None and answer.done() and not answer.cancelled():
        answer.exception()
