"""openai-agents' Runner over chat and Responses: tools, handoffs, sessions, structured output, errors."""

import sys
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from checking import MODEL, URL, run
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

CLIENT = "openai-agents"
PACKAGES = ["openai-agents"]
SERVER = ["--model", "scripted:agents.yaml", "--served-model-name", "scripted"]
HELLO = "Hello there, and good day."
SUNNY = "It is sunny in Paris."
set_tracing_disabled(True)


class Person(BaseModel):
    """What the script answers to `anybody`."""

    name: str
    is_tall: bool


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"Sun in {city}"


def models() -> dict[str, Any]:
    """A model of each interface."""
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
    return {
        "chat": OpenAIChatCompletionsModel(MODEL, openai_client=client),
        "responses": OpenAIResponsesModel(MODEL, openai_client=client),
    }


async def check_run() -> None:
    """An answer with its usage."""
    for name, model in models().items():
        result = await Runner.run(Agent(name="A", instructions="Be brief.", model=model), "Hello.")
        assert result.final_output == HELLO, (name, result)
        assert result.context_wrapper.usage.output_tokens > 0, (name, result)


async def check_stream() -> None:
    """run_streamed: text deltas add up to the answer."""
    for name, model in models().items():
        result = Runner.run_streamed(Agent(name="A", model=model), "Hello.")
        data = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        text = "".join(event.delta for event in data if event.type == "response.output_text.delta")
        assert text == result.final_output == HELLO, (name, text)


async def check_tool() -> None:
    """A tool is called and its result answered; to_input_list is history for the next question."""
    for name, model in models().items():
        agent = Agent(name="A", model=model, tools=[get_weather])
        first = await Runner.run(agent, "How is the weather in Paris?")
        assert first.final_output == SUNNY, (name, first)
        turns = [*first.to_input_list(), {"role": "user", "content": "Hello."}]
        second = await Runner.run(agent, turns)
        assert second.final_output == HELLO, (name, second)


async def check_streamed_tool() -> None:
    """The same, streamed."""
    for name, model in models().items():
        result = Runner.run_streamed(Agent(name="A", model=model, tools=[get_weather]), "How is the weather in Paris?")
        kinds = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        assert result.final_output == SUNNY and {"tool_called", "tool_output"} <= set(kinds), (name, kinds)


async def check_two_calls() -> None:
    """Two calls in one turn."""
    for name, model in models().items():
        result = await Runner.run(Agent(name="A", model=model, tools=[get_weather]), "For both cities, please.")
        assert result.final_output == SUNNY, (name, result)


async def check_previous_response() -> None:
    """previous_response_id instead of a history."""
    agent = Agent(name="A", model=models()["responses"], tools=[get_weather])
    first = await Runner.run(agent, "How is the weather in Paris?", auto_previous_response_id=True)
    assert first.final_output == SUNNY, first
    second = await Runner.run(agent, "Hello.", previous_response_id=first.last_response_id)
    assert second.final_output == HELLO, second


async def check_session() -> None:
    """A session holds the turns."""
    for name, model in models().items():
        session = SQLiteSession(name)
        agent = Agent(name="A", model=model, tools=[get_weather])
        assert (await Runner.run(agent, "How is the weather in Paris?", session=session)).final_output == SUNNY
        assert (await Runner.run(agent, "Hello.", session=session)).final_output == HELLO
        assert len(await session.get_items()) >= 6, name


async def check_handoff() -> None:
    """One agent hands over to another, which answers."""
    for name, model in models().items():
        other = Agent(name="Other", model=model, instructions="Be brief.")
        first = Agent(name="First", model=model, handoffs=[other])
        result = await Runner.run(first, "Hand over, please.")
        assert result.last_agent is other, (name, result)


async def check_output_type() -> None:
    """output_type: an object of a class."""
    for name, model in models().items():
        result = await Runner.run(Agent(name="A", model=model, output_type=Person), "Is anybody there?")
        assert result.final_output == Person(name="Ada", is_tall=True), (name, result)


async def check_settings() -> None:
    """Settings that an agent may have: reasoning, verbosity, store, metadata, parallel calls."""
    settings = ModelSettings(
        temperature=0.5,
        max_tokens=200,
        store=False,
        metadata={"run": "1"},
        parallel_tool_calls=False,
        verbosity="low",
        reasoning=Reasoning(effort="low"),
        truncation="disabled",
    )
    for name, model in models().items():
        agent = Agent(name="A", model=model, tools=[get_weather], model_settings=settings)
        result = await Runner.run(agent, "How is the weather in Paris?")
        assert result.final_output == SUNNY, (name, result)


async def check_errors() -> None:
    """A prompt that is too long and a mistake are openai's exceptions with their code and field."""
    for name, model in models().items():
        try:
            await Runner.run(Agent(name="A", model=model), "hi " * 60_000)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded", (name, error)
        else:
            raise AssertionError(f"{name}: it was answered")
        try:
            await Runner.run(Agent(name="A", model=model, model_settings=ModelSettings(temperature=-1)), "Hello.")
        except openai.BadRequestError as error:
            assert error.param == "temperature", (name, error)
        else:
            raise AssertionError(f"{name}: a negative temperature was taken")


if __name__ == "__main__":
    sys.exit(run(__name__))
