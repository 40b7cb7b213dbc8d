"""pydantic-ai's agents over chat, Responses, Anthropic's and Ollama's models: tools, three ways of output, history."""

import asyncio
import sys
from typing import Any

from checking import MODEL, URL, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelAPIError, ModelContextWindowExceededError, ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.ollama import OllamaModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider

CLIENT = "pydantic-ai"
PACKAGES = ["pydantic-ai-slim[openai,anthropic]"]
SERVER = ["--model", "scripted:agents.yaml", "--served-model-name", "scripted"]
HELLO = "Hello there, and good day."
SUNNY = "It is sunny in Paris."


class Person(BaseModel):
    """What the script answers to `anybody`."""

    name: str
    is_tall: bool


def models() -> dict[str, Any]:
    """A model of each interface; made anew, as its client belongs to one event loop."""
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    return {
        "chat": OpenAIChatModel(MODEL, provider=openai),
        "responses": OpenAIResponsesModel(MODEL, provider=openai),
        "anthropic": AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
        "ollama": OllamaModel(MODEL, provider=OllamaProvider(base_url=f"{URL}/v1", api_key="none")),
    }


def agent(model: Any, **fields: Any) -> Agent:
    """An agent with a tool."""
    made = Agent(model, **fields)

    @made.tool_plain
    def get_weather(city: str) -> str:
        return f"Sun in {city}"

    return made


async def check_run() -> None:
    """An answer with its usage, by four models."""
    for name, model in models().items():
        answer = await Agent(model, instructions="Be brief.").run("Hello.")
        assert answer.output == HELLO and answer.usage.output_tokens > 0, (name, answer)


async def check_stream() -> None:
    """run_stream: deltas that add up."""
    for name, model in models().items():
        async with Agent(model).run_stream("Hello.") as stream:
            text = "".join([piece async for piece in stream.stream_text(delta=True)])
        assert text == HELLO, (name, text)


async def check_tool() -> None:
    """A tool is called and its result answered; a second question follows the first run's messages."""
    for name, model in models().items():
        weather = agent(model)
        first = await weather.run("How is the weather in Paris?")
        assert first.output == SUNNY, (name, first)
        second = await weather.run("Hello.", message_history=first.all_messages())
        assert second.output == HELLO, (name, second)


async def check_streamed_tool() -> None:
    """The same with run_stream_events."""
    for name, model in models().items():
        async with agent(model).run_stream_events("How is the weather in Paris?") as stream:
            events = [event async for event in stream]
        kinds = {event.event_kind for event in events}
        assert {"function_tool_call", "function_tool_result", "agent_run_result"} <= kinds, (name, kinds)
        assert events[-1].result.output == SUNNY, (name, events[-1])


async def check_history_across_models() -> None:
    """The messages of one model's run are history for another's."""
    made = models()
    for name, model in made.items():
        first = await agent(model).run("How is the weather in Paris?")
        for other, next_model in made.items():
            second = await agent(next_model).run("Hello.", message_history=first.all_messages())
            assert second.output == HELLO, (name, other, second)


async def check_output() -> None:
    """Structured output by a tool, by a schema and by instructions."""
    for name, model in models().items():
        kinds = [ToolOutput(Person, name="final_result"), PromptedOutput(Person)]
        if name in ("chat", "responses"):  # the others' profiles do not know that this model can
            kinds.append(NativeOutput(Person))
        for kind in kinds:
            answer = await Agent(model, output_type=kind).run("Is anybody there?")
            assert answer.output == Person(name="Ada", is_tall=True), (name, kind, answer)


async def check_parallel() -> None:
    """Several runs at once."""
    hello = Agent(models()["chat"])
    answers = await asyncio.gather(*(hello.run("Hello.") for _ in range(4)))
    assert {answer.output for answer in answers} == {HELLO}


async def check_errors() -> None:
    """A prompt that is too long is ModelContextWindowExceededError; other mistakes are ModelHTTPError."""
    for name, model in models().items():
        try:
            await Agent(model).run("hi " * 60_000)
        except ModelContextWindowExceededError as error:
            assert error.model_name == MODEL
        except ModelAPIError as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        else:
            raise AssertionError(f"{name}: it was answered")
        try:
            await Agent(model, model_settings={"temperature": -1}).run("Hello.")
        except ModelHTTPError as error:
            assert error.status_code == 400 and "temperature" in str(error), (name, error)
        else:
            raise AssertionError(f"{name}: a negative temperature was taken")


if __name__ == "__main__":
    sys.exit(run(__name__))
