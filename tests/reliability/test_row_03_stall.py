"""Row 3: an engine that is stopped (SIGSTOP) or hangs is found, replaced, and nobody is lost; one that is only slow or
idle is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from octavo.core.request import FinishReason
from octavo.engine import heartbeat
from octavo.engine.keeper import EngineKeeper, KeeperState
from tests.engine.fakes import expected, make_request
from tests.reliability.deaths import Load, follow, keeping, until
from tests.reliability.scorecard import Score


async def stop(keeper: EngineKeeper) -> float:
    """Stop the engine's process; seconds until the keeper gave it up."""
    begun, epoch = time.monotonic(), keeper.epoch
    os.kill(keeper.pid, signal.SIGSTOP)
    await until(lambda: keeper.state is not KeeperState.READY or keeper.epoch > epoch)
    return time.monotonic() - begun


async def test_row_03_an_engine_stopped_in_a_step(score: Score, capfd: pytest.CaptureFixture[str]) -> None:
    async with keeping("slow") as keeper:
        load = Load(keeper, lambda n: make_request(f"r{n}", max_tokens=60), 8)
        await until(lambda: len(load.streams) > 8)  # steps of this size are known by now
        found_s = await stop(keeper)
        await until(lambda: keeper.state is KeeperState.READY)
        await load.stop()
        wrong = [s for s in load.streams if s.ids != expected(s.request) or s.reason is not FinishReason.LENGTH]
        score.count("lost, or not byte-equal", len(wrong) + len(load.errors))
        assert keeper.report()["stalls"] == 1
        score.time("seconds until it is found in a step", found_s, heartbeat.MIN_STEP_S + 1.5)
    assert "Thread 0x" in capfd.readouterr().err, "its stacks were told"


async def test_row_03_an_engine_stopped_while_idle(score: Score) -> None:
    """Nothing is due, so nothing is late; the next request finds it out, and is served by the next engine."""
    async with keeping("fake") as keeper:
        begun = time.monotonic()
        os.kill(keeper.pid, signal.SIGSTOP)
        stream = await follow(keeper, make_request("a", max_tokens=9))
        score.count("lost", int(stream.ids != expected(stream.request)))
        await until(lambda: keeper.num_restarts == 1)
        assert keeper.num_stalls == 1
        score.time("seconds from a request to its answer", time.monotonic() - begun, 12.0)


@pytest.mark.timeout(900)
async def test_row_03_slow_and_idle_engines_are_left_alone(score: Score) -> None:
    """Busy, idle, and this side itself late: no alarm."""
    async with keeping("slow") as keeper:
        load = Load(keeper, lambda n: make_request(f"r{n}", max_tokens=90), 16)
        until_s = time.monotonic() + score.dose(2.0, 600.0)
        while time.monotonic() < until_s:
            await asyncio.sleep(0.5)
            time.sleep(0.7)  # the event loop stands still
        await load.stop()
        await asyncio.sleep(score.dose(0.5, 20.0))
        score.count("false alarms", int(keeper.num_stalls + keeper.num_restarts))
        assert all(stream.ids == expected(stream.request) for stream in load.streams) and not load.errors
