"""Row 40, its part of replicas: replicas of a scripted model are killed at random under load; each answer is compared
with the script. And what a second replica adds to the throughput."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.artifacts.script import END_ID, encode
from octavo.config.sources import config_from_keywords
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.fleet.fleet_router import FleetRouter
from octavo.fleet.replicas import LocalReplicas
from octavo.frontend.engine_supervisor import EngineSupervisor
from tests.reliability.deaths import Load, quantile, start_fleet, until
from tests.reliability.scorecard import Score

WIDTH = 64
LETTERS = "abcdefghijklmnopqrstuvwxyz "


@asynccontextmanager
async def scripted_fleet(folder: Path, count: int, step_ms: float, **values: Any) -> AsyncIterator[LocalReplicas]:
    """Replicas of a model that echoes each prompt, a byte a step."""
    script = folder / "echo.json"
    script.write_text(json.dumps({"step_ms": step_ms}))
    config = config_from_keywords(f"scripted:{script}", values)
    supervisor = EngineSupervisor(router=FleetRouter("least_requests"))
    local = await start_fleet(supervisor, config, count)
    try:
        yield local
    finally:
        await supervisor.close()


class Prompts:
    """Requests whose texts differ; the right answer is the text."""

    def __init__(self, least: int, most: int) -> None:
        self._rng, self._least, self._most = random.Random(4), least, most

    def make(self, number: int) -> Request:
        length = self._rng.randrange(self._least, self._most)
        text = f"{number} " + "".join(self._rng.choices(LETTERS, k=length))
        params = SamplingParams(max_tokens=self._most + 16, temperature=0.0, seed=1)
        ids = array("i", encode(text))
        return Request(f"r{number}", ids, params, time.monotonic(), eos_token_ids=(END_ID,))


async def test_row_40_replicas_are_killed_under_load(score: Score, tmp_path: Path) -> None:
    score.of("three replicas of a scripted model")
    num_requests, num_kills = score.dose(300, 2000), score.dose(3, 10)
    async with scripted_fleet(tmp_path, 3, score.dose(8.0, 20.0), max_sequences=32) as local:
        supervisor, rng = local.supervisor, random.Random(5)
        prompts = Prompts(*score.dose((6, 30), (40, 120)))
        load, kills = Load(supervisor, prompts.make, WIDTH), list[float]()
        next_at = time.monotonic()
        while len(load.streams) < num_requests:
            live = [each.engine for each in supervisor.replicas if each.engine is not None]
            is_due = len(load.streams) > len(kills) * num_requests // (num_kills + 1) and time.monotonic() > next_at
            if live and is_due and len(kills) < num_kills + score.dose(0, 10):
                kills.append(time.monotonic())
                os.kill(rng.choice(live).pid, signal.SIGKILL)
                next_at = kills[-1] + score.dose(0.0, 5.0)
            assert not load.errors
            await asyncio.sleep(0.02)
        await load.stop()
        streams, report = load.streams, supervisor.report()
        right = [[*(stream.request.prompt_token_ids or ()), END_ID] for stream in streams]
        score.tell("requests, kills, resumed", f"{len(streams)}, {len(kills)}, {report['resumed_requests']}")
        score.count("lost", len(load.errors) + sum(stream.reason is not FinishReason.STOP for stream in streams))
        score.count("outputs at a wrong position", sum(stream.num_misplaced for stream in streams))
        score.share("equal to the script", sum(s.ids == ids for s, ids in zip(streams, right, strict=True)), len(right))
        gaps = [gap for stream in streams for at in kills if (gap := stream.gap_over(at)) is not None]
        score.time("gap p95 s", quantile(gaps, 0.95), 1.0)
        await until(lambda: supervisor.num_restarts == len(kills))
        await until(lambda: all(each.bound is not None for each in supervisor.replicas))
        statistics: Any = await supervisor.statistics()
        score.count("blocks used at the end", statistics["scheduler"]["num_blocks_used"])


@pytest.mark.slow
async def test_row_40_two_replicas_serve_nearly_twice_as_much_as_one(score: Score, tmp_path: Path) -> None:
    """Steps of 20 ms, which do not depend on the cores that are free."""

    async def rate(local: LocalReplicas, seconds: float) -> float:
        """Tokens per second under more load than the slots hold."""
        prompts = Prompts(40, 60)
        load = Load(local.supervisor, prompts.make, 48)
        await until(lambda: len(load.streams) >= 8)
        begun = await count(local.supervisor)
        started_at = time.monotonic()
        await asyncio.sleep(seconds)
        found = (await count(local.supervisor) - begun) / (time.monotonic() - started_at)
        for state in local.supervisor.requests:
            local.supervisor.cancel([state.request.request_id])
        await load.stop()
        return found

    async def count(supervisor: EngineSupervisor) -> int:
        statistics: Any = await supervisor.statistics()
        return int(statistics["scheduler"]["num_output_tokens"])

    best = 0.0
    async with scripted_fleet(tmp_path, 1, 20.0, max_sequences=8) as local:
        for _ in range(3):
            await local.scale(1)
            one = await rate(local, 6.0)
            await local.scale(2)
            two = await rate(local, 6.0)
            best = max(best, two / one)
            score.tell("tokens/s of one replica and of two", f"{one:.0f}, {two:.0f}")
            if best >= 1.95:
                break
    score.least("throughput of two replicas by that of one", best, 1.95)
