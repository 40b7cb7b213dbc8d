"""`octavo stop [NAME|PID|PORT]`: end a server that runs here, and wait until its open requests are done."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence

from octavo.cli.admin_client import AdminError, ask
from octavo.cli.flags import UsageError
from octavo.cli.servers import (
    Record,
    add_server_arguments,
    find_servers,
    is_server_named,
    named_server,
    send_signal,
)
from octavo.cli.terminal import say

TIMEOUT_S = 60.0
_LOOK_S = 0.05
_HURRY_S = 5.0  # for the answer to drain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_server_arguments(parser, is_positional=True)
    parser.add_argument("--all", action="store_true", help="every server of this user")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="X", help=f"seconds to wait [{TIMEOUT_S:g}]"
    )
    parser.add_argument("--now", action="store_true", help="do not wait for open requests: they end with an error")


def run(args: argparse.Namespace) -> int:
    """Stop the servers; return 0 when they have ended, 1 if one still runs after the timeout."""
    if args.all and is_server_named(args):
        raise UsageError("--all ends every server; leave the name out")
    if not args.timeout >= 0:
        raise UsageError(f"--timeout is {args.timeout:g}; give 0 or more seconds")
    chosen = find_servers() if args.all else [named_server(args)]
    if any(not server.pid for server in chosen):
        raise UsageError("--socket is of no server of this user; its owner can stop it")
    end = time.monotonic() + args.timeout
    for server in chosen:
        if not (args.now and _hurry(server)):
            _tell(server)
    left = _wait(chosen, end)
    for server in chosen:
        state = "still drains; its open requests go on" if server in left else "ended"
        say(f"{server.model} at {server.url} (process {server.pid}) {state}")
    return 1 if left else 0


def _tell(server: Record) -> None:
    """Ask a server to end: by a signal, or over its admin socket if its pid is not valid on this machine."""
    if send_signal(server, signal.SIGTERM):
        return
    try:
        ask(server.admin, "drain", timeout_s=_HURRY_S)
    except AdminError as error:
        say(f"process {server.pid} is not {server.model} at {server.url}, and was left alone: {error}")


def _hurry(server: Record) -> bool:
    """Ask a server to fail its open requests and end; return True if it was heard.

    Not by signals: their number would depend on how many it already had, and one too many kills it without answers.
    """
    try:
        ask(server.admin, "drain", "now", timeout_s=_HURRY_S)
    except AdminError as error:
        say(f"{server.model} at {server.url}: {error}; its open requests get the drain time")
        return False
    return True


def _running(servers: Sequence[Record]) -> list[Record]:
    known = {server.pid: server for server in find_servers()}
    return [server for server in servers if known.get(server.pid) == server]


def _wait(servers: Sequence[Record], end: float) -> list[Record]:
    """Return the servers that still run at the end of the time."""
    while (left := _running(servers)) and time.monotonic() < end:
        time.sleep(_LOOK_S)
    return left
