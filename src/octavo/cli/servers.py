"""The servers that this user runs on this machine: a folder with a record for each, and the arguments that name one.

Owns: the folder of a server (mode 0700: record, admin socket), finding the servers that run, removing what dead ones
left, signals, which server a command line means.
Does not: talk to a server (see admin_client).
Invariants: a server holds a lock on its record as long as it lives. A folder is removed only where its record proves
that a server made it (name, inode, owner), and then file by file: any other file and folder stays as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from octavo.cli.flags import UsageError
from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.machine import listener_of
from octavo.server.listener import is_loopback

RUN_DIR = "OCTAVO_RUN_DIR"
MAX_SOCKET_PATH = 100  # bytes; the system's bound is 104 or 108
_RECORD = "server.json"
_UNLOCKED = "server.new"
_ADMIN = "admin.sock"
_FORMAT = "octavo-server-1"


class Record(msgspec.Struct, frozen=True):
    """What a server writes about itself for other commands. `begun` is seconds since 1970.

    `started` tells the process from a later one with the same pid; None where the system does not report it.
    """

    pid: int
    url: str
    model: str
    admin: str
    begun: float
    started: str | None = None


class _Made(msgspec.Struct, frozen=True):
    """The proof that a server made a folder: the folder's name and inode."""

    format: str
    name: str
    inode: int


class _File(msgspec.Struct, frozen=True):
    """The contents of server.json; `server` is None until the server has opened its port."""

    made: _Made
    server: Record | None = None


def run_folder() -> Path:
    """Return the folder of this user's servers: $OCTAVO_RUN_DIR, else one in $XDG_RUNTIME_DIR or the cache folder."""
    if given := os.environ.get(RUN_DIR):
        return Path(given).expanduser()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "octavo"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "octavo" / "run"


class Home:
    """The folder of this process's server."""

    def __init__(self, path: Path) -> None:
        """Fill a new folder. The record is renamed into place last, once it is locked and complete."""
        self.path = path
        self._made = _Made(_FORMAT, path.name, path.stat().st_ino)
        self._lock = os.open(path / _UNLOCKED, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._write(None)
            (path / _UNLOCKED).rename(path / _RECORD)
        except OSError:  # the disk is full
            self.remove()
            raise

    def record(self, record: Record) -> None:
        """Publish this server's record, so that other commands find it."""
        self._write(record)

    def remove(self) -> None:
        """Remove the folder, and release the lock."""
        folder = _open_folder(self.path)
        if folder is not None:
            _remove(self.path, folder)
            os.close(folder)
        os.close(self._lock)

    def _write(self, server: Record | None) -> None:
        os.pwrite(self._lock, msgspec.json.encode(_File(self._made, server)), 0)

    def admin_path(self, given: str | None) -> Path:
        """Return the admin socket's path: `given`, else one in this folder. Raises ConfigError if it is too long."""
        path = Path(given).expanduser().absolute() if given else self.path / _ADMIN
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"the admin socket's path {str(path)!r} has more than {MAX_SOCKET_PATH} bytes; "
                "give a shorter one with --admin-socket"
            )
        return path


@contextlib.contextmanager
def own_home() -> Iterator[Home]:
    """Make a folder for this process's server, and remove it at the end. Raises ConfigError."""
    root = run_folder()
    try:
        _make_root(root)
        home = Home(Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root)))
    except OSError as error:
        raise ConfigError(f"no folder can be made in {root} ({error.strerror}); set {RUN_DIR}") from None
    try:
        yield home
    finally:
        home.remove()


def find_servers() -> list[Record]:
    """Return the running servers, oldest first; remove the folders of dead ones."""
    try:
        paths = sorted(run_folder().iterdir())
    except OSError:
        return []
    found = [record for path in paths if (record := _look(path)) is not None]
    return sorted(found, key=lambda record: record.begun)


def process_start(pid: int) -> str | None:
    """Return a process's start time in ticks, which tells it from others with the same pid; None if it is unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]  # the name in brackets may hold anything


def send_signal(server: Record, number: int) -> bool:
    """Signal a server; return False if its pid is not (or no longer) that of its process here.

    The lock shows that a server lives, not where: one in a container has its own pid namespace. Raises UsageError.
    """
    try:
        if sys.platform != "linux" or server.started is None:
            os.kill(server.pid, number)
            return True
        process = os.pidfd_open(server.pid)  # refers to this one process, even if its pid is reused
        try:
            if process_start(server.pid) != server.started:
                return False
            signal.pidfd_send_signal(process, number)
        finally:
            os.close(process)
    except ProcessLookupError:
        return False
    except PermissionError:
        raise UsageError(f"process {server.pid} belongs to another user") from None
    return True


def add_server_arguments(group: Any, *, is_positional: bool = False, default: str = "the only one") -> None:
    """Add the arguments that name a server: NAME|PID|PORT, as a word or as --server, and --url."""
    text = f"a server here, as octavo ps lists it [{default}]"
    if is_positional:
        group.add_argument("which", nargs="?", metavar="NAME|PID|PORT", help=text)
    group.add_argument("--server", metavar="NAME|PID|PORT", help=argparse.SUPPRESS if is_positional else text)
    group.add_argument("--url", metavar="URL", help="the same by its URL, such as 127.0.0.1:8000")
    group.add_argument("--base-url", dest="url", help=argparse.SUPPRESS)
    group.add_argument("--socket", metavar="PATH", help=argparse.SUPPRESS)  # its admin socket


def is_server_named(args: argparse.Namespace) -> bool:
    """Return True if the arguments name a server. Raises UsageError if they name two."""
    given = {"--server": args.server, "--url": args.url, "--socket": args.socket, "": getattr(args, "which", None)}
    named = [f"{flag} {word}".strip() for flag, word in given.items() if word is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} each name a server; give one of them")
    return bool(named)


def named_server(args: argparse.Namespace) -> Record:
    """Return the server that the arguments name, else the only one here. Raises UsageError."""
    is_server_named(args)
    servers = find_servers()
    if args.socket is not None:
        other = Record(0, "", "", args.socket, 0.0)  # another user's server
        return next((server for server in servers if server.admin == args.socket), other)
    which = args.server if args.server is not None else getattr(args, "which", None)
    return choose(servers, which if args.url is None else full_url(args.url))


def named_url(args: argparse.Namespace) -> str | None:
    """Return the URL of the server that the arguments name, None where they name none. Raises UsageError."""
    if not is_server_named(args):
        return None
    return full_url(args.url) if args.url is not None else named_server(args).url


def server_at(url: str) -> Record | None:
    """Return this user's server at a URL, if there is one."""
    return next((server for server in find_servers() if _is_same_place(server.url, url)), None)


def choose(servers: Sequence[Record], which: str | None) -> Record:
    """Return the one server that `which` means, for None the only one. Raises UsageError."""
    if not servers:
        at = f" ({which})" if which is not None else ""
        raise UsageError(f"no server of this user runs here{at}; start one with: octavo serve")
    found = [server for server in servers if which is None or _is_meant(server, which)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{server.model} (pid {server.pid}, port {port_of(server.url)})" for server in found or servers)
    if not found:
        models = [server.model for server in servers]
        raise UsageError(unknown("server", str(which), models, f"running: {known}"))
    raise UsageError(f"{len(found)} servers {'run here' if which is None else 'have that name'}; give a PORT: {known}")


def who_has(host: str, port: int) -> str:
    """Return the message about a port in use: which program has it, and the remedy."""
    free = next((other for other in range(port + 1, min(port + 100, 65536)) if _is_free(host, other)), 0)
    own = next((server for server in find_servers() if port_of(server.url) == port), None)
    if own is not None:
        return f"port {port} is used by octavo {own.model} (pid {own.pid}); octavo stop {port}, or --port {free}"
    other = listener_of(port)
    user = f"is used by {other[1]} (pid {other[0]})" if other is not None else "is in use"
    return f"port {port} {user}; give another, such as --port {free}"


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except OSError:
        return False


def _is_meant(server: Record, which: str) -> bool:
    if which in (str(server.pid), server.model, str(port_of(server.url))):
        return True
    return ":" in which and _is_same_place(server.url, which)


def _is_same_place(first: str, second: str) -> bool:
    """Return True if two URLs lead to the same listener; all names of this machine's loopback are equal."""
    places = []
    for url in (first, second):
        host = urlsplit(full_url(url)).hostname or ""
        places.append(("loopback" if is_loopback(host) else host, port_of(url)))
    return places[0] == places[1]


def full_url(given: str) -> str:
    """Return a server's URL with its scheme, without a last slash. Raises UsageError."""
    url = (given if "://" in given else f"http://{given}").rstrip("/")
    try:
        is_url = urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname and port_of(url) > 0
    except ValueError:
        is_url = False
    if not is_url:
        raise UsageError(f"--url is {given!r}; give a server's URL, such as http://127.0.0.1:8000")
    return url


def port_of(url: str) -> int:
    """Return the port of a URL. Raises ValueError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    return parts.port if parts.port is not None else 443 if parts.scheme == "https" else 80


def _look(path: Path) -> Record | None:
    """Return the record of a live server; remove the folder of a dead one. Anything else stays as it is."""
    folder = _open_folder(path)
    if folder is None:
        return None
    try:
        for name in (_RECORD, _UNLOCKED):
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # do not wait for a pipe
                file = os.open(name, flags, dir_fd=folder)
                try:
                    return _read(path, folder, file)
                finally:
                    os.close(file)
    finally:
        os.close(folder)
    return None


def _read(path: Path, folder: int, file: int) -> Record | None:
    """Return the record if its server lives; else remove the folder, which the record proves to be a server's."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        return None
    try:
        found = msgspec.json.decode(os.read(file, 1 << 16), type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    made = found.made
    if (made.format, made.name) != (_FORMAT, path.name) or not _is_own_folder(folder, made.inode):
        return None
    if not _can_lock(file):
        return found.server
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
    """Open a folder to read and clean up; return None for anything else, a link to a folder included."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None


def _is_own_folder(folder: int, inode: int) -> bool:
    """Return True if an open folder is this user's, closed to others, and has that inode."""
    status = os.fstat(folder)
    return status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077 and status.st_ino == inode


def _can_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_root(folder: Path) -> None:
    """Make the folder of all servers for this user alone. Raises OSError, ConfigError for one that others may enter."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid():
        raise ConfigError(f"the folder of servers, {folder}, belongs to user {status.st_uid}; set {RUN_DIR} to another")
    if mode & 0o077:
        raise ConfigError(
            f"the folder of servers, {folder}, is open to other users (mode {mode:04o}); "
            f"chmod 700 it, or set {RUN_DIR} to a folder that is not there yet"
        )
