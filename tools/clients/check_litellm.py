"""LiteLLM's package: OpenAI, vLLM, Anthropic and Ollama routes, two turns of tools with its own messages, errors."""

import asyncio
import json
import os
import sys

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it fetches its price list otherwise

import litellm
from checking import MODEL, URL, run
from pydantic import BaseModel

CLIENT = "LiteLLM"
PACKAGES = ["litellm[proxy]"]
ENVIRONMENT = "litellm"
SERVER = ["--model", "scripted:agents.yaml", "--served-model-name", "scripted"]

ROUTES = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"},
    "hosted_vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "max_tokens": 400},
    "ollama_chat": {"model": f"ollama_chat/{MODEL}", "api_base": URL},
}
OPENAI = ROUTES["openai"]
ASK = [{"role": "user", "content": "Hello."}]
WEATHER = [{"role": "user", "content": "How is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": PARAMETERS}}]
LONG = [{"role": "user", "content": "hi " * 60_000}]


class Person(BaseModel):
    """What the script answers to `anybody`."""

    name: str
    is_tall: bool


def check_completion() -> None:
    """completion on four routes: the same text, and usage."""
    for name, route in ROUTES.items():
        answer = litellm.completion(messages=ASK, **route)
        assert answer.choices[0].message.content == "Hello there, and good day.", (name, answer)
        assert answer.usage.completion_tokens > 0 and answer.choices[0].finish_reason == "stop", (name, answer)


def check_stream() -> None:
    """Chunks of four routes are built to the same message by stream_chunk_builder, with usage."""
    for name, route in ROUTES.items():
        chunks = list(litellm.completion(messages=ASK, stream=True, stream_options={"include_usage": True}, **route))
        built = litellm.stream_chunk_builder(chunks, messages=ASK)
        assert built.choices[0].message.content == "Hello there, and good day.", (name, built)
        assert built.usage.completion_tokens > 0, (name, built)


async def check_async() -> None:
    """acompletion: several at once, one streamed."""
    answers = await asyncio.gather(*(litellm.acompletion(messages=ASK, max_tokens=n, **OPENAI) for n in (1, 2, 3)))
    assert [answer.usage.completion_tokens for answer in answers] == [1, 2, 3]
    stream = await litellm.acompletion(messages=ASK, stream=True, **OPENAI)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello there, and good day."


def two_turns(route: dict, message: litellm.Message, other: dict | None = None) -> str:
    """Give the call's result after the message as the package made it; return the second answer."""
    (call,) = message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sun"}
    turns = [*WEATHER, message, result]
    answer = litellm.completion(messages=turns, tools=TOOLS, **(other or route))
    return answer.choices[0].message.content


def check_tool_turns() -> None:
    """The answer's own message object goes back in the history with the tool's result, on four routes."""
    for name, route in ROUTES.items():
        first = litellm.completion(messages=WEATHER, tools=TOOLS, **route)
        assert two_turns(route, first.choices[0].message) == "It is sunny in Paris.", name


def check_streamed_tool_turns() -> None:
    """The message that was built from a stream goes back too."""
    for name in ("openai", "hosted_vllm", "anthropic"):
        chunks = list(litellm.completion(messages=WEATHER, tools=TOOLS, stream=True, **ROUTES[name]))
        built = litellm.stream_chunk_builder(chunks, messages=WEATHER)
        assert two_turns(ROUTES[name], built.choices[0].message) == "It is sunny in Paris.", name


def check_dumped_turns() -> None:
    """So does model_dump() of the message, with all its fields (provider_specific_fields among them)."""
    first = litellm.completion(messages=WEATHER, tools=TOOLS, **OPENAI)
    dumped = first.choices[0].message.model_dump()
    assert "provider_specific_fields" in dumped, dumped
    result = {"role": "tool", "tool_call_id": dumped["tool_calls"][0]["id"], "content": "Sun"}
    answer = litellm.completion(messages=[*WEATHER, dumped, result], tools=TOOLS, **OPENAI)
    assert answer.choices[0].message.content == "It is sunny in Paris."


def check_thinking_turns() -> None:
    """thinking_blocks and reasoning_content of an answer by Anthropic's route go back by each route."""
    ask = [{"role": "user", "content": "Please think: two and two?"}]
    first = litellm.completion(messages=ask, **ROUTES["anthropic"]).choices[0].message
    assert first.content == "Four." and first.thinking_blocks and first.reasoning_content, first
    for name in ("anthropic", "openai", "hosted_vllm"):
        for message in (first, first.model_dump()):
            again = litellm.completion(messages=[*ask, message, *ASK], **ROUTES[name])
            assert again.choices[0].message.content == "Hello there, and good day.", name


def check_two_calls() -> None:
    """Two calls of one message, whose results go back together."""
    ask = [{"role": "user", "content": "Both, please: both cities."}]
    message = litellm.completion(messages=ask, tools=TOOLS, **OPENAI).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Sun"} for call in message.tool_calls]
    assert len(results) == 2
    answer = litellm.completion(messages=[*ask, message, *results], tools=TOOLS, **OPENAI)
    assert answer.choices[0].message.content == "It is sunny in Paris."


def check_structured() -> None:
    """response_format: a pydantic model, and a schema."""
    ask = [{"role": "user", "content": "Is anybody there?"}]
    answer = litellm.completion(messages=ask, response_format=Person, **OPENAI)
    assert Person.model_validate_json(answer.choices[0].message.content) == Person(name="Ada", is_tall=True)


def check_text_completion() -> None:
    """text_completion, whole and streamed."""
    fields = {"prompt": "Hello.", "max_tokens": 8, "model": f"text-completion-openai/{MODEL}"}
    fields |= {"api_base": f"{URL}/v1", "api_key": "none"}
    assert litellm.text_completion(**fields).choices[0].text == "Hello th"
    chunks = litellm.text_completion(**fields, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == "Hello th"


def check_responses() -> None:
    """litellm.responses, and a second one after the first."""
    first = litellm.responses(input="Hello.", **OPENAI)
    assert first.output[0].content[0].text == "Hello there, and good day.", first
    second = litellm.responses(input="Hello.", previous_response_id=first.id, **OPENAI)
    assert second.usage.input_tokens > first.usage.input_tokens


def check_embedding() -> None:
    """litellm.embedding gives a vector for each text."""
    found = litellm.embedding(model=f"openai/{MODEL}", input=["a", "b"], api_base=f"{URL}/v1", api_key="none")
    assert len(found.data) == 2


def check_context_window() -> None:
    """A prompt that is too long is ContextWindowExceededError, whole and streamed, so that fallbacks work."""
    for name in ("openai", "hosted_vllm", "anthropic"):
        for stream in (False, True):
            try:
                list(litellm.completion(messages=LONG, stream=stream, **ROUTES[name]))
            except litellm.ContextWindowExceededError:
                continue
            raise AssertionError(f"{name}: it was answered")


def check_errors() -> None:
    """Mistakes are the package's exceptions."""
    for error, fields in (
        (litellm.BadRequestError, {"temperature": -1}),
        (litellm.NotFoundError, {"model": "openai/no-such-model"}),
        (litellm.InternalServerError, {"messages": [{"role": "user", "content": "This ends badly."}]}),
    ):
        try:
            litellm.completion(**{"messages": ASK, **OPENAI, **fields}, max_retries=0, num_retries=0)
        except error as caught:
            assert str(caught), error
        else:
            raise AssertionError(f"no {error.__name__}")


if __name__ == "__main__":
    sys.exit(run(__name__))
