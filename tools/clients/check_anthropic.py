"""Anthropic's Python package: messages whole and streamed, sync and async, tools, schemas, counts, errors."""

import asyncio
import sys

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from checking import MODEL, URL, run
from pydantic import BaseModel

CLIENT = "anthropic"
PACKAGES = ["anthropic"]

client = Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=120)
ASK = [{"role": "user", "content": "Name three colours."}]
WEATHER = [{"role": "user", "content": "How is the weather in Paris? Use the tool."}]
GREEDY = {"extra_body": {"temperature": 0}}
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Answer(BaseModel):
    """Bounded, so that a small model gets to the end."""

    is_tall: bool
    is_old: bool


def check_models() -> None:
    """The served model is listed in Anthropic's form, and found by its name."""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).type == "model"


def check_message() -> None:
    """A message with its usage and reason."""
    message = client.messages.create(model=MODEL, max_tokens=24, messages=ASK, system="Be brief.", **GREEDY)
    assert message.content[0].text and message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 24


def check_stream() -> None:
    """The stream helper accumulates the same message."""
    fields = {"model": MODEL, "max_tokens": 24, "messages": ASK, **GREEDY}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def check_raw_stream() -> None:
    """The events come in their order."""
    kinds = [event.type for event in client.messages.create(model=MODEL, max_tokens=8, messages=ASK, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def check_async() -> None:
    """AsyncAnthropic: several messages at once."""
    async with AsyncAnthropic(base_url=URL, api_key="none", max_retries=0, timeout=120) as other:
        made = await asyncio.gather(
            *(other.messages.create(model=MODEL, max_tokens=n, messages=ASK, **GREEDY) for n in (1, 2, 3))
        )
    assert [message.usage.output_tokens for message in made] == [1, 2, 3]


def check_count_tokens() -> None:
    """The count is what the message's usage says, cached tokens among them."""
    fields = {"model": MODEL, "messages": WEATHER, "tools": [TOOL], "system": "Be brief."}
    usage = client.messages.create(max_tokens=1, **fields).usage
    count = client.messages.count_tokens(**fields).input_tokens
    assert count == usage.input_tokens + usage.cache_read_input_tokens


def check_tool_round_trip() -> None:
    """A named call obeys its schema; its result goes back."""
    choice = {"type": "tool", "name": "get_weather"}
    fields = {"model": MODEL, "max_tokens": 100, "tools": [TOOL], **GREEDY}
    called = client.messages.create(messages=WEATHER, tool_choice=choice, **fields)
    (call,) = called.content
    assert called.stop_reason == "tool_use" and call.name == "get_weather" and isinstance(call.input["city"], str)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12 degrees, rain"}]}
    turns = [*WEATHER, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=turns, **fields).content


def check_streamed_tool() -> None:
    """Arguments come as deltas, and add up."""
    choice = {"type": "tool", "name": "get_weather"}
    fields = {"model": MODEL, "max_tokens": 100, "tools": [TOOL], "messages": WEATHER, "tool_choice": choice, **GREEDY}
    with client.messages.stream(**fields) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(pieces) >= 1 and set(final.content[0].input) == {"city"}


def check_parse() -> None:
    """messages.parse gives an object of the model's class."""
    message = client.messages.parse(model=MODEL, max_tokens=60, messages=ASK, output_format=Answer)
    assert isinstance(message.parsed_output, Answer)


def check_stop_sequences() -> None:
    """A stop sequence ends the message, and is named."""
    ask = [{"role": "user", "content": "Count from one to ten, in digits."}, {"role": "assistant", "content": "1, 2,"}]
    message = client.messages.create(model=MODEL, max_tokens=40, messages=ask, stop_sequences=["5"], **GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "5")


def check_errors() -> None:
    """Refusals are the package's own exceptions."""
    for error, fields in (
        (anthropic.NotFoundError, {"model": "no-such-model"}),
        (anthropic.BadRequestError, {"max_tokens": -1}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "hi " * 100_000}]}),
    ):
        try:
            client.messages.create(**{"model": MODEL, "max_tokens": 5, "messages": ASK, **fields})
        except error as caught:
            assert caught.body["error"]["message"]
        else:
            raise AssertionError(f"no {error.__name__}")


if __name__ == "__main__":
    sys.exit(run(__name__))
