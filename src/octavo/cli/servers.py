"""The servers that this user runs on this machine: a folder with a record for each.

Owns: the folder of a server (mode 0700: record, admin socket), a second one for what its processes write all the time,
finding the servers that live, removing what dead ones left.
Does not: talk to a server (see admin_client). Invariant: a server holds a lock on its record as long as it lives, so a
record without a lock is stale, whatever became of its process or of the process's number.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from octavo.engine.scratch import scratch_root
from octavo.errors import ConfigError

RUN_DIR = "OCTAVO_RUN_DIR"
MAX_SOCKET_PATH = 100  # bytes; the system's bound is 104 or 108
_RECORD = "server.json"
_UNLOCKED = "server.new"
_ADMIN = "admin.sock"
_SCRATCH = "scratch"


class Record(msgspec.Struct, frozen=True):
    """What is known of a server from outside. `begun` is seconds since 1970, for people."""

    pid: int
    url: str
    model: str
    admin: str
    begun: float


def run_folder() -> Path:
    """The folder of this user's servers: $OCTAVO_RUN_DIR, else one below $XDG_RUNTIME_DIR or the cache folder."""
    if given := os.environ.get(RUN_DIR):
        return Path(given).expanduser()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "octavo"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "octavo" / "run"


class Home:
    """The folder of this process's server, and the scratch folder of its processes."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.scratch = Path(tempfile.mkdtemp(prefix="octavo-", dir=scratch_root()))
        (path / _SCRATCH).symlink_to(self.scratch)  # for whoever clears up behind a server that was killed

    def clear_scratch(self) -> None:
        """Remove what a process left that was killed."""
        for left in self.scratch.iterdir():
            shutil.rmtree(left, ignore_errors=True)

    def record(self, record: Record) -> None:
        """Let others find this server."""
        os.pwrite(self._lock, msgspec.json.encode(record), 0)

    def admin_path(self, given: str | None) -> Path:
        """Where the admin socket is: as given, else here. Raises ConfigError for a path that is too long."""
        path = Path(given).expanduser().absolute() if given else self.path / _ADMIN
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"the admin socket's path {str(path)!r} has more than {MAX_SOCKET_PATH} bytes; "
                "give a shorter one with --admin-socket"
            )
        return path


@contextlib.contextmanager
def own_home() -> Iterator[Home]:
    """Make a folder for this process's server, gone at the end. Raises ConfigError."""
    root = run_folder()
    try:
        _make_private(root)
        path = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root))
        lock = os.open(path / _UNLOCKED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (path / _UNLOCKED).rename(path / _RECORD)  # so that nobody ever sees it without its lock
        home = Home(path, lock)
    except OSError as error:
        raise ConfigError(f"no folder can be made in {root} ({error.strerror}); set {RUN_DIR}") from None
    try:
        yield home
    finally:
        _remove(path)
        os.close(lock)


def find_servers() -> list[Record]:
    """The running servers, oldest first; what dead ones left is removed."""
    found = []
    for folder in _folders():
        record = _read(folder)
        if record is not None:
            found.append(record)
    return sorted(found, key=lambda record: record.begun)


def _folders() -> list[Path]:
    try:
        return sorted(path for path in run_folder().iterdir() if path.is_dir())
    except OSError:
        return []


def _read(folder: Path) -> Record | None:
    """The record of a live server. Removes the folder of a dead one."""
    try:
        fd = os.open(folder / _RECORD, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # it is starting, or ending
    try:
        data = os.read(fd, 1 << 16)
        if _can_lock(fd):
            _remove(folder)
            return None
        return msgspec.json.decode(data, type=Record)
    except msgspec.MsgspecError:
        return None
    finally:
        os.close(fd)


def _remove(folder: Path) -> None:
    """Remove a server's folder, and its scratch folder."""
    with contextlib.suppress(OSError):
        scratch = (folder / _SCRATCH).readlink()
        if scratch.name.startswith("octavo-"):
            shutil.rmtree(scratch, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _can_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_private(folder: Path) -> None:
    """Make the folder for this user alone. Raises OSError, also for one that others may enter."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(1, "it belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)
