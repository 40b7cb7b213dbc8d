"""Tools and thinking through Anthropic's client: calls, results, choices, blocks in streams."""

from typing import Any

import pytest

from octavo.server.context import Context
from tests.server.fakes import TEMPLATE, FakeClient, Harness, assert_ignored, make_text
from tests.server.test_anthropic import ask, client_of, refused, stream_events

TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "Weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "cache_control": {"type": "ephemeral"},
    },
    {"type": "custom", "name": "get_time", "input_schema": {"type": "object", "properties": {}}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TWO = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>'
THINKS = TEMPLATE + "{% if false %}<think></think>{% endif %}{% if enable_thinking is false %}[no]{% endif %}"
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "call_1"}


def kinds(content: Any) -> list[str]:
    return [block.type for block in content]


def thinking(text: str) -> Harness:
    """A server whose model thinks, and can be told not to."""
    from octavo.text.chat_template import ChatTemplate
    from octavo.text.text_model import TextModel

    plain = make_text()
    text_model = TextModel(plain.name, plain.spec, plain.tokenizer, ChatTemplate(THINKS, {}, is_trusted=True))
    return Harness(engine=FakeClient(text), text=text_model)


async def test_calls_come_as_blocks_whole_and_streamed() -> None:
    harness = Harness(engine=FakeClient(TWO))
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 200,
        "tools": TOOLS,
        "messages": [{"role": "user", "content": "how is it"}],
    }
    async with client_of(harness) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    assert kinds(whole.content) == kinds(streamed.content) == ["text", "tool_use", "tool_use"]
    for message in (whole, streamed):
        text, first, second = message.content
        assert message.stop_reason == "tool_use"
        assert text.text.strip() == "Let me see."  # type: ignore[union-attr]
        assert (first.name, first.input) == ("get_weather", {"city": "Köln"})  # type: ignore[union-attr]
        assert (second.name, second.input) == ("get_time", {})  # type: ignore[union-attr]
        assert first.id != second.id  # type: ignore[union-attr]
    assert "Weather of a city." in harness.prompt


async def test_the_blocks_of_a_stream_never_overlap() -> None:
    harness = Harness(engine=FakeClient(TWO))
    events = stream_events((await ask(harness, max_tokens=200, tools=TOOLS, stream=True)).text)
    open_block, seen = None, 0
    for kind, event in events:
        if kind == "content_block_start":
            assert open_block is None and event["index"] == seen
            open_block, seen = event["index"], seen + 1
        elif kind == "content_block_delta":
            assert event["index"] == open_block
        elif kind == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
    assert open_block is None and seen == 3
    starts = [event["content_block"] for kind, event in events if kind == "content_block_start"]
    assert [start["type"] for start in starts] == ["text", "tool_use", "tool_use"]
    assert starts[1]["input"] == {}


async def test_a_call_that_was_cut_is_not_lost() -> None:
    harness = Harness(engine=FakeClient(CALL))
    body = (await ask(harness, max_tokens=len(CALL.encode()) - 30, tools=TOOLS)).json()
    assert body["stop_reason"] == "max_tokens"
    (call,) = body["content"]
    assert call["input"].keys() == {"INVALID_JSON"} and call["input"]["INVALID_JSON"].startswith("{")


async def test_results_go_back_to_the_model() -> None:
    harness = Harness()
    turns: list[Any] = [
        {"role": "user", "content": "how is it"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "I look."},
                {
                    "type": "tool_use",
                    "id": "call_1",
                    "name": "get_weather",
                    "input": {"city": "Köln"},
                    "cache_control": {"type": "ephemeral"},
                    "caller": {"type": "direct"},
                },
                {"type": "tool_use", "id": "call_2", "name": "get_time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {**RESULT, "content": [{"type": "text", "text": "12"}, {"type": "text", "text": "rain"}]},
                {**RESULT, "tool_use_id": "call_2", "content": "broken", "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    assert (await ask(harness, tools=TOOLS, messages=turns)).status_code == 200
    prompt = harness.prompt
    assert prompt.index("12\nrain") < prompt.index("Error: broken") < prompt.index("user:so?")
    assert '"Köln"' in prompt and "I look." in prompt and "abc" not in prompt
    bad = {**RESULT, "content": [{"type": "image", "source": {}}]}
    message = await refused(harness, messages=[{"role": "user", "content": [bad]}])
    assert message.startswith("messages[0].content[0].content[0].type is 'image'")
    bare = [*turns[:2], {"role": "user", "content": [RESULT, {**RESULT, "tool_use_id": "call_2"}]}]
    assert (await ask(harness, tools=TOOLS, messages=bare)).status_code == 200


@pytest.mark.parametrize(
    ("choice", "is_held"),
    [
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "get_time"}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, None),
    ],
)
async def test_choices_of_tools(choice: Any, is_held: bool | None) -> None:
    harness = Harness()
    assert (await ask(harness, tools=TOOLS, tool_choice=choice)).status_code == 200
    request = harness.engine.requests[-1]
    if is_held is not None:
        assert bool(request.params.grammar) == is_held
    assert ("Weather of a city." in harness.prompt) == (choice["type"] != "none" and "name" not in choice)


async def test_choices_that_make_no_sense_are_refused() -> None:
    harness = Harness()
    assert "tool_choice.name is missing" in await refused(harness, tools=TOOLS, tool_choice={"type": "tool"})
    assert "goes with type tool" in await refused(harness, tools=TOOLS, tool_choice={"type": "any", "name": "x"})
    unknown = {"type": "tool", "name": "fly"}
    assert "the tools are: get_weather, get_time" in await refused(harness, tools=TOOLS, tool_choice=unknown)
    twice = [TOOLS[0], TOOLS[0]]
    assert "tools[1].name is 'get_weather', the name of an earlier tool" in await refused(harness, tools=twice)
    too_deep = [{"name": "x", "input_schema": []}]
    assert "tools[0].input_schema is an empty list" in await refused(harness, tools=too_deep)


async def test_thinking_is_a_block_before_the_text() -> None:
    harness = thinking("<think>Well, hm.</think>\n\nYes.")
    async with client_of(harness) as client:
        fields: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": 100,
            "messages": [{"role": "user", "content": "?"}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        whole = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            streamed = await stream.get_final_message()
        hidden = await client.messages.create(**{**fields, "thinking": {"type": "adaptive", "display": "omitted"}})
    for message in (whole, streamed):
        thought, text = message.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "Well, hm.", "Yes.")  # type: ignore[union-attr]
        assert thought.signature  # type: ignore[union-attr]
    assert [hidden.content[0].thinking, hidden.content[1].text] == ["", "Yes."]  # type: ignore[union-attr]
    again = [*fields["messages"], {"role": "assistant", "content": whole.to_dict()["content"]}, *fields["messages"]]
    assert (await ask(harness, messages=again)).status_code == 200


async def test_thinking_is_told_to_templates_that_know_it() -> None:
    harness = thinking("Yes.")
    context: Context = harness.context
    assert "enable_thinking" in context.dialect.effort_variables
    for fields, is_off in (
        ({}, False),
        ({"thinking": {"type": "disabled"}}, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, False),
    ):
        assert (await ask(harness, **fields)).status_code == 200
        assert ("[no]" in harness.prompt) == is_off, fields


async def test_what_a_coding_agent_sends_is_taken() -> None:
    harness = Harness(engine=FakeClient(CALL))
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tools = [
        {
            "name": f"mcp__server_{i}__{'read_' * 6}file",
            "description": "Reads. " * 20,
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"path": {"type": "string", "description": "where"}, "limit": {"type": "integer"}},
                "required": ["path"],
                "additionalProperties": False,
            },
            **({"eager_input_streaming": True} if i == 1 else {}),
        }
        for i in range(2, 5)
    ]
    body = {
        "model": "tiny",
        "max_tokens": 32_000,
        "temperature": 1,
        "stream": True,
        "metadata": {"user_id": "user_a_account__session_b"},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=abc;"},
            {"type": "text", "text": "You are an agent.", **cached},
            {"type": "text", "text": "Be careful. " * 40, **cached},
        ],
        "tools": [{**TOOLS[0], **cached}, *tools],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>today</system-reminder>"},
                    {"type": "text", "text": "how is it", **cached},
                ],
            },
        ],
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-api-key": "anything",
        "x-stainless-retry-count": "0",
        "user-agent": "an-agent/1.0",
    }
    response = await harness.request("POST", "/v1/messages?beta=true", json=body, headers=headers)
    assert response.status_code == 200, response.text
    events = stream_events(response.text)
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert "billing" not in harness.prompt and "You are an agent." in harness.prompt
    counted = {name: body[name] for name in ("model", "system", "tools", "thinking", "output_config", "messages")}
    count = await harness.request("POST", "/v1/messages/count_tokens?beta=true", json=counted, headers=headers)
    assert count.json()["input_tokens"] == events[0][1]["message"]["usage"]["input_tokens"]


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


@pytest.mark.parametrize("choice", [None, {"type": "auto"}, {"type": "none"}, {"type": "tool", "name": "get_time"}])
async def test_tools_that_a_server_would_run_are_left_out_and_told(choice: Any) -> None:
    harness, plain = Harness(), Harness()
    chosen = {} if choice is None else {"tool_choice": choice}
    response = await ask(harness, tools=[SEARCH, *TOOLS], **chosen)
    assert_ignored(response, "tools[].type.web_search_20250305")
    assert (await ask(plain, tools=TOOLS, **chosen)).status_code == 200
    assert harness.prompt == plain.prompt
    alone = await ask(harness, tools=[SEARCH])
    assert_ignored(alone, "tools[].type.web_search_20250305")


async def test_cache_control_is_taken_wherever_it_stands() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    text = {"type": "text", "text": "a"}
    call = {"type": "tool_use", "id": "c", "name": "get_time", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c"}
    document = {"type": "document", "source": {"type": "content", "content": [text]}, "title": "t"}

    def body(mark: Any) -> dict[str, Any]:
        inner = [{**text, **mark}]
        return {
            "system": [{**text, **mark}],
            "tools": [{**tool, **mark} for tool in TOOLS],
            "messages": [
                {"role": "user", "content": [{**document, "source": {"type": "content", "content": inner}, **mark}]},
                {"role": "assistant", "content": [{**call, **mark}]},
                {"role": "user", "content": [{**result, "content": inner, **mark}, {**text, **mark}]},
            ],
            "seed": 1,
            **mark,
        }

    marked, plain = Harness(), Harness()
    response = await ask(marked, **body(mark))
    assert response.status_code == 200, response.text
    assert "x-octavo-ignored" not in response.headers
    assert (await ask(plain, **body({}))).status_code == 200
    assert marked.prompt == plain.prompt
