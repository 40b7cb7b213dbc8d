"""Fields that are not known: ignored and told by default, refused under --strict-fields."""

import logging
import re
from typing import Any

import pytest

from octavo.config import Config, ServingConfig
from octavo.server.api.anthropic.bodies import MessagesBody
from octavo.server.api.completions.bodies import ChatBody, CompletionBody
from octavo.server.api.embeddings import EmbeddingBody
from octavo.server.api.fields import HINTS, KNOWN_NAMES, MAX_PATH_CHARACTERS, MAX_PATHS, UNSUPPORTED
from octavo.server.api.ollama.bodies import OllamaChatBody
from octavo.server.api.responses.bodies import ResponsesBody
from octavo.server.http.body import OFF_LOOP_BYTES
from octavo.server.http.middleware import MAX_LOGGED_FIELDS
from tests.server.fakes import Harness, assert_ignored

STRICT = Config(serving=ServingConfig(strict_fields=True))
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "1"}


def calling(call: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "tool_calls": [call], **fields}, RESULT]


NESTED: dict[str, tuple[dict[str, Any], str]] = {
    "a message": ({"messages": [{**USER, "foo": 1}]}, "messages[].foo"),
    "a part": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
               "messages[].content[].x"),
    "a call": ({"messages": calling({**CALL, "provider_specific_fields": {"a": 1}})},
               "messages[].tool_calls[].provider_specific_fields"),
    "a called function": ({"messages": calling({**CALL, "function": {**CALL["function"], "x": 1}})},  # type: ignore[dict-item]
                          "messages[].tool_calls[].function.x"),
    "a tool": ({"tools": [{**TOOL, "x": 1}]}, "tools[].x"),
    "a function": ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[].function.x"),
    "a choice of a tool": ({"tools": [TOOL], "tool_choice": {**TOOL, "x": 1}}, "tool_choice.x"),
    "a tool that the server would run": ({"tools": [TOOL, {"type": "web_search"}]}, "tools[].type.web_search"),
    "a response format": ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    "a schema's wrapper": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "x": 1}}},
        "response_format.json_schema.x"),
    "structured outputs": ({"structured_outputs": {"regex": "a", "x": 1}}, "structured_outputs.x"),
    "options of a stream": ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    "reasoning": ({"reasoning": {"x": 1}}, "reasoning.x"),
}  # fmt: skip


@pytest.mark.parametrize("place", NESTED)
async def test_an_unknown_field_of_any_part_is_ignored_and_told(place: str) -> None:
    fields, told = NESTED[place]
    harness = Harness()
    assert_ignored(await harness.chat(**fields), told)
    assert len(harness.engine.requests) == 1
    response = await Harness(config=STRICT).chat(**fields)
    assert response.status_code == 400
    assert re.sub(r"\[\d+\]", "[]", response.json()["error"]["param"]) == told
    await harness.context.sandbox.close()


async def test_the_answer_is_that_of_the_request_without_the_field() -> None:
    harness = Harness()
    plain = await harness.chat(seed=1)
    assert "x-octavo-ignored" not in plain.headers
    told = await harness.chat(seed=1, client_metadata={"a": 1}, foo=[1])
    assert told.json()["choices"] == plain.json()["choices"]
    assert_ignored(told, "client_metadata", "foo")
    first, second = harness.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids and first.params == second.params


async def test_a_stream_and_a_long_body_tell_it_too() -> None:
    harness = Harness()
    assert_ignored(await harness.chat(stream=True, foo=1), "foo")
    assert_ignored(await harness.chat(foo="x" * 2 * OFF_LOOP_BYTES), "foo")
    assert_ignored(await harness.complete(stream=True, foo=1), "foo")


async def test_a_refusal_tells_it_too() -> None:
    response = await Harness().chat(foo=1, temperature=-1)
    assert response.status_code == 400 and response.headers["x-octavo-ignored"] == "foo"


async def test_null_is_as_left_out() -> None:
    assert "x-octavo-ignored" not in (await Harness().chat(foo=None, spaces_between_special_tokens=None)).headers


async def test_the_header_is_bounded_and_holds_no_text_of_the_client() -> None:
    harness = Harness()
    response = await harness.chat(**{"a b\r\nx-evil: 1": 1, "é" * 500: 1, "z" * 500: 1})
    names = response.headers["x-octavo-ignored"].split(", ")
    assert names == ["a_b__x-evil__1", "_" * MAX_PATH_CHARACTERS, "z" * MAX_PATH_CHARACTERS]
    assert "x-evil" not in response.headers
    response = await harness.chat(**{f"field{i}": 1 for i in range(5 * MAX_PATHS)})
    names = response.headers["x-octavo-ignored"].split(", ")
    assert len(names) == MAX_PATHS + 1 and names[-1] == "..."
    many = [{**USER, "foo": i} for i in range(100)]
    assert_ignored(await harness.chat(messages=many), "messages[].foo")


async def test_the_counter_has_known_names_only() -> None:
    harness = Harness()
    await harness.chat(verbosity="low", whatever=1)
    await harness.chat(messages=calling({**CALL, "provider_specific_fields": {}}), another=2)
    text = (await harness.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("octavo_ignored_fields_total")]
    found = {re.search(r'field="([^"]*)"', line)[1]: float(line.split()[-1]) for line in lines}  # type: ignore[index]
    assert found == {"verbosity": 1, "other": 2, "provider_specific_fields": 1}


async def test_each_field_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    with caplog.at_level(logging.WARNING, "octavo.server.http.middleware"):
        for _ in range(3):
            await harness.chat(foo=1)
        assert [record.getMessage() for record in caplog.records] == [
            "field foo of a request was ignored: this server does not know it (logged once)"
        ]
        for start in range(0, 2 * MAX_LOGGED_FIELDS, MAX_PATHS):
            await harness.complete(**{f"f{i}": 1 for i in range(start, start + MAX_PATHS)})
    assert len(caplog.records) == MAX_LOGGED_FIELDS


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
async def test_a_field_that_changes_the_meaning_is_refused_on_every_api(field: str) -> None:
    harness = Harness()
    bodies: dict[str, tuple[dict[str, Any], Any]] = {
        "/v1/chat/completions": ({"messages": [USER]}, ChatBody),
        "/v1/completions": ({"prompt": "hi"}, CompletionBody),
        "/v1/responses": ({"input": "hi"}, ResponsesBody),
        "/v1/embeddings": ({"input": "hi"}, EmbeddingBody),
        "/v1/messages": ({"messages": [USER], "max_tokens": 3}, MessagesBody),
        "/api/chat": ({"messages": [USER], "stream": False}, OllamaChatBody),
    }
    for path, (body, model) in bodies.items():
        if field not in model.model_fields and (path, field) != ("/v1/messages", "context_management"):
            response = await harness.request("POST", path, json={**body, field: {"not": "neutral"}})
            assert response.status_code == 400, (path, response.text)
            reason = f"{field}: this server does not support it"
            if (path, field) == ("/v1/responses", "messages"):
                reason = "messages is not a field of this endpoint; give input"
            assert reason in response.text, (path, response.text)


def test_a_field_is_in_one_table_only() -> None:
    assert not set(UNSUPPORTED) & (set(HINTS) | KNOWN_NAMES)
    assert all(len(each.means) > 8 for each in UNSUPPORTED.values())


async def test_strict_fields_refuse_by_name() -> None:
    harness = Harness(config=STRICT)
    for fields, code in (({"foo": 1}, "unknown_field"), ({"verbosity": "low"}, "unsupported_field")):
        response = await harness.chat(**fields)
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)
        assert response.json()["error"]["param"] == next(iter(fields))
    assert (await harness.chat(user="me", service_tier="auto")).status_code == 200
