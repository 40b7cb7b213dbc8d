"""OpenAI's Python package: whole and streamed answers, sync and async, tools, parsing, responses, embeddings."""

import asyncio
import sys

import openai
from checking import MODEL, URL, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

CLIENT = "openai"
PACKAGES = ["openai"]
FAST = True

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
ASK = [{"role": "user", "content": "Name three colours."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    """What parse is asked for; bounded, so that a small model gets to the end."""

    name: str
    is_tall: bool


class Answer(BaseModel):
    """Nothing but a choice."""

    person: Person | None


def check_models() -> None:
    """The served model is listed, and found by its name."""
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def check_chat() -> None:
    """A chat answer with its usage and reason."""
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=24, temperature=0)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def check_chat_stream() -> None:
    """A stream gives the same text as the whole answer, one id, and a usage chunk."""
    fields = {"model": MODEL, "messages": ASK, "max_tokens": 24, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def check_stream_helper() -> None:
    """The package's stream helper accumulates the events to a final answer."""
    with client.chat.completions.stream(model=MODEL, messages=ASK, max_tokens=16) as stream:
        kinds = [event.type for event in stream]
        final = stream.current_completion_snapshot
    assert "content.delta" in kinds and final.choices[0].message.content


async def check_async() -> None:
    """AsyncOpenAI: several requests at once, one of them streamed."""
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as other:

        async def streamed() -> str:
            stream = await other.chat.completions.create(model=MODEL, messages=ASK, max_tokens=12, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

        whole = other.chat.completions.create(model=MODEL, messages=ASK, max_tokens=12)
        text, answer = await asyncio.gather(streamed(), whole)
    assert text and answer.choices[0].message.content


def check_logprobs() -> None:
    """Log-probabilities with alternatives and bytes."""
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert entries and all(len(entry.top_logprobs) == 3 and bytes(entry.bytes) for entry in entries)


def check_choices() -> None:
    """n choices, a stop text and a seed."""
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8, n=2, stop=["\n\n\n"], seed=7)
    assert sorted(choice.index for choice in answer.choices) == [0, 1]


def check_completions() -> None:
    """Completions: echo with log-probabilities, token-id prompts, streams."""
    echoed = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=4, echo=True, logprobs=1)
    assert echoed.choices[0].text.startswith("Once upon a time")
    assert echoed.choices[0].logprobs.token_logprobs[0] is None
    by_ids = client.completions.create(model=MODEL, prompt=[[9, 10, 11], [12, 13]], max_tokens=3)
    assert len(by_ids.choices) == 2
    stream = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def check_json_object() -> None:
    """response_format json_object gives an object."""
    import json

    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "A person as JSON."}],
        response_format={"type": "json_object"},
        max_tokens=200,
        temperature=0,
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def check_parse() -> None:
    """chat.completions.parse gives an instance of a pydantic model."""
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "Is anybody there?"}], "max_tokens": 200}
    answer = client.chat.completions.parse(**fields, response_format=Answer, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Answer)


def check_tool_call() -> None:
    """tool_choice required, and a named tool: a call whose arguments are JSON."""
    import json

    ask = [{"role": "user", "content": "What is the weather in Paris?"}]
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=ask,
            tools=[TOOL],
            tool_choice=choice,
            max_tokens=100,
            temperature=0,
            parallel_tool_calls=False,
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather" and "city" in json.loads(call.function.arguments)


def check_tool_stream() -> None:
    """Streamed argument deltas join to the arguments; the conversation goes on with the tool's answer."""
    import json

    ask = [{"role": "user", "content": "What is the weather in Paris?"}]
    stream = client.chat.completions.create(
        model=MODEL, messages=ask, tools=[TOOL], tool_choice="required", max_tokens=100, temperature=0, stream=True
    )
    calls = [delta for chunk in stream if chunk.choices for delta in chunk.choices[0].delta.tool_calls or ()]
    arguments = "".join(delta.function.arguments or "" for delta in calls if delta.index == 0)
    assert json.loads(arguments)["city"] is not None and calls[0].id and calls[0].function.name == "get_weather"
    call = {"id": calls[0].id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    ask += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": call["id"], "content": "Sun"}]
    assert client.chat.completions.create(model=MODEL, messages=ask, tools=[TOOL], max_tokens=8).choices


def check_responses() -> None:
    """responses.create, streamed events, and previous_response_id."""
    first = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16)
    assert first.output_text and first.status in ("completed", "incomplete")
    second = client.responses.create(model=MODEL, input="Again.", previous_response_id=first.id, max_output_tokens=16)
    assert second.usage.input_tokens > first.usage.input_tokens
    with client.responses.stream(model=MODEL, input="Say hello.", max_output_tokens=16) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds


def check_responses_parse() -> None:
    """responses.parse gives an instance of a pydantic model."""
    answer = client.responses.parse(model=MODEL, input="Is anybody there?", text_format=Answer, max_output_tokens=200)
    if answer.status == "completed":
        assert isinstance(answer.output_parsed, Answer)


def check_embeddings() -> None:
    """Embeddings of two texts, as the package asks for them (base64) and as floats."""
    found = client.embeddings.create(model=MODEL, input=["a cat", "a dog"])
    again = client.embeddings.create(model=MODEL, input="a cat", encoding_format="float")
    assert len(found.data) == 2
    assert max(abs(a - b) for a, b in zip(found.data[0].embedding, again.data[0].embedding, strict=True)) < 1e-3


def check_errors() -> None:
    """Mistakes are the package's typed exceptions, with the field's name."""
    try:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
    except openai.BadRequestError as error:
        assert error.param == "temperature" and error.code
    else:
        raise AssertionError("a negative temperature was taken")
    try:
        client.chat.completions.create(model="no-such-model", messages=ASK)
    except openai.NotFoundError as error:
        assert MODEL in str(error)
    else:
        raise AssertionError("an unknown model was taken")


def check_raw_headers() -> None:
    """with_raw_response shows the request's id."""
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=ASK, max_tokens=1)
    assert raw.headers["x-request-id"] and raw.parse().id


if __name__ == "__main__":
    sys.exit(run(__name__))
