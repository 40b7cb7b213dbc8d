"""Queue timeouts over the real scheduler: who does not start in time is wait_text so, and later not let in at all."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from octavo.config import StatisticsConfig
from octavo.core.limits import Limits
from octavo.core.scheduler import Scheduler
from octavo.engine.loop import EngineLoop
from octavo.engine.observation import observe_engine
from octavo.executors.protocol import ExecutorSpec
from octavo.frontend.local_client import LocalClient
from tests.fake_model import FakeExecutor
from tests.server.fakes import Harness, events

VOCAB = 258
STEP_S = 0.01
LIMITS = Limits(block_size=16, num_blocks=(64,), max_model_len=512, vocab_size=VOCAB, max_sequences=1)


class SlowExecutor(FakeExecutor):
    """A step takes ten milliseconds."""

    def collect(self, ticket: object) -> Any:
        time.sleep(STEP_S)
        return super().collect(ticket)


@asynccontextmanager
async def served() -> AsyncIterator[Harness]:
    """An app over an engine that runs one request at a time."""
    executor = SlowExecutor(vocab_size=VOCAB, max_model_len=512)
    executor.open(ExecutorSpec(1, LIMITS.max_batch_tokens, 16, num_blocks=64))
    scheduler = Scheduler(LIMITS)
    loop = EngineLoop(scheduler, executor)
    observe_engine(loop, scheduler, StatisticsConfig())
    client = LocalClient(loop)
    harness = Harness(engine=client)  # type: ignore[arg-type]
    harness.context.queue.num_slots = 1
    try:
        yield harness
    finally:
        await client.close()


async def long_one(harness: Harness, num_tokens: int = 100) -> asyncio.Task[Any]:
    """A request that has the engine for itself from here on."""
    task = asyncio.create_task(harness.complete(max_tokens=num_tokens, ignore_eos=True))
    async with asyncio.timeout(60):
        while harness.context.queue.num_running == 0:
            await asyncio.sleep(0.001)
    return task


async def test_who_does_not_start_in_time_gets_408_and_the_rest_go_on() -> None:
    async with served() as harness:
        first = await long_one(harness)
        queued, timed, patient, streamed = await asyncio.gather(
            harness.complete(queue_timeout=0.1),
            harness.complete(timeout=0.1),
            harness.complete(queue_timeout=30, timeout=30, max_tokens=2, ignore_eos=True),
            harness.complete(queue_timeout=0.1, stream=True),
        )
        assert (queued.status_code, queued.json()["error"]["code"]) == (408, "queue_timeout")
        assert (timed.status_code, timed.json()["error"]["code"]) == (408, "timeout")
        assert patient.status_code == 200 and patient.json()["usage"]["completion_tokens"] == 2
        *_, error, _ = events(streamed.text)
        assert error["error"]["code"] == "queue_timeout"
        assert (await first).status_code == 200
        assert harness.context.queue.num_pending == harness.context.queue.num_running == 0


async def test_once_speeds_are_known_a_hopeless_wait_is_refused_at_once() -> None:
    async with served() as harness:
        assert (await harness.complete(max_tokens=50, ignore_eos=True)).status_code == 200
        first = await long_one(harness)
        response = await harness.complete(queue_timeout=0.05)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (429, "wait_too_long")
        assert "may wait 0.05 s" in error["message"] and response.headers["retry-after"] == "1"
        assert (await harness.complete(queue_timeout=60, max_tokens=1)).status_code == 200
        assert (await first).status_code == 200


@pytest.mark.slow  # how near depends on the pace of the machine
async def test_the_estimate_is_near_what_then_happens() -> None:
    async with served() as harness:
        for _ in range(2):
            await harness.complete(max_tokens=30, ignore_eos=True)
        first = await long_one(harness, 30)
        others = [asyncio.create_task(harness.complete(max_tokens=30, ignore_eos=True)) for _ in range(4)]
        while harness.context.queue.num_pending < 4:
            await asyncio.sleep(0.001)
        told_s, begun = harness.context.admission.wait_s(), time.monotonic()
        last = await harness.complete(max_tokens=1)
        waited_s = last.json()["timings"]["queue_s"]
        await asyncio.gather(first, *others)
        assert told_s is not None and waited_s / 5 < told_s < 5 * waited_s, (told_s, waited_s)
        assert time.monotonic() - begun >= waited_s
