"""One connection to an engine process: frames out, frames in.

Owns: the connection, and the pending calls. Events are passed to `receive`. An agent passes the frames on undecoded.
Does not: keep requests (open_requests), or start and end the process (engine_process).
Invariants: when the connection ends, every pending call is answered with an error. Malformed frames and frames of
another epoch are dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from octavo.core.plan import Events
from octavo.core.request import FinishReason, Request
from octavo.engine import wire
from octavo.engine.client import Accepted, Verb
from octavo.errors import EngineDeadError, EngineError, InvalidRequestError, OctavoError
from octavo.executors.protocol import Capacity
from octavo.frontend.open_request import settle
from octavo.media.item import MediaItem

_READ_BYTES = 1 << 18
_OWN_NUMBERS = 1 << 62  # control requests of a client whose frames were forwarded; others count from 0

Receive = Callable[[int, Events], None]  # called with the epoch and the events
Writer = asyncio.StreamWriter | asyncio.WriteTransport


class SocketClient:
    """One connection to one engine process; belongs to one event loop.

    `epoch` is the engine's number for the client's user. The engine's frames carry its number on its own machine, which
    is another one if the engine was opened before this client's user began.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: Writer, epoch: int, receive: Receive) -> None:
        loop = asyncio.get_running_loop()
        self.epoch = self._wire_epoch = epoch
        self.has_begun = asyncio.Event()  # the first frame was received, or the connection ended
        self.num_malformed = 0
        self.failure = ""  # why the engine says that it ends
        self.num_stale = 0
        self._receive = receive
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()
        self._pending: dict[wire.ReplyTo, tuple[float, asyncio.Future[Any]]] = {}  # time of the call, and its answer
        self._ready: asyncio.Future[Capacity] = loop.create_future()
        self._end: OctavoError | None = None
        self._is_closing = False
        self._forward: Callable[[bytes], None] | None = None
        self.forwarded_call_at: float | None = None  # when the other's oldest unanswered call was sent
        self._reading = loop.create_task(self._read_all(), name="octavo-reader")

    @classmethod
    async def over(cls, connection: socket.socket, epoch: int, receive: Receive) -> SocketClient:
        """Return a client over a connection to an engine process."""
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        return cls(reader, writer, epoch, receive)

    @classmethod
    def attached(
        cls, reader: asyncio.StreamReader, writer: Writer, epochs: tuple[int, int], receive: Receive
    ) -> SocketClient:
        """Return a client of an engine that is open already. `epochs`: its number for the user, and in its frames."""
        client = cls(reader, writer, epochs[0], receive)
        client._wire_epoch = epochs[1]
        return client

    def forward(self, to: Callable[[bytes], None] | None) -> None:
        """Pass the engine's frames to `to`, whole and undecoded, from now on; with None, handle them here again."""
        self._forward = to
        self.forwarded_call_at = None
        self._numbers = itertools.count(_OWN_NUMBERS)  # answers to forwarded calls may still arrive

    def write_frames(self, frames: bytes) -> None:
        """Write whole frames without waiting. Writing to a broken connection has no effect; its end soon answers calls.

        uvloop raises RuntimeError on a broken connection, asyncio does not.
        """
        if self.is_alive:
            with contextlib.suppress(RuntimeError):
                self._writer.write(frames)

    async def ready(self) -> Capacity:
        """Wait until the engine is open. Raises the error of its opening, or EngineDeadError."""
        return await asyncio.shield(self._ready)

    @property
    def is_alive(self) -> bool:
        """True if the connection is open."""
        return self._end is None

    async def ended(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the connection, at most `timeout_s`."""
        await asyncio.wait({self._reading}, timeout=timeout_s)

    @property
    def unanswered(self) -> tuple[str, ...]:
        """Requests that were sent and neither accepted nor refused (before the connection ended)."""
        return tuple(key for key in self._pending if isinstance(key, str))

    @property
    def oldest_call_at(self) -> float | None:
        """When the oldest unanswered call was sent, on the monotonic clock; None if no call is pending."""
        if self._forward is not None:
            return self.forwarded_call_at
        return next((oldest_call_at for oldest_call_at, _ in self._pending.values()), None)

    def send(self, request: Request, media: tuple[MediaItem, ...] = ()) -> asyncio.Future[Accepted]:
        """Send a request; return a future of the engine's answer, or of the error that ended the engine.

        Raises InvalidRequestError if the request is too large for a frame, or EngineDeadError.
        """
        try:
            return self._call(request.request_id, wire.Submit.of(self._wire_epoch, request, media))
        except wire.WireError as error:
            raise InvalidRequestError(f"the request is too large: {error}", "prompt") from None

    def post_cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        """End requests, or one choice of each, without waiting for an answer."""
        self._post(wire.CancelRequests(self._wire_epoch, tuple(request_ids), reason, choice))

    def post_control(self, verb: Verb, argument: str = "") -> None:
        """Send a verb whose answer is not needed, without waiting."""
        self._post(wire.ControlRequest(self._wire_epoch, next(self._numbers), verb, argument))

    async def control(self, verb: Verb, argument: str = "") -> object:
        """See EngineClient."""
        number = next(self._numbers)
        try:
            return await self._call(number, wire.ControlRequest(self._wire_epoch, number, verb, argument))
        finally:
            self._pending.pop(number, None)

    async def close(self) -> None:
        """Let the engine end its requests, then end the connection. Idempotent."""
        if not self._is_closing:
            self._is_closing = True
            self._post(wire.Close(self._wire_epoch))
        await self.ended()

    def abandon(self) -> None:
        """End the connection at once."""
        self._writer.close()

    def _call(self, key: wire.ReplyTo, message: wire.ToEngine) -> asyncio.Future[Any]:
        """Write a message; return a future of the answer. Raises EngineDeadError, WireError."""
        if self._end is not None:
            raise EngineDeadError(str(self._end))
        self._post(message)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[key] = time.monotonic(), answer
        return answer

    def _post(self, message: wire.ToEngine) -> None:
        """Write a message without waiting."""
        self.write_frames(wire.frame(message))

    async def _read_all(self) -> None:
        splitter = wire.FrameSplitter()
        reason = "its connection ended"
        try:
            while data := await self._reader.read(_READ_BYTES):
                self.has_begun.set()
                if self._forward is not None:
                    self._forward(wire.join_frames(splitter.feed(data)))
                    continue
                for body in splitter.feed(data):
                    self._handle(body)
        except (OSError, wire.WireError) as error:
            reason = str(error)
        finally:
            self._finish(reason)
            self._writer.close()

    def _handle(self, body: bytes) -> None:
        """Handle one frame."""
        try:
            message = wire.decode_from_engine(body)
            events = message.events() if isinstance(message, wire.Outputs) else None
        except wire.WireError:
            self.num_malformed += 1
            return
        if message.epoch != self._wire_epoch:
            self.num_stale += 1
        elif events is not None:
            self._receive(self.epoch, events)
        elif isinstance(message, wire.SubmitReply):
            self._answer(message.accepted.request_id, message.accepted)
        elif isinstance(message, wire.ControlReply):
            self._answer(message.to, message.value)
        elif isinstance(message, wire.Ready):
            is_same = message.version == wire.VERSION
            settle(self._ready, message.capacity if is_same else _other_version(message.version))
        elif isinstance(message, wire.ErrorReply):
            if message.to is not None:
                self._answer(message.to, message.error())
            elif self._ready.done():
                self.failure = message.message
                self._finish(self.failure)
            else:
                self._end = message.error()
                settle(self._ready, self._end)

    def _answer(self, key: wire.ReplyTo, value: object) -> None:
        _, answer = self._pending.pop(key, (0.0, None))
        settle(answer, value)

    def _finish(self, reason: str) -> None:
        """Answer every pending call with an error, because the connection has ended."""
        if self._end is None:
            self._end = EngineDeadError(
                "the engine was stopped" if self._is_closing else f"the engine process ended: {reason}"
            )
        self.has_begun.set()
        settle(self._ready, self._end)
        for _, answer in self._pending.values():
            settle(answer, self._end)


def _other_version(version: int) -> EngineError:
    return EngineError(f"the engine process speaks version {version} of the protocol, this one {wire.VERSION}")
