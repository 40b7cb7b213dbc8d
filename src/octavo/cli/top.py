"""`octavo top [NAME|PID|PORT]`: a running server at a glance, in the terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live

from octavo.cli.admin_client import AdminError, ask
from octavo.cli.flags import UsageError
from octavo.cli.servers import Record, add_server_arguments, find_servers, named_server
from octavo.cli.top_figures import Figures
from octavo.cli.top_screen import View, screen

INTERVALS_S = (0.1, 60.0)
TIMEOUT_S = 5.0
MAX_POLLS = 50  # in one refresh, to catch up with the engine
_PAGE = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_server_arguments(parser, is_positional=True)
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks [1]")
    parser.add_argument("--once", action="store_true", help="print once, without taking the terminal over")
    parser.add_argument("--json", action="store_true", help="print everything shown as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Show the server until q; return 1 if it ended meanwhile."""
    least, most = INTERVALS_S
    if not least <= args.interval <= most:
        raise UsageError(f"--interval is {args.interval:g}; give {least:g} to {most:g} seconds")
    source = WatchedServer.of(named_server(args))
    if args.json:
        print(json.dumps(source.look()))
        return 0
    if args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        console = Console(highlight=False)
        console.print(screen(source.look(), View(is_live=False), console.width, console.height))
        return 0
    return _show(source, args.interval)


class WatchedServer:
    """A server queried over its admin socket. `is_there` returns True if a server that did not answer still runs."""

    def __init__(self, path: str, name: str = "", is_there: Callable[[], bool] = lambda: False) -> None:
        self.name = name or f"the server at {path}"
        self.is_there = is_there
        self._path = path
        self._figures = Figures()
        self._cursor = ""
        self._last: dict[str, Any] = {"status": {}}

    @classmethod
    def of(cls, server: Record) -> WatchedServer:
        """Return a watch on a server that was found, or on another user's."""
        if not server.pid:
            return cls(server.admin)
        name = f"{server.model} at {server.url} (process {server.pid})"
        return cls(server.admin, name, lambda: any(known.pid == server.pid for known in find_servers()))

    def look(self) -> dict[str, Any]:
        """Fetch what is new and return the figures. Raises AdminError if there is no answer."""
        answer = ask(self._path, "top", self._cursor, TIMEOUT_S)
        self._last = answer
        self._read(answer.get("frames"))
        for _ in range(MAX_POLLS):
            if not (answer.get("frames") or {}).get("more"):
                break
            answer = {"frames": ask(self._path, "frames", self._cursor, TIMEOUT_S)}
            self._read(answer["frames"])
        return self._figures.snapshot(self._last)

    def without(self, trouble: str) -> dict[str, Any]:
        """Return the last figures, while the server does not answer."""
        return self._figures.snapshot({**self._last, "trouble": trouble})

    def _read(self, polled: dict[str, Any] | None) -> None:
        if polled is not None:
            self._cursor = polled["cursor"]
            self._figures.read(polled["frames"])


def _show(source: WatchedServer, interval_s: float) -> int:
    from octavo.cli.keyboard import Keyboard  # terminals of this system only

    figures, view, console = source.look(), View(), Console(highlight=False)
    with Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        next_look = time.monotonic() + interval_s
        while True:
            live.update(screen(figures, view, console.width, console.height), refresh=True)
            key = keyboard.wait(max(0.0, next_look - time.monotonic()))
            if key in ("q", "Q", "escape", "ctrl-c", "end of input"):
                return 0
            if key is not None:
                _press(key, view)
                continue
            next_look = time.monotonic() + interval_s
            if view.is_paused:
                continue
            try:
                figures = source.look()
            except AdminError as error:
                if not source.is_there():
                    break
                figures = source.without(str(error))
    print(f"{source.name} ended", file=sys.stderr)
    return 1


def _press(key: str, view: View) -> None:
    moves = {"up": -1, "down": 1, "page up": -_PAGE, "page down": _PAGE, "home": -(1 << 30), "end": 1 << 30}
    if key in moves:
        view.first = max(0, view.first + moves[key])
    elif key == "s":
        view.next_order()
    elif key in ("p", " "):
        view.is_paused = not view.is_paused
