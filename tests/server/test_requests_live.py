"""Explanations of a real scheduler through the server: what a client reads while its request waits, and after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from octavo.config import StatisticsConfig
from octavo.core.scheduler import Scheduler
from octavo.engine.loop import EngineLoop
from octavo.engine.observation import observe_engine
from octavo.frontend.local_client import LocalClient
from octavo.observe.history import PHASES
from octavo.server.api.requests import explain_open
from tests.engine.fakes import GatedExecutor, make_limits, open_fake
from tests.server.fakes import Harness


@asynccontextmanager
async def served(**sizes: Any) -> AsyncIterator[tuple[Harness, GatedExecutor]]:
    """An app over an engine whose steps can be held."""
    executor, limits = GatedExecutor(), make_limits(vocab_size=258, **sizes)
    executor.vocab_size = limits.vocab_size
    open_fake(executor, limits)
    scheduler = Scheduler(limits)
    loop = EngineLoop(scheduler, executor)
    observe_engine(loop, scheduler, StatisticsConfig())
    client = LocalClient(loop)
    try:
        yield Harness(engine=client), executor  # type: ignore[arg-type]
    finally:
        executor.gate.set()
        await client.close()


async def until_open(harness: Harness, count: int) -> None:
    async with asyncio.timeout(60):
        while len((await explain_open(harness.context)).get("open", ())) < count:  # type: ignore[arg-type]
            await asyncio.sleep(0.002)


async def test_I04_S20_the_queue_is_explained_with_its_numbers_and_so_is_the_end() -> None:
    async with served(max_sequences=1) as (harness, _):
        assert await harness.context.sessions.client.control("pause") is True
        tasks = [
            asyncio.create_task(harness.complete(max_tokens=4, headers={"X-Request-Id": name})) for name in ("a", "b")
        ]
        await until_open(harness, 2)
        first, second = [
            (await harness.get(f"/v1/requests/{name}/explain")).json()["explanations"][0] for name in ("a", "b")
        ]
        assert (first["state"], first["reason"], first["position"]) == ("waiting", "paused", 1)
        assert (second["position"], second["behind"], second["num_ahead"]) == (2, "a", 1)
        assert second["prediction"]["why_not"] == "the engine is paused"
        assert second["policy"] == "fcfs" and second["ahead"] == [{"id": "a", "why": "arrival 1"}]
        await harness.context.sessions.client.control("resume")
        assert [(await task).status_code for task in tasks] == [200, 200]
        answer = (await harness.get("/v1/requests/b/explain")).json()
        (told,) = answer["explanations"]
        assert told["state"] == "finished" and told["end"]["finish_reason"] in ("length", "stop")
        assert told["events"][-1]["event"] == "finished"
        assert abs(sum(told["seconds"][phase] for phase in PHASES) - told["seconds"]["total"]) < 1e-9
        assert answer["queue"]["num_waiting"] == 0
