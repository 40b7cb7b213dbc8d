"""A client for load tests: one connection a request, written by hand so that it costs little beside the server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PATH = "/v1/completions"


@dataclass
class Outcome:
    """What one request got. Times are seconds after it was sent, but for `begun`."""

    begun: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ttft_s: float | None = None
    total_s: float = 0.0
    event_times: list[float] = field(default_factory=list)
    is_done: bool = False  # a stream that ended with [DONE] and without an error

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"]) if self.status >= 400 else ""


async def ask(port: int, fields: Mapping[str, Any] | None, path: str = PATH, headers: str = "") -> Outcome:
    """One request, a GET without fields; a refused connection is status 0."""
    body = b"" if fields is None else json.dumps(fields).encode()
    verb = "GET" if fields is None else "POST"
    head = f"{verb} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\n{headers}"
    outcome = Outcome(time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    except OSError:
        return outcome
    try:
        writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        outcome.status = int(first.split()[1])
        outcome.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if outcome.headers.get("content-type", "").startswith("text/event-stream"):
            await _read_events(reader, outcome)
        else:
            outcome.body = await reader.read()
    finally:
        outcome.total_s = time.perf_counter() - outcome.begun
        writer.close()
    return outcome


async def _read_events(reader: asyncio.StreamReader, outcome: Outcome) -> None:
    has_error = False
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            outcome.event_times.append(time.perf_counter())
            has_error |= line.startswith(b'data: {"error"')
            if outcome.ttft_s is None and not has_error:
                outcome.ttft_s = time.perf_counter() - outcome.begun
        elif line.startswith(b"data: [DONE]"):
            outcome.is_done = not has_error


async def at_once(
    port: int, make: Callable[[int], Mapping[str, Any]], num_clients: int, seconds: float
) -> list[Outcome]:
    """So many clients that each ask again as soon as they are answered: what the server can do."""
    end, found = time.perf_counter() + seconds, list[Outcome]()

    async def client(number: int) -> None:
        while time.perf_counter() < end:
            found.append(await ask(port, make(number)))

    await asyncio.gather(*(client(number) for number in range(num_clients)))
    return found


async def at_a_rate(port: int, make: Callable[[int], Mapping[str, Any]], rate: float, seconds: float) -> list[Outcome]:
    """Requests that come by chance, so many a second on average, however many are open."""
    rng, tasks = random.Random(9), list[asyncio.Task[Outcome]]()
    begun = due = time.perf_counter()
    while due - begun < seconds:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(port, make(len(tasks)))))
    return list(await asyncio.gather(*tasks))


async def probe(port: int, seconds: float, every_s: float = 0.02) -> list[Outcome]:
    """The cheapest request there is, again and again: how fast the machine lets the server answer at all."""
    end, found = time.perf_counter() + seconds, list[Outcome]()
    while time.perf_counter() < end:
        found.append(await ask(port, None, "/livez"))
        await asyncio.sleep(every_s)
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
