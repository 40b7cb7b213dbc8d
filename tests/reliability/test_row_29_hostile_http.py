"""Row 29: hundreds of connections that keep to no rule are cut by limits; honest requests are served beside them."""

import asyncio
import time

import pytest

from tests.reliability.hostile_clients import ATTACKS, CHAT, PATH, attackers
from tests.reliability.lag_api import Api, watched_api
from tests.reliability.load import Outcome, ask, quantile
from tests.reliability.scorecard import Score

LIMITS = {"head_timeout_s": 1.0, "body_timeout_s": 1.0, "body_grace_s": 0.5, "max_connections": 300}
LONGEST_S = 4.0  # that a hostile connection may live: both limits, and room for a busy machine


async def _honest(api: Api, seconds: float) -> list[Outcome]:
    end, found = time.monotonic() + seconds, []
    while time.monotonic() < end:
        found.append(await ask(api.port, CHAT, PATH))
        await asyncio.sleep(0.01)
    return found


def _rounds(api: Api, num: int, rounds: int, lives: dict[str, list[float]]) -> tuple[list[Outcome], list[Outcome]]:
    """Honest outcomes without and beside hostile connections, in turn."""
    calm: list[Outcome] = []
    beside: list[Outcome] = []
    for _ in range(rounds):
        calm += asyncio.run(_honest(api, 1.0))
        with attackers(api.port, num, lives):
            beside += asyncio.run(_honest(api, 3.0))
    return calm, beside


@pytest.mark.timeout(300)
def test_row_29_hostile_connections_are_cut_and_honest_ones_served(score: Score) -> None:
    num, rounds = score.dose((44, 1), (220, 8))
    lives: dict[str, list[float]] = {}
    with watched_api(LIMITS) as api:
        calm, beside = _rounds(api, num, rounds, lives)
        after = asyncio.run(_honest(api, 0.3))
        assert api.is_alive
    served = [outcome for outcome in (*calm, *beside, *after) if outcome.status == 200]
    score.tell("hostile connections", sum(map(len, lives.values())))
    score.share("honest requests served", len(served), len(calm) + len(beside) + len(after))
    uncut = [attack.__name__ for attack in ATTACKS if not lives.get(attack.__name__)]
    score.count(f"kinds of hostile connections that were not cut {uncut or ''}".strip(), len(uncut))
    score.time("longest life of one, s", max(max(times) for times in lives.values()), LONGEST_S)
    times = [[outcome.total_s for outcome in outcomes] for outcomes in (beside, calm)]
    p50, p99 = (quantile(times[0], share) / quantile(times[1], share) for share in (0.5, 0.99))
    score.tell("an honest request's p50 beside them by that without", f"{p50:.2f}")
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
    score.least("idle connections that gave their place up", num_cut, places)
