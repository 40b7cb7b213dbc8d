"""`octavo chaos`: a drill against a server on this machine, which shows what its users see when its engine dies.

Owns: the arguments and their bounds, finding the server, the report.
Does not: cause faults or compare answers (bench.drill does).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from octavo.bench.completion_client import CompletionClient, Target
from octavo.bench.drill import FAULTS, Drill, Drilling, Outcome
from octavo.bench.percentiles import percentile
from octavo.bench.server_facts import first_model
from octavo.bench.table import show_facts
from octavo.cli.admin_client import AdminError, ask, peer_of
from octavo.cli.flags import UsageError
from octavo.cli.servers import add_server_arguments, full_url, named_server
from octavo.server.listener import is_loopback

MAX_STREAMS = 256
MAX_TOKENS = 4096
MAX_DURATION_S = 1800.0
MIN_INTERVAL_S = 0.5
REQUEST_TIMEOUT_S = 300.0
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    for flag, text in (
        ("--kill-engine", "kill the engine process so often (SIGKILL)"),
        ("--stop-engine", "stop it so often, as one that hangs (SIGSTOP)"),
        ("--kill-api", "kill the api process so often; streams then ask again and go on, which takes a --journal"),
    ):
        parser.add_argument(flag, nargs="+", metavar="every 5s", help=text)
    parser.add_argument("--streams", type=int, default=16, metavar="N", help="streams at once [16]")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens of each [64]")
    parser.add_argument("--duration", default="30s", metavar="30s", help="how long new streams are begun [30s]")
    add_server_arguments(parser, is_positional=True)
    parser.add_argument("--api-key", metavar="KEY", help="a key of the server [OCTAVO_API_KEY]")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask before the drill")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run the drill; return 0 when nothing was lost, 1 otherwise."""
    drill = _drill(args)
    if args.url is not None:
        _check_local(full_url(args.url))
    server = named_server(args)
    before = ask(server.admin, "status")
    url = before["url"]
    _check_local(url)
    _check_processes(server.admin, before["processes"]["api"])
    if not args.yes:
        _confirm(drill, f"{before['model']} at {url}")
    key = args.api_key or os.environ.get("OCTAVO_API_KEY", "").split(",")[0]
    target = Target(url, api_key=key, timeout_s=REQUEST_TIMEOUT_S)
    outcome = asyncio.run(_run(drill, target, server.admin))
    report = make_report(drill, outcome, before, ask(server.admin, "status"))
    if args.json:
        print(json.dumps(report))
    else:
        show_facts(Console(file=sys.stdout, highlight=False), f"drill of {url}", _facts(report))
    return 0 if outcome.is_clean else 1


def _confirm(drill: Drill, server: str) -> None:
    """Print what the drill does, and ask. Raises UsageError unless the answer is yes."""
    deeds = {"kill_engine": "kills its engine", "stop_engine": "stops its engine", "kill_api": "kills its api process"}
    faults = "".join(f", and {deeds[kind]} every {every_s:g} s" for kind, every_s in drill.every_s.items())
    if not sys.stdin.isatty():
        raise UsageError(f"a drill loads {server}{faults}; give --yes to start it without a terminal")
    print(
        f"This drill keeps {drill.num_streams} streams open on {server} for {drill.duration_s:g} s{faults}.\n"
        "Its other clients get slower answers. Start? [y/N] ",
        end="", file=sys.stderr, flush=True,
    )  # fmt: skip
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("not confirmed; nothing was done")


async def _run(drill: Drill, target: Target, socket: str) -> Outcome:
    model = await first_model(CompletionClient(target))
    named = Target(target.base_url, model, target.api_key, timeout_s=target.timeout_s)
    return await Drilling(drill, CompletionClient(named, keeps_texts=True), lambda role: process_of(socket, role)).run()


def process_of(socket: str, role: str) -> int | None:
    """Return the pid of a role as the server reports it, None if there is none now."""
    try:
        pid = ask(socket, "status", timeout_s=5.0)["processes"].get(role)
    except AdminError:
        return None
    return pid if isinstance(pid, int) and pid > 1 else None


def make_report(drill: Drill, outcome: Outcome, before: Any, after: Any) -> dict[str, Any]:
    """Return every figure as JSON values."""
    kinds = [kind for kind, _, _ in outcome.faults]
    api_restarts = after["api_restarts"] - before["api_restarts"]
    counted = 0 if api_restarts else before["engine"]["restarts"]  # each api counts its own engine's from 0
    return {
        "streams": drill.num_streams,
        "duration_s": drill.duration_s,
        "faults": {**{kind: kinds.count(kind) for kind in drill.every_s}, "skipped": outcome.num_skipped},
        "finished": outcome.num_finished,
        "refused": outcome.num_refused,
        "tokens": outcome.num_tokens,
        "lost": outcome.num_lost,
        "duplicated": outcome.num_duplicated,
        "different": outcome.num_different,
        "errors": dict(outcome.errors.most_common(5)),
        "gap_s": _points(outcome.fault_gaps),
        "token_gap_s": _points(outcome.gaps),
        "restarts": {
            "engine": after["engine"]["restarts"] - counted,
            "api": api_restarts,
        },
    }


def _points(gaps: list[float]) -> dict[str, float]:
    named = {f"p{point}": percentile(gaps, point) for point in (50, 95)}
    return {name: round(value, 4) for name, value in {**named, "max": max(gaps, default=0.0)}.items()}


def _facts(report: dict[str, Any]) -> dict[str, object]:
    faults = ", ".join(f"{count} {kind}" for kind, count in report["faults"].items() if count) or "none"
    failed = sum(report["errors"].values())
    return {
        "faults": faults,
        "restarts": f"engine {report['restarts']['engine']}, api {report['restarts']['api']}",
        "streams": f"{report['finished']} finished, {failed} failed, {report['refused']} refused",
        "tokens": report["tokens"],
        "lost tokens": report["lost"],
        "duplicated or other tokens": report["duplicated"],
        "gap at a fault": _spelled(report["gap_s"]),
        "gap between tokens": _spelled(report["token_gap_s"]),
        **{f"error, {count} times": text for text, count in report["errors"].items()},
    }


def _spelled(points: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f} s" for name, value in points.items())


def _drill(args: argparse.Namespace) -> Drill:
    given = {kind: getattr(args, kind) for kind in FAULTS}
    every_s = {kind: _interval("--" + kind.replace("_", "-"), words) for kind, words in given.items() if words}
    duration_s = _seconds("--duration", args.duration)
    for flag, value, most in (
        ("--streams", args.streams, MAX_STREAMS),
        ("--max-tokens", args.max_tokens, MAX_TOKENS),
        ("--duration", duration_s, MAX_DURATION_S),
    ):
        if not 1 <= value <= most:
            raise UsageError(f"{flag} is {value:g}; give 1 to {most:g}")
    return Drill(every_s, args.streams, args.max_tokens, duration_s)


def _interval(flag: str, words: list[str]) -> float:
    if len(words) > 2 or (len(words) == 2 and words[0] != "every"):
        raise UsageError(f"{flag} is {' '.join(words)!r}; give an interval, such as every 5s")
    seconds = _seconds(flag, words[-1])
    if seconds < MIN_INTERVAL_S:
        raise UsageError(f"{flag} is every {seconds:g} s; give at least {MIN_INTERVAL_S:g} s")
    return seconds


def _seconds(flag: str, text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise UsageError(f"{flag} is {text!r}; give a time, such as 500ms, 5s or 2m")
    return float(match[1]) * {"ms": 0.001, "m": 60.0}.get(match[2], 1.0)


def _check_local(url: str) -> None:
    if not is_loopback(urlsplit(url).hostname or ""):
        raise UsageError(f"--url is {url!r}; a drill is for a server on this machine: give a loopback address")


def _check_processes(socket: str, api: int) -> None:
    """Refuse a server whose pids belong to another machine or container: here they are other programs'."""
    number = peer_of(socket)
    if number not in (None, api):
        raise UsageError(f"process {api} of the server is process {number} here; run the drill where the server runs")
