"""`octavo chaos`: kills and stops a local server's processes while streams are open, and checks the answers.

Owns: the streams; the faults and their times; the comparison of each answer with a reference without faults; the
report. Invariants: a stopped process is continued at the end. A stream that the server refused (busy, starting) is not
a loss and is requested again. If the drill kills the api process too, streams have an Idempotency-Key and resume after
their last event over a new connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from octavo.bench.completion_client import CompletionClient, CompletionResult, Target, first_model
from octavo.bench.report import percentile, show_facts
from octavo.cli.flags import UsageError, read_duration
from octavo.cli.servers import (
    AdminError,
    add_server_arguments,
    admin_pid,
    call_admin,
    client_key,
    full_url,
    named_server,
)
from octavo.config.setting import Number
from octavo.errors import EngineError
from octavo.machine import is_loopback

MAX_DURATION_S = 1800.0
MIN_INTERVAL_S = 0.5
REQUEST_TIMEOUT_S = 300.0
BUSY_STATUSES = (429, 503)
RETRY_S = 0.25
MAX_PROMPTS = 16
MAX_CONNECTIONS = 50  # maximum connections of one stream, if the drill kills the api process
# Fault -> (role of the process, signal, effect on the server).
FAULTS = {
    "kill_engine": ("engine", signal.SIGKILL, "kills its engine"),
    "stop_engine": ("engine", signal.SIGSTOP, "stops its engine"),
    "kill_api": ("api", signal.SIGKILL, "kills its api process"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    for flag, text in (
        ("--kill-engine", "kill the engine process at this interval (SIGKILL)"),
        ("--stop-engine", "stop it at this interval, as if it hung (SIGSTOP)"),
        ("--kill-api", "kill the api process at this interval; streams are resumed, which needs --journal"),
    ):
        parser.add_argument(flag, nargs="+", metavar="every 5s", help=text)
    parser.add_argument("--streams", type=Number(int, 1, 256), default=16, metavar="N", help="concurrent streams [16]")
    parser.add_argument(
        "--max-tokens", type=Number(int, 1, 4096), default=64, metavar="N", help="tokens per stream [64]"
    )
    parser.add_argument("--duration", default="30s", metavar="TIME", help="time during which streams are started [30s]")
    add_server_arguments(parser, is_positional=True)
    parser.add_argument("--api-key", metavar="KEY", help="a key of the server [OCTAVO_API_KEY]")
    parser.add_argument("--yes", "-y", action="store_true", help="start without confirmation")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run the drill; return 0 if no token was lost, repeated or changed, else 1."""
    drill = _read_drill(args)
    if args.url is not None:
        _check_local(full_url(args.url))
    socket = named_server(args).admin
    before = call_admin(socket, "status")
    url = before["url"]
    _check_local(url)
    _check_processes(socket, before["processes"]["api"])
    if not args.yes:
        _confirm(drill, f"{before['model']} at {url}")
    target = Target(url, api_key=client_key(args.api_key), timeout_s=REQUEST_TIMEOUT_S)
    result = asyncio.run(_run(drill, target, socket))
    report = make_report(drill, result, before, call_admin(socket, "status"))
    if args.json:
        print(json.dumps(report))
    else:
        show_facts(Console(file=sys.stdout, highlight=False), f"drill of {url}", _rows(report))
    return 0 if result.is_clean else 1


@dataclass(frozen=True, slots=True)
class Drill:
    """A drill's parameters: intervals by kind of fault, number of streams, tokens per stream, duration in seconds."""

    intervals_s: dict[str, float]
    num_streams: int = 16
    max_tokens: int = 64
    duration_s: float = 30.0


def _read_drill(args: argparse.Namespace) -> Drill:
    """Return the drill that the arguments describe. Raises UsageError."""
    given = {kind: getattr(args, kind) for kind in FAULTS}
    intervals_s = {kind: _read_interval("--" + kind.replace("_", "-"), words) for kind, words in given.items() if words}
    duration_s = read_duration("--duration", args.duration)
    if not 1 <= duration_s <= MAX_DURATION_S:
        raise UsageError(f"--duration is {duration_s:g} s; give 1 to {MAX_DURATION_S:g} s")
    return Drill(intervals_s, args.streams, args.max_tokens, duration_s)


def _read_interval(flag: str, words: list[str]) -> float:
    if len(words) > 2 or (len(words) == 2 and words[0] != "every"):
        raise UsageError(f"{flag} is {' '.join(words)!r}; give an interval, such as every 5s")
    seconds = read_duration(flag, words[-1])
    if seconds < MIN_INTERVAL_S:
        raise UsageError(f"{flag} is every {seconds:g} s; give at least {MIN_INTERVAL_S:g} s")
    return seconds


def _check_local(url: str) -> None:
    if not is_loopback(urlsplit(url).hostname or ""):
        raise UsageError(f"--url is {url!r}; a drill is for a server on this machine: give a loopback address")


def _check_processes(socket: str, api: int) -> None:
    """Refuse a server on another machine or in a container: its pids may be other programs' pids here."""
    pid = admin_pid(socket)
    if pid not in (None, api):
        raise UsageError(f"process {api} of the server is process {pid} here; run the drill where the server runs")


def _confirm(drill: Drill, server: str) -> None:
    """Print the drill's effects and ask for confirmation. Raises UsageError unless the answer is yes."""
    faults = "".join(f", and {FAULTS[kind][2]} every {seconds:g} s" for kind, seconds in drill.intervals_s.items())
    if not sys.stdin.isatty():
        raise UsageError(f"a drill loads {server}{faults}; give --yes to start it without a terminal")
    print(
        f"This drill keeps {drill.num_streams} streams open on {server} for {drill.duration_s:g} s{faults}.\n"
        "Its other clients get slower answers. Start? [y/N] ",
        end="", file=sys.stderr, flush=True,
    )  # fmt: skip
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("not confirmed; nothing was done")


async def _run(drill: Drill, target: Target, socket: str) -> DrillResult:
    model = await first_model(CompletionClient(target))
    client = CompletionClient(
        Target(target.base_url, model, target.api_key, timeout_s=target.timeout_s), keeps_texts=True
    )
    return await DrillRun(drill, client, lambda role: process_of(socket, role)).run()


def process_of(socket: str, role: str) -> int | None:
    """Ask the server for the pid of a role; return None if no such process runs now.

    The engine of a fleet is that of a random replica on this machine.
    """
    try:
        status = call_admin(socket, "status", timeout_s=5.0)
    except AdminError:
        return None
    pid = status["processes"].get(role)
    replicas = status["engine"].get("replicas", ())
    if role == "engine" and pid is None:
        pid = random.choice([row["pid"] for row in replicas if row["where"] == "local" and row["pid"]] or [None])
    return pid if isinstance(pid, int) and pid > 1 else None


# --- the run


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """An answer's text without faults, and the offsets where chunks end. A chunk may have several tokens."""

    text: str
    chunk_ends: tuple[int, ...]
    num_tokens: int

    @classmethod
    def of(cls, answer: CompletionResult) -> ReferenceAnswer:
        """Return the text of a finished answer."""
        ends, length = [], 0
        for text in answer.texts or ():
            length += len(text)
            ends.append(length)
        return cls("".join(answer.texts or ()), tuple(ends), answer.num_tokens)

    def compare(self, answer: CompletionResult) -> tuple[int, int]:
        """Return the number of lost tokens, and the number of extra or different tokens."""
        text = "".join(answer.texts or ())
        pairs = enumerate(zip(text, self.text, strict=False))
        num_equal = next((i for i, (a, b) in pairs if a != b), min(len(text), len(self.text)))
        per_chunk = self.num_tokens / max(1, len(self.chunk_ends))
        lost = round(sum(end > num_equal for end in self.chunk_ends) * per_chunk)
        surplus = len(text) - num_equal
        extra = max(1, round(surplus * self.num_tokens / max(1, len(self.text)))) if surplus else 0
        if not (lost or extra) and answer.num_tokens != self.num_tokens and answer.usage_tokens is not None:
            extra = abs(answer.num_tokens - self.num_tokens)  # a token without text
        return lost, extra


@dataclass(slots=True)
class DrillResult:
    """A drill's results. `gaps` are seconds between chunks of a stream.

    `fault_gaps` are the gaps that contain a fault; the wait for the first chunk counts as one of them.
    """

    num_finished: int = 0
    num_refused: int = 0
    num_tokens: int = 0
    num_lost: int = 0
    num_duplicated: int = 0
    num_different: int = 0  # number of streams
    errors: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, float, int]] = field(default_factory=list)  # kind, time, pid
    num_skipped: int = 0  # faults for which there was no process
    gaps: list[float] = field(default_factory=list)
    fault_gaps: list[float] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """True if no token was lost, repeated or changed."""
        return not (self.num_lost or self.num_duplicated or self.num_different)


class DrillRun:
    """One run of a drill. `find_process` returns the pid of a role, or None; the call may block."""

    def __init__(self, drill: Drill, client: CompletionClient, find_process: Callable[[str], int | None]) -> None:
        self.drill = drill
        self.result = DrillResult()
        self._client = client
        self._find_process = find_process
        self._name = f"drill-{secrets.token_hex(6)}"
        self._references: list[ReferenceAnswer] = []
        self._answers: list[CompletionResult] = []
        self._stopped: set[int] = set()
        self._end = 0.0

    async def run(self) -> DrillResult:
        """Request the reference texts, then stream and cause faults until the drill's end. Raises EngineError."""
        bodies = [self._client.body(text, self.drill.max_tokens) for text in _prompts(self.drill.num_streams)]
        for answer in await asyncio.gather(*map(self._client.send, bodies)):
            if answer.has_failed:
                raise EngineError(f"a stream failed before any fault: {answer.kind}, {answer.error}")
            self._references.append(ReferenceAnswer.of(answer))
        self._end = time.perf_counter() + self.drill.duration_s
        faults = [asyncio.create_task(self._cause(kind, every)) for kind, every in self.drill.intervals_s.items()]
        try:
            await asyncio.gather(*(self._stream(index, bodies) for index in range(self.drill.num_streams)))
        finally:
            for task in faults:
                task.cancel()
            await asyncio.gather(*faults, return_exceptions=True)
            for pid in self._stopped:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGCONT)
        self._measure_gaps()
        return self.result

    async def _stream(self, index: int, bodies: Sequence[bytes]) -> None:
        """Request one text after another until the drill's end. Read the last answer completely, too."""
        turn = index
        while time.perf_counter() < self._end:
            answer = await self._request(bodies[turn % len(bodies)], f"{index}-{turn}")
            if _is_interrupted(answer) and not answer.chunk_times:
                self.result.num_refused += 1
                await asyncio.sleep(RETRY_S)
                continue
            self._count(answer, self._references[turn % len(bodies)])
            turn += 1

    async def _request(self, body: bytes, name: str) -> CompletionResult:
        """Return one answer. If the drill kills the api process too, reconnect as often as needed."""
        if "kill_api" not in self.drill.intervals_s:
            return await self._client.send(body)
        key = f"Idempotency-Key: {self._name}-{name}\r\n"
        answer = await self._client.send(body, headers=key)
        for _ in range(MAX_CONNECTIONS):
            if not _is_interrupted(answer):
                break
            await asyncio.sleep(RETRY_S)
            last = f"Last-Event-ID: {answer.last_id}\r\n" if answer.last_id else ""
            answer = join_answers(answer, await self._client.send(body, headers=key + last))
        return answer

    def _count(self, answer: CompletionResult, reference: ReferenceAnswer) -> None:
        lost, extra = reference.compare(answer)
        result = self.result
        result.num_lost += lost
        result.num_duplicated += extra
        result.num_different += bool(lost or extra)
        result.num_tokens += answer.num_tokens
        result.num_finished += not answer.has_failed
        if answer.has_failed:
            result.errors[f"{answer.kind}: {answer.error}"] += 1
        self._answers.append(answer)

    async def _cause(self, kind: str, interval_s: float) -> None:
        """Cause faults of one kind at intervals; none in the last interval, as its effect could not be measured."""
        role, number, _ = FAULTS[kind]
        while (start := time.perf_counter()) + interval_s < self._end:
            await asyncio.sleep(interval_s)
            pid = await asyncio.to_thread(self._find_process, role)
            try:
                if pid is None:
                    raise ProcessLookupError
                os.kill(pid, number)
            except ProcessLookupError:
                self.result.num_skipped += 1
                continue
            self.result.faults.append((kind, max(start, time.perf_counter()), pid))
            if number == signal.SIGSTOP:
                self._stopped.add(pid)

    def _measure_gaps(self) -> None:
        fault_times = [fault_time for _, fault_time, _ in self.result.faults]
        for answer in self._answers:
            times = answer.chunk_times
            self.result.gaps += [after - before for before, after in pairwise(times)]
            for before, after in pairwise([answer.sent, *times]):
                if any(before <= fault_time < after for fault_time in fault_times):
                    self.result.fault_gaps.append(after - before)


def join_answers(before: CompletionResult, after: CompletionResult) -> CompletionResult:
    """Join the parts of one answer that arrived over two connections."""
    after.sent = before.sent
    after.chunk_times = before.chunk_times + after.chunk_times
    after.texts = [*(before.texts or ()), *(after.texts or ())]
    after.last_id = after.last_id or before.last_id
    if after.usage_tokens is None:
        after.usage_tokens = before.usage_tokens
    return after


def _is_interrupted(answer: CompletionResult) -> bool:
    """Return True if a new connection may receive the rest of the answer."""
    return answer.kind in ("lost", "refused") or answer.status in BUSY_STATUSES


def _prompts(num_streams: int) -> list[str]:
    return [
        f"Drill {number}. Tell me a story in which the number {number * 7 + 3} is found."
        for number in range(min(num_streams, MAX_PROMPTS))
    ]


# --- the report


def make_report(drill: Drill, result: DrillResult, before: Any, after: Any) -> dict[str, Any]:
    """Return every figure as JSON values; `before` and `after` are the server's status."""
    kinds = [kind for kind, _, _ in result.faults]
    api_restarts = after["api_restarts"] - before["api_restarts"]
    engine_restarts_before = 0 if api_restarts else before["engine"]["restarts"]  # a new api process counts from 0
    return {
        "streams": drill.num_streams,
        "duration_s": drill.duration_s,
        "faults": {**{kind: kinds.count(kind) for kind in drill.intervals_s}, "skipped": result.num_skipped},
        "finished": result.num_finished,
        "refused": result.num_refused,
        "tokens": result.num_tokens,
        "lost": result.num_lost,
        "duplicated": result.num_duplicated,
        "different": result.num_different,
        "errors": dict(result.errors.most_common(5)),
        "gap_s": _quantiles(result.fault_gaps),
        "token_gap_s": _quantiles(result.gaps),
        "restarts": {"engine": after["engine"]["restarts"] - engine_restarts_before, "api": api_restarts},
    }


def _quantiles(gaps: list[float]) -> dict[str, float]:
    values = {f"p{point}": percentile(gaps, point) for point in (50, 95)}
    return {name: round(value, 4) for name, value in {**values, "max": max(gaps, default=0.0)}.items()}


def _rows(report: dict[str, Any]) -> dict[str, object]:
    faults = ", ".join(f"{count} {kind}" for kind, count in report["faults"].items() if count) or "none"
    failed = sum(report["errors"].values())
    gaps = {
        name: ", ".join(f"{point} {seconds:.3f} s" for point, seconds in report[name].items())
        for name in ("gap_s", "token_gap_s")
    }
    return {
        "faults": faults,
        "restarts": f"engine {report['restarts']['engine']}, api {report['restarts']['api']}",
        "streams": f"{report['finished']} finished, {failed} failed, {report['refused']} refused",
        "tokens": report["tokens"],
        "lost tokens": report["lost"],
        "duplicated or other tokens": report["duplicated"],
        "gap at a fault": gaps["gap_s"],
        "gap between tokens": gaps["token_gap_s"],
        **{f"error, {count} times": text for text, count in report["errors"].items()},
    }
