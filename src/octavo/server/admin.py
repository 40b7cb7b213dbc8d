"""The admin socket: a Unix socket for the operator, apart from the clients' port.

Owns: the socket, the check of the peer's user, the protocol (one JSON line per question, one per answer), bounds.
Does not: know what the verbs do.
Invariants: only this user and root get answers. A line that is too long or too slow, or a connection above the limit,
closes that connection only. A file at the path is replaced only if it is a socket of this user without a listener.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from octavo.config.spelling import unknown
from octavo.errors import ConfigError, OctavoError

Verb = Callable[[str], Awaitable[object]]

MAX_LINE_BYTES = 1 << 16
MAX_CONNECTIONS = 16
LINE_TIMEOUT_S = 30.0
VERB_TIMEOUT_S = 60.0
_log = logging.getLogger(__name__)


class AdminQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """One line from a client: a verb and its argument."""

    verb: str
    argument: str = ""


class AdminServer:
    """A server on the Unix socket at `path`."""

    def __init__(self, path: Path, verbs: Mapping[str, Verb]) -> None:
        self.path = path
        self._verbs = verbs
        self._server: asyncio.Server | None = None
        self._inode = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen on the socket. Raises ConfigError."""
        self._server = await asyncio.start_unix_server(self._serve, sock=bind(self.path), limit=MAX_LINE_BYTES)
        self._inode = self.path.lstat().st_ino

    async def close(self) -> None:
        """Stop answering and remove the socket's file. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:  # else another server has the path by now
                self.path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) <= MAX_CONNECTIONS and _is_own(writer.get_extra_info("socket")):
                while line := await _line(reader):
                    writer.write(msgspec.json.encode(await self._answer(line)) + b"\n")
                    await writer.drain()
        except (OSError, ValueError, TimeoutError, RuntimeError, asyncio.CancelledError):
            pass  # slow, overlong or closed connection (uvloop raises RuntimeError), or shutdown: send no answer
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, object]:
        try:
            ask = msgspec.json.decode(line, type=AdminQuestion)
        except msgspec.MsgspecError as error:
            return {"error": f'give {{"verb": ..., "argument": ...}} on a line: {error}'}
        verb = self._verbs.get(ask.verb)
        if verb is None:
            return {"error": unknown("verb", ask.verb[:64], self._verbs, f"give one of {', '.join(self._verbs)}")}
        try:
            async with asyncio.timeout(VERB_TIMEOUT_S):
                return {"ok": await verb(ask.argument)}
        except TimeoutError:
            return {"error": f"no answer within {VERB_TIMEOUT_S:g} s"}
        except OctavoError as error:
            return {"error": str(error)}
        except Exception:  # a bug in a verb is answered and logged; the socket stays open
            _log.exception("admin verb %s failed", ask.verb)
            return {"error": "internal error; see the server's log"}


def bind(path: Path) -> socket.socket:
    """Return a listening socket of mode 0600; replace a socket file without a listener. Raises ConfigError."""
    _clear(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--admin-socket {str(path)!r} cannot be had ({error.strerror or error})") from None
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener


def _clear(path: Path) -> None:
    """Remove a socket file of this user that no process listens to. Raises ConfigError for any other file."""
    try:
        status = path.lstat()
    except OSError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"--admin-socket {str(path)!r} is a file that is no socket; give another path")
    if status.st_uid != os.getuid():
        raise ConfigError(f"--admin-socket {str(path)!r} belongs to user {status.st_uid}; give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as error:
            raise ConfigError(f"--admin-socket {str(path)!r} cannot be had ({error})") from None
    raise ConfigError(f"--admin-socket {str(path)!r} is in use by a running server; give another path")


def _is_own(connection: socket.socket) -> bool:
    """Return True if the peer is this user or root. Without SO_PEERCRED, only the file's mode protects the socket."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, size))
    return uid in (0, os.getuid())


async def _line(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(LINE_TIMEOUT_S):
        return await reader.readline()
