"""A scripted model behind the HTTP interface: grammars, tools, reasoning, embeddings, failures, a crash."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.assembly import build_local
from octavo.cli.servers import call_admin
from octavo.config.sources import config_from_keywords
from octavo.server.app import create_app
from tests.fake_server import FakeServer
from tests.server.fakes import events

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
RULES = [
    {"contains": "person", "say": '{"name": "Ann", "age": 3}'},
    {"contains": "no json", "say": "this is none"},
    {
        "contains": "weather",
        "role": "user",
        "think": "I need a tool.",
        "call": {"name": "get_weather", "arguments": {"city": "Paris"}},
    },
    {"role": "tool", "say": "Sunny."},
    {"contains": "fail", "say": "half an answer", "fail_after": 4},
    {"contains": "crash", "say": "on and on", "crash_after": 3},
]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(RULES))
    config = config_from_keywords(f"scripted:{path}", {})
    engine = build_local(config)
    app = create_app(engine.sessions, engine.text, config, engine.client.statistics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        yield http
    await app.state.context.sandbox.close()
    await engine.client.close()


async def chat(client: httpx.AsyncClient, text: str, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    return await client.post("/v1/chat/completions", json=body, timeout=60)


async def test_an_answer_that_obeys_its_grammar_is_given_and_another_fails(client: httpx.AsyncClient) -> None:
    for form in (JSON_SCHEMA, {"type": "json_object"}):
        answer = await chat(client, "a person", response_format=form)
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"name": "Ann", "age": 3}
    answer = await chat(client, "no json", response_format=JSON_SCHEMA)
    assert answer.status_code == 500
    assert (await chat(client, "no json")).status_code == 200, "without a grammar it is said"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_scripted_calls_are_calls(client: httpx.AsyncClient, choice: Any) -> None:
    text = "weather?"
    answer = await chat(client, text, tools=TOOLS, tool_choice=choice)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    conversation = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "25 degrees"},
    ]
    body = {"messages": conversation, "tools": TOOLS}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "Sunny."


async def test_a_failure_is_an_error_event_behind_what_was_said(client: httpx.AsyncClient) -> None:
    assert (await chat(client, "fail")).status_code == 500
    found = events((await chat(client, "fail", stream=True)).text)
    said = "".join(event["choices"][0]["delta"].get("content") or "" for event in found if "choices" in event)
    assert said == "half" and "error" in found[-2] and found[-1] == "[DONE]"


async def test_a_request_put_back_after_a_failure_is_no_preemption(client: httpx.AsyncClient) -> None:
    for _ in range(3):
        assert (await chat(client, "fail")).status_code == 500
    lines = dict(line.rsplit(" ", 1) for line in (await client.get("/metrics")).text.splitlines() if line[:1] != "#")
    found = {name.split("{")[0]: float(value) for name, value in lines.items()}
    assert found["octavo_requests_requeued_total"] == 3
    assert found["octavo_preemptions_total"] == found["vllm:num_preemptions_total"] == 0


async def test_the_wait_of_a_new_request_is_from_the_forecast_of_those_that_wait(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps([{"say": "on and on ", "finish": "length", "delay_ms": 10}]))
    config = config_from_keywords(f"scripted:{path}", {"max_sequences": 1})
    engine = build_local(config)
    app = create_app(engine.sessions, engine.text, config, engine.client.statistics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:

        async def ask(name: str) -> int:
            body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
            response = await http.post("/v1/completions", json=body, headers={"x-request-id": name}, timeout=60)
            return response.status_code

        tasks = [asyncio.create_task(ask(name)) for name in ("a", "b", "c")]
        while (await http.get("/v1/requests/a/explain")).json().get("explanations", [{}])[0].get("num_outputs", 0) < 20:
            await asyncio.sleep(0.01)
        told = (await http.get("/v1/requests/c/explain")).json()
        (last,) = told["explanations"]
        assert last["state"] == "waiting" and "new_request_s" not in last
        waits_s, new_s = last["prediction"]["next_token_s"], told["queue"]["wait_s"]
        assert 0 < waits_s < new_s, "a new request comes behind the last, which one slot serves before"
        assert await asyncio.gather(*tasks) == [200, 200, 200]
        ended = (await http.get("/v1/requests/c/explain")).json()
        assert ended["queue"]["wait_s"] == 0.0, "there is room now"
    await app.state.context.sandbox.close()
    await engine.client.close()


async def test_explain_and_retry_after_tell_the_same_wait(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps([{"say": "on and on ", "finish": "length", "delay_ms": 10}]))
    config = config_from_keywords(f"scripted:{path}", {"max_sequences": 1, "max_waiting": 2})
    engine = build_local(config)
    app = create_app(engine.sessions, engine.text, config, engine.client.statistics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:

        async def ask(name: str, num_tokens: int = 200) -> httpx.Response:
            body = {"prompt": "x", "max_tokens": num_tokens, "ignore_eos": True}
            return await http.post("/v1/completions", json=body, headers={"x-request-id": name}, timeout=60)

        assert (await ask("first", 20)).status_code == 200
        tasks = [asyncio.create_task(ask(name)) for name in ("a", "b", "c")]
        while (await http.get("/v1/requests/a/explain")).json().get("explanations", [{}])[0].get("num_outputs", 0) < 20:
            await asyncio.sleep(0.01)
        told = (await http.get("/v1/requests/c/explain")).json()
        refused = await ask("d")
        wait_s = told["queue"]["wait_s"]
        (last,) = told["explanations"]
        assert last["prediction"]["next_token_s"] < wait_s, "a new request comes after the last that waits"
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        message = refused.json()["error"]["message"]
        said_s = float(message.partition("would wait about ")[2].partition(" s")[0])
        assert said_s == pytest.approx(wait_s, abs=0.05 + 1e-9), "to the decimal that is shown"
        assert int(refused.headers["retry-after"]) == math.ceil(wait_s / 3), "one of the two that wait, and of a third"
        shown = [line for line in (await http.get("/metrics")).text.splitlines() if "wait_estimate_seconds{" in line]
        assert float(shown[0].rsplit(" ", 1)[1]) == pytest.approx(wait_s, abs=1e-6)
        late = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "queue_timeout": 0.1})
        assert late.json()["error"]["code"] == "queue_full", "the bound is looked at first"
        assert [(await task).status_code for task in tasks] == [200, 200, 200]
    await app.state.context.sandbox.close()
    await engine.client.close()


async def test_a_pool_that_is_shorter_than_the_model_is_what_every_card_tells(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(RULES))
    config = config_from_keywords(f"scripted:{path}", {"kv_cache_tokens": 1000})
    engine = build_local(config)
    app = create_app(engine.sessions, engine.text, config, engine.client.statistics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == 992
        listed = await http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert listed.json()["data"][0]["max_input_tokens"] == 992
        assert (await http.get("/api/ps")).json()["models"][0]["context_length"] == 992
        assert (await http.post("/tokenize", json={"prompt": "a"})).json()["max_model_len"] == 992
        assert (await http.get("/tokenizer_info")).json()["model_max_length"] == 992
        refused = await http.post("/v1/completions", json={"prompt": "a" * 1000, "max_tokens": 1})
        assert refused.status_code == 400 and "992" in refused.json()["error"]["message"]
        answered = await http.post("/v1/completions", json={"prompt": "a" * 990, "max_tokens": 2})
        assert answered.status_code == 200 and answered.json()["usage"]["prompt_tokens"] == 990
    await app.state.context.sandbox.close()
    await engine.client.close()


async def test_embeddings_are_the_same_for_the_same_text(client: httpx.AsyncClient) -> None:
    body = {"input": ["hello", "hello", "another"]}
    vectors = [entry["embedding"] for entry in (await client.post("/v1/embeddings", json=body)).json()["data"]]
    assert vectors[0] == vectors[1] != vectors[2] and len(vectors[0]) == 64


def test_a_server_starts_and_goes_on_behind_a_scripted_crash(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(RULES))
    with ScriptedServer(f"scripted:{path}", tmp_path / "log") as server:
        assert "no weights: answers are those of" in server.text
        body = {"messages": [{"role": "user", "content": "crash"}]}
        status, _, answer = server.post("/v1/chat/completions", body)
        assert status == 200 and answer["choices"][0]["message"]["content"] == "on and on"
        assert answer["model"] == "script"
        assert call_admin(server.admin, "status")["engine"]["epoch"] == 2
        assert server.end() == 0


class ScriptedServer(FakeServer):
    """The real program."""

    program = (sys.executable, "-m", "octavo")
    common = ("--port", "0")
