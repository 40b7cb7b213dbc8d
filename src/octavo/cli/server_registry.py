"""The registry of this user's servers on this machine: one folder with a record for each server.

Owns: a server's folder (mode 0700, with the record and the admin socket); finding running servers; removing the folders
of dead servers; signals. Does not: know which server a command line names, or query one (servers.py does).
Invariants: a server holds a lock on its record while it runs. A folder is removed only if its record proves (by name,
inode and owner) that a server made it. Only the server's own files are removed; a folder with other files stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from octavo.cli.flags import UsageError
from octavo.errors import ConfigError

RUN_DIR = "OCTAVO_RUN_DIR"
MAX_SOCKET_PATH = 100  # bytes; the system's limit is 104 or 108
_RECORD = "server.json"
_UNLOCKED = "server.new"
_ADMIN = "admin.sock"
_FORMAT = "octavo-server-1"


class ServerRecord(msgspec.Struct, frozen=True, rename={"started_at": "begun", "start_ticks": "started"}):
    """A server's record for other commands. `started_at` is in seconds since 1970.

    `start_ticks` distinguishes the process from a later one with the same pid; None if the system does not report it.
    """

    pid: int
    url: str
    model: str
    admin: str
    started_at: float
    start_ticks: str | None = None

    @property
    def has_http(self) -> bool:
        """False for an engine that serves a front on another machine: its URL is join://FRONT or offer://ADDRESS."""
        return self.url.startswith("http")


class _Proof(msgspec.Struct, frozen=True):
    """The proof that a server made a folder: the folder's name and inode."""

    format: str
    name: str
    inode: int


class _RecordFile(msgspec.Struct, frozen=True, rename={"proof": "made"}):
    """The contents of server.json; `server` is None until the server has opened its port."""

    proof: _Proof
    server: ServerRecord | None = None


_RECORD_FILES = msgspec.json.Decoder(_RecordFile)  # made here: the first use of a Struct is not safe for threads


def run_folder() -> Path:
    """Return the folder of this user's servers: $OCTAVO_RUN_DIR, else in $XDG_RUNTIME_DIR, else in the cache folder."""
    if given := os.environ.get(RUN_DIR):
        return Path(given).expanduser()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "octavo"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "octavo" / "run"


class ServerFolder:
    """The folder of this process's server."""

    def __init__(self, path: Path) -> None:
        """Fill a new folder. The record is renamed into place last, after it is locked and complete."""
        self.path = path
        self._proof = _Proof(_FORMAT, path.name, path.stat().st_ino)
        self._lock = os.open(path / _UNLOCKED, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._write(None)
            (path / _UNLOCKED).rename(path / _RECORD)
        except OSError:  # the disk is full
            self.remove()
            raise

    def publish(self, record: ServerRecord) -> None:
        """Write this server's record, so that other commands find the server."""
        self._write(record)

    def remove(self) -> None:
        """Remove the folder, and release the lock."""
        folder = _open_folder(self.path)
        if folder is not None:
            _remove(self.path, folder)
            os.close(folder)
        os.close(self._lock)

    def admin_path(self, given: str | None) -> Path:
        """Return the admin socket's path: `given`, else a path in this folder. Raises ConfigError if it is too long."""
        path = Path(given).expanduser().absolute() if given else self.path / _ADMIN
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"the admin socket's path {str(path)!r} has more than {MAX_SOCKET_PATH} bytes; "
                "give a shorter one with --admin-socket"
            )
        return path

    def _write(self, server: ServerRecord | None) -> None:
        os.pwrite(self._lock, msgspec.json.encode(_RecordFile(self._proof, server)), 0)


@contextlib.contextmanager
def open_server_folder() -> Iterator[ServerFolder]:
    """Make a folder for this process's server, and remove it at the end. Raises ConfigError."""
    root = run_folder()
    try:
        _make_root(root)
        folder = ServerFolder(Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root)))
    except OSError as error:
        raise ConfigError(f"cannot make a folder in {root} ({error.strerror}); set {RUN_DIR} to another") from None
    try:
        yield folder
    finally:
        folder.remove()


def _make_root(folder: Path) -> None:
    """Make the folder of this user's servers. Raises OSError; ConfigError if other users have access to the folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid():
        raise ConfigError(f"the folder of servers, {folder}, belongs to user {status.st_uid}; set {RUN_DIR} to another")
    if mode & 0o077:
        raise ConfigError(
            f"the folder of servers, {folder}, is open to other users (mode {mode:04o}); "
            f"chmod 700 it, or set {RUN_DIR} to a folder that does not exist yet"
        )


def find_servers() -> list[ServerRecord]:
    """Return the running servers, oldest first; remove the folders of dead ones."""
    try:
        paths = sorted(run_folder().iterdir())
    except OSError:
        return []
    records = [record for path in paths if (record := _read_folder(path)) is not None]
    return sorted(records, key=lambda record: record.started_at)


def _read_folder(path: Path) -> ServerRecord | None:
    """Return the record of a running server; remove the folder of a dead one. Other folders are unchanged."""
    folder = _open_folder(path)
    if folder is None:
        return None
    try:
        for name in (_RECORD, _UNLOCKED):
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # do not wait for a pipe
                file = os.open(name, flags, dir_fd=folder)
                try:
                    return _read_record(path, folder, file)
                finally:
                    os.close(file)
    finally:
        os.close(folder)
    return None


def _read_record(path: Path, folder: int, file: int) -> ServerRecord | None:
    """Return the record if its server runs. Otherwise remove the folder if the record proves that a server made it."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        return None
    try:
        contents = _RECORD_FILES.decode(os.read(file, 1 << 16))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    proof = contents.proof
    if (proof.format, proof.name) != (_FORMAT, path.name) or not _is_own_folder(folder, proof.inode):
        return None
    if not _can_lock(file):
        return contents.server
    _remove(path, folder)
    return None


def _remove(path: Path, folder: int) -> None:
    """Remove a server's folder. If it holds other files, the folder and those files stay."""
    for name, is_kind in ((_ADMIN, stat.S_ISSOCK), (_UNLOCKED, stat.S_ISREG), (_RECORD, stat.S_ISREG)):
        with contextlib.suppress(OSError):
            if is_kind(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
    with contextlib.suppress(OSError):
        path.rmdir()


def _open_folder(path: Path) -> int | None:
    """Open a folder; return None if the path is not a folder. A link to a folder is not opened."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None


def _is_own_folder(folder: int, inode: int) -> bool:
    """Return True if an open folder belongs to this user, is closed to others and has this inode."""
    status = os.fstat(folder)
    return status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077 and status.st_ino == inode


def _can_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def process_start_ticks(pid: int) -> str | None:
    """Return a process's start time in ticks, or None. It distinguishes processes with the same pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]  # the name in brackets may contain brackets


def send_signal(server: ServerRecord, number: int) -> bool:
    """Signal a server; return False if its pid does not (or no longer) belong to its process on this machine.

    The lock shows that a server runs, but it may run in a container with its own pid namespace. Raises UsageError.
    """
    try:
        if sys.platform != "linux" or server.start_ticks is None:
            os.kill(server.pid, number)
            return True
        process = os.pidfd_open(server.pid)  # refers to this one process, even if its pid is reused
        try:
            if process_start_ticks(server.pid) != server.start_ticks:
                return False
            signal.pidfd_send_signal(process, number)
        finally:
            os.close(process)
    except ProcessLookupError:
        return False
    except PermissionError:
        raise UsageError(f"process {server.pid} belongs to another user") from None
    return True
