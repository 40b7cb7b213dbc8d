"""`octavo ps`: the servers that this user runs on this machine."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from octavo.cli.admin_client import AdminError, ask
from octavo.cli.servers import Record, find_servers

TIMEOUT_S = 2.0
_COLUMNS = ("PID", "URL", "MODEL", "STATE", "UPTIME", "API", "ENGINE", "EPOCH", "RESTARTS", "OPEN")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def run(args: argparse.Namespace) -> int:
    """Print a line for each server."""
    servers = [_look(record) for record in find_servers()]
    if args.json:
        print(json.dumps(servers))
        return 0
    if not servers:
        print("no server of this user runs here")
        return 0
    rows = [_COLUMNS, *map(_row, servers)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _look(record: Record) -> dict[str, Any]:
    """Return a server's record and, if it answers, its status."""
    known = {"pid": record.pid, "url": record.url, "model": record.model, "admin": record.admin, "begun": record.begun}
    try:
        return {**known, **ask(record.admin, "status", timeout_s=TIMEOUT_S)}
    except AdminError:
        return {**known, "phase": "starting"}  # or its api process is being restarted


def _row(server: dict[str, Any]) -> tuple[str, ...]:
    processes, engine = server.get("processes", {}), server.get("engine", {})
    restarts = f"engine {engine.get('restarts', 0)}, api {server.get('api_restarts', 0)}" if engine else "-"
    state = server["phase"] if server.get("trouble") is None else f"{server['phase']}: {server['trouble']}"
    return (
        str(server["pid"]),
        server["url"],
        server["model"],
        state,
        _duration(max(0.0, time.time() - server["begun"])),
        str(processes.get("api", "-")),
        str(processes.get("engine", "-")),
        str(engine.get("epoch", "-")),
        restarts,
        str(server.get("open_requests", "-")),
    )


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} m"
