"""Row 3: an engine that is stopped (SIGSTOP) or hangs is found, replaced, and nobody is lost; one that is only slow or
idle is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from array import array
from typing import Any

import pytest

from octavo.config.sources import config_from_keywords
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.engine import heartbeat
from octavo.frontend.engine_process import EngineProcess
from octavo.frontend.engine_supervisor import EngineState, EngineSupervisor
from tests.engine.fakes import expected, make_request
from tests.reliability.deaths import Load, follow, keeping, until
from tests.reliability.scorecard import Score


def page_of(keeper: EngineSupervisor) -> heartbeat.HeartbeatPage:
    """The heartbeat of the engine."""
    engine = keeper.replicas[0].engine
    assert isinstance(engine, EngineProcess)
    return engine.page


async def stop(keeper: EngineSupervisor) -> float:
    """Stop the engine's process; seconds until the keeper gave it up."""
    begun, epoch = time.monotonic(), keeper.epoch
    os.kill(keeper.processes["engine"], signal.SIGSTOP)
    await until(lambda: keeper.state is not EngineState.READY or keeper.epoch > epoch)
    return time.monotonic() - begun


async def test_row_03_an_engine_stopped_in_a_step(score: Score, capfd: pytest.CaptureFixture[str]) -> None:
    async with keeping("slow") as keeper:
        load = Load(keeper, lambda n: make_request(f"r{n}", max_tokens=60), 8)
        await until(lambda: len(load.streams) > 8)  # steps of this size are known by now
        found_s = await stop(keeper)
        await until(lambda: keeper.state is EngineState.READY)
        await load.stop()
        wrong = [s for s in load.streams if s.ids != expected(s.request) or s.reason is not FinishReason.LENGTH]
        score.count("lost, or not byte-equal", len(wrong) + len(load.errors))
        assert keeper.report()["stalls"] == 1
        score.time("seconds until a stopped step is detected", found_s, heartbeat.MIN_STEP_S + 1.5)
    assert "Thread 0x" in capfd.readouterr().err, "its stacks were told"


@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param("stops", id="the first step after the start"),
        pytest.param("stops_later", id="the first step of a standby that took over"),
        pytest.param("stops_large", id="the first step of a new size"),
    ],
)
async def test_row_03_an_engine_stopped_in_a_first_step(score: Score, behaviour: str) -> None:
    """The engine stops itself, so that it does so in that step."""
    is_standby, is_large = behaviour == "stops_later", behaviour == "stops_large"
    async with keeping(behaviour, standby=is_standby) as keeper:
        small = await follow(keeper, make_request("small", max_tokens=9)) if is_large else None
        if is_standby:
            await until(lambda: bool(keeper.report()["has_standby"]))
            os.kill(keeper.processes["engine"], signal.SIGKILL)
            await until(lambda: keeper.epoch > 1)
        pid, begun = keeper.processes["engine"], time.monotonic()
        following = asyncio.create_task(follow(keeper, make_request("a", length=40, max_tokens=9)))
        await until(lambda: keeper.num_stalls == 1)
        found_s = time.monotonic() - begun
        stream = await following
        score.count("lost", sum(each.ids != expected(each.request) for each in (small, stream) if each is not None))
        assert keeper.num_stalls == 1 and keeper.processes["engine"] != pid
        score.time("seconds until a stopped first step is detected", found_s, heartbeat.MIN_STEP_S + 1.5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_new", [False, True], ids=["the first step", "the first step of a new size"])
async def test_row_03_the_default_model_stopped_in_a_first_step(score: Score, is_new: bool) -> None:
    config = config_from_keywords("smollm2", {"max_model_len": 1024, "kv_cache_tokens": 8192})
    params = SamplingParams(max_tokens=4, temperature=0.0, seed=1, ignore_eos=True)
    long = Request("long", array("i", range(100, 900)), params)
    async with keeping(config) as keeper:
        if is_new:
            await follow(keeper, Request("short", array("i", range(100, 104)), params))
        page = page_of(keeper)
        before = page.beat()
        following = asyncio.create_task(follow(keeper, long))
        committed = before.num_committed if before is not None else 0
        async with asyncio.timeout(30):
            while (beat := page.beat()) is None or beat.phase is not heartbeat.Phase.STEP:
                await asyncio.sleep(0)
        allowed_s = (beat.deadline or 0.0) - time.monotonic()
        found_s = await stop(keeper)
        assert beat.num_committed == committed, "it was stopped in the step that was to be"
        stream = await following
        score.count("lost", int(len(stream.ids) != 4 or stream.reason is not FinishReason.LENGTH))
        assert keeper.num_stalls == 1
        score.time("seconds beyond the time allowed for such a step", found_s - allowed_s, 1.5)
        score.tell("seconds allowed for such a step", f"{allowed_s:.1f}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_row_03_first_steps_on_a_busy_machine_are_left_alone(score: Score) -> None:
    """Engines are started beside two busy processes a core, and meet steps of every kind for the first time."""
    config = config_from_keywords("smollm2", {"max_model_len": 1024, "kv_cache_tokens": 16384})
    command = [sys.executable, "-c", "while True: pass"]
    crowd = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        for _ in range(score.dose(2, 10)):
            async with keeping(config) as keeper:
                found = await asyncio.gather(*(follow(keeper, request) for request in kinds()))
                score.count("false alarms", keeper.num_stalls + keeper.num_restarts)
                score.count("lost", sum(stream.reason is not FinishReason.LENGTH for stream in found))
    finally:
        for process in crowd:
            process.kill()
            process.wait()


def kinds() -> list[Request]:
    """Long and short prompts, greedy and sampled, scores, choices and beams: together, hence steps of every size."""
    plain: dict[str, Any] = {"max_tokens": 12, "seed": 1, "ignore_eos": True}
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01, "logprobs": 5},
        {"temperature": 0.8, "n": 4, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.0, "prompt_logprobs": 3},
        {"temperature": 0.0, "beam_width": 3},
        {"temperature": 0.7, "typical_p": 0.8, "dry_multiplier": 0.8, "logit_bias": {7: 3.0}},
    ]
    lengths = (900, 4, 60, 300, 17, 500)
    return [
        Request(
            f"r{number}",
            array("i", range(100 + number, 100 + number + length)),
            SamplingParams(**{**plain, **way}),
        )
        for number, (way, length) in enumerate(zip(ways, lengths, strict=True))
    ]


async def test_row_03_a_standby_that_was_stopped_while_it_waited(score: Score) -> None:
    """It takes over when the engine dies, is found like any other that does not answer, and a third one serves."""
    async with keeping("slow", standby=True) as keeper:
        await until(lambda: bool(keeper.report()["has_standby"]))
        following = asyncio.create_task(follow(keeper, make_request("a", max_tokens=80)))
        await until(lambda: page_of(keeper).beat() is not None)
        standby = keeper.replicas[0].source.standby
        assert standby is not None
        os.kill(standby.pid, signal.SIGSTOP)
        begun = time.monotonic()
        os.kill(keeper.processes["engine"], signal.SIGKILL)
        stream = await following
        score.count("lost", int(stream.ids != expected(stream.request)))
        assert keeper.num_stalls == 1 and keeper.num_restarts == 2
        score.time("seconds from the engine's crash to the end of an answer", time.monotonic() - begun, 12.0)


async def test_row_03_an_engine_stopped_while_idle(score: Score) -> None:
    """Nothing is due, so nothing is late; the next request finds it out, and is served by the next engine."""
    async with keeping("fake") as keeper:
        begun = time.monotonic()
        os.kill(keeper.processes["engine"], signal.SIGSTOP)
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
