"""Sealed frames between machines: a handshake that proves a shared secret, then frames with a keyed checksum.

Owns: the handshake's three messages, the keys of a connection, the frames' MAC and counter, the size caps. Works on
bytes, so that event loops and blocking sockets use the same code; `connect` is the blocking form.
Does not: encrypt (TLS beneath does), open connections, or know what frames contain.
Frame: `u32 length | body | 16 bytes of keyed BLAKE2b over counter and body`; handshake messages have no MAC.
Handshake: the listener sends a nonce, the dialler its nonce and proof, the listener its proof. A proof is HMAC-SHA256
over purpose, role and both nonces, so that it is of no use in another connection, role or purpose. The dialler proves
first: a stranger who dials learns nothing that depends on the secret.
Invariants: each direction has its own key. A changed, repeated, missing or reordered frame ends the connection.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Iterator
from hashlib import blake2b, sha256

from octavo.errors import EngineError

MIN_TOKEN_BYTES = 16
MAX_FRAME_BYTES = 64 * 2**20 + 1024  # an engine's largest frame with its header
MAX_HANDSHAKE_BYTES = 4096
HANDSHAKE_LIMIT_S = 5.0
_NONCE_BYTES = 32
_MAC_BYTES = 16
_PROTOCOL = b"octavo sealed frames 1"
_LENGTH = struct.Struct("<I")
_COUNTER = struct.Struct("<Q")
_READ_BYTES = 1 << 18


class SealError(EngineError):
    """The other side does not have the token, or bytes were changed on the way."""


class Handshake:
    """One side's part of the handshake, then the sealed frames of the connection.

    Pass received bytes to `feed`, and send what `begin` and `feed` append to `to_send`. `purpose` names the protocol of
    the frames: sides with different purposes refuse each other.
    """

    def __init__(self, token: bytes, purpose: str, *, is_dialler: bool) -> None:
        self._key = hmac.digest(token, _PROTOCOL, "sha256")
        self._purpose = purpose.encode()
        self._is_dialler = is_dialler
        self._nonce = os.urandom(_NONCE_BYTES)
        self._nonces = b""  # the listener's, then the dialler's
        self._buffer = bytearray()

    def begin(self) -> bytes:
        """Return the bytes to send before anything is received."""
        return b"" if self._is_dialler else _LENGTH.pack(len(_PROTOCOL) + _NONCE_BYTES) + _PROTOCOL + self._nonce

    def feed(self, data: bytes) -> tuple[bytes, SealedFrames | None]:
        """Take received bytes; return the bytes to send and, once both sides have proved the token, the frames.

        Raises SealError.
        """
        self._buffer += data
        if len(self._buffer) < _LENGTH.size:
            return b"", None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_HANDSHAKE_BYTES:
            raise SealError(f"a handshake of {length} bytes was announced; it has at most {MAX_HANDSHAKE_BYTES}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return b"", None
        body, rest = bytes(self._buffer[_LENGTH.size : end]), bytes(self._buffer[end:])
        self._buffer.clear()
        if not self._is_dialler:
            return self._take_proof(body, rest)
        if self._nonces:
            self._check(body, b"listener")
            return b"", self._frames(rest)
        return self._take_challenge(body, rest), None

    def _take_challenge(self, body: bytes, rest: bytes) -> bytes:
        """Return the dialler's nonce and proof."""
        if len(body) != len(_PROTOCOL) + _NONCE_BYTES or not body.startswith(_PROTOCOL):
            raise SealError("the other side does not speak this version of Octavo's protocol between machines")
        if rest:
            raise SealError("the other side sent more than its challenge")
        self._nonces = body[len(_PROTOCOL) :] + self._nonce
        answer = self._nonce + self._proof(b"dialler")
        return _LENGTH.pack(len(answer)) + answer

    def _take_proof(self, body: bytes, rest: bytes) -> tuple[bytes, SealedFrames]:
        """Check the dialler's proof; return the listener's, and the frames."""
        self._nonces = self._nonce + body[:_NONCE_BYTES]
        self._check(body[_NONCE_BYTES:], b"dialler")
        proof = self._proof(b"listener")
        return _LENGTH.pack(len(proof)) + proof, self._frames(rest)

    def _check(self, proof: bytes, role: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(role)):
            raise SealError("the other side has another token (OCTAVO_FLEET_TOKEN, --fleet-token-file), or none")

    def _proof(self, role: bytes) -> bytes:
        return self._derive(b"proof of the " + role)

    def _derive(self, label: bytes) -> bytes:
        """Return 32 bytes that depend on the token, the purpose, both nonces and a label."""
        parts = (label, self._purpose, self._nonces)
        return hmac.digest(self._key, b"".join(_LENGTH.pack(len(part)) + part for part in parts), sha256)

    def _frames(self, rest: bytes) -> SealedFrames:
        keys = self._derive(b"frames of the dialler"), self._derive(b"frames of the listener")
        ours, theirs = keys if self._is_dialler else keys[::-1]
        return SealedFrames(ours, theirs, rest)


class SealedFrames:
    """The frames of one connection after the handshake, in both directions."""

    def __init__(self, ours: bytes, theirs: bytes, received: bytes = b"") -> None:
        self._ours, self._theirs = ours, theirs
        self._num_sealed = self._num_opened = 0
        self._buffer = bytearray(received)

    def seal(self, *parts: bytes) -> bytes:
        """Return the next frame to send, whose body is the parts one after another. Raises SealError if it is large."""
        body = b"".join(parts)
        if len(body) > MAX_FRAME_BYTES:
            raise SealError(f"a frame of {len(body)} bytes; frames have at most {MAX_FRAME_BYTES}")
        mac = _mac(self._ours, self._num_sealed, body)
        self._num_sealed += 1
        return _LENGTH.pack(len(body)) + body + mac

    def feed(self, data: bytes = b"") -> Iterator[bytes]:
        """Add received bytes and yield the complete bodies. Raises SealError; the connection is of no use then."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise SealError(f"a frame of {length} bytes was announced; frames have at most {MAX_FRAME_BYTES}")
                end = start + _LENGTH.size + length
                if len(self._buffer) < end + _MAC_BYTES:
                    break
                body = bytes(self._buffer[start + _LENGTH.size : end])
                mac = bytes(self._buffer[end : end + _MAC_BYTES])
                if not hmac.compare_digest(mac, _mac(self._theirs, self._num_opened, body)):
                    raise SealError("a frame was changed, repeated or left out on the way")
                self._num_opened += 1
                start = end + _MAC_BYTES
                yield body
        finally:
            del self._buffer[:start]


def _mac(key: bytes, counter: int, body: bytes) -> bytes:
    state = blake2b(_COUNTER.pack(counter), key=key, digest_size=_MAC_BYTES)
    state.update(body)
    return state.digest()


class SealedSocket:
    """Sealed frames over a blocking socket, for one thread that sends and one that receives."""

    def __init__(self, connection: socket.socket, frames: SealedFrames) -> None:
        self._connection = connection
        self._frames = frames
        self._bodies: Iterator[bytes] = frames.feed()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._connection.fileno()

    def send(self, *parts: bytes) -> None:
        """Send one frame. Raises OSError."""
        self._connection.sendall(self._frames.seal(*parts))

    def receive(self) -> bytes:
        """Wait for the next frame's body. Raises SealError, EOFError, OSError (TimeoutError if a timeout is set)."""
        while (body := next(self._bodies, None)) is None:
            data = self._connection.recv(_READ_BYTES)
            if not data:
                raise EOFError("the connection ended")
            self._bodies = self._frames.feed(data)
        return body

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._connection.close()


def connect(connection: socket.socket, token: bytes, purpose: str, *, is_dialler: bool) -> SealedSocket:
    """Do the handshake on a connected socket, within HANDSHAKE_LIMIT_S. Raises SealError, and closes it then."""
    handshake, until = Handshake(token, purpose, is_dialler=is_dialler), time.monotonic() + HANDSHAKE_LIMIT_S
    timeout = connection.gettimeout()
    try:
        connection.settimeout(HANDSHAKE_LIMIT_S)
        connection.sendall(handshake.begin())
        while True:
            connection.settimeout(max(until - time.monotonic(), 1e-3))
            data = connection.recv(MAX_HANDSHAKE_BYTES)
            if not data:
                raise SealError("the other side ended the connection during the handshake; compare both tokens")
            answer, frames = handshake.feed(data)
            connection.sendall(answer)
            if frames is not None:
                connection.settimeout(timeout)
                return SealedSocket(connection, frames)
    except OSError as error:
        connection.close()
        raise SealError(f"the handshake failed: {error}") from None
    except SealError:
        connection.close()
        raise
