"""The connection between a front and an agent, which runs an engine on another machine.

Owns: the messages; Link, one sealed connection on which messages and an engine's frames are multiplexed.
Does not: dial, listen (connections does), or read an engine's frames: they are passed on as bytes.
Body of a sealed frame: one byte of kind; then a message in msgpack, or the number of an epoch and an engine's frames.
Protocol: handshake; AgentHello and Welcome; the agent offers its engine (EngineReady), the front takes it (Bind) under
an epoch of its own, and both send frames under this epoch until EngineEnded, Release or the end of the connection. The
front pings every PING_S. Silence of LOST_S means for the front that the engine is lost; silence of LEASE_S means for
the agent that no front waits for its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol, cast

import msgspec

from octavo.engine import wire
from octavo.executors.protocol import Capacity
from octavo.sealing import HANDSHAKE_LIMIT_S, Handshake, SealedFrames, SealError

VERSION = 1
# Purposes of connections: an agent dials its front, a front dials an agent, a standby dials the front it follows.
JOIN, OFFER, FOLLOW = "an engine joins its front", "a front takes an engine", "a standby follows a front"
PING_S = 0.5
LOST_S = 2.0
LEASE_S = 5.0
MAX_UNSENT_BYTES = 256 << 20  # of a connection whose other side does not read
LATE_S = 0.5  # a later look than this means that this process was stopped, so that silence proves nothing
_MESSAGE, _FRAMES = b"\0", b"\1"
_EPOCH = struct.Struct("<Q")


class _LinkMessage(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class AgentHello(_LinkMessage):
    """The agent's first message. `agent_id` stays while its process lives; `term` is the highest that it has seen."""

    version: int
    agent_id: str
    name: str
    model: str
    term: int


class Welcome(_LinkMessage):
    """The front's answer. A front that takes over from another one has a higher term."""

    version: int
    front_id: str
    term: int


class Refused(_LinkMessage):
    """The reason why the sender ends the connection."""

    why: str


class EngineReady(_LinkMessage):
    """The agent's engine can be bound. `number` is its epoch on its own machine, which its frames carry."""

    number: int
    wire_version: int
    pid: int
    capacity: Capacity


class Bind(_LinkMessage):
    """The front takes an engine under an epoch."""

    number: int
    epoch: int


class Release(_LinkMessage):
    """The front gives an engine back: the agent cancels its requests and offers it again."""

    epoch: int


class Kill(_LinkMessage):
    """The agent must kill its engine."""

    epoch: int


class EngineEnded(_LinkMessage):
    """A bound engine has ended: see EngineDeath."""

    epoch: int
    what: str
    batch: tuple[str, ...]
    in_commands: bool
    was_useful: bool
    stalled: bool


class AgentFailed(_LinkMessage):
    """The agent starts no more engines."""

    why: str


class Ping(_LinkMessage):
    """Answered at once. `oldest_call_s`: for how long the engine has left a call unanswered."""

    number: int
    oldest_call_s: float | None


class Pong(_LinkMessage):
    """The answer to a ping. `trouble` says why the engine makes no progress now."""

    number: int
    trouble: str | None


class StandbyHello(_LinkMessage):
    """The first message of a standby front. `model` is its journal's; records follow the Welcome as frames."""

    version: int
    model: str


class CopyStarts(_LinkMessage):
    """The next frame is the head of a new copy of the journal."""


class CopyComplete(_LinkMessage):
    """All runs of the journal were sent; each later record is sent as it is written."""


class CopyHeld(_LinkMessage):
    """The standby has written this many bytes of this connection's frames."""

    num_bytes: int


FromStandby = StandbyHello | CopyHeld | Pong
FromAgent = AgentHello | Refused | EngineReady | EngineEnded | AgentFailed | Pong
FromFront = Welcome | Refused | Bind | Release | Kill | Ping | CopyStarts | CopyComplete
LinkMessage = FromAgent | FromStandby | FromFront
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[LinkMessage] = msgspec.msgpack.Decoder(LinkMessage)


class LinkEnds:
    """What a link calls in its event loop: `message`, `frames` with their epoch, and `ended` with the reason, once."""

    def message(self, link: Link, message: LinkMessage) -> None:
        """Handle a message."""

    def frames(self, link: Link, epoch: int, data: bytes) -> None:
        """Handle an engine's frames."""

    def ended(self, link: Link, why: str) -> None:
        """Handle the end of the connection."""


class LinkGate(Protocol):
    """What a listener decides about connections before and after their handshake."""

    def may_begin(self, peer: str) -> bool:
        """Return False to refuse an address."""

    def refused(self, peer: str, why: str) -> None:
        """Handle a side that failed to prove the token."""


class Link(asyncio.Protocol):
    """One sealed connection. Made for each connection by the dialler's or listener's event loop."""

    def __init__(self, token: bytes, purpose: str, ends: LinkEnds, *, is_dialler: bool) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.received_at = time.monotonic()
        self.peer = "?"
        self.ends = ends
        self.gate: LinkGate | None = None
        self._handshake = Handshake(token, purpose, is_dialler=is_dialler)
        self._frames: SealedFrames | None = None
        self._transport: asyncio.Transport | None = None
        self._why = "the connection ended"
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """True from the end of the handshake to the end of the connection."""
        return self._frames is not None and self._transport is not None

    def send(self, message: LinkMessage) -> None:
        """Send a message; without effect on a connection that has ended."""
        self._write(_MESSAGE, _ENCODER.encode(message))

    def send_frames(self, epoch: int, data: bytes) -> None:
        """Send an engine's frames under an epoch; without effect on a connection that has ended."""
        self._write(_FRAMES, _EPOCH.pack(epoch), data)

    def abort(self, why: str) -> None:
        """End the connection at once, without sending what is pending. Idempotent."""
        if self._transport is not None:
            self._why = why
            self._transport.abort()

    def close(self, why: str) -> None:
        """Send why, then end the connection. Idempotent."""
        if self._transport is not None:
            self.send(Refused(why))
            self._why = why
            self._transport.close()

    async def run_pings(self, oldest_call_at: Callable[[], float | None]) -> None:
        """Send pings; end the connection after LOST_S of silence. For the front."""
        number = 0
        async for now in self._until_silent(LOST_S, PING_S / 2, "answer"):  # seen sooner than a ping later
            if number % 2 == 0:
                at = oldest_call_at()
                self.send(Ping(number // 2, None if at is None else now - at))
            number += 1

    async def watch_pings(self) -> None:
        """End the connection after LEASE_S of silence. For the agent."""
        async for _ in self._until_silent(LEASE_S, PING_S, "ping"):
            pass

    async def _until_silent(self, limit_s: float, pause_s: float, lack: str) -> AsyncIterator[float]:
        """Yield the time every `pause_s` while the connection is open; end it after `limit_s` of silence."""
        looked_at = self.received_at = time.monotonic()
        while self.is_open:
            now = time.monotonic()
            if now - looked_at > LATE_S + PING_S:
                self.received_at = now
            looked_at = now
            if now - self.received_at > limit_s:
                self.abort(f"no {lack} for {now - self.received_at:.1f} s")
                return
            yield now
            await asyncio.sleep(pause_s)

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) and name else "?"
        if self.gate is not None and not self.gate.may_begin(self.peer):
            self.abort("refused before the handshake")
            return
        self._timer = asyncio.get_running_loop().call_later(
            HANDSHAKE_LIMIT_S, self.abort, "the handshake took too long"
        )
        self._transport.write(self._handshake.begin())

    def data_received(self, data: bytes) -> None:
        """Take bytes of the handshake or of frames; end the connection if they are not the other side's."""
        self.received_at = time.monotonic()
        try:
            if self._frames is None:
                self._shake(data)
            else:
                self._take(self._frames, data)
        except SealError as error:
            if self._frames is None and self.gate is not None:
                self.gate.refused(self.peer, str(error))
            self.abort(str(error))
        except wire.WireError as error:
            self.abort(f"the other side sent what is no message: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end."""
        if self._transport is None:
            return
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        why = f"{self._why}: {exc}" if exc is not None else self._why
        if not self.opened.done():
            self.opened.set_exception(SealError(why))
            self.opened.exception()  # marked as retrieved: a listener does not wait for it
        self.ends.ended(self, why)

    def _shake(self, data: bytes) -> None:
        answer, frames = self._handshake.feed(data)
        assert self._transport is not None
        self._transport.write(answer)
        if frames is not None:
            self._frames = frames
            if self._timer is not None:
                self._timer.cancel()
            if not self.opened.done():
                self.opened.set_result(None)
            self._take(frames, b"")

    def _take(self, frames: SealedFrames, data: bytes) -> None:
        for body in frames.feed(data):
            if self._transport is None or self._transport.is_closing():
                return
            if body[:1] == _MESSAGE:
                self.ends.message(self, _decode(body))
            elif body[:1] == _FRAMES and len(body) > _EPOCH.size:
                self.ends.frames(self, _EPOCH.unpack_from(body, 1)[0], body[1 + _EPOCH.size :])
            else:
                raise wire.WireError("a frame of an unknown kind")

    def _write(self, *parts: bytes) -> None:
        if self._transport is None or self._frames is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort("the other side does not read")
            return
        with contextlib.suppress(RuntimeError):  # uvloop's, on a broken connection; its end follows
            self._transport.write(self._frames.seal(*parts))


def _decode(body: bytes) -> LinkMessage:
    try:
        return _DECODER.decode(memoryview(body)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise wire.WireError(str(error)) from None
