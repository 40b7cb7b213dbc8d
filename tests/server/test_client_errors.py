"""What users of OpenAI's and Anthropic's packages see of their mistakes: the exception's class, the field, the message.

Every refusal names the field and its value, and says what to give instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from octavo.config import BatchConfig, Config
from tests.server.fakes import MAX_LEN
from tests.server.test_run import Running, running

anthropic = pytest.importorskip("anthropic", reason="Anthropic's package is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's package is not installed")

USER: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}


def said(*parts: Any) -> list[Any]:
    """A conversation of one user's message."""
    return [{"role": "user", "content": list(parts)}]


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


def schema(value: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("batches")
    with running(Config(batch=BatchConfig(batch_dir=str(folder)))) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def other_client(server: Running) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


Mistake = tuple[dict[str, Any], str, str]  # (fields, the faulty one, the message)
SAMPLING: list[Mistake] = [
    ({"temperature": "hot"}, "temperature", "temperature is 'hot'; give a number"),
    ({"temperature": True}, "temperature", "temperature is true; give a number"),
    ({"temperature": -1}, "temperature", "temperature is -1.0; give a number from 0 (greedy) to 100"),
    ({"top_p": 1.5}, "top_p", "top_p is 1.5; give a number from 0 (the likeliest token only) to 1 (off)"),
]
BOTH: list[Mistake] = [  # of chats and completions
    *SAMPLING,
    ({"n": 0}, "n", "n is 0; give at least 1"),
    ({"n": 17}, "n", "n is 17; give at most 16"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens is -1; give at least 1"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens is '5'; give a whole number"),
    ({"stop": ["x"] * 20}, "stop", "stop has 20 items; give at most 16"),
    ({"stop": 5}, "stop", "stop is 5; give a string or a list of strings"),
    ({"stop": [""]}, "stop[0]", "stop[0] is empty; give at least one character"),
    ({"seed": 1.5}, "seed", "seed is 1.5; give a whole number"),
    ({"presence_penalty": 5}, "presence_penalty", "presence_penalty is 5.0; give a number from -2 to 2"),
    ({"model": 5}, "model", "model is 5; give a string"),
    (
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "response_format.type is 'xml'; give 'text', 'json_object' or 'json_schema'",
    ),
    ({"response_format": "json"}, "response_format", "response_format is 'json'; give an object"),
]
CHAT: list[Mistake] = [
    *BOTH,
    ({"logprobs": 1}, "logprobs", "logprobs is 1; give true or false"),
    ({"top_logprobs": 5}, "top_logprobs", "top_logprobs is 5, but logprobs is not true; set logprobs to true"),
    (
        {"logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "top_logprobs is 21; give a whole number from 0 to 20",
    ),
    ({"messages": []}, "messages", "messages is empty; give at least one item"),
    ({"messages": "hi"}, "messages", "messages is 'hi'; give a list"),
    ({"messages": {}}, "messages", "messages is an empty object; give a list"),
    ({"messages": ["hi"]}, "messages[0]", "messages[0] is 'hi'; give an object"),
    (
        {"messages": [{"role": "wizard", "content": "x"}]},
        "messages[0].role",
        "messages[0].role is 'wizard'; give 'system', 'developer', 'user', 'assistant' or 'tool'",
    ),
    (
        {"messages": said({"type": "image_url", "image_url": {"url": "data:"}})},
        "messages[0].content[0].type",
        "messages[0].content[0].type is 'image_url'; this server does not accept images, give text",
    ),
    (
        {"messages": said({"type": "blob"})},
        "messages[0].content[0].type",
        "messages[0].content[0].type is 'blob'; give 'text'",
    ),
    (
        {"messages": said({"text": "x"})},
        "messages[0].content[0].type",
        "messages[0].content[0].type is missing; give 'text'",
    ),
    ({"tools": [function(parameters={})]}, "tools[0].function.name", "tools[0].function.name is missing"),
    ({"tools": "f"}, "tools", "tools is 'f'; give a list"),
    (
        {"tools": [function(name="f"), function(name="f")]},
        "tools[1].function.name",
        "tools[1].function.name is 'f', the name of an earlier tool; give each its own",
    ),
    (
        {"tools": [function(name="f")], "tool_choice": function(name="g")},
        "tool_choice",
        "tool_choice names 'g'; the tools are: f",
    ),
    (
        {"tool_choice": "required"},
        "tool_choice",
        "tool_choice asks for a call, but there are no tools; give tools",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "response_format.json_schema is missing",
    ),
    (
        {"response_format": schema({"type": "objekt"})},
        "response_format.json_schema.schema",
        "response_format.json_schema.schema: #/type: 'objekt' is not a type; give "
        "array, boolean, integer, null, number, object, string",
    ),
]
COMPLETION: list[Mistake] = [
    *BOTH,
    ({"logprobs": True}, "logprobs", "logprobs is true; give a whole number"),
    ({"logprobs": 21}, "logprobs", "logprobs is 21; give a whole number from 0 to 20"),
    ({"prompt": [258]}, "prompt", "prompt holds 258; this model's token ids are whole numbers from 0 to 257"),
    (
        {"prompt": ["a", 5]},
        "prompt",
        "prompt is a list of 2; its item 1 is 5; give a string, a list of strings, a list of token ids (0 or more) "
        "or a list of lists of token ids",
    ),
    (
        {"prompt": []},
        "prompt",
        "prompt is an empty list; give a string, a list of strings, a list of token ids (0 or more) "
        "or a list of lists of token ids",
    ),
    ({"best_of": 1, "n": 2}, "best_of", "best_of is 1; give at least n (2)"),
]
RESPONSES: list[Mistake] = [
    *SAMPLING,
    ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens is -1; give at least 1"),
    ({"max_tokens": 5}, "max_tokens", "max_tokens is not a field of this endpoint; give max_output_tokens"),
    ({"messages": USER}, "messages", "messages is not a field of this endpoint; give input"),
    (
        {"response_format": {"type": "json_object"}},
        "response_format",
        "response_format is not a field of this endpoint; give text.format",
    ),
    ({"input": 5}, "input", "input is 5; give a string or a list of items"),
    ({"input": [None]}, "input[0]", "input[0] is null; give an object"),
    (
        {"input": [{"role": "wizard", "content": "x"}]},
        "input[0].role",
        "input[0].role is 'wizard'; give 'user', 'system', 'developer' or 'assistant'",
    ),
    (
        {"input": said({"type": "text", "text": "x"})},
        "input[0].content[0].type",
        "input[0].content[0].type is 'text'; give input_text",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name is missing"),
    (
        {"text": {"format": {"type": "xml"}}},
        "text.format.type",
        "text.format.type is 'xml'; give 'text', 'json_object' or 'json_schema'",
    ),
    (
        {"background": True, "store": False},
        "background",
        "background is true, but the response would not be stored; set store to true",
    ),
]
CALLS: dict[str, tuple[Callable[[Any], Callable[..., Any]], dict[str, Any], list[Mistake]]] = {
    "chat": (lambda it: it.chat.completions.create, {"model": "tiny", "messages": USER}, CHAT),
    "completions": (lambda it: it.completions.create, {"model": "tiny", "prompt": "hi"}, COMPLETION),
    "responses": (lambda it: it.responses.create, {"model": "tiny", "input": "hi"}, RESPONSES),
}


def refused(error: Any, call: Callable[..., Any], fields: dict[str, Any]) -> Any:
    """The exception of this class that a call raises; the fields go around the package's own types."""
    with pytest.raises(error) as caught:
        call(extra_body=fields)
    return caught.value


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CALLS)
def test_openais_client_raises_bad_request_with_the_field(
    client: Any, server: Running, name: str, stream: bool
) -> None:
    call, base, mistakes = CALLS[name]
    for fields, param, message in mistakes:
        error = refused(
            openai.BadRequestError, lambda **more: call(client)(**base, **more), fields | {"stream": stream}
        )
        told = (error.status_code, error.type, error.param, error.body["message"])
        assert told == (400, "invalid_request_error", param, message), fields
        assert error.code in ("invalid_value", "missing_field", "unsupported_field"), fields
    assert not server.engine.requests, "nothing was computed"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CALLS)
def test_openais_client_raises_not_found_with_the_served_names(client: Any, name: str, stream: bool) -> None:
    call, base, _ = CALLS[name]
    error = refused(
        openai.NotFoundError, lambda **more: call(client)(**base, **more), {"model": "gpt", "stream": stream}
    )
    assert (error.code, error.param) == ("model_not_found", "model")
    assert error.body["message"] == "no model 'gpt' is served here; this server has: tiny"


def test_a_prompt_that_is_too_long_has_openais_code(client: Any) -> None:
    long = [{"role": "user", "content": "x" * MAX_LEN}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=long)
    error = caught.value
    assert error.code == "context_length_exceeded"
    assert f"maximum context length is {MAX_LEN} tokens" in error.body["message"]


def test_mistakes_about_embeddings(client: Any) -> None:
    for fields, param, message in (
        ({"input": []}, "input", "input is an empty list; give a string"),
        ({"input": ["a", 5]}, "input", "input is a list of 2; its item 1 is 5; give a string"),
        ({"input": ["a", ""]}, "input[1]", "input[1] is empty; give"),
        ({"encoding_format": "hex"}, "encoding_format", "encoding_format is 'hex'; give 'float' or 'base64'"),
        ({"dimensions": 9}, "dimensions", "dimensions is 9; this model's vectors have 8, give at most that"),
        ({"dimensions": 0}, "dimensions", "dimensions is 0; give at least 1"),
    ):
        base = {"model": "tiny", "input": "hi"}
        error = refused(
            openai.BadRequestError, lambda base=base, **more: client.embeddings.create(**base, **more), fields
        )
        assert error.param == param and error.body["message"].startswith(message), fields


def test_mistakes_about_files_and_batches(client: Any) -> None:
    files, batches = client.files, client.batches
    with pytest.raises(openai.BadRequestError) as bad:
        files.create(file=("a.jsonl", b"{}"), purpose="assistants")
    assert bad.value.body["message"] == "purpose is 'assistants'; give 'batch': files are for batches only"
    for call, kind in ((files.retrieve, "file"), (files.content, "file"), (files.delete, "file")):
        with pytest.raises(
            openai.NotFoundError, match=f"you have no {kind} with the id 'x'; GET /v1/files lists yours"
        ):
            call("x")
    for call in (batches.retrieve, batches.cancel):
        with pytest.raises(
            openai.NotFoundError, match="you have no batch with the id 'x'; GET /v1/batches lists yours"
        ):
            call("x")
    file = files.create(file=("a.jsonl", b"{}\n"), purpose="batch").id
    base = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for fields, param, message in (
        ({"input_file_id": "x"}, "input_file_id", "input_file_id is 'x'; give the id of a file that you uploaded"),
        ({"completion_window": "1h"}, "completion_window", "completion_window is '1h'; give '24h'"),
        ({"endpoint": "/v1/models"}, "endpoint", "endpoint is '/v1/models'; give '/v1/chat/completions', "),
        ({"metadata": {"a": 1}}, "metadata.a", "metadata.a is 1; give a string"),
    ):
        error = refused(openai.BadRequestError, lambda **more: batches.create(**base, **more), fields)
        assert error.param == param and error.body["message"].startswith(message), fields


def test_a_wrong_base_url_is_told(client: Any, other_client: Any, server: Running) -> None:
    for url, path, meant in (
        ("/v1/v1", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/api", "/v1/api/chat/completions", None),
        ("", "/chat/completions", "/v1/chat/completions"),
    ):
        with pytest.raises(openai.NotFoundError) as lost:
            client.with_options(base_url=server.url + url).chat.completions.create(model="tiny", messages=USER)
        hint = "" if meant is None else f"; did you mean '{meant}'? Correct the client's base URL"
        assert lost.value.body["message"] == f"no endpoint at '{path}'{hint}"
    with pytest.raises(anthropic.NotFoundError, match="did you mean '/v1/messages'"):
        wrong = other_client.with_options(base_url=server.url + "/v1")
        wrong.messages.create(model="tiny", max_tokens=5, messages=USER)


ANTHROPIC: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens is -1; give at least 1"),
    ({"max_tokens": "x"}, "max_tokens is 'x'; give a whole number"),
    ({"temperature": "x"}, "temperature is 'x'; give a number"),
    ({"top_p": 2}, "top_p is 2.0; give a number from 0 (the likeliest token only) to 1 (off)"),
    ({"stop_sequences": ["x"] * 20}, "stop_sequences has 20 items; give at most 16"),
    ({"messages": []}, "messages is empty; give at least one item"),
    (
        {"messages": [{"role": "wizard", "content": "x"}]},
        "messages[0].role is 'wizard'; give 'user', 'assistant' or 'system'",
    ),
    (
        {"messages": said({"type": "image", "source": {}})},
        "messages[0].content[0].type is 'image'; this server does not accept images here, give text",
    ),
    (
        {"messages": said({"type": "web_search_tool_result"})},
        "messages[0].content[0].type is 'web_search_tool_result'; this server runs no tools itself, leave it out",
    ),
    (
        {"messages": said({"type": "blob"})},
        "messages[0].content[0].type is 'blob'; blocks here may be: text, document, search_result, tool_result",
    ),
    ({"messages": said({"type": "text"})}, "messages[0].content[0].text is missing"),
    ({"tools": [{"input_schema": SCHEMA}]}, "tools[0].name is missing"),
    (
        {"tools": [{"name": "f", "input_schema": SCHEMA}] * 2},
        "tools[1].name is 'f', the name of an earlier tool; give each its own",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice is any, and there are no tools; give some"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "objekt"}}}},
        "output_config.format.schema: #/type: 'objekt' is not a type; give "
        "array, boolean, integer, null, number, object, string",
    ),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_anthropics_client_raises_bad_request_with_the_field(other_client: Any, server: Running, stream: bool) -> None:
    base = {"model": "tiny", "max_tokens": 5, "messages": USER}
    num_before = len(server.engine.requests)
    for fields, message in ANTHROPIC:
        error = refused(
            anthropic.BadRequestError,
            lambda **more: other_client.messages.create(**base, **more),
            fields | {"stream": stream},
        )
        assert error.body["error"] == {"type": "invalid_request_error", "message": message}, fields
        assert error.body["request_id"] == error.request_id
    error = refused(
        anthropic.NotFoundError, lambda **more: other_client.messages.create(**base, **more), {"model": "gpt"}
    )
    assert error.body["error"]["message"] == "no model 'gpt' is served here; this server has: tiny"
    assert len(server.engine.requests) == num_before


def test_anthropics_client_is_told_that_its_files_api_is_not_offered(client: Any, other_client: Any) -> None:
    kept = client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    files = other_client.beta.files
    calls: list[Callable[..., Any]] = [
        files.list,
        partial(files.upload, file=("in.jsonl", b"{}\n")),
        partial(files.retrieve_metadata, kept.id),
        partial(files.download, kept.id),
        partial(files.delete, kept.id),
    ]
    for call in calls:
        error = refused(anthropic.BadRequestError, call, {})
        assert error.body["error"]["type"] == "invalid_request_error", error.body
        assert error.body["error"]["message"].startswith("Anthropic's Files API is not offered; send texts and images ")
        assert error.body["request_id"] == error.request_id is not None
    assert client.files.content(kept.id).content == b"{}\n", "OpenAI's client has its file"


def test_an_unknown_model_is_an_error_in_the_clients_own_form(client: Any, other_client: Any) -> None:
    error = refused(anthropic.NotFoundError, partial(other_client.models.retrieve, "gpt"), {})
    assert error.body["error"]["type"] == "not_found_error" and error.body["request_id"] == error.request_id is not None
    error = refused(openai.NotFoundError, partial(client.models.retrieve, "gpt"), {})
    assert error.code == "model_not_found"
