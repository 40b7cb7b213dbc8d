"""Every field of /v1/responses is honoured, refused by name, or documented as ignored."""

from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import response_create_params

from octavo.config import Config, ServingConfig
from octavo.server.api.responses.bodies import IGNORED_RESPONSES, NOT_HERE, REFUSED_RESPONSES, ResponsesBody
from octavo.server.api.sampling import SamplingBody
from tests.server.fakes import FakeClient, Harness, assert_ignored
from tests.server.response_events import read_events
from tests.server.test_fields import HONOURED as HONOURED_ELSEWHERE
from tests.server.test_fields import REFUSED as REFUSED_EVERYWHERE
from tests.server.test_fields import Check, answer, params

PATH = "/v1/responses"
OPENAI = set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"}
REFUSED = REFUSED_EVERYWHERE | REFUSED_RESPONSES
FIELDS = OPENAI | set(ResponsesBody.model_fields) | set(REFUSED) | set(NOT_HERE) | set(IGNORED_RESPONSES)
PLAYED = FakeClient().tokenizer
GET_TIME = {"type": "function", "name": "get_time", "description": "the time", "parameters": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
LOGPROBS = "message.output_text.logprobs"
LABEL = {"user": "u1", "safety_identifier": "s1", "prompt_cache_key": "k1"}


def prompt(check: Callable[[str], bool]) -> Check:
    return lambda request, _: check(PLAYED.decode(request.prompt_token_ids or (), skip_special_tokens=False))


def echoed(field: str, value: object) -> Check:
    return answer(lambda response: response.json()[field] == value)


HONOURED: dict[str, tuple[dict[str, Any], Any, Check]] = {
    "input": ({}, [{"role": "user", "content": "zz"}], prompt(lambda text: "user:zz" in text)),
    "instructions": ({}, "be brief", prompt(lambda text: text.startswith("system:be brief\n"))),
    "max_output_tokens": ({}, 3, params(lambda p: p.max_tokens == 3)),
    "include": (
        {},
        [LOGPROBS],
        lambda q, r: q.params.logprobs == 0 and r.json()["output"][0]["content"][0]["logprobs"],
    ),
    "top_logprobs": ({"include": [LOGPROBS]}, 4, params(lambda p: p.logprobs == 4)),
    "tools": ({}, [GET_TIME], prompt(lambda text: "get_time" in text)),
    "tool_choice": ({"tools": [GET_TIME]}, "required", lambda q, _: "get_time" in q.params.grammar),
    "parallel_tool_calls": ({"tools": [GET_TIME]}, False, echoed("parallel_tool_calls", False)),
    "max_tool_calls": ({}, 3, echoed("max_tool_calls", 3)),
    "text": (
        {},
        {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}, "verbosity": "medium"},
        lambda q, r: bool(q.params.grammar) and r.json()["text"]["format"]["schema"] == SCHEMA,
    ),
    "reasoning": ({}, {"effort": "none", "summary": "auto"}, echoed("reasoning", {"effort": "none", "summary": None})),
    "stream": ({}, True, answer(lambda r: read_events(r.text)[-1]["type"] == "response.completed")),
    "metadata": ({}, {"a": "b"}, echoed("metadata", {"a": "b"})),
    "truncation": ({}, "disabled", echoed("truncation", "disabled")),
    "store": ({}, False, echoed("store", False)),
    "background": ({}, True, echoed("background", True)),
    "return_tokens_as_token_ids": ({"include": [LOGPROBS]}, True, answer(lambda r: '"token_id:' in r.text)),
    **{field: ({}, value, echoed(field, value)) for field, value in LABEL.items()},
}
ELSEWHERE = {"previous_response_id": "test_responses.py", "stream_options": "below", "return_token_ids": "below"}
VALUES = {"n": 2, "use_beam_search": True, "context_management": [{"type": "compaction"}]}


async def post(harness: Harness, **fields: Any) -> Any:
    return await harness.request("POST", PATH, json={"model": "tiny", "input": "hi", **fields})


@pytest.mark.parametrize("field", sorted(FIELDS))
async def test_each_field_is_honoured_refused_or_ignored(field: str) -> None:
    is_taken = field in ResponsesBody.model_fields and field not in NOT_HERE
    kinds = [is_taken, field in REFUSED, field in NOT_HERE, field in IGNORED_RESPONSES]
    assert sum(kinds) <= 1, f"{field} must be in one of the body, the refused and the ignored fields"
    harness = Harness()
    if not any(kinds):
        assert_ignored(await post(harness, **{field: 3}), field)
        return
    if field in ELSEWHERE:
        return
    if field in IGNORED_RESPONSES:
        assert (await post(harness, **{field: 3})).status_code == 200
        return
    if not is_taken:
        neutral = {**REFUSED, **NOT_HERE}[field]
        response = await post(harness, **{field: VALUES.get(field, "not neutral")})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert response.json()["error"]["code"] == "unsupported_field"
        for value in (*neutral, None):
            assert (await post(harness, **{field: value})).status_code == 200
        return
    others, value, proof = HONOURED.get(field) or HONOURED_ELSEWHERE[field]
    response = await post(harness, **{**others, field: value})
    assert response.status_code == 200, response.text
    assert proof(harness.engine.requests[-1], response)


def test_every_sampling_field_is_taken_or_named_as_missing() -> None:
    assert set(SamplingBody.model_fields) <= set(ResponsesBody.model_fields)
    assert set(NOT_HERE) - {"prompt_logprobs", "echo"} <= set(SamplingBody.model_fields) | {"best_of"}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input"),
    "an empty input": ({"input": []}, "input"),
    "a number as input": ({"input": 5}, "input"),
    "an unknown item": ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
    "an item that is no object": ({"input": ["x"]}, "input[0]"),
    "an unknown role": ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
        "input[0].content[0].type",
    ),
    "no parts": ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
    "a call without a name": (
        {"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]},
        "input[0].name",
    ),
    "arguments that are no JSON": (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
        "input[0].arguments",
    ),
    "an output without its call": (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input",
    ),
    "a reference to nothing": ({"input": [{"type": "item_reference", "id": "msg_no"}]}, "input"),
    "an unknown inclusion": ({"include": ["file_search_call.results"]}, "include[0]"),
    "a built-in tool that is required": (
        {"tools": [GET_TIME, {"type": "web_search"}], "tool_choice": "required"},
        "tools[1].type",
    ),
    "a tool's name": ({"tools": [{**GET_TIME, "name": "a b"}]}, "tools[0].name"),
    "two tools of one name": ({"tools": [GET_TIME, GET_TIME]}, "tools[1].name"),
    "a choice of nothing": ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a choice of a built-in": ({"tools": [GET_TIME], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    "a schema that is missing": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    "a schema of another kind": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}},
        "text.format.schema",
    ),
    "a bad schema": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "thing"}}}},
        "text.format.schema",
    ),
    "an effort": ({"reasoning": {"effort": "a lot"}}, "reasoning.effort"),
    "a reasoning context": ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    "too few tokens": ({"max_output_tokens": -1}, "max_output_tokens"),
    "too many log-probabilities": ({"top_logprobs": 21}, "top_logprobs"),
    "too hot": ({"temperature": -1}, "temperature"),
    "many metadata": ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    "long metadata": ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    "a long label": ({"user": "x" * 513}, "user"),
    "a response that is not stored": ({"previous_response_id": "resp_no"}, "previous_response_id"),
    "a prompt that cannot fit": ({"input": "x" * 5000}, "input"),
    "truncation": ({"truncation": "sometimes"}, "truncation"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_a_mistake_is_told_with_its_field(name: str) -> None:
    fields, param = BAD[name]
    harness = Harness()
    response = await post(harness, **fields)
    assert response.status_code == (404 if param == "previous_response_id" else 400), response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert param.split("[")[0].split(".")[0] in error["message"] or error["code"] == "context_length_exceeded"
    assert "message" in error and not harness.engine.requests


IGNORED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"surprise": 1}, "surprise"),
    "what completions alone have": ({"return_token_ids": True}, "return_token_ids"),
    "what Codex sends with each request": ({"client_metadata": {"x": "y"}}, "client_metadata"),
    "an unknown field of an item": ({"input": [{"role": "user", "content": "a", "b": 1}]}, "input[].b"),
    "a built-in tool": ({"tools": [GET_TIME, {"type": "web_search"}]}, "tools[].type.web_search"),
    "a built-in tool alone": ({"tools": [{"type": "local_shell"}], "tool_choice": "auto"}, "tools[].type.local_shell"),
    "a tool's unknown field": ({"tools": [{**GET_TIME, "x": 1}]}, "tools[].x"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity"),
    "a format's unknown field": ({"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
    "obfuscation": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    "an unknown option of streams": ({"stream": True, "stream_options": {"zap": True}}, "stream_options.zap"),
}  # fmt: skip


@pytest.mark.parametrize("name", IGNORED)
async def test_what_is_not_known_is_ignored_and_told(name: str) -> None:
    fields, told = IGNORED[name]
    harness = Harness()
    assert_ignored(await post(harness, **fields), told)
    assert len(harness.engine.requests) == 1
    strict = Harness(config=Config(serving=ServingConfig(strict_fields=True)))
    response = await post(strict, **fields)
    assert (
        response.status_code == 400
        and response.json()["error"]["param"].replace("[0]", "[]").replace("[1]", "[]") == told
    )


async def test_a_stream_option_that_asks_for_nothing_is_taken() -> None:
    response = await post(Harness(), stream=True, stream_options={"include_obfuscation": False})
    assert response.status_code == 200


async def test_nulls_are_as_left_out() -> None:
    harness = Harness()
    known = {*ResponsesBody.model_fields, *REFUSED_RESPONSES, *NOT_HERE, *IGNORED_RESPONSES}
    nulls = {field: None for field in known - {"input"}}
    assert (await post(harness)).status_code == 200
    response = await post(harness, **nulls)
    assert response.status_code == 200, response.text
    first, second = harness.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert (first.params.max_tokens, first.params.temperature) == (second.params.max_tokens, second.params.temperature)


async def test_the_api_description_lists_the_fields() -> None:
    description = (await Harness().get("/openapi.json")).json()["paths"][PATH]["post"]
    schema = description["requestBody"]["content"]["application/json"]["schema"]
    taken = set(ResponsesBody.model_fields) - set(NOT_HERE) - {"stream_options"}
    assert set(schema["properties"]) == taken
    for field in (*IGNORED_RESPONSES, *REFUSED_RESPONSES, *NOT_HERE):
        assert f"`{field}`" in description["description"]
