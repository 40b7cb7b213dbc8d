"""EngineSupervisor over fake engine processes: deaths, cancels and submits in between, standbys, the end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.fakes import expected, make_request
from tests.frontend.test_engine_process import is_alive

from octavo.config import Config, ModelConfig, ServingConfig
from octavo.core.request import FinishReason, SamplingParams
from octavo.engine.client import TokenOutput
from octavo.errors import CapacityError, EngineDeadError, ErrorKind, QueueFullError
from octavo.frontend import engine_process as spawner_module
from octavo.frontend.engine_supervisor import EngineState, EngineSupervisor
from octavo.frontend.open_request import OpenRequest

COMMAND = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))


def config(behaviour: str, **serving: object) -> Config:
    return Config(model=ModelConfig(model=behaviour), serving=ServingConfig(**serving))  # type: ignore[arg-type]


@asynccontextmanager
async def keeping(behaviour: str = "fake", **serving: object) -> AsyncIterator[EngineSupervisor]:
    keeper = await EngineSupervisor.start(config(behaviour, **serving), command=COMMAND)
    try:
        yield keeper
    finally:
        await keeper.close()


async def read(keeper: EngineSupervisor, name: str) -> tuple[list[int], TokenOutput]:
    ids: list[int] = []
    async for output in keeper.outputs(name):
        if not output.choice:
            assert output.position == len(ids)
            ids += output.token_ids
        last = output
    return ids, last


async def until(condition: object, timeout_s: float = 60.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def standby_pid(keeper: EngineSupervisor) -> int | None:
    standby = keeper.replicas[0].source.standby
    return None if standby is None else standby.pid


def num_ids(keeper: EngineSupervisor, name: str) -> int:
    entry = keeper.requests.get(name)
    return len(entry.pages[0].ids) if entry is not None else 0


async def test_a_killed_engine_is_replaced_and_streams_go_on() -> None:
    async with keeping("slow") as keeper:
        requests = [make_request(f"r{i}", max_tokens=60) for i in range(6)]
        await asyncio.gather(*map(keeper.submit, requests))
        reading = [asyncio.create_task(read(keeper, request.request_id)) for request in requests]
        for epoch in (1, 2, 3):
            assert keeper.epoch == epoch and keeper.trouble() is None
            before = num_ids(keeper, "r0")
            await until(lambda before=before: num_ids(keeper, "r0") > before + 3)
            os.kill(keeper.processes["engine"], signal.SIGKILL)
            await until(lambda epoch=epoch: keeper.epoch > epoch and keeper.state is EngineState.READY)
        for request, (ids, last) in zip(requests, await asyncio.gather(*reading), strict=True):
            assert ids == expected(request) and last.finish_reason is FinishReason.LENGTH
        report = keeper.report()
        assert (report["restarts"], report["resumed_requests"], keeper.num_restarts) == (3, 18, 3)
        assert len(report["recovery_gaps_s"]) == 3 and report["open_requests"] == 0  # type: ignore[arg-type]


async def test_a_lost_device_ends_the_engine_and_the_next_one_resumes(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with keeping("lost_device") as keeper:
        requests = [make_request(f"r{i}", max_tokens=40) for i in range(4)]
        await asyncio.gather(*map(keeper.submit, requests))
        answers = await asyncio.gather(*(read(keeper, request.request_id) for request in requests))
        for request, (ids, last) in zip(requests, answers, strict=True):
            assert ids == expected(request) and last.finish_reason is FinishReason.LENGTH
        assert (keeper.epoch, keeper.num_restarts) == (2, 1)
    why = "the device cuda cannot be used any more: CUDA error: an illegal memory access"
    assert f"the engine of epoch 1 ended (EngineDeadError: {why}" in caplog.text
    logged = capfd.readouterr().err
    assert "failed" not in logged.replace("test_", ""), "no step was tried again on the lost device"


async def test_what_comes_while_there_is_no_engine_waits_for_the_next() -> None:
    async with keeping() as keeper:
        keeper.kill("a test")
        await until(lambda: keeper.state is EngineState.RECOVERING)
        assert keeper.trouble() is not None
        with pytest.raises(EngineDeadError, match="restarted"):
            await keeper.statistics()
        with pytest.raises(EngineDeadError, match="restarted"):
            await keeper.control("explain", "nobody")
        request, gone = make_request("a", max_tokens=9), make_request("b", max_tokens=9)
        late = make_request("c", max_tokens=9, deadline=time.monotonic() + 0.01)
        submits = [asyncio.create_task(keeper.submit(each)) for each in (request, gone, late)]
        await asyncio.sleep(0)
        held = await keeper.control("explain", "a")
        assert isinstance(held, dict) and (held["state"], held["epoch"]) == ("held", 1)
        assert held["text"] == "a waits: the engine is being restarted" == f"a {held['public_text']}"
        keeper.cancel(["b", "nobody"])
        assert (await submits[1]).request_id == "b"
        assert (await read(keeper, "b"))[1].finish_reason is FinishReason.CANCELLED
        assert (await submits[2]).request_id == "c"
        assert (await read(keeper, "c"))[1].finish_reason is FinishReason.TIMEOUT
        assert keeper.state is EngineState.RECOVERING, "they did not wait for an engine"
        assert (await submits[0]).max_tokens == 9
        assert (await read(keeper, "a"))[0] == expected(request)
        assert keeper.epoch == 2


async def test_a_cancel_that_the_engine_did_not_hear_is_not_forgotten() -> None:
    """The engine stands in a step when it is told, and dies there."""
    async with keeping("gated") as keeper:
        both = [asyncio.create_task(keeper.submit(make_request(name, max_tokens=60))) for name in ("a", "b")]
        await until(lambda: num_ids(keeper, "a") == 3)
        keeper.cancel(["a"])
        os.kill(keeper.processes["engine"], signal.SIGKILL)
        ids, last = await read(keeper, "a")
        assert len(ids) == 3 and last.finish_reason is FinishReason.CANCELLED
        await until(lambda: keeper.epoch == 2)
        await asyncio.gather(*both)
        assert [entry.request.request_id for entry in keeper.requests] == ["b"]


async def test_a_submit_given_up_while_recovering_is_forgotten() -> None:
    async with keeping() as keeper:
        keeper.kill("a test")
        await until(lambda: keeper.state is EngineState.RECOVERING)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await keeper.submit(make_request("a"))
        assert not len(keeper.requests)
        await until(lambda: keeper.state is EngineState.READY)
        await keeper.submit(make_request("a", max_tokens=4))
        assert (await read(keeper, "a"))[0] == expected(make_request("a", max_tokens=4))


async def test_refusals_are_the_submitters_own() -> None:
    async with keeping() as keeper:
        with pytest.raises(Exception, match="128"):
            await keeper.submit(make_request("long", length=400))
        assert not len(keeper.requests)
        assert await keeper.control("pause") is True
        await keeper.submit(make_request("a"))
        keeper.kill("a test")
        await until(lambda: keeper.epoch == 2)
        await asyncio.sleep(0.3)
        assert num_ids(keeper, "a") == 0, "a new engine is paused too"
        told = await keeper.control("explain", "a")
        assert isinstance(told, dict) and (told["state"], told["reason"]) == ("waiting", "paused")
        assert (told["epoch"], told["begun_in_epoch"], told["num_resumes"]) == (2, 1, 1)
        assert told["text"].endswith("; resumed by the engine of epoch 2, it arrived in epoch 1")
        assert await keeper.control("drain") is True
        with pytest.raises(QueueFullError):
            await keeper.submit(make_request("b"))
        assert await keeper.control("resume") is True
        assert (await read(keeper, "a"))[0] == expected(make_request("a"))
        assert await keeper.control("cancel_all") == 0


async def test_an_engine_that_dies_by_itself_is_replaced_too() -> None:
    """It says why before it ends; that is no end of the requests either."""
    async with keeping("dying") as keeper:
        request = make_request("a", max_tokens=30)
        await keeper.submit(request)
        assert (await read(keeper, "a"))[0] == expected(request)
        assert keeper.num_restarts >= 3


async def test_reliability_12_engines_that_do_no_step_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody is answered with an error, new ones at once."""
    monkeypatch.setattr(spawner_module.random, "random", lambda: 0.0)
    async with keeping("stillborn") as keeper:
        source = keeper.replicas[0].source
        assert isinstance(source, spawner_module.EngineSpawner)
        source.budget.max_useless, source.budget._first_s = 2, 0.01
        names = [f"r{i}" for i in range(4)]
        tasks = [asyncio.create_task(keeper.submit(make_request(name))) for name in names]
        await asyncio.wait_for(keeper.failed.wait(), 60)
        assert keeper.state is EngineState.FAILED and "2 times" in keeper.failure
        for name, answer in zip(names, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
            if not isinstance(answer, EngineDeadError):
                error = (await read(keeper, name))[1].error
                assert error is not None and error.kind in (ErrorKind.ENGINE_DEAD, ErrorKind.STEP_FAILED)
        with pytest.raises(EngineDeadError):
            await keeper.submit(make_request("late"))


async def test_reliability_6_an_engine_that_cannot_start_raises_why() -> None:
    with pytest.raises(CapacityError, match="the pool holds nothing"):
        await EngineSupervisor.start(config("broken"), command=COMMAND)
    with pytest.raises(EngineDeadError, match="exit status 9"):
        await EngineSupervisor.start(config("crash"), command=COMMAND)


async def test_on_a_device_no_standby_opens_and_the_next_engine_follows_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault 16: a standby would need a second copy of the weights and the pool on the device."""
    monkeypatch.setattr(spawner_module, "STANDBY_DELAY_S", 0.01)
    async with keeping("on_device", standby=True) as keeper:
        await asyncio.sleep(0.3)
        assert not keeper.report()["has_standby"] and standby_pid(keeper) is None
        request = make_request("r", max_tokens=50)
        os.kill(keeper.processes["engine"], signal.SIGKILL)  # first, or the request may end before it
        await until(lambda: keeper.state is EngineState.RECOVERING)
        await keeper.submit(request)
        ids, last = await read(keeper, "r")
        assert ids == expected(request) and last.finish_reason is FinishReason.LENGTH and keeper.num_restarts == 1


async def test_a_standby_takes_over_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawner_module, "STANDBY_DELAY_S", 0.0)
    async with keeping("slow", standby=True) as keeper:
        for epoch in (1, 2):
            await until(lambda: keeper.report()["has_standby"])
            standby, request = standby_pid(keeper), make_request(f"r{epoch}", max_tokens=50)
            assert standby is not None and standby != keeper.processes["engine"]
            await keeper.submit(request)
            await until(lambda request=request: num_ids(keeper, request.request_id) > 3)
            os.kill(keeper.processes["engine"], signal.SIGKILL)
            assert (await read(keeper, request.request_id))[0] == expected(request)
            assert keeper.processes["engine"] == standby
        await until(lambda: keeper.report()["has_standby"])
        lost = standby_pid(keeper)
        assert lost is not None
        os.kill(lost, signal.SIGKILL)
        await until(lambda: standby_pid(keeper) not in (None, lost))
        assert keeper.num_restarts == 2
        pids = [keeper.processes["engine"], standby_pid(keeper)]
    assert not any(is_alive(pid) for pid in pids if pid is not None)


async def test_close_answers_everyone_in_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawner_module, "STANDBY_DELAY_S", 0.0)
    for state in ("ready", "recovering"):
        async with keeping("gated", standby=True) as keeper:
            await keeper.submit(make_request("a", max_tokens=60))
            await until(lambda keeper=keeper: num_ids(keeper, "a") == 3)
            if state == "recovering":
                keeper.kill("a test")
                await until(lambda keeper=keeper: keeper.state is EngineState.RECOVERING)
            reading = asyncio.create_task(read(keeper, "a"))
            await asyncio.sleep(0)
            if state == "ready":
                os.kill(keeper.processes["engine"], signal.SIGKILL)
            await keeper.close()
            assert (await reading)[1].finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR)
            with pytest.raises(EngineDeadError):
                await keeper.submit(make_request("b"))


async def test_choices_go_on_where_they_were() -> None:
    """A request of several choices starts anew; what is here is not given twice, and ended choices stay ended."""
    async with keeping("slow") as keeper:
        request = make_request("a", params=SamplingParams(n=3, max_tokens=40, seed=5, temperature=0.0))
        await keeper.submit(request)
        await until(lambda: num_ids(keeper, "a") > 5)
        keeper.cancel(["a"], FinishReason.STOP, choice=1)
        entry = keeper.requests.get("a")
        assert entry is not None
        await until(lambda: 1 in entry.ended_choices)
        stopped = list(entry.pages[1].ids)
        os.kill(keeper.processes["engine"], signal.SIGKILL)
        ends: dict[int, FinishReason] = {}
        ids: dict[int, list[int]] = {}
        async for output in keeper.outputs("a"):
            assert output.position == len(ids.setdefault(output.choice, []))
            ids[output.choice] += output.token_ids
            if output.finish_reason is not None:
                assert output.choice not in ends
                ends[output.choice] = output.finish_reason
        assert ends == {0: FinishReason.LENGTH, 1: FinishReason.STOP, 2: FinishReason.LENGTH}
        assert [ids[0], ids[2]] == [expected(request, 0), expected(request, 2)] and ids[1] == stopped


async def test_requests_of_an_earlier_front_end_are_resumed() -> None:
    async with keeping() as keeper:
        request = make_request("a", max_tokens=20)
        whole, part = expected(request), OpenRequest(request)
        part.pages[0].ids.extend(whole[:7])
        done = OpenRequest(replace(make_request("b", max_tokens=4), request_id="b"))
        done.pages[0].ids.extend(expected(make_request("b", max_tokens=4)))
        keeper.restore([part, done])
        assert (await read(keeper, "a"))[0] == whole
        ids, last = await read(keeper, "b")
        assert len(ids) == 4 and last.finish_reason is FinishReason.LENGTH
