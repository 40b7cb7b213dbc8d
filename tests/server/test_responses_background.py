"""Responses in the background: they run on by themselves, are read, streamed from any event on, cancelled, deleted."""

import asyncio
from typing import Any

from openai.types.responses import Response

from octavo.core.request import ErrorKind, FinishError, FinishReason
from tests.server.fakes import Harness, Wire, keyed
from tests.server.response_events import check_events, check_model, put_together, read_events

PATH = "/v1/responses"


async def post(harness: Harness, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"input": "hi", "background": True, **fields}
    return await harness.request("POST", PATH, json=body, headers=headers or {})


async def begun(harness: Harness, **fields: Any) -> Any:
    harness.engine.is_held = True
    response = await post(harness, **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def until(harness: Harness, response_id: str, status: str) -> Any:
    async with asyncio.timeout(60):
        while True:
            found = (await harness.get(f"{PATH}/{response_id}")).json()
            if found["status"] == status:
                return found
            await asyncio.sleep(0.001)


async def test_it_is_in_progress_and_then_completed() -> None:
    harness = Harness()
    response = await begun(harness, metadata={"a": "b"})
    check_model(Response, response)
    assert (response["status"], response["background"], response["output"]) == ("in_progress", True, [])
    assert (await harness.get(f"{PATH}/{response['id']}")).json() == response
    assert len(harness.context.background) == 1
    harness.engine.answer(harness.engine.requests[-1])
    ended = await until(harness, response["id"], "completed")
    check_model(Response, ended)
    assert ended["output"][0]["content"][0]["text"] == "Hello é!" and ended["metadata"] == {"a": "b"}
    assert len(harness.context.background) == 0
    harness.engine.is_held = False
    chained = await harness.request("POST", PATH, json={"input": "go on", "previous_response_id": response["id"]})
    assert chained.status_code == 200
    assert harness.prompt == "user:hi\nassistant:Hello é!\nuser:go on\nassistant:"


async def test_nothing_goes_on_from_what_has_not_ended() -> None:
    harness = Harness()
    response = await begun(harness)
    chained = await harness.request("POST", PATH, json={"input": "x", "previous_response_id": response["id"]})
    error = chained.json()["error"]
    assert (chained.status_code, error["param"]) == (400, "previous_response_id") and "in_progress" in error["message"]
    await harness.request("POST", f"{PATH}/{response['id']}/cancel")


async def test_a_mistake_is_told_at_once() -> None:
    harness = Harness()
    for fields, param in (({"store": False}, "background"), ({"temperature": -1}, "temperature")):
        response = await post(harness, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert len(harness.context.responses) == len(harness.context.background) == 0


async def test_a_failure_is_kept() -> None:
    harness = Harness()
    harness.engine.end = (FinishReason.ERROR, FinishError(ErrorKind.ENGINE, "the model is not well"))
    response = (await post(harness)).json()
    ended = await until(harness, response["id"], "failed")
    check_model(Response, ended)
    assert ended["error"] == {"code": "server_error", "message": "the engine failed"}


async def test_cancelling_ends_it_in_the_engine() -> None:
    harness = Harness()
    response = await begun(harness)
    cancelled = await harness.request("POST", f"{PATH}/{response['id']}/cancel")
    assert cancelled.status_code == 200 and cancelled.json()["status"] == "cancelled"
    check_model(Response, cancelled.json())
    assert [reason for _, reason in harness.engine.cancelled] == [FinishReason.CANCELLED]
    again = await harness.request("POST", f"{PATH}/{response['id']}/cancel")
    assert again.json() == cancelled.json()
    assert (await harness.get(f"{PATH}/{response['id']}")).json() == cancelled.json()


async def test_deleting_ends_it_and_it_does_not_come_back() -> None:
    harness = Harness()
    response = await begun(harness)
    assert (await harness.request("DELETE", f"{PATH}/{response['id']}")).json()["deleted"] is True
    assert (await harness.get(f"{PATH}/{response['id']}")).status_code == 404
    assert len(harness.engine.cancelled) == 1 and len(harness.context.responses) == 0


async def test_a_stream_that_breaks_is_read_on_from_any_event() -> None:
    harness = Harness()
    harness.engine.is_held = True
    logprobs = {"include": ["message.output_text.logprobs"]}
    wire = Wire(harness.app, PATH, {"input": "hi", "background": True, "stream": True, **logprobs})
    task = wire.start()
    await wire.until(lambda: "response.in_progress" in wire.text)
    response_id = read_events(wire.text)[0]["response"]["id"]
    wire.leave()
    await task
    assert not harness.engine.cancelled
    harness.engine.answer(harness.engine.requests[-1])
    await until(harness, response_id, "completed")
    path = f"{PATH}/{response_id}"
    all_of_it = read_events((await harness.get(path, params={"stream": "true"})).text)
    check_events(all_of_it)
    assert put_together(all_of_it) == all_of_it[-1]["response"]["output"]
    assert all_of_it[-1]["response"] == (await harness.get(path)).json()
    for number in range(len(all_of_it)):
        response = await harness.get(path, params={"stream": "true", "starting_after": number})
        rest = [line for line in response.text.split("\n\n") if line]
        assert len(rest) == len(all_of_it) - number - 1
        assert all(f'"sequence_number":{number + 1 + i},' in event for i, event in enumerate(rest))


async def test_several_read_it_while_it_runs() -> None:
    harness = Harness()
    response = await begun(harness)
    path = f"{PATH}/{response['id']}"
    reading = [asyncio.create_task(harness.get(path, params={"stream": "true"})) for _ in range(3)]
    await asyncio.sleep(0)
    harness.engine.answer(harness.engine.requests[-1])
    texts = [(await each).text for each in reading]
    assert len(set(texts)) == 1 and read_events(texts[0])[-1]["type"] == "response.completed"


async def test_a_cancelled_one_tells_its_readers() -> None:
    harness = Harness()
    response = await begun(harness)
    path = f"{PATH}/{response['id']}"
    reading = asyncio.create_task(harness.get(path, params={"stream": "true"}))
    while harness.context.runs.num_attached == 0:
        await asyncio.sleep(0)
    await harness.request("POST", path + "/cancel")
    events = read_events((await reading).text)
    check_events(events)
    assert (events[-2]["type"], events[-2]["code"]) == ("error", "cancelled")


async def test_a_retry_gets_the_same_one() -> None:
    harness = Harness()
    key = {"idempotency-key": "k"}
    first = await begun(harness, headers=key)
    second = (await post(harness, headers=key)).json()
    assert first == second and len(harness.engine.requests) == 1 and len(harness.context.background) == 1
    harness.engine.answer(harness.engine.requests[-1])
    ended = await until(harness, first["id"], "completed")
    assert (await post(harness, headers=key)).json() == ended


async def test_only_its_tenant_finds_it() -> None:
    harness = Harness(config=keyed("k1", "k2"))
    own, other = {"authorization": "Bearer k1"}, {"authorization": "Bearer k2"}
    response = await begun(harness, headers=own)
    path = f"{PATH}/{response['id']}"
    for method, address in (("GET", path), ("GET", path + "?stream=true"), ("POST", path + "/cancel")):
        assert (await harness.request(method, address, headers=other)).status_code == 404
    assert (await harness.request("POST", path + "/cancel", headers=own)).json()["status"] == "cancelled"


async def test_parameters_of_reading_are_checked() -> None:
    harness = Harness()
    response = (await post(harness)).json()
    path = f"{PATH}/{response['id']}"
    await until(harness, response["id"], "completed")
    bad = {"stream": "maybe", "starting_after": "3", "include_obfuscation": "true"}
    for name, value in bad.items():
        refused = await harness.get(path, params={name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert (await harness.get(path, params={"stream": "true", "starting_after": "x"})).status_code == 400


async def test_a_server_that_drains_waits_for_it() -> None:
    harness = Harness()
    response = await begun(harness)
    drained = asyncio.create_task(harness.context.lifecycle.drain(5.0))
    await asyncio.sleep(0)
    assert not drained.done()
    harness.engine.answer(harness.engine.requests[-1])
    assert await drained == 0
    assert (await harness.get(f"{PATH}/{response['id']}")).json()["status"] == "completed"


async def test_a_server_that_stops_tells_that_it_did() -> None:
    harness = Harness()
    response = await begun(harness)
    assert await harness.context.lifecycle.drain(0.0) == 1
    found = await until(harness, response["id"], "failed")
    assert "shutting down" in found["error"]["message"]
    await harness.context.runs.close()


async def test_it_is_explained_and_cancelled_by_its_id_like_any_request() -> None:
    harness = Harness()
    response = await begun(harness)
    path = f"/v1/requests/{response['id']}"
    assert (await harness.get(path + "/explain")).json()["id"] == response["id"]
    assert (await harness.request("POST", path + "/cancel")).json() == {"id": response["id"], "cancelled": True}
    assert (await until(harness, response["id"], "failed"))["error"]["code"] == "server_error"
