"""Row 29: hundreds of connections that keep to no rule are cut by limits; honest requests are served beside them."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.reliability.hostile_clients import ATTACKS, CHAT, CPU, PATH, attackers
from tests.reliability.lag_api import Api, watched_api
from tests.reliability.load import Outcome, ask, quantile
from tests.reliability.nasty_requests import nasty_request
from tests.reliability.scorecard import Score

LIMITS = {"head_timeout_s": 1.0, "body_timeout_s": 1.0, "body_grace_s": 0.5, "max_connections": 300}
LONGEST_S = 4.0  # that a hostile connection may live: both limits, and room for a busy machine


async def _honest(api: Api, seconds: float) -> list[Outcome]:
    end, found = time.monotonic() + seconds, []
    while time.monotonic() < end:
        found.append(await ask(api.port, CHAT, PATH))
        await asyncio.sleep(0.01)
    return found


@dataclass
class Side:
    """Honest requests of all rounds, without or beside hostile connections, and what the server and they cost."""

    outcomes: list[Outcome] = field(default_factory=list)
    own_late_s: list[float] = field(default_factory=list)  # p99.9 of each round
    wall_s: float = 0.0
    server_cpu_s: float = 0.0
    honest_cpu_s: float = 0.0

    def add(self, api: Api, seconds: float) -> None:
        """Measure one round."""
        before, used = api.report()["cpu_s"], time.process_time()
        self.outcomes += asyncio.run(_honest(api, seconds))
        report = api.report()
        self.wall_s += seconds
        self.honest_cpu_s += time.process_time() - used
        self.server_cpu_s += report["cpu_s"] - before
        self.own_late_s.append(report["own_p999_s"])

    @property
    def shares(self) -> str:
        """Of one core, in the server and in the honest client."""
        return f"{self.server_cpu_s / self.wall_s:.2f}, {self.honest_cpu_s / self.wall_s:.2f}"


def _rounds(api: Api, num: int, rounds: int, lives: dict[str, list[float]]) -> tuple[Side, Side]:
    """Honest requests without and beside hostile connections, in turn."""
    calm, beside = Side(), Side()
    for _ in range(rounds):
        calm.add(api, 1.0)
        with attackers(api.port, num, lives):
            beside.add(api, 3.0)
    return calm, beside


@pytest.mark.timeout(300)
def test_row_29_hostile_connections_are_cut_and_honest_ones_served(score: Score) -> None:
    num, rounds = score.dose((44, 1), (220, 8))
    lives: dict[str, list[float]] = {}
    with watched_api(LIMITS) as api:
        asyncio.run(_honest(api, 0.3))
        calm, beside = _rounds(api, num, rounds, lives)
        after = asyncio.run(_honest(api, 0.3))
        assert api.is_alive
    hostile_cpu_s = sum(lives.pop(CPU))
    outcomes = [*calm.outcomes, *beside.outcomes, *after]
    score.tell("hostile connections", sum(map(len, lives.values())))
    score.share("honest requests served", sum(outcome.status == 200 for outcome in outcomes), len(outcomes))
    uncut = [attack.__name__ for attack in ATTACKS if not lives.get(attack.__name__)]
    score.count(f"kinds of hostile connections that were not cut {uncut or ''}".strip(), len(uncut))
    score.time("longest time of one, s", max(max(times) for times in lives.values()), LONGEST_S)
    score.tell("cores used without them by server, honest client", calm.shares)
    score.tell("cores used beside them by server, honest client, hostile clients",
               f"{beside.shares}, {hostile_cpu_s / beside.wall_s:.2f}")  # fmt: skip
    times = [[outcome.total_s for outcome in side.outcomes] for side in (beside, calm)]
    p50, p99 = (quantile(times[0], share) / quantile(times[1], share) for share in (0.5, 0.99))
    score.tell("an honest request's p50 beside them by that without", f"{p50:.2f}")
    score.tell("event loop late by work of its own process, the worst round's p99.9 in ms: without them, beside them",
               f"{1000 * max(calm.own_late_s):.1f}, {1000 * max(beside.own_late_s):.1f}")  # fmt: skip
    score.time("an honest request's p99 beside them by that without", p99, 1.2)


@pytest.mark.timeout(120)
def test_row_29_more_connections_than_places_cost_the_idle_ones_theirs(score: Score) -> None:
    """Twice as many idle connections as there are places, and a request that comes last."""
    places = 60

    async def crowd(port: int) -> tuple[int, list[Outcome]]:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * places)]
        outcomes = [await ask(port, CHAT, PATH) for _ in range(20)]
        await asyncio.sleep(0.2)
        num_cut = sum(reader.at_eof() for reader, _ in idle)
        for _, writer in idle:
            writer.close()
        return num_cut, outcomes

    with watched_api({"max_connections": places, "head_timeout_s": 30.0}) as api:
        num_cut, outcomes = asyncio.run(crowd(api.port))
    score.share("honest requests served beside a crowd of idle connections",
                sum(outcome.status == 200 for outcome in outcomes), len(outcomes))  # fmt: skip
    score.least("idle connections that were cut to make room", num_cut, places)


def _damaged(rng: random.Random) -> bytes:
    """A request on the wire, odd by itself or with a fault or two in its bytes."""
    nasty = nasty_request(rng)
    body = nasty.body[:20_000]
    named = {"host": "localhost", "connection": "close", "content-length": str(len(body)), **nasty.headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items()).encode("latin-1")
    raw = bytearray(f"{nasty.method} {nasty.path} HTTP/1.1\r\n".encode() + lines + b"\r\n" + body)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        at = rng.randrange(min(len(raw), rng.choice((20, 200, len(raw)))))
        kind = rng.randrange(4)
        if kind == 0:
            raw[at] = rng.randrange(256)
        elif kind == 1:
            del raw[at : at + rng.choice((1, 2, 30))]
        elif kind == 2:
            raw[at:at] = rng.choice((b"\r\n", b"\n", b"\x00", b": ", b" ", b"%", b"chunked", b"\r\n\r\n", b"9" * 30))
        else:
            raw[at:at] = raw[at : at + 50]
    return bytes(raw)


@pytest.mark.timeout(600)
def test_row_29_damaged_requests_are_answered_or_cut(score: Score) -> None:
    """What comes off the wire in pieces that no parser likes: no fault of ours, no connection that stays."""
    count = score.dose(200, 8000)
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    longest_s = 0.0

    async def one(port: int, raw: bytes) -> None:
        nonlocal longest_s
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begun = time.monotonic()
        received = b""
        with contextlib.suppress(ConnectionError):
            writer.write(raw)
            while data := await reader.read(65_536):
                received += data
        writer.close()
        longest_s = max(longest_s, time.monotonic() - begun)
        status = int(received[9:12]) if received.startswith(b"HTTP/1.1 ") else 0
        statuses[status] += 1
        if status >= 500 or (received and not status):
            wrong.append(f"{raw[:300]!r}: {received[:300]!r}")
        elif status == 400 and b"HTTP/1.1 100" not in received:
            head, _, body = received.partition(b"\r\n\r\n")
            if b"\r\ncontent-length: " in head and not raw.startswith(b"HEAD"):
                assert json.loads(body[: body.rindex(b"}") + 1])["error"]["code"], received

    async def all_of_them(port: int) -> None:
        rng = random.Random(29)
        requests = [_damaged(rng) for _ in range(count)]

        async def client(mine: list[bytes]) -> None:
            for raw in mine:
                await one(port, raw)

        await asyncio.gather(*(client(requests[index::32]) for index in range(32)))

    with watched_api({"head_timeout_s": 0.5, "body_timeout_s": 0.5, "body_grace_s": 0.2}) as api:
        asyncio.run(all_of_them(api.port))
        after = asyncio.run(_honest(api, 0.2))
        assert api.is_alive
    print("\n".join(wrong[:10]))
    shown = " ".join(f"{status or 'none'}: {number}" for status, number in sorted(statuses.items()))
    score.tell("damaged requests, by the status of their answers", shown)
    score.count("damaged requests with a 5xx, or an answer that is not HTTP", len(wrong))
    score.share("honest requests served after them", sum(o.status == 200 for o in after), len(after))
    score.time("longest time of a damaged request, s", longest_s, 8.0)  # one that is kept alive has five
