"""Row 21: a disk that is full, and descriptors that are used up. The server goes on with less, and recovers."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.fake_server import FakeServer
from tests.reliability.retrying import Retrying
from tests.reliability.scorecard import Score
from tests.tiny_models import make_tiny_model

WAIT_S = 60.0


def client(server: FakeServer, key: str, number: int, max_tokens: int = 120) -> Retrying:
    port = urlsplit(server.url).port
    assert port is not None
    fields = {"prompt": f"number {number}", "max_tokens": max_tokens, "ignore_eos": True, "seed": number}
    return Retrying(port, f"{key}-{number}", fields | {"stream": number % 2 == 0})


async def run(*groups: list[Retrying]) -> None:
    await asyncio.gather(*(each.run(60) for group in groups for each in group))


@contextmanager
def limited(pid: int, what: int, most: int) -> Iterator[None]:
    """A process under a soft limit, as when its machine has no more to give."""
    soft, hard = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (most, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, what, (soft, hard))


def journal_state(server: FakeServer) -> str:
    return str(server.get("/health")[2]["journal"]["state"])


def wait_for(condition: Any) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "what must come did not come"
        time.sleep(0.05)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(make_tiny_model("smollm2", tmp_path / "tiny"))


def same(expected: list[Retrying], found: list[Retrying]) -> int:
    return sum(a.is_done and b.is_done and a.choices == b.choices for a, b in zip(expected, found, strict=True))


@pytest.mark.slow
def test_row_21_a_full_disk_stops_the_journal_and_nothing_else(tmp_path: Path, model: str, score: Score) -> None:
    count = score.dose(4, 16)
    flags = ("--journal", str(tmp_path / "journal"), "--journal-sync", "group")
    with FakeServer(model, tmp_path / "log", *flags, env={"FAKE_STEP_S": "0.01"}) as server:
        plain, full, after = ([client(server, key, number) for number in range(count)] for key in ("p", "f", "a"))
        asyncio.run(run(plain))
        with limited(server.pid("api"), resource.RLIMIT_FSIZE, 1):
            asyncio.run(run(full))
            assert journal_state(server) == "suspended"
            assert server.get("/health")[0] == 200 and "octavo_journal_up" in metrics(server)
        wait_for(lambda: journal_state(server) == "on")
        assert server.get("/health")[2]["journal"]["suspensions"] == 1

        async def killed() -> None:
            """What was asked while the disk was full, and what is asked now, outlives the api all the same."""
            running = asyncio.create_task(run(after))
            await asyncio.sleep(0.3)
            os.kill(await asyncio.to_thread(server.pid, "api"), signal.SIGKILL)
            await running
            for each in full:
                each.is_done, each.whole, each.events, each.last_id = False, None, [], None
            await run(full)

        asyncio.run(killed())
        taken = server.status()["api_restarts"]
        assert server.end() == 0
    score.count("lost", sum(not each.is_done for each in (*plain, *full, *after)))
    score.count("executed twice", sum(len(each.ids) > 1 for each in (*full, *after)))
    score.share("equal to the unfaulted run", same(plain, full) + same(plain, after), 2 * count)
    assert taken == 1


def metrics(server: FakeServer) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


@pytest.mark.slow
def test_row_21_no_descriptors_left(tmp_path: Path, model: str, score: Score) -> None:
    count = score.dose(4, 16)
    flags = ("--journal", str(tmp_path / "journal"))
    with FakeServer(model, tmp_path / "log", *flags, env={"FAKE_STEP_S": "0.02"}) as server:
        early, late, plain = ([client(server, key, number) for number in range(count)] for key in ("e", "l", "p"))
        pid = server.pid("api")
        hogs: list[socket.socket] = []

        async def exhausted() -> None:
            going = asyncio.create_task(run(early))
            await asyncio.sleep(0.5)
            with limited(pid, resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{pid}/fd")) + 4):
                hogs.extend(socket.create_connection(("127.0.0.1", early[0].port)) for _ in range(24))
                await asyncio.sleep(0.2)
                refused = asyncio.create_task(run(late))
                await going
                for hog in hogs:
                    hog.close()
                await refused

        asyncio.run(exhausted())
        asyncio.run(run(plain))
        assert server.get("/health")[0] == 200 and journal_state(server) == "on"
        assert server.status()["api_restarts"] == 0 and server.pid("api") == pid
        assert server.end() == 0
    score.count("lost", sum(not each.is_done for each in (*early, *late, *plain)))
    score.count("streams cut", sum(each.num_connections - 1 for each in early))
    score.count("executed twice", sum(len(each.ids) > 1 for each in (*early, *late)))
    score.share("equal to the unfaulted run", same(plain, early) + same(plain, late), 2 * count)
    score.tell("connections a request while no descriptor was free", sum(each.num_connections for each in late) / count)
