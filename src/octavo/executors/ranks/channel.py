"""A connection between two ranks as a stream of frames: u32 length, one byte of kind, the body.

Owns: reading and writing whole frames, and their size cap. Between hosts the frames are sealed (octavo.sealing).
Does not: know what a body means (frames does), or notice a peer that is stopped (group does).
Invariant: one thread at a time sends, and one receives.
"""

from __future__ import annotations

import contextlib
import socket
import struct

from octavo.executors.ranks.frames import Kind, RankFrameError
from octavo.sealing import MAX_FRAME_BYTES, SealedSocket

PURPOSE = "octavo ranks 1"
_HEAD = struct.Struct("<IB")
_KINDS = tuple(bytes((kind,)) for kind in Kind)


class Channel:
    """One connection, sealed if `sealed` is given. `num_bytes` counts the bodies sent and received."""

    def __init__(self, connection: socket.socket, sealed: SealedSocket | None = None) -> None:
        self.num_bytes = 0
        self._connection = connection
        self._sealed = sealed
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Return the connection's descriptor, for selectors."""
        return self._connection.fileno()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Write a frame. Raises OSError, SealError."""
        self.num_bytes += len(body)
        if self._sealed is None:
            self._connection.sendall(_HEAD.pack(len(body), kind) + body)
        else:
            self._sealed.send(_KINDS[kind], body)

    def receive(self) -> tuple[Kind, bytes]:
        """Wait for a frame. Raises EOFError at the end of the connection, OSError, SealError, RankFrameError."""
        if self._sealed is not None:
            frame = self._sealed.receive()
            size, number, body = len(frame), frame[0] if frame else len(Kind), frame[1:]
        else:
            size, number = _HEAD.unpack(self._read(_HEAD.size))
            body = b"" if size > MAX_FRAME_BYTES else self._read(size)
        if size > MAX_FRAME_BYTES or number >= len(Kind):
            raise RankFrameError(f"a frame of kind {number} and {size} bytes between ranks; at most {MAX_FRAME_BYTES}")
        self.num_bytes += size
        return Kind(number), body

    def expect(self, kind: Kind) -> bytes:
        """Wait for a frame of this kind and return its body. Raises what `receive` raises."""
        found, body = self.receive()
        if found is not kind:
            raise RankFrameError(f"a frame {found.name} between ranks, {kind.name} was expected")
        return body

    def set_timeout(self, seconds: float | None) -> None:
        """Bound each later read and write; None = no bound."""
        self._connection.settimeout(seconds)

    def shutdown(self) -> None:
        """End the connection, from any thread: a read or write in progress ends too. Idempotent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def _read(self, size: int) -> bytes:
        data = self._connection.recv(size, socket.MSG_WAITALL) if size else b""  # nearly always the whole frame
        if len(data) == size:
            return data
        parts, missing = [data], size - len(data)
        while missing:
            part = self._connection.recv(missing)
            if not part:
                raise EOFError("the connection ended")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)
