"""A request's life: disconnects, keep-alive, slow readers, shutdown, readiness."""

import asyncio
import logging
from typing import Any

import pytest

from octavo.core.request import FinishReason
from octavo.errors import EngineDeadError
from octavo.server.http.lifecycle import ServerPhase
from octavo.server.http.limits import HttpLimits
from tests.server.fakes import Harness, Wire, events

CHAT = "/v1/chat/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


async def assert_idle(harness: Harness) -> None:
    await asyncio.sleep(0.001)  # a dropped async generator is closed by the loop
    assert harness.context.lifecycle.num_open == 0
    assert harness.context.queue.num_pending == harness.context.queue.num_requests == 0
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, left


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_L03_a_client_that_leaves_cancels_its_request(stream: bool, num_tokens: int) -> None:
    harness = Harness()
    harness.engine.is_held = True
    wire = Wire(harness.app, CHAT, body(stream=stream))
    task = wire.start()
    await harness.engine.submitted.wait()
    request = harness.engine.requests[0]
    harness.engine.answer(request, num_tokens)
    await asyncio.sleep(0.01)
    wire.leave()
    await asyncio.wait_for(task, 60)
    assert harness.engine.cancelled == [(request.request_id, FinishReason.CANCELLED)]
    await assert_idle(harness)


async def test_L03_a_client_that_leaves_cancels_every_prompt_of_its_batch() -> None:
    harness = Harness()
    harness.engine.is_held = True
    wire = Wire(harness.app, "/v1/completions", {"prompt": ["a", "b", "c"], "stream": True})
    task = wire.start()
    await wire.until(lambda: len(harness.engine.requests) == 3)
    harness.engine.answer(harness.engine.requests[1])
    await wire.until(lambda: '"stop"' in wire.text)
    wire.leave()
    await asyncio.wait_for(task, 60)
    names = {harness.engine.requests[index].request_id for index in (0, 2)}
    assert {request_id for request_id, _ in harness.engine.cancelled} == names
    await assert_idle(harness)


async def test_a_finished_request_is_not_cancelled() -> None:
    harness = Harness()
    await harness.chat()
    await harness.chat(stream=True)
    assert harness.engine.cancelled == []
    await assert_idle(harness)


async def test_comments_keep_a_queued_stream_alive() -> None:
    harness = Harness(limits=HttpLimits(keep_alive_s=0.01))
    harness.engine.is_held = True
    wire = Wire(harness.app, CHAT, body(stream=True))
    task = wire.start()
    await wire.until(lambda: wire.text.count(": keep-alive\n\n") >= 2)
    assert wire.status == 200
    harness.engine.answer(harness.engine.requests[0])
    await asyncio.wait_for(task, 60)
    assert events(wire.text)[-1] == "[DONE]"
    await assert_idle(harness)


async def test_a_reader_that_does_not_read_is_cut() -> None:
    harness = Harness(limits=HttpLimits(stall_timeout_s=0.02))
    wire = Wire(harness.app, CHAT, body(stream=True))
    harness.engine.is_held = True
    task = wire.start()
    await wire.until(lambda: wire.status == 200)
    wire.reads.clear()
    harness.engine.answer(harness.engine.requests[0], 3)
    await asyncio.wait_for(task, 60)
    assert len(harness.engine.cancelled) == 1
    text = (await harness.get("/metrics")).text
    assert 'octavo_requests_failed_total{code="slow_reader",model_name="tiny"} 1.0' in text
    assert text.count("octavo_requests_failed_total{") == 1
    await assert_idle(harness)


async def test_drain_finishes_open_work_and_refuses_new() -> None:
    harness = Harness()
    harness.engine.is_held = True
    open_one = asyncio.create_task(harness.chat())
    await harness.engine.submitted.wait()
    drain = asyncio.create_task(harness.context.lifecycle.drain(5))
    await asyncio.sleep(0)
    ready = await harness.get("/readyz")
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "draining")
    assert (await harness.get("/livez")).status_code == 200
    refused = await harness.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["retry-after"]
    harness.engine.answer(harness.engine.requests[0])
    assert (await open_one).status_code == 200
    assert await drain == 0
    await assert_idle(harness)


async def test_what_outlives_the_drain_gets_an_explicit_error() -> None:
    harness = Harness()
    harness.engine.is_held = True
    streams = [Wire(harness.app, CHAT, body(stream=True)) for _ in range(3)]
    whole = Wire(harness.app, CHAT, body())
    tasks = [wire.start() for wire in (*streams, whole)]
    await whole.until(lambda: len(harness.engine.requests) == 4)
    harness.engine.answer(harness.engine.requests[0], 2)
    await asyncio.sleep(0.01)
    assert await harness.context.lifecycle.drain(0.02) == 4
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    for wire in streams:
        *_, error, done = events(wire.text)
        assert error["error"]["code"] == "draining" and done == "[DONE]"
        assert wire.sent[-1]["more_body"] is False, "never a bare cut"
    assert whole.status == 503
    assert len(harness.engine.cancelled) == 4
    await assert_idle(harness)


@pytest.mark.parametrize(
    ("phase", "code"), [(ServerPhase.LOADING, "loading"), (ServerPhase.FAILED, "engine_unavailable")]
)
async def test_not_ready_is_503_with_retry_after(phase: ServerPhase, code: str) -> None:
    harness = Harness()
    harness.context.lifecycle.phase = phase
    for response in (await harness.chat(), await harness.get("/readyz"), await harness.get("/health")):
        assert (response.status_code, response.json()["error"]["code"]) == (503, code)
        assert response.headers["retry-after"] and "x-should-retry" not in response.headers
    assert (await harness.get("/livez")).status_code == 200


async def test_readiness_asks_the_engine() -> None:
    harness = Harness()
    assert (await harness.get("/readyz")).json() == {"status": "ready"}
    assert (await harness.get("/health")).json()["model"] == "tiny"

    async def dead() -> Any:
        raise EngineDeadError("gone")

    harness.engine.statistics = dead  # type: ignore[method-assign]
    harness = Harness(engine=harness.engine)
    for path in ("/readyz", "/health"):
        response = await harness.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_health_counts_what_is_queued_or_generates_and_nothing_else() -> None:
    harness = Harness()
    for _ in range(3):
        assert (await harness.get("/health")).json()["open_requests"] == 0, "not the question itself"
    harness.engine.is_held = True
    wires = [Wire(harness.app, CHAT, body(stream=stream)) for stream in (False, True)]
    tasks = [wire.start() for wire in wires]
    await wires[0].until(lambda: len(harness.engine.requests) == 2)
    assert (await harness.get("/health")).json()["open_requests"] == 2
    for request in list(harness.engine.requests):
        harness.engine.answer(request)
    await asyncio.gather(*tasks)
    assert (await harness.get("/health")).json()["open_requests"] == 0
    await assert_idle(harness)


async def test_readiness_follows_what_the_keeper_of_the_engine_says() -> None:
    harness = Harness()
    harness.context.lifecycle.engine_trouble = lambda: "the engine is being restarted"
    for path in ("/readyz", "/health"):
        response = await harness.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "restarted" in response.json()["error"]["message"] and response.headers["retry-after"]
    assert (await harness.get("/livez")).status_code == 200
    assert (await harness.chat()).status_code == 200, "what comes meanwhile is taken"
    harness.context.lifecycle.engine_trouble = lambda: None
    assert (await harness.get("/readyz")).json() == {"status": "ready"}


async def test_a_failed_server_stays_failed_while_it_ends() -> None:
    harness = Harness()
    harness.context.lifecycle.fail()
    assert await harness.context.lifecycle.drain(1) == 0
    response = await harness.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert response.headers["retry-after"]


async def test_the_first_answer_is_told_once() -> None:
    told: list[int] = []
    harness = Harness()
    harness.context.lifecycle._on_answered = lambda: told.append(1)
    await harness.get("/livez")
    assert told == []
    await harness.chat()
    await harness.chat(stream=True)
    assert told == [1]


async def test_an_unexpected_failure_in_mid_stream_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()

    async def broken(*_: object, **__: object) -> Any:
        raise ZeroDivisionError("inside")
        yield

    harness.engine.outputs = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        response = await harness.chat(stream=True)
    error, done = events(response.text)
    assert error["error"]["code"] == "internal_error" and done == "[DONE]"
    assert "inside" not in response.text and "ZeroDivisionError" in caplog.text
    assert (await harness.chat()).status_code == 500
    await assert_idle(harness)


async def test_models_are_listed_and_described() -> None:
    harness = Harness()
    listed = (await harness.get("/v1/models")).json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["tiny"]
    assert (await harness.get("/v1/models/tiny")).json() == listed["data"][0]
    response = await harness.get("/v1/models/other/one")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
