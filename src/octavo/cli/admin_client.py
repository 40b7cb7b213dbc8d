"""Client of a running server's admin socket.

Owns: one question and its answer. Does not: find the socket (servers does), or know the verbs.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from octavo.cli.terminal import reason_of
from octavo.errors import OctavoError

TIMEOUT_S = 65.0  # above the server's own bound
_READ_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 24
_CREDENTIALS = struct.Struct("3i")  # process, user, group: SO_PEERCRED, unix(7)


class AdminError(OctavoError):
    """The server did not answer, or refused."""


class _Answer(msgspec.Struct):
    ok: Any = None
    error: str | None = None


def ask(path: str, verb: str, argument: str = "", timeout_s: float = TIMEOUT_S) -> Any:
    """Send one verb and return its answer. Raises AdminError."""
    line = msgspec.json.encode({"verb": verb, "argument": argument}) + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            connection.sendall(line)
            answer = msgspec.json.decode(_read_line(connection), type=_Answer)
    except (OSError, msgspec.MsgspecError) as error:
        raise AdminError(f"no answer on the admin socket {path} ({reason_of(error)})") from None
    if answer.error is not None:
        raise AdminError(answer.error)
    return answer.ok


def peer_of(path: str) -> int | None:
    """Return the pid, as seen here, of the process that listens on an admin socket.

    None if the system does not report it.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(path)
            data = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
        except OSError as error:
            raise AdminError(f"no answer on the admin socket {path} ({reason_of(error)})") from None
    number: int = _CREDENTIALS.unpack(data)[0]
    return number


def _read_line(connection: socket.socket) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n") and len(data) < MAX_ANSWER_BYTES:
        part = connection.recv(_READ_BYTES)
        if not part:
            break
        data += part
    return bytes(data)
