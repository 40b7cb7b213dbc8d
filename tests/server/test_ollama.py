"""Ollama's interface: its own client gets what it expects, whole and streamed."""

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import ollama
import pytest

from octavo.core.request import FinishError, FinishReason
from octavo.errors import ErrorKind
from octavo.server.http.limits import HttpLimits
from tests.server.fakes import MAX_LEN, FakeClient, Harness, Wire, keyed, vector_of
from tests.server.test_anthropic_tools import CALL, TOOLS, thinking

USER = [{"role": "user", "content": "hi"}]
FUNCTIONS = [
    {
        "type": "function",
        "function": {"name": t["name"], "description": t.get("description", ""), "parameters": t["input_schema"]},
    }
    for t in TOOLS
]


@asynccontextmanager
async def client_of(harness: Harness, **options: Any) -> AsyncIterator[ollama.AsyncClient]:
    client = ollama.AsyncClient("http://localhost", transport=httpx.ASGITransport(harness.app), **options)
    async with client:
        yield client


async def chat(harness: Harness, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": USER, "stream": False, **fields}
    return await harness.request("POST", "/api/chat", json=body)


async def generate(harness: Harness, **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": "hi", "stream": False, **fields}
    return await harness.request("POST", "/api/generate", json=body)


def lines(text: str) -> list[Any]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


async def test_chat_is_the_same_whole_and_streamed() -> None:
    harness = Harness()
    async with client_of(harness) as client:
        whole = await client.chat("tiny", USER)
        parts = [part async for part in await client.chat("tiny", USER, stream=True)]
    assert whole.message.content == "".join(part.message.content or "" for part in parts) == "Hello é!"
    assert (whole.message.role, whole.model, whole.done, whole.done_reason) == ("assistant", "tiny", True, "stop")
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    for answer in (whole, last):
        assert (answer.prompt_eval_count, answer.eval_count) == (len("user:hi\nassistant:"), 10)
        spent = [answer.load_duration, answer.prompt_eval_duration, answer.eval_duration]
        assert sum(value or 0 for value in spent) == answer.total_duration
    assert (last.message.content, last.done_reason) == ("", "stop")


async def test_streaming_is_the_default_and_comes_in_lines() -> None:
    harness = Harness()
    response = await harness.request("POST", "/api/chat", json={"model": "tiny:latest", "messages": USER})
    assert response.headers["content-type"] == "application/x-ndjson"
    found = lines(response.text)
    assert found[0] == {**found[0], "message": {"role": "assistant", "content": "H"}, "done": False}
    assert found[-1]["done"] and found[-1]["created_at"].endswith("Z")


async def test_generate_uses_the_template_unless_it_is_raw() -> None:
    harness = Harness()
    async with client_of(harness) as client:
        answer = await client.generate("tiny", "ab", system="be")
        assert (answer.response, answer.done_reason, harness.prompt) == (
            *("Hello é!", "stop"),
            "system:be\nuser:ab\nassistant:",
        )
        raw = await client.generate("tiny", "ab", raw=True, options={"num_predict": 3})
        assert (raw.response, raw.done_reason, harness.prompt) == ("Hel", "length", "ab")
        parts = [part async for part in await client.generate("tiny", "ab", stream=True)]
    assert "".join(part.response or "" for part in parts) == "Hello é!"


async def test_options_are_sampling_fields() -> None:
    harness = Harness()
    options: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.25,
        "min_p": 0.125,
        "typical_p": 0.75,
        "seed": 7,
        "num_predict": 9,
        "stop": ["lo"],
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repeat_last_n": 64,
        "num_ctx": 100_000,
        "num_thread": 3,
    }
    for ask in (chat, generate):
        assert (await ask(harness, options=options)).status_code == 200
        params = harness.engine.requests[-1].params
        assert (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p) == (
            *(0.5, 5, 0.25, 0.125),
            0.75,
        )
        assert (params.seed, params.max_tokens, params.stop, params.repetition_penalty) == (7, 9, ("lo",), 1.5)
        assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    assert (await chat(harness, options={"repeat_last_n": 0, "repeat_penalty": 1.5})).status_code == 200
    assert harness.engine.requests[-1].params.repetition_penalty == 1.0
    for endless in (-1, -2):
        assert (await chat(harness, options={"num_predict": endless})).status_code == 200
        assert harness.engine.requests[-1].params.max_tokens is None


async def test_calls_are_told_whole_and_results_find_their_call() -> None:
    harness = Harness(engine=FakeClient(CALL))
    async with client_of(harness) as client:
        whole = await client.chat("tiny", USER, tools=FUNCTIONS)
        parts = [part async for part in await client.chat("tiny", USER, tools=FUNCTIONS, stream=True)]
        assert whole.message.tool_calls is not None
        streamed = [call for part in parts for call in part.message.tool_calls or ()]
        for call in (*whole.message.tool_calls, *streamed):
            assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Köln"})
        assert len(streamed) == len(whole.message.tool_calls) == 1
        turns = [
            *USER,
            whole.message,
            {"role": "tool", "tool_name": "get_weather", "content": "12, rain"},
            {"role": "user", "content": "so?"},
        ]
        harness.engine.text = "Wet."
        assert (await client.chat("tiny", turns, tools=FUNCTIONS)).message.content == "Wet."
    assert harness.prompt.index("Köln") < harness.prompt.index("12, rain") < harness.prompt.index("so?")


async def test_results_are_given_to_the_calls_of_their_name_or_in_order() -> None:
    from octavo.server.api.ollama.bodies import chat_of, read_ollama_chat
    from octavo.text.dialect import Dialect

    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"a": 1}, "index": 0}, **more}

    messages = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call("f"), call("g"), call("g", id="own")]},
        {"role": "tool", "tool_name": "g", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "tool_call_id": "own", "content": "3"},
        {"role": "tool", "tool_name": "h", "content": "4"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call("f")]},
    ]
    body = chat_of(read_ollama_chat({"messages": messages}), Dialect())
    made = [message.tool_call_id for message in body.messages if message.role == "tool"]
    assert made == ["call_1", "call_0", "own", "call_unknown"]
    assert [call.id for call in body.messages[1].tool_calls] == ["call_0", "call_1", "own"]
    assert body.messages[1].tool_calls[0].function.arguments == '{"a": 1}'
    assert (body.messages[-1].tool_calls[0].id, body.messages[-1].reasoning) == ("call_3", "hm")


async def test_thinking_comes_apart() -> None:
    harness = thinking("<think>Well, hm.</think>\n\nYes.")
    async with client_of(harness) as client:
        whole = await client.chat("tiny", USER, think=True)
        parts = [part async for part in await client.chat("tiny", USER, think="high", stream=True)]
        made = await client.generate("tiny", "hi", think=False)
    assert (whole.message.thinking, whole.message.content) == ("Well, hm.", "Yes.")
    assert "".join(part.message.thinking or "" for part in parts) == "Well, hm."
    assert "".join(part.message.content or "" for part in parts) == "Yes."
    assert (made.thinking, made.response) == ("Well, hm.", "Yes.") and "[no]" in harness.prompt


async def test_formats_hold_the_answer() -> None:
    harness = Harness()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form, is_held in (("", False), (None, False), ("json", True), (schema, True)):
        for ask in (chat, generate):
            assert (await ask(harness, format=form)).status_code == 200
            assert bool(harness.engine.requests[-1].params.grammar) == is_held
    response = await chat(harness, format={"type": "nonsense"})
    assert response.status_code == 400 and "format" in response.json()["error"]


async def test_logprobs_stand_beside_the_text() -> None:
    harness = Harness()
    async with client_of(harness) as client:
        whole = await client.chat("tiny", USER, logprobs=True, top_logprobs=2)
        parts = [part async for part in await client.generate("tiny", "hi", logprobs=True, stream=True)]
        raw = await client.generate("tiny", "hi", raw=True, logprobs=True, top_logprobs=1)
    assert whole.logprobs is not None and raw.logprobs is not None
    assert [entry.token for entry in whole.logprobs][:2] == ["H", "e"]
    assert len(whole.logprobs[0].top_logprobs or ()) == 2 and len(raw.logprobs[0].top_logprobs or ()) == 1
    assert sum(len(part.logprobs or ()) for part in parts) == len(whole.logprobs)


async def test_nothing_to_say_is_a_load() -> None:
    harness = Harness()
    async with client_of(harness) as client:
        assert (await client.generate("tiny")).done_reason == "load"
        assert (await client.chat("tiny", [])).done_reason == "load"
        assert (await client.generate("tiny", keep_alive=0)).done_reason == "load"
    assert not harness.engine.requests


async def test_models_are_described() -> None:
    harness = Harness()
    async with client_of(harness) as client:
        listed = await client.list()
        shown = await client.show("tiny:latest")
        running = await client.ps()
        assert (await client.pull("tiny")).status == "success"
        with pytest.raises(ollama.ResponseError, match="this server has: tiny") as other:
            await client.pull("llama3.2")
    assert other.value.status_code == 404
    (model,) = listed.models
    assert model.model == "tiny" and model.details is not None and model.details.family == "llama"
    assert shown.modelinfo is not None and shown.modelinfo["llama.context_length"] == 4096
    assert shown.capabilities == ["completion", "embedding", "tools"] and shown.template
    assert [each.model for each in running.models] == ["tiny"]
    assert running.models[0].context_length == 4096
    for method, path in (("GET", "/"), ("HEAD", "/"), ("HEAD", "/api/tags"), ("GET", "/api/version")):
        assert (await harness.request(method, path)).status_code == 200


@pytest.mark.parametrize("verb", ["push", "create", "copy", "delete"])
async def test_what_a_server_of_one_model_does_not_do_is_refused(verb: str) -> None:
    method = "DELETE" if verb == "delete" else "POST"
    response = await Harness().request(method, f"/api/{verb}", json={"model": "x"})
    assert response.status_code == 400 and f"/api/{verb} is not done here" in response.json()["error"]


async def test_embeddings_are_vectors_of_length_one() -> None:
    harness = Harness()
    encode = harness.text.tokenizer.encode
    async with client_of(harness) as client:
        found = await client.embed("tiny:latest", ["ab", "cd"])
        assert [list(vector) for vector in found.embeddings] == [vector_of(encode(t)).tolist() for t in ("ab", "cd")]
        assert (found.prompt_eval_count, found.model) == (4, "tiny") and (found.total_duration or 0) > 0
        short = (await client.embed("tiny", "some letters", dimensions=3)).embeddings[0]
        assert len(short) == 3 and math.hypot(*short) == pytest.approx(1.0, abs=1e-6)
        assert (await client.embeddings("tiny", "ab")).embedding == found.embeddings[0]
        assert (await client.embed("tiny", [])).embeddings == []
        assert (await client.embeddings("tiny", "")).embedding == []
        assert (await client.embed("tiny", "x" * 5000)).prompt_eval_count == MAX_LEN
        with pytest.raises(ollama.ResponseError, match="input has 5000"):
            await client.embed("tiny", "x" * 5000, truncate=False)
        with pytest.raises(ollama.ResponseError, match="this model's vectors have 8, give at most"):
            await client.embed("tiny", "a", dimensions=9)
        with pytest.raises(ollama.ResponseError, match="this server has: tiny"):
            await client.embed("other", "a")


async def test_errors_are_ollamas() -> None:
    harness = Harness(config=keyed("sk-a"))
    async with client_of(harness) as client:
        with pytest.raises(ollama.ResponseError, match="give a valid key") as no_key:
            await client.chat("tiny", USER)
    assert no_key.value.status_code == 401
    async with client_of(harness, headers={"authorization": "Bearer sk-a"}) as client:
        with pytest.raises(ollama.ResponseError, match="this server has: tiny") as unknown:
            await client.chat("llama3.2", USER)
        assert unknown.value.status_code == 404
        harness.engine.end = (FinishReason.ERROR, FinishError(ErrorKind.STEP_FAILED, "no"))
        with pytest.raises(ollama.ResponseError, match="the engine failed on this request"):
            async for _ in await client.chat("tiny", USER, stream=True):
                pass


async def test_nothing_but_lines_is_in_a_stream() -> None:
    harness = Harness(limits=HttpLimits(keep_alive_s=0.01))
    body = {"model": "tiny", "messages": USER}
    harness.engine.is_held = True
    wire = Wire(harness.app, "/api/chat", body, {"idempotency-key": "k"})
    task = wire.start()
    await harness.engine.submitted.wait()
    harness.engine.answer(harness.engine.requests[-1])
    await task
    again = await harness.request("POST", "/api/chat", json=body, headers={"idempotency-key": "k"})
    for text in (wire.text, again.text):
        assert "".join(each["message"]["content"] for each in lines(text)) == "Hello é!"
    assert lines(again.text)[-1] == lines(wire.text)[-1]
    assert len(harness.engine.requests) == 1


@pytest.mark.parametrize(
    ("ask", "fields", "words"),
    [
        (chat, {"options": {"num_predict": 0}}, "options.num_predict is 0"),
        (chat, {"options": {"temperature": -1}}, "options.temperature is -1"),
        (chat, {"options": {"repeat_penalty": 0}}, "options.repeat_penalty is 0"),
        (chat, {"options": {"stop": ["x"] * 17}}, "options.stop has 17 items; give at most 16"),
        (chat, {"options": {"top_k": "x"}}, "options.top_k is 'x'"),
        (chat, {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, "messages[0].images"),
        (chat, {"messages": [{"role": "someone", "content": "x"}]}, "messages[0].role"),
        (chat, {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {}}]}]}, "function.name"),
        (chat, {"think": "much"}, "think is 'much'; give true or false or "),
        (chat, {"top_logprobs": 2}, "top_logprobs is 2, but logprobs is not true"),
        (chat, {"format": "xml"}, "format is 'xml'; give 'json' or an object"),
        (chat, {"template": "x"}, "template: this server does not support it"),
        (generate, {"template": "x"}, "template: this server does not support it"),
        (generate, {"suffix": "x"}, "suffix: this server does not support it"),
        (generate, {"context": [1]}, "context: this server does not support it"),
        (generate, {"images": ["aa"]}, "images: this server does not support it"),
        (generate, {"raw": True, "system": "x"}, "system is a matter of the chat template"),
        (generate, {"prompt": "x" * 100_000}, "prompt"),
        (generate, {"raw": True, "prompt": "x" * 5000}, "prompt"),
    ],
)
async def test_refusals_name_the_field_as_ollama_does(ask: Any, fields: Any, words: str) -> None:
    harness = Harness()
    response = await ask(harness, **fields)
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]
    assert not harness.engine.requests
