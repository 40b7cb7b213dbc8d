"""POST /v1/messages: Anthropic's own client gets what it expects, whole and streamed."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import pytest

from octavo.core.request import FinishError, FinishReason
from octavo.errors import ErrorKind
from octavo.server.http.limits import HttpLimits
from tests.server.fakes import FakeClient, Harness, Wire, keyed

USER = [{"role": "user", "content": "hi"}]
BASE: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": USER}


@asynccontextmanager
async def client_of(harness: Harness, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    transport = httpx2.ASGITransport(harness.app)
    async with (
        httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http,
        anthropic.AsyncAnthropic(
            **{"api_key": "x", "base_url": "http://localhost", "http_client": http, "max_retries": 0, **options}
        ) as client,
    ):
        yield client


async def ask(harness: Harness, **fields: Any) -> Any:
    return await harness.request("POST", "/v1/messages", json={**BASE, **fields})


async def refused(harness: Harness, **fields: Any) -> str:
    """The message of a 400."""
    response = await ask(harness, **fields)
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    return str(body["error"]["message"])


def stream_events(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        kind, data = block.split("\n")
        assert kind.startswith("event: ") and data.startswith("data: "), block
        found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][1]["type"] == found[-1][0]
    return found


async def test_I03_the_client_gets_the_same_message_whole_and_streamed() -> None:
    harness = Harness()
    async with client_of(harness) as client:
        whole = await client.messages.create(**BASE)
        async with client.messages.stream(**BASE) as stream:
            pieces = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
    assert whole.content[0].text == "".join(pieces) == "Hello é!"  # type: ignore[union-attr]
    assert (whole.role, whole.type, whole.model, whole.stop_reason) == ("assistant", "message", "tiny", "end_turn")
    assert whole.id.startswith("msg") and whole.stop_sequence is None
    assert streamed.to_dict() | {"id": whole.id} == whole.to_dict() | {"stop_details": None}
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (len("user:hi\nassistant:"), 10)


async def test_a_streams_events_have_anthropics_order_and_names() -> None:
    response = await ask(Harness(), stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = stream_events(response.text)
    kinds = [kind for kind, _ in events]
    deltas = ["content_block_delta"] * 8
    assert kinds == [
        *("message_start", "content_block_start", *deltas, "content_block_stop", "message_delta", "message_stop")
    ]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] == 18
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


@pytest.mark.parametrize(
    ("fields", "end", "reason", "word"),
    [
        ({}, None, "end_turn", None),
        ({"max_tokens": 3}, None, "max_tokens", None),
        ({"stop_sequences": ["lo"]}, None, "stop_sequence", "lo"),
        ({}, (FinishReason.LENGTH, ""), "model_context_window_exceeded", None),
    ],
)
async def test_each_end_has_its_reason(fields: Any, end: Any, reason: str, word: str | None) -> None:
    harness = Harness()
    harness.engine.end = end
    whole = (await ask(harness, **fields)).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, word)
    events = stream_events((await ask(harness, stream=True, **fields)).text)
    assert events[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": word}
    text = "".join(event["delta"]["text"] for kind, event in events if kind == "content_block_delta")
    assert text == "".join(block["text"] for block in whole["content"])


async def test_usage_and_count_tokens_agree() -> None:
    harness = Harness()
    harness.engine.cached_tokens = 8
    fields = {"system": "be brief", "messages": [{"role": "user", "content": "héllo"}]}
    usage = (await ask(harness, **fields)).json()["usage"]
    async with client_of(harness) as client:
        count = await client.messages.count_tokens(model="tiny", **fields)  # type: ignore[arg-type]
    assert usage["cache_read_input_tokens"] == 8
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count.input_tokens
    events = stream_events((await ask(harness, stream=True, **fields)).text)
    assert events[0][1]["message"]["usage"]["input_tokens"] == count.input_tokens
    assert events[-2][1]["usage"] == {k: v for k, v in usage.items() if k != "service_tier"}


async def test_a_conversation_becomes_the_messages_that_it_is() -> None:
    harness = Harness()
    fields = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=12345"},
            {"type": "text", "text": "one", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            {"type": "text", "text": "two"},
        ],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "document",
                        "title": "T",
                        "context": "C",
                        "source": {"type": "text", "media_type": "text/plain", "data": "e"},
                    },
                    {
                        "type": "search_result",
                        "title": "S",
                        "source": "U",
                        "content": [{"type": "text", "text": "f"}],
                        "citations": {"enabled": False},
                    },
                ],
            },
            {"role": "system", "content": "g"},
            {"role": "user", "content": ""},
        ],
    }
    assert (await ask(harness, **fields)).status_code == 200
    assert harness.prompt == (
        "system:one\ntwo\nuser:a\nb\nassistant:cd\nuser:T\nC\ne\nS\nU\nf\nsystem:g\nuser:\nassistant:"
    )


async def test_an_answer_that_was_begun_goes_on() -> None:
    harness = Harness()
    asked = [*USER, {"role": "assistant", "content": "Well"}]
    assert (await ask(harness, messages=asked)).status_code == 200
    assert harness.prompt == "user:hi\nassistant:Well"


async def test_agents_headers_and_queries_are_taken() -> None:
    harness = Harness(config=keyed("sk-a"))
    async with client_of(harness, api_key="sk-a") as client:
        beta = await client.beta.messages.create(**BASE, betas=["interleaved-thinking-2025-05-14"])
        listed = await client.models.list()
        one = await client.models.retrieve("tiny")
    assert beta.stop_reason == "end_turn"
    assert [model.id for model in listed.data] == ["tiny"] and one.id == "tiny" and one.type == "model"
    async with client_of(harness, api_key=None, auth_token="sk-a") as client:
        assert (await client.messages.create(**BASE)).stop_reason == "end_turn"


async def test_errors_are_anthropics() -> None:
    harness = Harness(config=keyed("sk-a"))
    async with client_of(harness, api_key="sk-b") as client:
        with pytest.raises(anthropic.AuthenticationError) as wrong_key:
            await client.messages.create(**BASE)
    assert wrong_key.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    async with client_of(harness, api_key="sk-a") as client:
        with pytest.raises(anthropic.NotFoundError, match="this server has: tiny"):
            await client.messages.create(**{**BASE, "model": "claude"})
        with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0") as bad:
            await client.messages.create(**{**BASE, "max_tokens": 0})
    body: Any = bad.value.body
    assert body["request_id"] == bad.value.response.headers["x-request-id"]
    response = await harness.request("GET", "/v1/messages", headers={"x-api-key": "sk-a"})
    assert (response.status_code, response.json()["type"]) == (405, "error")


async def test_an_error_in_mid_stream_is_an_event() -> None:
    harness = Harness()
    harness.engine.end = (FinishReason.ERROR, FinishError(ErrorKind.STEP_FAILED, "no"))
    events = stream_events((await ask(harness, stream=True)).text)
    assert events[-1] == (
        "error",
        {"type": "error", "error": {"type": "api_error", "message": "the engine failed on this request"}},
    )
    async with client_of(harness) as client:
        with pytest.raises(anthropic.APIStatusError, match="the engine failed on this request"):
            async with client.messages.stream(**BASE) as stream:
                await stream.until_done()


async def test_pings_keep_a_waiting_stream_alive() -> None:
    harness = Harness(limits=HttpLimits(keep_alive_s=0.01))
    harness.engine.is_held = True
    wire = Wire(harness.app, "/v1/messages", {**BASE, "stream": True})
    task = wire.start()
    await wire.until(lambda: wire.text.count("event: ping") >= 2)
    harness.engine.answer(harness.engine.requests[-1])
    await task
    kinds = [kind for kind, _ in stream_events(wire.text)]
    assert kinds[0] == "message_start" and kinds[1] == "ping" and kinds[-1] == "message_stop"


async def test_a_client_that_leaves_cancels() -> None:
    harness = Harness()
    harness.engine.is_held = True
    wire = Wire(harness.app, "/v1/messages", {**BASE, "stream": True})
    task = wire.start()
    await harness.engine.submitted.wait()
    wire.leave()
    await task
    assert [reason for _, reason in harness.engine.cancelled] == [FinishReason.CANCELLED]


async def test_a_retry_with_a_key_reads_the_same_answer() -> None:
    harness = Harness()
    key = {"idempotency-key": "k"}
    first, second = [
        await harness.request("POST", "/v1/messages", json={**BASE, "stream": True}, headers=key) for _ in range(2)
    ]
    assert len(harness.engine.requests) == 1
    assert first.text == second.text and "message_stop" in first.text
    again = await harness.request(
        "POST", "/v1/messages", json={**BASE, "stream": True}, headers={**key, "last-event-id": "3"}
    )
    assert again.status_code == 400 and "cannot be continued" in again.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "blocks here may be: text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0] is no content block"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5; give a string or a list"),
        ({"system": 5}, "system is 5; give a string or a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": []}, "messages is empty"),
        ({"messages": ["x"]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]},
            "messages[0].content[0].source.type is 'url'",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type is 'image'"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17 items; give at most 16"),
        ({"stop_sequences": ["" * 3]}, "stop_sequences[0]"),
        ({"temperature": -1}, "temperature is -1"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
            "tools[0].type is 'web_search_20250305'",
        ),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "tool", "name": "bash"}},
            "there are no tools",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name is 'a b'"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type is 'sometimes'"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type is 'xml'"),
    ],
)
async def test_refusals_name_the_place(fields: Any, words: str) -> None:
    harness = Harness()
    assert words in await refused(harness, **fields)
    assert not harness.engine.requests


async def test_many_at_once_each_get_their_own() -> None:
    harness = Harness(engine=FakeClient("one two three"))
    async with client_of(harness) as client:
        made = await asyncio.gather(*(client.messages.create(**{**BASE, "max_tokens": n}) for n in range(1, 9)))
    assert [message.usage.output_tokens for message in made] == list(range(1, 9))
