"""Tools: what the model is shown, what its calls become, whole and streamed, what is refused by name."""

import json
import re
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import ChatConfig, Config
from octavo.core.request import FinishReason
from octavo.frontend.outputs import TextDelta
from octavo.server.api.completions.bodies import read_chat
from octavo.server.api.completions.requests import ChatRequest
from octavo.server.encoding import ENCODERS, AnswerSpec, Choice
from octavo.server.http.errors import ApiError
from octavo.text.chat_template import ChatTemplate
from octavo.text.text_model import TextModel
from octavo.text.tokenizer import Tokenizer
from tests.server.fakes import FakeClient, Harness, events, make_text

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city"],
            "$defs": {"days": {"type": "integer"}},
        },
        "strict": True,
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Oslo?"}]}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": ""}, "index": 1},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
]
# What a template that knows tools shows of each message.
SHOWS_TOOLS = (
    "{% if tools %}{% for tool in tools %}<tool_call> {{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }})"
    "{% endfor %}"
    "{{ m.tool_call_id or '' }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def speaking(template: str, special: tuple[str, ...] = ()) -> TextModel:
    """The tiny model with another template and further special tokens."""
    text = make_text()
    backend = text.tokenizer.backend
    backend.add_special_tokens(list(special))
    spec = replace(text.spec, vocab_size=backend.get_vocab_size())
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"}, [1], Path("fake"))
    return TextModel("tiny", spec, tokenizer, ChatTemplate(template, {}, is_trusted=True))


def saying(text: str, template: str | None = None) -> Harness:
    return Harness(FakeClient(text)) if template is None else Harness(FakeClient(text), speaking(template))


def rebuilt(chunks: list[Any]) -> list[dict[str, Any]]:
    """The calls of the first choice as a client puts them together."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            seen: set[int] = set()
            for delta in choice["delta"].get("tool_calls", ()):
                assert delta["index"] not in seen, "one entry for each call"
                seen.add(delta["index"])
                if delta["index"] == len(calls):
                    assert set(delta) == {"index", "id", "type", "function"} and delta["function"]["name"]
                    calls.append({**delta, "function": {"name": delta["function"]["name"], "arguments": ""}})
                else:
                    assert set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"}
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


async def test_calls_come_out_whole_and_streamed_alike() -> None:
    harness = saying(CALLS)
    choice = (await harness.chat(tools=TOOLS)).json()["choices"][0]
    message = choice["message"]
    assert message["content"] == "Let me see." and choice["finish_reason"] == "tool_calls"
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
        {"name": "get_time", "arguments": "{}"},
    ]
    assert {tuple(call) for call in message["tool_calls"]} == {("id", "type", "function")}
    assert len({call["id"] for call in message["tool_calls"]}) == 2

    *chunks, done = events((await harness.chat(tools=TOOLS, stream=True)).text)
    assert done == "[DONE]"
    assert [call["function"] for call in rebuilt(chunks)] == functions
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Let me see."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert all(chunk["choices"][0]["delta"].get("tool_calls", True) for chunk in chunks), "no empty tool_calls"
    arguments = [c["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] for c in chunks
                 if "tool_calls" in c["choices"][0]["delta"]]  # fmt: skip
    assert len(arguments) > 10, "arguments come as they are made"


async def test_an_answer_without_a_call_is_content() -> None:
    harness = saying("It rains. <tool_call>no</tool_call>")
    choice = (await harness.chat(tools=TOOLS)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": harness.engine.text, "refusal": None}
    assert choice["finish_reason"] == "stop"
    *chunks, _ = events((await harness.chat(tools=TOOLS, stream=True)).text)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == harness.engine.text


async def test_a_call_alone_has_no_content() -> None:
    message = (await saying(CALLS.partition("\n")[2]).chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 2


async def test_without_tools_or_with_none_nothing_is_a_call() -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        harness = saying(CALLS)
        choice = (await harness.chat(**fields)).json()["choices"][0]
        assert choice["message"]["content"] == CALLS and choice["finish_reason"] == "stop"
        assert "get_weather" not in harness.prompt


async def test_only_the_first_call_counts_without_parallel_calls() -> None:
    message = (await saying(CALLS).chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]


async def test_a_call_that_was_cut_off_says_so() -> None:
    choice = (await saying(CALLS).chat(tools=TOOLS, max_tokens=70)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert '{"city": "Oslo"}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


async def test_each_choice_has_its_own_calls() -> None:
    engine = FakeClient()
    engine.texts = [CALLS, "No call."]
    harness = Harness(engine)
    first, second = (await harness.chat(tools=TOOLS, n=2)).json()["choices"]
    assert len(first["message"]["tool_calls"]) == 2 and first["finish_reason"] == "tool_calls"
    assert second["message"]["content"] == "No call." and second["finish_reason"] == "stop"
    *chunks, _ = events((await harness.chat(tools=TOOLS, n=2, stream=True)).text)
    assert len(rebuilt([chunk for chunk in chunks if chunk["choices"][0]["index"] == 0])) == 2
    assert not rebuilt([chunk for chunk in chunks if chunk["choices"][0]["index"] == 1])


async def test_log_probabilities_are_those_of_all_tokens() -> None:
    harness = saying(CALLS)
    whole = (await harness.chat(tools=TOOLS, logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    *chunks, _ = events((await harness.chat(tools=TOOLS, logprobs=True, stream=True)).text)
    streamed = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == whole and len(whole) == len(CALLS.encode()) + 1


async def test_a_stream_of_calls_is_continued_behind_any_event() -> None:
    harness = saying(CALLS)
    headers = {"Idempotency-Key": "call-1"}
    whole = (await harness.chat(headers, tools=TOOLS, stream=True)).text
    blocks = [block for block in whole.split("\n\n") if block.startswith("id: ")]
    for index in range(0, len(blocks), 7):
        seen = blocks[index].partition("\n")[0].removeprefix("id: ")
        rest = (await harness.chat({**headers, "Last-Event-ID": seen}, tools=TOOLS, stream=True)).text
        chunks = [json.loads(b.partition("data: ")[2]) for b in [*blocks[: index + 1], *rest.split("\n\n")[:-2]]]
        assert [call["function"]["arguments"] for call in rebuilt(chunks)] == ['{"city": "Oslo"}', "{}"]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == "Let me see."
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_spec_that_was_kept_reads_calls_as_before() -> None:
    """Specs outlive the server in the journal."""
    harness = saying(CALLS)
    asked = await ChatRequest.of(harness.context, read_chat({**ASKED, "tools": TOOLS}), "chat", "chatcmpl")
    known = asked.answer_format()
    form = AnswerSpec("chat", ("chatcmpl-1", 0, "tiny"), facts={"format": known})
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(form), type=AnswerSpec)
    delta = TextDelta(0, CALLS, array("i"), finish_reason=FinishReason.STOP)
    answers = [ENCODERS[each.kind](each, harness.text.tokenizer).whole([Choice([delta])]) for each in (form, kept)]
    assert answers[0] == answers[1] and len(answers[0]["choices"][0]["message"]["tool_calls"]) == 2


async def test_a_model_whose_template_knows_no_tools_is_told_of_them() -> None:
    harness = saying("ok")
    await harness.chat(tools=TOOLS, messages=[{"role": "system", "content": "Be brief."}, *HISTORY])
    prompt = harness.prompt
    assert prompt.startswith("system:Be brief.\n\nYou can call functions.")
    for tool in TOOLS:
        assert f'"name": "{tool["function"]["name"]}"' in prompt
    assert 'assistant:<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n' in prompt
    assert '{"name": "get_time", "arguments": {}}' in prompt
    assert prompt.endswith(
        "user:<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n"
        "Now answer my question in plain words.\nassistant:"
    )


async def test_a_template_that_knows_tools_shows_them_itself() -> None:
    harness = saying(CALLS, SHOWS_TOOLS)
    response = await harness.chat(tools=[WEATHER], messages=HISTORY)
    prompt = harness.prompt
    assert "You can call functions" not in prompt
    shown = json.loads(prompt.partition("<tool_call> ")[2].partition("\n")[0])
    assert shown["function"]["parameters"] == WEATHER["function"]["parameters"]
    assert '(call_1 get_weather {"city": "Oslo"})(call_2 get_time {})' in prompt
    assert "tool:rain" in prompt and "call_1\n" in prompt
    assert response.json()["choices"][0]["message"]["tool_calls"]


async def test_mistral_templates_get_ids_that_they_take() -> None:
    template = SHOWS_TOOLS.replace("<tool_call>", "[TOOL_CALLS]")
    harness = saying('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}]', template)
    response = await harness.chat(tools=TOOLS, messages=HISTORY)
    shown = re.findall(r"\((\w+) get_weather", harness.prompt)
    assert re.fullmatch("[a-z0-9]{9}", shown[0]) and f"rain{shown[0]}" in harness.prompt
    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch("[a-z0-9]{9}", call["id"])


async def test_markers_that_are_special_tokens_are_seen() -> None:
    text = speaking(SHOWS_TOOLS.replace("<tool_call>", "[TOOL_CALLS]"), ("[TOOL_CALLS]", "[ARGS]", "[OTHER]"))
    engine = FakeClient('[TOOL_CALLS]get_weather[ARGS]{"city": "[OTHER]Oslo"}')
    engine.tokenizer = text.tokenizer
    harness = Harness(engine, text)
    choice = (await harness.chat(tools=TOOLS)).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    content = (await harness.chat()).json()["choices"][0]["message"]["content"]
    assert content == 'get_weather{"city": "Oslo"}', "without tools they are skipped"


@pytest.mark.parametrize(
    ("choice", "forms", "names"),
    [
        ("required", "{0,15}", ["get_weather", "get_time"]),
        (NAMED, "", ["get_weather"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, "{0,15}", ["get_weather"]),
    ],
)
async def test_forced_calls_are_held_to_their_schemas(choice: Any, forms: str, names: list[str]) -> None:
    harness = saying('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
    answer = (await harness.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=True)).json()["choices"][0]
    assert answer["finish_reason"] == ("stop" if choice == NAMED else "tool_calls"), "as OpenAI says it"
    grammars = json.loads(harness.engine.requests[-1].params.grammar)["grammars"]
    assert re.findall(r'\\"(get_\w+)\\"', grammars[0]["lark_grammar"]) == names
    assert forms in grammars[0]["lark_grammar"]
    assert grammars[1]["json_schema"]["required"] == ["city"]
    assert grammars[1]["json_schema"]["additionalProperties"] is False, "a model would invent arguments"
    await harness.chat(tools=TOOLS, tool_choice=choice)
    assert "{0,15}" not in harness.engine.requests[-1].params.grammar, "one call, unless more are asked for"
    await harness.context.sandbox.close()


async def test_a_structure_and_free_calls_are_alternatives() -> None:
    harness = saying('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = (await harness.chat(tools=TOOLS, response_format=form)).json()["choices"][0]["message"]
    assert answer["content"] == '{"a": 1}'
    lark, *parts = json.loads(harness.engine.requests[-1].params.grammar)["grammars"]
    assert "(calls | @structure)" in lark["lark_grammar"]
    assert [part["name"] for part in parts] == ["arguments_0", "arguments_1", "structure"]
    await harness.context.sandbox.close()


async def test_calls_of_qwen3_coder_are_written_as_json_where_a_grammar_holds() -> None:
    config = Config(chat=ChatConfig(tool_call_parser="qwen3_coder"))
    harness = Harness(FakeClient(CALLS), config=config)
    for fields in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        message = (await harness.chat(tools=TOOLS, **fields)).json()["choices"][0]["message"]
        assert len(message["tool_calls"]) == 2
        assert "<tool_call>" in harness.engine.requests[-1].params.grammar
    assert (await harness.chat(tools=TOOLS)).json()["choices"][0]["message"]["content"] == CALLS
    harness.engine.text = "<function=get_weather>\n<parameter=city>\n12\n</parameter>\n</function>"
    message = (await harness.chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "12"}', "the schema says that it is a string"
    await harness.context.sandbox.close()


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=4)
    | st.sampled_from(["function", "tool", "f", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "function", "name", "parameters", "arguments", "id", "tools", "allowed_tools", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries({}, optional={
        "tools": ODD | st.lists(ODD, max_size=2), "tool_choice": ODD, "reasoning": ODD,
    }),
    st.fixed_dictionaries({"role": st.sampled_from(["assistant", "tool", "user"])}, optional={
        "tool_calls": ODD | st.lists(ODD, max_size=2), "reasoning_content": ODD, "tool_call_id": ODD, "content": ODD,
    }),
)  # fmt: skip
def test_any_body_is_read_or_refused_by_name(fields: dict[str, Any], message: dict[str, Any]) -> None:
    try:
        read_chat({"messages": [message], **fields})
    except ApiError as error:
        assert error.status == 400 and error.param


async def test_allowed_tools_are_all_that_the_model_is_told_of() -> None:
    harness = saying("ok")
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    await harness.chat(tools=TOOLS, tool_choice=allowed)
    assert "get_weather" in harness.prompt and "get_time" not in harness.prompt
    assert harness.engine.requests[-1].params.grammar == ""


async def test_the_settings_choose_the_format() -> None:
    harness = Harness(
        FakeClient('{"name": "get_time", "parameters": {}}'),
        config=Config(chat=ChatConfig(tool_call_parser="llama3")),
    )
    assert (await harness.chat(tools=TOOLS)).json()["choices"][0]["message"]["tool_calls"]
    harness = Harness(FakeClient(CALLS), config=Config(chat=ChatConfig(tool_call_parser="none")))
    assert (await harness.chat(tools=TOOLS)).json()["choices"][0]["message"]["content"] == CALLS
    error = (await harness.chat(tools=TOOLS, tool_choice="required")).json()["error"]
    assert (error["param"], error["code"]) == ("tool_choice", "unsupported_field")


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def calling(**fields: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool(name="a" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"title": "x" * 70_000})]}, "tools[0].function.parameters"),
        ({"tools": [tool(description="x" * 70_000)]}, "tools[0].function.description"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}], "tool_choice": "required"}, "tools[0].type"),
        ({"tools": [*TOOLS, {"type": "web_search"}], "tool_choice": "required"}, f"tools[{len(TOOLS)}].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [tool(parameters={"type": "object", "not": {}})], "tool_choice": "required"},
         "tools[0].function.parameters"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages[0].reasoning"),
        ({"messages": [{"role": "assistant", "reasoning": "y", "reasoning_content": "z"}]},
         "messages[0].reasoning_content"),
        ({"messages": [{"role": "assistant", "reasoning": 7}]}, "messages[0].reasoning"),
        (calling(type="custom"), "messages[1].tool_calls[0].type"),
        (calling(id=None), "messages[1].tool_calls[0].id"),
        (calling(function={"name": "f", "arguments": {}}), "messages[1].tool_calls[0].function.arguments"),
        (calling(function={"name": "f", "arguments": "{"}), "messages[1].tool_calls"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    harness = saying("ok")
    response = await harness.chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not harness.engine.requests
    await harness.context.sandbox.close()


async def test_the_openai_client_puts_streamed_calls_together() -> None:
    import httpx

    harness = saying(CALLS)
    client = openai.AsyncOpenAI(
        api_key="none",
        base_url="http://localhost/v1",
        http_client=httpx.AsyncClient(transport=httpx.ASGITransport(harness.app)),
    )
    async with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "Oslo?"}], tools=TOOLS
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    message = final.choices[0].message
    assert message.content == "Let me see." and message.tool_calls
    assert message.tool_calls[0].function.parsed_arguments == {"city": "Oslo"}, "strict tools are parsed"
    again = await client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "Oslo?"},
            message.model_dump(exclude={"parsed"}, exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"},
        ],
        tools=TOOLS,
    )
    assert again.choices[0].message.tool_calls
