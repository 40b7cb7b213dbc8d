"""Row 33: clients without a key hold as many connections as they can; key holders are served all the same."""

import asyncio
import contextlib
import resource
import socket
import time
from collections import deque
from collections.abc import Iterator

import pytest

from tests.reliability.hostile_clients import CHAT, PATH
from tests.reliability.lag_api import watched_api
from tests.reliability.load import ask
from tests.reliability.scorecard import Score

KEY = "sk-row-33"
BEARER = f"authorization: Bearer {KEY}\r\n"
HEAD = b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n"
# What strangers send, then nothing more: heads whose bodies never come, heads without an end, nothing at all.
KINDS = {
    "POST /login without its body": b"POST /login" + HEAD + b"\r\n",
    "a refused POST without its body": b"POST /v1/chat/completions" + HEAD + b"\r\n",
    "GET /livez with a body that never comes": b"GET /livez" + HEAD + b"\r\n",
    "half a head": b"POST /login" + HEAD,
    "nothing": b"",
}


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 8192 else max(soft, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def crowd(port: int, sent: bytes, num: int) -> Iterator[list[socket.socket]]:
    """So many connections that send this and wait."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_stranger(port, sent)) for _ in range(num)]


def _stranger(port: int, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    with contextlib.suppress(ConnectionError):  # cut at once
        connection.sendall(sent)
    return connection


def num_kept(connections: list[socket.socket]) -> int:
    """How many of them the server has not closed."""
    kept = 0
    for connection in connections:
        connection.settimeout(0)
        try:
            while connection.recv(65_536):
                pass
        except BlockingIOError:
            kept += 1
        except ConnectionError:
            pass
    return kept


async def _keep_coming(port: int, sent: bytes, num: int) -> None:
    """New strangers without a pause, some 200 a second; as many as `num` stay."""
    peers: deque[socket.socket] = deque()
    try:
        while True:
            peers.extend(_stranger(port, sent) for _ in range(10))
            while len(peers) > num:
                peers.popleft().close()
            await asyncio.sleep(0.05)
    finally:
        for peer in peers:
            peer.close()


async def _beside(port: int, sent: bytes, num: int, rounds: int, headers: str) -> tuple[int, int, float]:
    """Honest requests while a crowd waits and more come: how many were served, of how many, the longest time."""
    served, asked, longest_s = 0, 0, 0.0
    with crowd(port, sent, num):
        coming = asyncio.create_task(_keep_coming(port, sent, num))
        for _ in range(rounds):
            outcomes = await asyncio.gather(*(ask(port, CHAT, PATH, headers) for _ in range(4)))
            served += sum(outcome.status == 200 for outcome in outcomes)
            asked += len(outcomes)
            longest_s = max([longest_s, *(outcome.total_s for outcome in outcomes)])
            await asyncio.sleep(0.05)
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
    return served, asked, longest_s


@pytest.mark.timeout(300)
def test_row_33_key_holders_are_served_whatever_strangers_hold(score: Score) -> None:
    num, rounds = score.dose((300, 6), (1024, 40))
    with watched_api({"max_connections": num}, api_key=[KEY]) as api:
        for kind, sent in KINDS.items():
            served, asked, longest_s = asyncio.run(_beside(api.port, sent, num, rounds, BEARER))
            score.of(kind)
            score.count("refused clients with a key", asked - served)
            score.tell("longest answer meanwhile, s", f"{longest_s:.2f}")
        assert api.is_alive


@pytest.mark.timeout(120)
def test_row_33_bodies_of_strangers_are_few_and_short(score: Score) -> None:
    """Of a crowd of withheld bodies 16 stay, for 2 s."""
    with watched_api(api_key=[KEY]) as api, crowd(api.port, KINDS["POST /login without its body"], 200) as peers:
        time.sleep(0.7)
        num_left = num_kept(peers)
        time.sleep(2.3)
        num_late = num_kept(peers)
    score.count("unfinished bodies without a key", num_left, most=16)
    score.least("unfinished bodies without a key that are kept", num_left, 1)
    score.count("unfinished bodies without a key after 3 s", num_late)


@pytest.mark.timeout(120)
def test_row_33_without_keys_whole_requests_are_served_beside_withheld_bodies(score: Score) -> None:
    num, rounds = score.dose((300, 6), (1024, 40))
    with watched_api({"max_connections": num}) as api:
        sent = KINDS["a refused POST without its body"]
        served, asked, _ = asyncio.run(_beside(api.port, sent, num, rounds, ""))
    score.count("requests refused by a server without keys", asked - served)


@pytest.mark.timeout(120)
def test_row_33_idle_connections_of_key_holders_outlast_a_crowd_of_strangers(score: Score) -> None:
    places, num_idle = 80, 40
    asked = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{BEARER}\r\n".encode()
    with (
        watched_api({"max_connections": places, "head_timeout_s": 30.0}, api_key=[KEY]) as api,
        crowd(api.port, asked, num_idle) as holders,
    ):
        time.sleep(0.5)
        assert num_kept(holders) == num_idle
        with crowd(api.port, b"", 2 * places):
            time.sleep(0.5)
            score.share("idle connections with a key, beside many without", num_kept(holders), num_idle)
