"""Running servers: the arguments that name one, its admin socket, `octavo ps` and `octavo stop`.

A server is named by its model, pid, port or URL, or by the path of its admin socket. The records of the servers are in
server_registry.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import msgspec

from octavo.cli.flags import UsageError
from octavo.cli.server_registry import ServerRecord, find_servers, send_signal
from octavo.cli.terminal import align_columns, duration_text, reason_of, say
from octavo.config.setting import Number
from octavo.config.spelling import unknown
from octavo.errors import OctavoError
from octavo.machine import is_loopback, listener_of

ADMIN_TIMEOUT_S = 65.0  # longer than the server's own timeout
MAX_ANSWER_BYTES = 1 << 24
_READ_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # process, user, group: SO_PEERCRED, unix(7)
_STATUS_TIMEOUT_S = 2.0  # timeout of a status query by octavo ps
_DRAIN_TIMEOUT_S = 5.0  # timeout of the verb's answer, not of the drain
_POLL_S = 0.05
_PS_COLUMNS = ("PID", "URL", "MODEL", "STATE", "UPTIME", "API", "ENGINE", "EPOCH", "RESTARTS", "OPEN")


class AdminError(OctavoError):
    """The server did not answer, or refused the verb."""


# --- naming a server


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
    """Return True if the arguments name a server. Raises UsageError if they name two servers."""
    given = {"--server": args.server, "--url": args.url, "--socket": args.socket, "": getattr(args, "which", None)}
    named = [f"{flag} {word}".strip() for flag, word in given.items() if word is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} each name a server; give one of them")
    return bool(named)


def named_server(args: argparse.Namespace) -> ServerRecord:
    """Return the server that the arguments name, else this user's only server. Raises UsageError."""
    is_server_named(args)
    servers = find_servers()
    if args.socket is not None:
        other = ServerRecord(0, "", "", args.socket, 0.0)  # another user's server
        return next((server for server in servers if server.admin == args.socket), other)
    which = args.server if args.server is not None else getattr(args, "which", None)
    return choose(servers, which if args.url is None else full_url(args.url))


def named_url(args: argparse.Namespace) -> str | None:
    """Return the URL of the server that the arguments name; None if they name no server. Raises UsageError."""
    if not is_server_named(args):
        return None
    return full_url(args.url) if args.url is not None else named_server(args).url


def choose(servers: Sequence[ServerRecord], which: str | None) -> ServerRecord:
    """Return the server with this name, pid, port or URL; for None the only server. Raises UsageError."""
    if not servers:
        at = f" ({which})" if which is not None else ""
        raise UsageError(f"no server of this user runs here{at}; start one with: octavo serve")
    if which is None:
        matches = [server for server in servers if server.has_http] or list(servers)
    else:
        matches = [server for server in servers if _is_named(server, which)]
    if len(matches) == 1:
        return matches[0]
    known = ", ".join(f"{server.model} (pid {server.pid}, port {port_of(server.url)})" for server in matches or servers)
    if not matches:
        models = [server.model for server in servers]
        raise UsageError(unknown("server", str(which), models, f"running: {known}"))
    problem = "run here" if which is None else "have that name"
    raise UsageError(f"{len(matches)} servers {problem}; give a PORT: {known}")


def _is_named(server: ServerRecord, which: str) -> bool:
    if which in (str(server.pid), server.model) or (server.has_http and which == str(port_of(server.url))):
        return True
    return server.has_http and ":" in which and _is_same_listener(server.url, which)


def _is_same_listener(first: str, second: str) -> bool:
    """Return True if two URLs have the same listener. All names of the loopback interface are equal."""
    listeners = []
    for url in (first, second):
        host = urlsplit(full_url(url)).hostname or ""
        listeners.append(("loopback" if is_loopback(host) else host, port_of(url)))
    return listeners[0] == listeners[1]


def has_server_at(url: str) -> bool:
    """Return True if one of this user's servers on this machine has this URL."""
    return any(server.has_http and _is_same_listener(server.url, url) for server in find_servers())


def full_url(given: str) -> str:
    """Return a server's URL with a scheme and without a trailing slash. Raises UsageError."""
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


def client_key(given: str | None) -> str:
    """Return the API key to send to a server: `given`, else the first key of OCTAVO_API_KEY, else ""."""
    return given or os.environ.get("OCTAVO_API_KEY", "").split(",")[0]


def bearer_headers(given_key: str | None) -> dict[str, str]:
    """Return the HTTP headers that send a key; {} if there is no key."""
    key = client_key(given_key)
    return {"Authorization": f"Bearer {key}"} if key else {}


def refusal_text(status: int, body: bytes) -> str:
    """Return the message of an error body in OpenAI's format, or else the status."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {status}"


def port_in_use_message(host: str, port: int) -> str:
    """Return the message about a port in use, with the program that uses the port and the remedy."""
    free = next((other for other in range(port + 1, min(port + 100, 65536)) if _is_free(host, other)), 0)
    own = next((server for server in find_servers() if server.has_http and port_of(server.url) == port), None)
    if own is not None:
        return f"port {port} is used by octavo {own.model} (pid {own.pid}); octavo stop {port}, or --port {free}"
    listener = listener_of(port)
    user = f"is used by {listener[1]} (pid {listener[0]})" if listener is not None else "is in use"
    return f"port {port} {user}; give another, such as --port {free}"


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except OSError:
        return False


# --- the admin socket


class _AdminAnswer(msgspec.Struct):
    ok: Any = None
    error: str | None = None


_ANSWER = msgspec.json.Decoder(_AdminAnswer)  # made here: the first use of a Struct is not safe for threads


def call_admin(path: str, verb: str, argument: str = "", timeout_s: float = ADMIN_TIMEOUT_S) -> Any:
    """Send one verb to the admin socket at `path` and return its answer. Raises AdminError."""
    line = msgspec.json.encode({"verb": verb, "argument": argument}) + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            connection.sendall(line)
            answer = _ANSWER.decode(_read_line(connection))
    except (OSError, msgspec.MsgspecError) as error:
        raise _no_answer(path, error) from None
    if answer.error is not None:
        raise AdminError(answer.error)
    return answer.ok


def admin_pid(path: str) -> int | None:
    """Return the pid, in this pid namespace, of the process that listens on an admin socket; None if it is unknown.

    Raises AdminError.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(path)
            data = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
        except OSError as error:
            raise _no_answer(path, error) from None
    pid: int = _CREDENTIALS.unpack(data)[0]
    return pid


def _no_answer(path: str, error: Exception) -> AdminError:
    return AdminError(f"no answer on the admin socket {path} ({reason_of(error)})")


def _read_line(connection: socket.socket) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n") and len(data) < MAX_ANSWER_BYTES:
        part = connection.recv(_READ_BYTES)
        if not part:
            break
        data += part
    return bytes(data)


# --- octavo ps


def add_ps_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo ps`."""
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def run_ps(args: argparse.Namespace) -> int:
    """Print a line for each server of this user."""
    servers = [_status(record) for record in find_servers()]
    if args.json:
        print(json.dumps(servers))
    elif servers:
        print("\n".join(align_columns([_PS_COLUMNS, *chain.from_iterable(map(_ps_rows, servers))])))
    else:
        print("no server of this user runs here")
    return 0


def _status(record: ServerRecord) -> dict[str, Any]:
    """Return a server's record, with its status if the server answers."""
    status = msgspec.to_builtins(record)
    del status["started"]
    try:
        return {**status, **call_admin(record.admin, "status", timeout_s=_STATUS_TIMEOUT_S)}
    except AdminError:
        return {**status, "phase": "starting"}  # or the api process is restarting


def _ps_rows(server: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the row of a server, then the rows of its models, replicas and ranks, if there are several."""
    processes, engine = server.get("processes", {}), server.get("engine", {})
    replicas, models = engine.get("replicas", ()), engine.get("models", {})
    yield (
        str(server["pid"]),
        server["url"],
        server["model"],
        server["phase"] if server.get("trouble") is None else f"{server['phase']}: {server['trouble']}",
        duration_text(max(0.0, time.time() - server["begun"])),
        str(processes.get("api", "-")),
        str(processes.get("engine", "-")),
        str(engine.get("epoch", "-")),
        f"engine {engine.get('restarts', 0)}, api {server.get('api_restarts', 0)}" if engine else "-",
        str(server.get("open_requests", "-")),
    )
    for name, model in models.items():
        parts = model.get("engine", {})
        yield (
            "  model",
            "",
            name,
            f"{model['state']}: {model['failure']}" if "failure" in model else model["state"],
            *["", ""],
            str(model.get("processes", {}).get("engine", "-")),
            str(parts.get("epoch", "-")),
            f"engine {parts.get('restarts', 0)}",
            str(model["users"]),
        )
    for replica in replicas if len(replicas) > 1 else ():
        yield (
            f"  replica {replica['number']}",
            replica["where"],
            "",
            replica["state"],
            *["", ""],
            str(replica["pid"] or "-"),
            str(replica["epoch"] or "-"),
            f"engine {replica['restarts']}",
            str(replica["open_requests"]),
        )
    for replica in replicas:
        for rank in replica.get("ranks", ()):
            yield f"    rank {rank['rank']}", rank["where"], "", rank["state"], *["", ""], str(rank["pid"]), *[""] * 3


# --- octavo stop


def add_stop_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo stop`."""
    add_server_arguments(parser, is_positional=True)
    parser.add_argument("--all", action="store_true", help="stop every server of this user")
    parser.add_argument("--timeout", type=Number(float, 0), default=60.0, metavar="X", help="seconds to wait [60]")
    parser.add_argument("--now", action="store_true", help="fail open requests instead of waiting for them")


def run_stop(args: argparse.Namespace) -> int:
    """Stop the servers; return 0 if all have ended, 1 if one still runs after the timeout."""
    if args.all and is_server_named(args):
        raise UsageError("--all stops every server; leave the name out")
    servers = find_servers() if args.all else [named_server(args)]
    if any(not server.pid for server in servers):
        raise UsageError("--socket belongs to another user's server; its owner can stop it")
    end = time.monotonic() + args.timeout
    for server in servers:
        if not (args.now and _fail_requests(server)):
            _request_stop(server)
    running = _wait_for_end(servers, end)
    for server in servers:
        state = "is still draining; its open requests go on" if server in running else "ended"
        say(f"{server.model} at {server.url} (process {server.pid}) {state}")
    return 1 if running else 0


def _request_stop(server: ServerRecord) -> None:
    """Stop a server gracefully: by a signal, or over the admin socket if the pid is not valid on this machine."""
    if send_signal(server, signal.SIGTERM):
        return
    try:
        call_admin(server.admin, "drain", timeout_s=_DRAIN_TIMEOUT_S)
    except AdminError as error:
        say(f"process {server.pid} is not {server.model} at {server.url}, and was not stopped: {error}")


def _fail_requests(server: ServerRecord) -> bool:
    """Make a server fail its open requests and end; return True if it answered.

    Signals cannot do this: their effect depends on the number of earlier signals, and one too many kills the server
    without answers.
    """
    try:
        call_admin(server.admin, "drain", "now", timeout_s=_DRAIN_TIMEOUT_S)
    except AdminError as error:
        say(f"{server.model} at {server.url}: {error}; its open requests get the drain time")
        return False
    return True


def _wait_for_end(servers: Sequence[ServerRecord], end: float) -> list[ServerRecord]:
    """Wait until all servers have ended, or until `end`; return the servers that still run."""
    while True:
        known = {server.pid: server for server in find_servers()}
        running = [server for server in servers if known.get(server.pid) == server]
        if not running or time.monotonic() >= end:
            return running
        time.sleep(_POLL_S)
