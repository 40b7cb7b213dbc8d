"""The servers that this user runs on this machine: a folder with a record for each, and the arguments that name one.

Owns: the folder of a server (mode 0700: record, admin socket), a second one for what its processes write all the time,
finding the servers that live, removing what dead ones left, which server a command line means.
Does not: talk to a server (see admin_client). Invariant: a server holds a lock on its record as long as it lives, so a
record without a lock is stale, whatever became of its process or of the process's number.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from octavo.cli.flags import UsageError
from octavo.config.spelling import unknown
from octavo.engine.scratch import scratch_root
from octavo.errors import ConfigError
from octavo.machine import listener_of
from octavo.server.listener import is_loopback

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
        other = Record(0, "", "", args.socket, 0.0)  # of another user
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
    """Return the one server that `which` means, the only one for None. Raises UsageError."""
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
    """Return the message about a port that is in use: who has it, and what to do."""
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
    """Return True if two URLs lead to the same listener: every name of this machine's loopback is one."""
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
