"""Idempotency-Key and Last-Event-ID: one execution, any number of connections, one answer."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from octavo.config import Config, RetryConfig
from octavo.core.request import FinishError, FinishReason, Request
from octavo.errors import AdmissionError, ErrorKind
from tests.server.fakes import EOS, FakeClient, Harness, Wire, keyed

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def kept(**changes: Any) -> Config:
    return Config(retry=RetryConfig(**changes))


def key(value: str = "k", last: str | None = None) -> dict[str, str]:
    return {"Idempotency-Key": value} | ({} if last is None else {"Last-Event-ID": last})


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}


def blocks(text: str) -> list[tuple[str | None, Any]]:
    """(event id, data) of a stream as far as it came; comments left out."""
    found: list[tuple[str | None, Any]] = []
    for block in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if "data" in lines:
            data = lines["data"]
            found.append((lines.get("id"), data if data == "[DONE]" else json.loads(data)))
    return found


def assembled(events: list[Any]) -> dict[str, Any]:
    """What a client has of a stream: per choice its text, log-probabilities and ends, and every usage chunk."""
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {"choices": choices, "usage": [], "ids": set(), "roles": []}
    for event in events:
        assert "error" not in event, event
        whole["ids"].add((event["id"], event["created"]))
        if event.get("usage") is not None:
            whole["usage"].append(event["usage"])
        for choice in event["choices"]:
            mine = choices.setdefault(choice["index"], {"text": "", "logprobs": [], "ends": []})
            delta = choice.get("delta", {})
            mine["text"] += choice.get("text", "") + (delta.get("content") or "")
            if "role" in delta:
                whole["roles"].append(choice["index"])
            logprobs = choice["logprobs"] or {}
            mine["logprobs"] += logprobs.get("content") or list(
                zip(
                    logprobs.get("tokens", ()),
                    logprobs.get("token_logprobs", ()),
                    logprobs.get("text_offset", ()),
                    strict=True,
                )
            )
            if choice["finish_reason"] is not None:
                mine["ends"].append((choice["finish_reason"], choice["stop_reason"]))
    return whole


def plain(events: list[Any]) -> list[Any]:
    return [data for _, data in events if data != "[DONE]"]


async def test_a_retry_gets_the_stored_answer_and_nothing_is_executed_twice() -> None:
    harness = Harness()
    first = await harness.chat(headers=key(), n=2, logprobs=True, top_logprobs=2)
    again = await harness.chat(headers=key(), n=2, logprobs=True, top_logprobs=2)
    assert first.status_code == again.status_code == 200 and first.content == again.content
    assert len(harness.engine.requests) == 1
    other = await harness.chat(headers=key("another"), n=2, logprobs=True, top_logprobs=2)
    assert len(harness.engine.requests) == 2 and other.json()["choices"] == first.json()["choices"]


async def test_an_answer_with_a_key_is_the_answer_without_one() -> None:
    harness = Harness()
    harness.engine.texts = ["one é two", "three"]
    asked: tuple[dict[str, Any], ...] = (
        {},
        {"n": 2, "logprobs": 2},
        {"best_of": 2},
        {"stop": ["tw"]},
        {"prompt": ["a", "b"], "echo": True},
    )
    for fields in asked:
        bare, with_key = [
            await harness.complete(headers=head, **fields) for head in ({}, key(f"k{asked.index(fields)}"))
        ]
        for response in (bare, with_key):
            assert response.status_code == 200, response.text
        assert {**bare.json(), "id": 0, "created": 0, "timings": 0} == {
            **with_key.json(),
            "id": 0,
            "created": 0,
            "timings": 0,
        }


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"n": 3, "logprobs": True, "top_logprobs": 1}),
        (CHAT, {"stop": ["é"], "max_tokens": 50}),
        (CHAT, {"max_tokens": 7}),  # cuts é in two
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": False}),
        (COMPLETIONS, {"prompt": "ab", "echo": True}),
    ],
)
@pytest.mark.parametrize("has_usage", [False, True])
async def test_connections_cut_anywhere_add_up_to_the_unbroken_answer(
    path: str, fields: dict[str, Any], has_usage: bool
) -> None:
    harness = Harness()
    harness.engine.texts = ["Hello é中 and more", "short", "", "x" * 40]
    body = {"stream": True, "stream_options": {"include_usage": has_usage}, **fields}
    send = harness.chat if path == CHAT else harness.complete
    unbroken = blocks((await send(headers=key("whole"), **body)).text)
    assert unbroken[-1] == (None, "[DONE]") and all(name for name, _ in unbroken[:-1])
    assert len({name for name, _ in unbroken[:-1]}) == len(unbroken) - 1
    expected = assembled(plain(unbroken))
    for cut in range(len(unbroken)):
        last = unbroken[cut - 1][0] if cut else None
        rest = blocks((await send(headers=key("whole", last), **body)).text)
        assert rest[-1] == (None, "[DONE]")
        assert assembled(plain(unbroken[:cut]) + plain(rest)) == expected, cut
    assert len(harness.engine.requests) == len(harness.engine.requests[:1]) * (
        2 if isinstance(fields.get("prompt"), list) else 1
    )


async def read_until(wire: Wire, num_events: int) -> list[tuple[str | None, Any]]:
    await wire.until(lambda: len(blocks(wire.text)) >= num_events)
    return blocks(wire.text)


def say_rest(engine: FakeClient, request: Request, start: int) -> None:
    """What the fake has not said yet of a request of two choices."""
    ids = [*engine.tokenizer.encode(engine.text), EOS]
    for position in range(start, len(ids)):
        for choice in range(2):
            end = (FinishReason.STOP, "") if position == len(ids) - 1 else None
            engine._put(request, (choice, position), ids[position], end)


async def test_a_stream_goes_on_while_its_client_is_away() -> None:
    harness = Harness()
    harness.engine.is_held = True
    body = chat_body(stream=True, stream_options={"include_usage": True}, logprobs=True, n=2)
    first = Wire(harness.app, CHAT, body, key())
    reading = first.start()
    await first.until(lambda: harness.engine.requests)
    request = harness.engine.requests[0]
    harness.engine.answer(request, 3)
    had = (await read_until(first, 4))[:3]
    first.leave()
    await reading
    assert not harness.engine.cancelled, "it is not cancelled with its connection"
    second = Wire(harness.app, CHAT, body, key(last=had[-1][0]))
    reading = second.start()
    await asyncio.sleep(0.01)
    say_rest(harness.engine, request, 3)
    await asyncio.wait_for(reading, 60)
    got = assembled(plain(had) + plain(blocks(second.text)))
    fields = {name: value for name, value in body.items() if name not in ("model", "messages")}
    unbroken = assembled(plain(blocks((await harness.chat(headers=key(), **fields)).text)))
    assert got == unbroken and got["choices"][0]["text"] == "Hello é!" and len(harness.engine.requests) == 1


async def test_two_connections_read_one_run_at_once() -> None:
    harness = Harness()
    harness.engine.is_held = True
    body = chat_body(stream=True)
    wires = [Wire(harness.app, CHAT, body, key()) for _ in range(5)]
    tasks = [wire.start() for wire in wires]
    await wires[0].until(lambda: harness.engine.requests)
    await asyncio.sleep(0.01)
    harness.engine.answer(harness.engine.requests[0])
    await asyncio.gather(*tasks)
    texts = {json.dumps(assembled(plain(blocks(wire.text))), default=str) for wire in wires}
    assert len(texts) == 1 and len(harness.engine.requests) == 1


async def test_nobody_comes_back_within_the_orphan_time() -> None:
    harness = Harness(config=kept(orphan_timeout_s=0.05))
    harness.engine.is_held = True
    wire = Wire(harness.app, CHAT, chat_body(stream=True), key())
    reading = wire.start()
    await wire.until(lambda: harness.engine.requests)
    await asyncio.sleep(0.1)
    assert not harness.engine.cancelled, "somebody reads it"
    wire.leave()
    await reading
    await wire.until(lambda: harness.engine.cancelled)
    assert harness.context.runs.report()["orphaned"] == 1 and len(harness.context.runs) == 0
    await wire.until(lambda: harness.context.queue.num_pending == 0)
    response = await harness.chat(headers=key(last="0"), stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "nothing_to_resume")
    harness.engine.is_held = False
    assert (await harness.chat(headers=key(), stream=True)).status_code == 200
    assert len(harness.engine.requests) == 2


async def test_another_body_another_tenant_another_endpoint() -> None:
    harness = Harness(config=keyed("one", "two"))
    one, two = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))
    assert (await harness.chat(headers={**one, **key()})).status_code == 200
    for send, fields in ((harness.chat, {"seed": 1}), (harness.chat, {"stream": True}), (harness.complete, {})):
        response = await send(headers={**one, **key()}, **fields)
        assert (response.status_code, response.json()["error"]["code"]) == (409, "idempotency_key_reused")
        assert response.json()["error"]["param"] == "Idempotency-Key" and response.headers["x-should-retry"] == "false"
    assert (await harness.chat(headers={**two, **key()}, seed=1)).status_code == 200
    assert len(harness.engine.requests) == 2


async def test_the_order_and_spacing_of_fields_does_not_matter() -> None:
    harness = Harness()
    for body in (b'{"prompt":"hi","seed":1}', b'{ "seed": 1,\n "prompt": "hi", "user": "me" }'):
        response = await harness.request("POST", COMPLETIONS, content=body, headers=key())
        assert response.status_code == 200
    assert len(harness.engine.requests) == 1


@pytest.mark.parametrize(
    ("headers", "code", "param"),
    [
        ({"Idempotency-Key": ""}, "invalid_value", "Idempotency-Key"),
        ({"Idempotency-Key": "a b"}, "invalid_value", "Idempotency-Key"),
        ({"Idempotency-Key": "k" * 256}, "invalid_value", "Idempotency-Key"),
        ({"Last-Event-ID": "3"}, "missing_idempotency_key", "Last-Event-ID"),
    ],
)
async def test_headers_are_checked(headers: dict[str, str], code: str, param: str) -> None:
    harness = Harness()
    response = await harness.chat(headers=headers, stream=True)
    assert response.status_code == 400
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == (code, param)
    assert not harness.engine.requests


async def test_event_ids_are_checked() -> None:
    harness = Harness()
    assert (await harness.chat(headers=key(), stream=True, n=2)).status_code == 200
    for last in ("", "1", "1,2,3", "x,1", "-+,1", "1,2;", "1,2;x", "1,2;u;u", "99999,1", "-1,0", "1,2,"):
        response = await harness.chat(headers=key(last=last), stream=True, n=2)
        assert response.status_code == 400, last
        assert response.json()["error"]["code"] in ("invalid_event_id", "invalid_value")
    whole = await harness.chat(headers=key("w"))
    assert whole.status_code == 200
    assert (await harness.chat(headers=key("w", "1"))).status_code == 400, "not a stream"


async def test_a_refusal_is_not_kept_and_all_who_wait_get_it() -> None:
    harness = Harness()
    harness.engine.submit_error = AdmissionError("too long", "prompt")
    responses = await asyncio.gather(*(harness.chat(headers=key()) for _ in range(4)))
    assert [response.status_code for response in responses] == [400] * 4
    assert len(harness.context.runs) == 0
    harness.engine.submit_error = None
    assert (await harness.chat(headers=key())).status_code == 200


@pytest.mark.parametrize(
    ("end", "status", "is_kept"),
    [
        ((FinishReason.ERROR, FinishError(ErrorKind.STEP_FAILED, "this one")), 500, True),
        ((FinishReason.ERROR, FinishError(ErrorKind.ENGINE_DEAD, "gone")), 503, False),
        ((FinishReason.TIMEOUT, FinishError(ErrorKind.DEADLINE, "deadline")), 408, False),
        ((FinishReason.CANCELLED, None), 499, True),
        ((FinishReason.CANCELLED, FinishError(ErrorKind.ENGINE_DEAD, "the engine was stopped")), 503, False),
    ],
)
async def test_failures_that_may_be_tried_again_are(end: Any, status: int, is_kept: bool) -> None:
    harness = Harness()
    harness.engine.end = end
    first = await harness.chat(headers=key())
    assert first.status_code == status and len(harness.context.runs) == is_kept
    again = await harness.chat(headers=key())
    assert again.json() == first.json() and len(harness.engine.requests) == (1 if is_kept else 2)
    streamed = blocks((await harness.chat(headers=key("s"), stream=True)).text)
    assert streamed[-2][1]["error"] == first.json()["error"] and streamed[-1][1] == "[DONE]"


async def test_bounds_in_number_bytes_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(config=kept(max_kept=3))
    for name in ("a", "b", "c"):
        await harness.chat(headers=key(name))
    await harness.chat(headers=key("a"))  # asked for again: now b is the oldest
    await harness.chat(headers=key("d"))
    assert [name for _, name in harness.context.runs._runs] == ["c", "a", "d"]
    harness.engine.is_held = True
    open_ones = [asyncio.create_task(harness.chat(headers=key(name))) for name in ("x", "y", "z")]
    while len(harness.engine.requests) < 7:
        await asyncio.sleep(0.001)
    response = await harness.chat(headers=key("w"))
    assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_idempotency_keys")
    assert response.headers["retry-after"] == "5"
    for request in harness.engine.requests[4:]:
        harness.engine.answer(request)
    assert {r.status_code for r in await asyncio.gather(*open_ones)} == {200}
    small = Harness(config=kept(max_kept_bytes=200))
    for number in range(20):
        await small.chat(headers=key(str(number)))
    assert 1 <= len(small.context.runs) < 20 and small.context.runs.num_bytes <= 200
    monkeypatch.setattr("octavo.server.idempotency.SWEEP_S", 0.01)
    brief = Harness(config=kept(keep_s=0.02))
    await brief.chat(headers=key())
    assert len(brief.context.runs) == 1
    await asyncio.sleep(0.1)
    assert len(brief.context.runs) == 0 and brief.context.runs.num_bytes == 0
    await asyncio.gather(*(each.context.runs.close() for each in (harness, small, brief)))


async def test_nothing_is_left_behind() -> None:
    harness = Harness(config=kept(keep_s=0.0))
    rng = random.Random(7)
    before = len(asyncio.all_tasks())
    for number in range(40):
        harness.engine.is_held = rng.random() < 0.5
        wire = Wire(harness.app, CHAT, chat_body(stream=rng.random() < 0.5), key(str(number % 7)))
        task = wire.start()
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        wire.leave()
        await asyncio.wait_for(task, 60)
    await harness.context.runs.close()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before
    assert harness.context.queue.num_pending == 0 and len(harness.context.request_index) == 0
