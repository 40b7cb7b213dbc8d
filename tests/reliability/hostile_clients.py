"""Connections that keep to no rule: `python hostile_clients.py PORT NUM`; at any time so many, of every kind.

When stdin ends, says how long each lived, by kind, as one line of JSON, with its own processor seconds. It runs at the
lowest priority: on a machine of two cores it would otherwise take the processor from the server and the honest client,
and not what it sends but what it costs to send would be measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
PATH = "/v1/chat/completions"
CPU = "processor seconds"  # beside the kinds, in what is said at the end
PAUSE_S = 1.0  # of one that was cut, before it comes again: the limits are looked at here, not who has more cores
Attack = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def head(path: str = PATH, method: str = "POST", **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n".encode()


async def _drip(writer: asyncio.StreamWriter, first: bytes, piece: bytes) -> None:
    writer.write(first)
    while True:
        await asyncio.sleep(0.2)
        writer.write(piece)
        await writer.drain()


async def slow_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _drip(writer, b"GET /livez HTTP/1.1\r\n", b"x: y\r\n")


async def slow_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _drip(writer, head(content_length="1000000"), b" ")


async def slow_unread_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _drip(writer, head("/livez", "GET", content_length="1000000"), b" ")


async def slow_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _drip(writer, head(transfer_encoding="chunked"), b"1\r\n \r\n")


async def nothing_at_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def huge_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _flood(writer, b"GET /livez HTTP/1.1\r\nx: ", b"y" * 16_384)


async def endless_trailers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _flood(writer, head(transfer_encoding="chunked") + b"0\r\n", b"x: y\r\n" * 1000)


async def endless_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _flood(writer, head(transfer_encoding="chunked"), b"10000\r\n" + b"x" * 65_536 + b"\r\n")


async def absurd_chunk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _flood(writer, head(transfer_encoding="chunked") + b"FFFFFFFFFFFFFFFF\r\n", b"x" * 65_536)


async def pipeline(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _flood(writer, b"", head("/v1/models", "GET") * 500)


async def wrong_length(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    body = json.dumps(CHAT).encode()
    await _drip(writer, head(content_length=str(len(body) + 500)) + body, b"")


async def _flood(writer: asyncio.StreamWriter, first: bytes, piece: bytes) -> None:
    writer.write(first)
    while True:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.25)  # hostile, but one of many


ATTACKS: list[Attack] = [
    slow_head, slow_body, slow_unread_body, slow_chunks, nothing_at_all, huge_head, endless_trailers, endless_chunks,
    absurd_chunk, pipeline, wrong_length,
]  # fmt: skip


async def _attack(port: int, attack: Attack, lives: list[float]) -> None:
    """One hostile connection until it is cut; notes how long it lived."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = time.monotonic()
    sending = asyncio.create_task(attack(reader, writer))
    try:
        with contextlib.suppress(ConnectionError):
            while await reader.read(65_536):
                pass
        lives.append(time.monotonic() - begun)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


async def keep_attacking(port: int, num: int, lives: dict[str, list[float]]) -> None:
    async def keep(attack: Attack) -> None:
        while True:
            with contextlib.suppress(OSError):
                await _attack(port, attack, lives.setdefault(attack.__name__, []))
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(keep(ATTACKS[index % len(ATTACKS)]) for index in range(num)))


async def main(port: int, num: int) -> None:
    os.nice(19)
    lives: dict[str, list[float]] = {}
    task = asyncio.create_task(keep_attacking(port, num, lives))
    print("begun", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    print(json.dumps({**lives, CPU: [time.process_time()]}), flush=True)


@contextlib.contextmanager
def attackers(port: int, num: int, lives: dict[str, list[float]]) -> Iterator[None]:
    """For tests: such a process; how long its connections lived, and its `CPU`, is added when the block ends."""
    words = [sys.executable, str(Path(__file__)), str(port), str(num)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            time.sleep(0.5)
            yield
            told, _ = process.communicate(timeout=60)
            for kind, times in json.loads(told).items():
                lives.setdefault(kind, []).extend(times)
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
