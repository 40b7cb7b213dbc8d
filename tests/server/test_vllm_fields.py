"""Fields of vLLM's interface and of others beside OpenAI's: the usage so far, ids, truncation, documents."""

import re
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from tokenizers import processors

from octavo.core.request import Want
from octavo.server.api.fields import HEADER
from octavo.text.chat_template import ChatTemplate
from octavo.text.text_model import TextModel
from tests.server.fakes import MAX_LEN, TEMPLATE, FakeClient, Harness, assert_ignored, events, make_text

USAGE = {"include_usage": True, "continuous_usage_stats": True}
TOO_LONG = f"This model's maximum context length is {MAX_LEN} tokens"
USER = {"role": "user", "content": "hi"}


def client_of(harness: Harness) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(harness.app)
    http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)


# --- usage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_continuous_usage_is_in_every_chunk(endpoint: str) -> None:
    harness = Harness(FakeClient("abc"))
    *chunks, done = events((await getattr(harness, endpoint)(stream=True, stream_options=USAGE, n=2)).text)
    assert done == "[DONE]"
    last = chunks.pop()
    assert last["choices"] == []
    prompt = last["usage"]["prompt_tokens"]
    seen: dict[int, int] = {0: 0, 1: 0}
    for chunk in chunks:
        [choice] = chunk["choices"]
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == prompt
        assert usage["total_tokens"] == prompt + usage["completion_tokens"]
        assert usage["completion_tokens"] >= seen[choice["index"]]
        seen[choice["index"]] = usage["completion_tokens"]
    assert seen == {0: 4, 1: 4}, "three letters and the end"
    assert last["usage"]["completion_tokens"] == 8
    if endpoint == "chat":
        assert chunks[0]["usage"]["completion_tokens"] == 0, "the chunk with the role"


async def test_continuous_usage_of_several_prompts_tells_each_its_own() -> None:
    harness = Harness()
    *chunks, _ = events((await harness.complete(prompt=["a", "bcd"], stream=True, stream_options=USAGE)).text)
    found = {chunk["choices"][0]["index"]: chunk["usage"]["prompt_tokens"] for chunk in chunks if chunk["choices"]}
    assert found == {0: 1, 1: 3}


async def test_continuous_usage_needs_include_usage_as_in_vllm() -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    *chunks, _ = events((await Harness().chat(stream=True, stream_options=options)).text)
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_options_of_a_stream_need_one(path: str) -> None:
    body = {"messages": [USER]} if "chat" in path else {"input": "x"} if "responses" in path else {"prompt": "x"}
    options = {"include_obfuscation": False} if "responses" in path else {"include_usage": True}
    harness = Harness()
    response = await harness.request("POST", path, json={**body, "stream_options": options})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "stream_options")
    assert error["message"] == "stream_options needs stream to be true; leave it out"
    for nothing in (None, {}):
        assert (await harness.request("POST", path, json={**body, "stream_options": nothing})).status_code == 200


async def test_usage_of_a_chat_counts_the_reasoning() -> None:
    template = TEMPLATE + "{% if false %}</think>{% endif %}"
    plain = make_text()
    text = TextModel("tiny", plain.spec, plain.tokenizer, ChatTemplate(template, {}, is_trusted=True))
    harness = Harness(FakeClient("<think>aaaa</think>bb"), text)
    usage = (await harness.chat()).json()["usage"]
    share = 4 / len("<think>aaaa</think>bb")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": round(share * usage["completion_tokens"])}
    *_, last, _ = events((await harness.chat(stream=True, stream_options={"include_usage": True})).text)
    assert last["usage"] == usage
    usage = (await Harness().chat()).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


# --- how many tokens ---------------------------------------------------------------------------------


async def test_max_tokens_of_a_text_is_16_unless_given() -> None:
    harness = Harness(FakeClient("x" * 100))
    answer = (await harness.complete()).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (16, "length")
    assert (await harness.chat()).json()["choices"][0]["finish_reason"] == "stop", "a chat has what fits"
    assert (await harness.complete(n_predict=-1)).json()["choices"][0]["finish_reason"] == "stop"
    assert (await harness.complete(n_predict=5)).json()["usage"]["completion_tokens"] == 5
    raw = {"prompt": "x", "raw": True, "stream": False}
    assert (await harness.request("POST", "/api/generate", json=raw)).json()["done_reason"] == "stop"


async def test_top_p_0_is_taken() -> None:
    harness = Harness()
    assert (await harness.chat(top_p=0)).status_code == 200
    assert harness.engine.requests[-1].params.top_p == 0


# --- prompts -----------------------------------------------------------------------------------------


async def ask(harness: Harness, path: str, text: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": text}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/v1/embeddings": {"input": text},
        "/v1/messages": {"messages": messages, "max_tokens": 5},
        "/api/chat": {"messages": messages, "stream": False},
        "/api/generate": {"prompt": text, "stream": False},
    }
    return await harness.request("POST", path, json={**bodies[path], **fields})


PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages", "/api/chat",
    "/api/generate",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [MAX_LEN + 1, 50_000])
async def test_a_prompt_that_is_too_long_has_the_familiar_words(path: str, size: int) -> None:
    harness = Harness()
    response = await ask(harness, path, "x" * size)
    assert response.status_code == 400 and TOO_LONG in response.text, response.text
    assert "--max-model-len" not in response.text, "the model itself holds no more"
    if not path.startswith(("/api", "/v1/messages")):
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] != "max_tokens"
    assert not harness.engine.requests


@pytest.mark.parametrize("path", PATHS[:3])
async def test_truncation_keeps_the_end_of_a_prompt(path: str) -> None:
    harness = Harness()
    text = "".join(chr(97 + i % 26) for i in range(50_000))
    whole = (await ask(harness, path, text[-100:])).status_code == 200 and harness.prompt
    assert (await ask(harness, path, text, truncate_prompt_tokens=40)).status_code == 200
    request = harness.engine.requests[-1]
    assert request.num_prompt_tokens == 40 and whole and harness.prompt == whole[-40:]
    assert request.params.truncate_prompt_tokens is None, "nothing beyond the front end knows it"
    limit = "max_output_tokens" if "responses" in path else "max_tokens"
    assert (await ask(harness, path, text, truncate_prompt_tokens=-1, **{limit: 96})).status_code == 200
    assert harness.engine.requests[-1].num_prompt_tokens == MAX_LEN - 96
    assert (await ask(harness, path, "ab", truncate_prompt_tokens=1000)).status_code == 200
    assert harness.prompt.startswith("user:" if "completions" not in path or "chat" in path else "ab")
    for wrong in (0, -2):
        error = (await ask(harness, path, "ab", truncate_prompt_tokens=wrong)).json()["error"]
        assert error["param"] == "truncate_prompt_tokens" and f"is {wrong}; give how many" in error["message"]


async def test_truncation_of_ids_and_of_an_echo() -> None:
    harness = Harness()
    ids = harness.text.tokenizer.encode("abcdef")
    answer = (await harness.complete(prompt=ids, truncate_prompt_tokens=2, echo=True)).json()
    assert list(harness.engine.requests[-1].prompt_token_ids or ()) == ids[-2:]
    assert answer["choices"][0]["text"].startswith("efHello")
    answer = (await harness.complete(prompt="abcdef", truncate_prompt_tokens=2, echo=True)).json()
    assert answer["choices"][0]["text"].startswith("efHello")


async def test_special_tokens_are_added_where_they_are_asked_for() -> None:
    text = make_text()
    text.tokenizer.backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    harness = Harness(text=text)

    async def begins(endpoint: str, **fields: Any) -> bool:
        assert (await getattr(harness, endpoint)(**fields)).status_code == 200
        return harness.prompt.startswith("<s>")

    assert await begins("complete") and not await begins("complete", add_special_tokens=False)
    assert not await begins("chat") and await begins("chat", add_special_tokens=True)


async def test_documents_are_shown_by_templates_that_have_them() -> None:
    template = "{% for d in documents or [] %}<{{ d.title }}:{{ d.text }}>{% endfor %}" + TEMPLATE
    harness = Harness(text=replace(make_text(), chat_template=ChatTemplate(template, {}, is_trusted=True)))
    documents = [{"title": "a", "text": "b"}]
    assert (await harness.chat(documents=documents)).status_code == 200
    assert harness.prompt.startswith("<a:b>user:hi")
    response = await Harness().chat(documents=documents)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "documents")
    assert (await Harness().chat(documents=[])).status_code == 200


async def test_a_template_of_the_client_is_refused_with_the_reason() -> None:
    response = await Harness().chat(chat_template="{{ messages }}")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "chat_template")
    assert "only the model's own template is rendered" in error["message"]


# --- ids ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_ids_are_given_whole_and_in_a_stream(endpoint: str) -> None:
    harness = Harness()
    whole = (await getattr(harness, endpoint)(return_token_ids=True)).json()
    request = harness.engine.requests[-1]
    holder = whole if endpoint == "chat" else whole["choices"][0]
    assert holder["prompt_token_ids"] == list(request.prompt_token_ids or ())
    ids = whole["choices"][0]["token_ids"]
    assert harness.text.tokenizer.decode(ids) == "Hello é!" and len(ids) == whole["usage"]["completion_tokens"]
    *chunks, _ = events((await getattr(harness, endpoint)(return_token_ids=True, stream=True)).text)
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())] == ids
    first = chunks[0] if endpoint == "chat" else chunks[0]["choices"][0]
    assert first["prompt_token_ids"] == holder["prompt_token_ids"]
    assert sum("prompt_token_ids" in str(chunk) for chunk in chunks) == 1
    assert "token_ids" not in (await getattr(harness, endpoint)(stream=True)).text


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_tokens_of_log_probabilities_are_shown_as_ids(endpoint: str) -> None:
    harness = Harness()
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if endpoint == "chat" else {"logprobs": 2}
    answer = (await getattr(harness, endpoint)(return_tokens_as_token_ids=True, **fields)).json()
    logprobs = answer["choices"][0]["logprobs"]
    tokens = [entry["token"] for entry in logprobs["content"]] if endpoint == "chat" else logprobs["tokens"]
    ids = [*harness.text.tokenizer.encode("Hello é!"), 1]
    assert tokens == [f"token_id:{token_id}" for token_id in ids]


# --- what real clients send --------------------------------------------------------------------------


async def test_what_nothing_here_does_is_ignored_and_told() -> None:
    fields = {
        "spaces_between_special_tokens": False,
        "request_id": "x",
        "include_reasoning": False,
        "mm_processor_kwargs": {"a": 1},
        "kv_transfer_params": {"a": 1},
        "vllm_xargs": {"a": 1},
        "cache_prompt": True,
    }
    harness = Harness()
    assert_ignored(await harness.chat(**fields), *fields)
    assert_ignored(await harness.complete(**fields), *fields)
    nothing = dict.fromkeys(fields)
    assert HEADER not in (await harness.chat(**nothing, spaces_between=None, truncate_prompt_tokens=None)).headers


async def test_history_of_litellm_and_of_refusals() -> None:
    harness = Harness()
    history = [
        USER,
        {
            "role": "assistant",
            "content": "Well",
            "refusal": None,
            "provider_specific_fields": {"refusal": None},
            "thinking_blocks": [{"type": "thinking", "thinking": "x"}],
            "annotations": [],
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "provider_specific_fields": {},
                    "function": {"name": "f", "arguments": "{}", "provider_specific_fields": None},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1", "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not"}]},
        {"role": "assistant", "content": None, "refusal": "nor will I"},
        {"role": "user", "content": [{"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}}]},
    ]
    response = await harness.chat(messages=history)
    assert_ignored(
        response,
        "messages[].provider_specific_fields",
        "messages[].thinking_blocks",
        "messages[].tool_calls[].provider_specific_fields",
    )
    assert "assistant:I will not\nassistant:nor will I\nuser:go on\n" in harness.prompt
    wrong = [{"role": "user", "content": "x", "refusal": "no"}]
    error = (await harness.chat(messages=wrong)).json()["error"]
    assert error["param"] == "messages[0].refusal" and "role 'assistant'" in error["message"]


async def test_openais_client_sends_hints_and_gets_answers() -> None:
    harness = Harness()
    client = client_of(harness)
    for tier in ("auto", "default", "flex", "priority", "scale"):
        raw = await client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            service_tier=tier,  # type: ignore[arg-type]
            verbosity="low",
            prediction={"type": "content", "content": "Hello"},
            web_search_options={},
        )
        told = ["verbosity", "prediction", "web_search_options"]
        told = told if tier in ("auto", "default") else ["service_tier", *told]
        assert set(raw.headers[HEADER].split(", ")) == set(told)
        usage = raw.parse().usage
        assert usage is not None and usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == 0
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 20_000}])
    assert refused.value.code == "context_length_exceeded" and TOO_LONG in str(refused.value)


async def test_a_responses_request_as_codex_sends_it() -> None:
    harness = Harness()
    tools: list[Any] = [
        {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False},
        {"type": "namespace", "name": "files", "tools": []},
        {"type": "web_search", "external_web_access": True},
        {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    ]
    raw = await client_of(harness).responses.with_raw_response.create(
        model="tiny",
        input=[{"role": "user", "content": "hi"}],
        tools=tools,
        tool_choice="auto",
        parallel_tool_calls=False,
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        extra_body={"client_metadata": {"x-codex-installation-id": "1"}},
    )
    told = raw.headers[HEADER].split(", ")
    assert sorted(told) == [
        "client_metadata",
        "tools[].type.custom",
        "tools[].type.local_shell",
        "tools[].type.namespace",
        "tools[].type.web_search",
    ]
    assert raw.parse().output_text == "Hello é!"
    assert "shell" in harness.prompt and "apply_patch" not in harness.prompt
    assert harness.engine.requests[-1].wants & Want.SAMPLE


async def test_there_is_no_compaction_and_no_kept_conversation() -> None:
    harness = Harness()
    response = await harness.request("POST", "/v1/responses/compact", json={"model": "tiny", "input": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    response = await harness.request("POST", "/v1/responses", json={"input": "x", "conversation": "conv_1"})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "conversation", "unsupported_field")
    assert re.search("kept by the server", error["message"])


async def test_messages_of_mistakes_are_plain() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    told = {
        "messages is empty; give at least one item": {"messages": []},
        "temperature is true; give a number": {"temperature": True},
        "messages[0].content[0].type is 'image_url'; this server does not accept images, give text": {
            "messages": image
        },
        "temperature is 'hot'; give a number": {"temperature": "hot"},
        "stream is 'yes'; give true or false": {"stream": "yes"},
        "n is 1.5; give a whole number": {"n": 1.5},
        "tools is 5; give a list": {"tools": 5},
        "stop has 17 items; give at most 16": {"stop": ["x"] * 17},
        "messages[0].content is 5; give a string or a list of parts": {"messages": [{"role": "user", "content": 5}]},
        "messages[0].role is 'robot'; give 'system', 'developer', 'user', 'assistant' or 'tool'": {
            "messages": [{"role": "robot", "content": "x"}]
        },
    }
    harness = Harness()
    for message, fields in told.items():
        response = await harness.chat(**fields)
        assert (response.status_code, response.json()["error"]["message"]) == (400, message)
