"""Row 8: readers that do not read, beside readers that do: bounded in bytes and time, and cut with an error."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from octavo.frontend.sessions import Sessions
from octavo.server.app import create_app
from octavo.server.http.connection import BoundedConnection
from octavo.server.http.lifecycle import Lifecycle
from octavo.server.http.limits import HttpLimits
from octavo.server.http.listener import open_socket
from octavo.server.http.server import HttpServer
from tests.engine.direct_client import start_engine
from tests.reliability.load import quantile
from tests.reliability.scorecard import Score
from tests.server.fakes import make_text
from tests.settings import load_config

ENGINE = Path(__file__).with_name("timed_engine.py")
STALL_S = 1.5
KERNEL_BYTES = 16 * 1024  # of each side's buffer, so that little is hidden there
SLOW = {"prompt": "slow", "max_tokens": 4000, "ignore_eos": True, "stream": True, "logprobs": 5}


class Server:
    """An application on a socket, in this process, so that every connection's buffer can be looked at."""

    def __init__(self, app: Any, server: HttpServer, port: int) -> None:
        self.context = app.state.context
        self.port = port
        self._server = server
        self.most_bytes = 0  # that one connection had: buffered, and waiting for it
        self.waits: dict[BoundedConnection, tuple[float, float]] = {}  # since when one could not be written to, until

    @property
    def connections(self) -> set[BoundedConnection]:
        return self._server._server.server_state.connections  # type: ignore[return-value]

    def look(self, sessions: Sessions) -> None:
        ledger = sessions.client.requests  # type: ignore[attr-defined]
        waiting = [4 * sum(len(page.ids) - page.num_read for page in entry.pages.values())
                   + 600 * sum(len(page.logprobs) for page in entry.pages.values()) for entry in ledger]  # fmt: skip
        buffered = [connection.transport.get_write_buffer_size() for connection in self.connections]
        self.most_bytes = max(self.most_bytes, max(waiting, default=0) + max(buffered, default=0))
        now = time.perf_counter()
        for connection in self.connections:
            if connection.flow.write_paused and not connection.transport.is_closing():
                self.waits[connection] = (self.waits.get(connection, (now, now))[0], now)

    @property
    def num_cut(self) -> int:
        counted = (sample for family in self.context.metrics.collect() for sample in family.samples)
        failed = (sample for sample in counted if sample.name == "octavo_requests_failed_total")
        return sum(int(sample.value) for sample in failed if sample.labels["code"] == "slow_reader")


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, Sessions]]:
    config = load_config({"port": 0, "model": "4", "max_sequences": 64, "num_blocks": 20_000})
    listener = open_socket(config.serving)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)  # what it accepts inherits it
    engine = await start_engine(config, command=(sys.executable, str(ENGINE)))
    sessions = Sessions(engine.client, make_text(), capacity=engine.capacity)
    lifecycle = Lifecycle()
    limits = HttpLimits(stall_timeout_s=STALL_S)
    app = create_app(sessions, sessions.text, config, engine.client.statistics, limits=limits, lifecycle=lifecycle)
    server = HttpServer(app, listener, lifecycle, 0.0)
    running = asyncio.create_task(server.run())
    try:
        yield Server(app, server, listener.getsockname()[1]), sessions
    finally:
        server.stop()
        server.stop()
        await running
        await engine.close()
        listener.close()


def request(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def stop_reading(port: int) -> socket.socket:
    """Ask for a stream and never read it."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
    await loop.sock_connect(sock, ("127.0.0.1", port))
    await loop.sock_sendall(sock, request(SLOW))
    return sock


async def read_all(port: int) -> None:
    """Ask for the same stream and read it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(SLOW))
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


async def read_gaps(port: int, number: int, num_tokens: int) -> tuple[list[float], bool]:
    """Seconds between the events of a stream that is read, and whether it came to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = {"prompt": f"fast {number}", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    writer.write(request(fields))
    gaps, last, is_done = list[float](), 0.0, False
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            is_done = True
            break
        if line.startswith(b"data: "):
            now = time.perf_counter()
            gaps += [now - last] if last else []
            last = now
    writer.close()
    return gaps, is_done


async def read_rest(sock: socket.socket) -> bytes:
    """What a client finds that reads on after it was cut."""
    loop, found = asyncio.get_running_loop(), bytearray()
    while data := await loop.sock_recv(sock, 1 << 16):
        found += data
    return bytes(found)


async def both(server: Server, sessions: Sessions, count: int, num_tokens: int) -> tuple[list[float], int]:
    """Fast readers beside others that read, then beside slow ones: their gaps, and how many were lost."""
    others = [asyncio.create_task(read_all(server.port)) for _ in range(count)]
    unfaulted = await asyncio.gather(*(read_gaps(server.port, number, num_tokens) for number in range(count)))
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    socks = [await stop_reading(server.port) for _ in range(count)]
    fast = asyncio.gather(*(read_gaps(server.port, number, num_tokens) for number in range(count)))
    async with asyncio.timeout(40):
        while server.num_cut < count:
            server.look(sessions)
            await asyncio.sleep(0.01)
    told = await asyncio.wait_for(read_rest(socks[0]), 60)
    assert b'"code":"slow_reader"' in told and told.rstrip().endswith(b"0") and b"data: [DONE]" in told
    beside = await fast
    p99s = [quantile([gap for gaps, _ in run for gap in gaps], 0.99) for run in (unfaulted, beside)]
    lost = sum(not is_done for _, is_done in (*unfaulted, *beside))
    for sock in socks:
        sock.close()
    return p99s, lost


async def test_row_08_slow_readers_are_cut_and_cost_the_others_nothing(score: Score) -> None:
    count, num_tokens = score.dose((8, 100), (32, 300))
    async with serving() as (server, sessions):
        p99s, lost = await both(server, sessions, count, num_tokens)
        async with asyncio.timeout(60):
            while len(sessions.client.requests):  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
    score.count("slow readers not cut", count - server.num_cut)
    score.count("fast readers lost", lost)
    score.count("KB of one connection beside kernel buffers", server.most_bytes // 1024, most=256)
    longest = max(end - begun for begun, end in server.waits.values())
    score.time("longest wait for a reader before it was cut, s", longest, most=STALL_S + 1)
    score.time("fast readers' p99 gap, ratio to the same load without slow readers", p99s[1] / p99s[0], most=1.1)
