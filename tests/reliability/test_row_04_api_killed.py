"""Row 4: the api process is killed under load, with the journal on. Clients ask again and continue."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from octavo.cli.servers import AdminError
from octavo.frontend.journal_files import BootClock
from octavo.frontend.journal_state import recover
from tests.fake_server import FakeServer
from tests.reliability.retrying import Retrying
from tests.reliability.scorecard import Score
from tests.tiny_models import make_tiny_model


def fields(number: int) -> dict[str, Any]:
    """Streams and whole answers, several choices and prompts, log-probabilities, penalties, stop strings."""
    base = {
        "prompt": f"number {number} of all",
        "max_tokens": 60 + 3 * (number % 20),
        "ignore_eos": True,
        "seed": number,
    }
    kinds: list[dict[str, Any]] = [
        {"stream": True, "temperature": 0},
        {"stream": True, "temperature": 0.8, "presence_penalty": 0.5, "logprobs": 2},
        {"stream": True, "n": 3, "logprobs": 1, "stream_options": {"include_usage": True}},
        {"temperature": 0, "n": 2},
        {"stream": True, "prompt": [f"a{number}", f"b{number}"], "temperature": 0},
        {"stream": True, "temperature": 0.5, "stop": ["e", "zz"], "ignore_eos": False},
    ]
    return base | kinds[number % len(kinds)]


def clients(server: FakeServer, count: int, run: str) -> list[Retrying]:
    port = urlsplit(server.url).port
    assert port is not None
    return [Retrying(port, f"{run}-{number}", fields(number)) for number in range(count)]


async def load(asking: list[Retrying]) -> None:
    await asyncio.gather(*(client.run(90) for client in asking))


async def killed(server: FakeServer, asking: list[Retrying], num_kills: int, rng: random.Random) -> None:
    """Kill the api again and again while everybody asks."""
    working = asyncio.create_task(load(asking))
    for _ in range(num_kills):
        pid = await asyncio.to_thread(server.pid, "api")
        await asyncio.sleep(rng.uniform(0.15, 0.6))
        if working.done():
            break
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.1)
        while not working.done():  # until the next life serves
            try:
                if await asyncio.to_thread(server.pid, "api") != pid:
                    break
            except Exception:  # its admin socket is not there yet
                await asyncio.sleep(0.05)
    await working


async def answers_again(server: FakeServer) -> None:
    """Wait until an api answers on the admin socket."""
    async with asyncio.timeout(60):
        while True:
            try:
                server.status()
                return
            except AdminError:
                await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["none", "group"])
def test_row_04_clients_continue_when_the_api_is_killed(tmp_path: Path, score: Score, sync: str) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    num_clients, num_kills = score.dose((12, 1), (32, 10))
    folder = tmp_path / "journal"
    flags = ("--journal", str(folder), "--journal-sync", sync, "--max-num-seqs", "64")
    with FakeServer(model, tmp_path / "log", *flags, env={"FAKE_STEP_S": "0.01"}) as server:
        plain = clients(server, num_clients, "plain")
        asyncio.run(load(plain))
        faulted = clients(server, num_clients, "faulted")
        asyncio.run(killed(server, faulted, num_kills, random.Random(4)))
        asyncio.run(answers_again(server))  # the last kill may have been just now
        restarts = server.status()["api_restarts"]
        assert server.end() == 0, server.text
    kept = recover(folder, f"{model}@", BootClock.now()).state
    begun = [run.began.key for run in kept.runs.values()]
    score.of(f"journal-sync {sync}")
    score.tell("kills", restarts)
    score.tell("connections a request", round(sum(c.num_connections for c in faulted) / len(faulted), 2))
    score.count("lost", sum(not client.is_done for client in faulted))
    score.count("executed twice", sum(len(c.ids) > 1 for c in faulted) + len(begun) - len(set(begun)))
    score.count("open in the journal at the end", sum(not run.is_ended for run in kept.runs.values()))
    differing = [
        (b.fields, a.choices, b.choices) for a, b in zip(plain, faulted, strict=True) if a.choices != b.choices
    ]
    print(*differing, sep="\n")
    score.share("equal to the unfaulted run", len(faulted) - len(differing), len(faulted))
    assert restarts >= 1 and any(client.num_connections > 1 for client in faulted), server.text
    assert all(status in (200, 503) for client in faulted for status in client.statuses)
