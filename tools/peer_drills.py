"""Six rows of the reliability scorecard in a small dose, against any server with OpenAI's completions, for comparisons.

Owns: the drills and what they count. Does not: judge, or start more than one server at a time.
Usage: python -m tools.peer_drills --url URL --model NAME [--computes TEXT] [--rows 1,7,9,14,20] -- COMMAND...
from the root of the repository; one JSON object a row on stdout. Counts compare; times only on a machine at rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.reliability.load import quantile
from tests.reliability.nasty_requests import Nasty, nasty_request
from tools.peer_server import PeerServer

from octavo.bench.completion_client import CompletionClient, CompletionResult, Target

FACTOR = 5  # of the load that the server can carry
PATIENCE = 3  # times the time that a stream takes beside seven others: then a client of row 9 gives up
FUZZ_BATCH = 50  # requests between two checks of the server
MAX_OFFERED = 3000
Figures = dict[str, Any]


@dataclass(frozen=True)
class Dose:
    """The sizes of the drills."""

    streams: int
    tokens: int
    aborts: int
    abort_within_s: float
    at_once: int
    load_s: float
    fuzz: int
    fuzz_patience_s: float
    fuzz_s: float
    start_s: float
    recovery_s: float


@dataclass(frozen=True)
class Drill:
    """A started server and its client."""

    server: PeerServer
    client: CompletionClient
    dose: Dose
    url: str
    model: str


def prompt(number: int) -> str:
    """Return a short prompt; prompts of different numbers share no prefix."""
    return f"{number} ships sailed to the island of"


def fate(answer: CompletionResult, wanted: str | None = None) -> str:
    """Return a stream's result in a word or two."""
    names = {"failed": "explicit error", "lost": "cut", "refused": "connection refused", "timeout": "no end in time"}
    if answer.has_failed:
        return f"status {answer.status}" if answer.status else names[answer.kind]
    return "whole" if wanted is None or text_of(answer) == wanted else "whole, another text"


def text_of(answer: CompletionResult) -> str:
    """The text of a stream."""
    return "".join(answer.texts or [])


async def streams(drill: Drill, act: Callable[[], object] | None = None) -> tuple[list[CompletionResult], int]:
    """Run all streams at once; call act() after a quarter of the tokens. Return answers, and streams open at act()."""
    dose, reached, count = drill.dose, asyncio.Event(), 0

    def advance(num_tokens: int) -> None:
        nonlocal count
        count += num_tokens
        if count >= dose.streams * dose.tokens // 4:
            reached.set()

    bodies = [drill.client.body(prompt(number), dose.tokens) for number in range(dose.streams)]
    tasks = [asyncio.create_task(drill.client.send(body, advance)) for body in bodies]
    all_ended = asyncio.gather(*tasks)
    num_open = 0
    if act is not None:
        waiting: asyncio.Future[Any] = asyncio.create_task(reached.wait())
        await asyncio.wait([waiting, all_ended], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        num_open = sum(not task.done() for task in tasks)
        act()
    return await all_ended, num_open


async def row_1(drill: Drill) -> Figures:
    """Kill -9 of the process that computes."""
    begun = time.perf_counter()
    wanted = [text_of(answer) for answer in (await streams(drill))[0]]
    unfaulted_s, recovered = time.perf_counter() - begun, None
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at, recovered
        os.kill(drill.server.computing_pid(), signal.SIGKILL)
        killed_at = time.perf_counter()
        recovered = asyncio.create_task(again())

    async def again() -> float | None:
        await asyncio.sleep(0.3)  # an answer that was under way is none of the new life
        found = await drill.server.answers_within(drill.dose.recovery_s)
        return None if found is None else time.perf_counter() - killed_at

    answers, num_open = await streams(drill, kill)
    fates = Counter(fate(answer, text) for answer, text in zip(answers, wanted, strict=True))
    seconds = await recovered if recovered is not None else None
    return {
        "unfaulted run without texts": sum(not text for text in wanted),
        "unfaulted s": round(unfaulted_s, 1),
        "open at the kill": num_open,
        "streams": dict(fates),
        "main process still there": drill.server.is_alive,
        "answers again after s": "never" if seconds is None else round(seconds, 1),
        "first error": next((answer.error[:160] for answer in answers if answer.error), ""),
    }


async def row_7(drill: Drill) -> Figures:
    """Streams whose clients disconnect."""
    rng, dose, ended = random.Random(7), drill.dose, Counter[str]()
    fds, before, computing = drill.server.num_fds(), await drill.server.gauges(), drill.server.computing_pid()

    async def client(numbers: range) -> None:
        for number in numbers:
            task = asyncio.create_task(drill.client.send(drill.client.body(prompt(number), dose.tokens)))
            done, _ = await asyncio.wait([task], timeout=rng.uniform(0.0, dose.abort_within_s))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            ended[fate(task.result()) if done else "aborted"] += 1

    await asyncio.gather(*(client(range(start, dose.aborts, dose.streams)) for start in range(dose.streams)))
    seconds = await drill.server.answers_within(dose.recovery_s)
    after = await settled(drill.server)
    return {
        "requests": dict(ended),
        "answers after s": "never" if seconds is None else round(seconds, 2),
        "in use before": before,
        "in use afterwards": after,
        "open fds before, after": [fds, drill.server.num_fds()],
        "same process computes": drill.server.is_alive and drill.server.computing_pid() == computing,
    }


async def settled(server: PeerServer, within_s: float = 10.0) -> dict[str, float]:
    """Return the gauges once all are 0, or after `within_s`."""
    end = time.perf_counter() + within_s
    while (found := await server.gauges()) and any(found.values()) and time.perf_counter() < end:
        await asyncio.sleep(0.25)
    return found


async def row_9(drill: Drill) -> Figures:
    """Five times the server's maximum load."""
    dose, end = drill.dose, time.perf_counter() + drill.dose.load_s
    closed, took = list[CompletionResult](), list[float]()

    async def one_of_few(number: int) -> None:
        while time.perf_counter() < end:
            answer = await drill.client.send(drill.client.body(prompt(number + len(closed)), dose.tokens))
            took.append(time.perf_counter() - answer.sent)
            closed.append(answer)

    begun = time.perf_counter()
    await asyncio.gather(*(one_of_few(1000 + number) for number in range(dose.at_once)))
    capacity = sum(answer.num_tokens for answer in closed if not answer.has_failed) / (time.perf_counter() - begun)
    patience_s = PATIENCE * quantile(took, 0.5)
    patient = CompletionClient(Target(drill.url, drill.model, timeout_s=patience_s))
    rng, tasks, seconds_by_task = random.Random(9), list[asyncio.Task[CompletionResult]](), list[float]()

    async def timed(number: int) -> CompletionResult:
        answer = await patient.send(patient.body(prompt(number), dose.tokens))
        if answer.status in (429, 503):
            seconds_by_task.append(time.perf_counter() - answer.sent)
        return answer

    begun = due = time.perf_counter()
    while due - begun < dose.load_s and len(tasks) < MAX_OFFERED:
        due += rng.expovariate(FACTOR * capacity / dose.tokens)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(timed(2000 + len(tasks))))
    offered_s = time.perf_counter() - begun
    answers = await asyncio.gather(*tasks)
    well = [answer for answer in answers if not answer.has_failed]
    tokens = sum(
        answer.num_tokens / len(answer.chunk_times)  # a chunk may hold several
        for answer in well
        for at in answer.chunk_times
        if begun <= at < begun + offered_s
    )
    ttfts = [answer.chunk_times[0] - answer.sent for answer in answers if answer.chunk_times]
    after = await drill.server.answers_within(dose.recovery_s)
    return {
        "capacity tokens/s": round(capacity, 1),
        "s of one of 8 streams; clients wait": [round(quantile(took, 0.5), 1), round(patience_s, 1)],
        "offered": len(answers),
        "answers": dict(Counter(fate(answer) for answer in answers)),
        "begun, but the client gave up": sum(
            answer.kind == "timeout" and bool(answer.chunk_times) for answer in answers
        ),
        "refusals p99 ms": round(quantile(seconds_by_task, 0.99) * 1000) if seconds_by_task else "none",
        "TTFT p50, p99 s": [round(quantile(ttfts, 0.5), 2), round(quantile(ttfts, 0.99), 2)],
        "goodput / capacity": round(tokens / offered_s / capacity, 2) if capacity else 0,
        "answers afterwards": after is not None,
        "main process still there": drill.server.is_alive,
    }


async def row_14(drill: Drill) -> Figures:
    """Requests that no honest client sends."""
    rng, dose, statuses = random.Random(14), drill.dose, Counter[str]()
    deaths, changed = 0, 0
    computing, end = drill.server.computing_pid(), time.perf_counter() + dose.fuzz_s
    pending = [bounded(nasty_request(rng)) for _ in range(dose.fuzz)]
    odd = list[str]()

    async def work(batch: Sequence[Nasty]) -> None:
        for nasty in batch:
            found = await raw(drill.url, nasty, dose.fuzz_patience_s)
            statuses[found] += 1
            if found[0] == "5" or not found.isdigit():
                odd.append(f"{found}: {nasty.shown[:200]}")

    for at in range(0, len(pending), FUZZ_BATCH):
        if time.perf_counter() > end:
            break
        batch = pending[at : at + FUZZ_BATCH]
        await asyncio.gather(*(work(batch[start :: dose.at_once]) for start in range(dose.at_once)))
        if await drill.server.answers_within(dose.recovery_s) is None:
            deaths += 1
            await drill.server.end()
            await drill.server.start(dose.start_s)
            computing = drill.server.computing_pid()
        elif drill.server.computing_pid() != computing:
            changed, computing = changed + 1, drill.server.computing_pid()
    classes = Counter(status[0] + "xx" if status.isdigit() else status for status in statuses.elements())
    return {
        "sent": sum(statuses.values()),
        "answers": dict(sorted(classes.items())),
        "statuses": dict(sorted(statuses.items())),
        "times it had to be started anew": deaths,
        "times it replaced its engine": changed,
        "5xx and no answers, some of them": odd[:8],
    }


def bounded(nasty: Nasty) -> Nasty:
    """Return the request with a small token limit if it has none, so that slow servers finish."""
    if nasty.body.startswith(b"{") and b"max_" not in nasty.body and nasty.body[1:].strip()[:1] == b'"':
        nasty.body = b'{"max_tokens": 4, ' + nasty.body[1:]
    return nasty


async def raw(url: str, nasty: Nasty, patience_s: float) -> str:
    """Send the bytes; return the status, or what the server sent instead."""
    parts = urlsplit(url)
    headers = {"host": parts.netloc, "connection": "close", "content-type": "application/json"}
    headers |= {"content-length": str(len(nasty.body))} | nasty.headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
    status, writer = "", None
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
            writer.write(f"{nasty.method} {nasty.path} HTTP/1.1\r\n".encode() + lines + b"\r\n" + nasty.body)
            words = (await reader.readline()).split()
            status = words[1].decode() if len(words) > 1 else "closed without an answer"
            while status[0] == "2" and await reader.read(1 << 16):
                pass
    except TimeoutError:
        return status or "no answer in time"
    except (OSError, ValueError) as error:
        return status or f"connection error: {type(error).__name__}"
    finally:
        if writer is not None:
            writer.close()
    return status


async def row_20(drill: Drill) -> Figures:
    """SIGTERM under load."""
    process, at = drill.server.process, 0.0
    assert process is not None

    def terminate() -> None:
        nonlocal at
        at = time.perf_counter()
        process.terminate()

    answers, num_open = await streams(drill, terminate)
    ended = await drill.server.wait(drill.dose.recovery_s)
    return {
        "open at the signal": num_open,
        "streams": dict(Counter(fate(answer) for answer in answers)),
        "exit after s": "not in time" if ended is None else round(time.perf_counter() - at, 1),
        "exit status": process.poll(),
        "first error": next((answer.error[:160] for answer in answers if answer.error), ""),
    }


ROWS: dict[str, Callable[[Drill], Any]] = {"1": row_1, "7": row_7, "9": row_9, "14": row_14, "20": row_20}


async def run(words: argparse.Namespace, dose: Dose) -> None:
    """Run the rows one after another; restart the server if a row left it dead."""
    client = CompletionClient(Target(words.url, words.model, timeout_s=words.timeout), keeps_texts=True)
    server = PeerServer(words.command, client, words.computes, Path(words.log))
    try:
        for row in words.rows.split(","):
            figures: Figures = {"row": row}
            if await server.answers_within(10.0) is None:
                await server.end()
                figures["started in s"] = round(await server.start(words.start_within), 1)
            begun = time.perf_counter()
            try:
                figures |= await ROWS[row](Drill(server, client, dose, words.url, words.model))
            except (RuntimeError, StopIteration, OSError) as error:
                figures["did not finish"] = repr(error)
            figures["drill s"] = round(time.perf_counter() - begun)
            figures["load average"] = round(os.getloadavg()[0], 1)
            print(json.dumps(figures), flush=True)
    finally:
        await server.end()


def main() -> int:
    """Parse the arguments and run the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--computes", default="", help="part of the command line of the process to kill in row 1")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--log", default="peer.log", help="file for what the server prints")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--aborts", type=int, default=300)
    parser.add_argument("--abort-within", type=float, default=1.5, help="most seconds until a client goes away")
    parser.add_argument("--fuzz", type=int, default=1000)
    parser.add_argument("--load-s", type=float, default=20.0)
    parser.add_argument("--fuzz-s", type=float, default=240.0, help="most seconds of row 14")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that clients wait, but for row 9")
    parser.add_argument("--start-within", type=float, default=120.0)
    parser.add_argument("--recovery-within", type=float, default=60.0)
    parser.add_argument("command", nargs="+")
    words = parser.parse_args()
    dose = Dose(
        streams=words.streams,
        tokens=words.tokens,
        aborts=words.aborts,
        abort_within_s=words.abort_within,
        at_once=8,
        load_s=words.load_s,
        fuzz=words.fuzz,
        fuzz_patience_s=10.0,
        fuzz_s=words.fuzz_s,
        start_s=words.start_within,
        recovery_s=words.recovery_within,
    )
    asyncio.run(run(words, dose))
    return 0


if __name__ == "__main__":
    sys.exit(main())
