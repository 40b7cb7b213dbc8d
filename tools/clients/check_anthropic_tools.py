"""Anthropic's Python tool runners, which ask for a server-side thread first and go on without one: several turns."""

import sys

import anthropic
from anthropic import Anthropic, AsyncAnthropic, beta_async_tool, beta_tool
from anthropic.types import ThreadUnsupportedRequestError
from checking import MODEL, URL, run
from pydantic import BaseModel

CLIENT = "anthropic tool_runner"
PACKAGES = ["anthropic"]
SERVER = ["--model", "scripted:agents.yaml", "--served-model-name", "scripted"]

client = Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=120)
ASK = [{"role": "user", "content": "Hello."}]
WEATHER = [{"role": "user", "content": "How is the weather in Paris?"}]
FIELDS = {"model": MODEL, "max_tokens": 400}
called: list[str] = []


class Person(BaseModel):
    """What the script answers to `anybody`."""

    name: str
    is_tall: bool


@beta_tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The city's name.
    """
    called.append(city)
    return "Sun"


def check_tool_runner() -> None:
    """until_done: the tool is called once, and its result is answered."""
    called.clear()
    final = client.beta.messages.tool_runner(messages=WEATHER, tools=[get_weather], **FIELDS).until_done()
    assert called == ["Paris"] and final.content[-1].text == "It is sunny in Paris.", (called, final)


def check_turns() -> None:
    """Each turn is given as a message: a call, then the answer."""
    called.clear()
    turns = list(client.beta.messages.tool_runner(messages=WEATHER, tools=[get_weather], **FIELDS))
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"], turns
    assert [block.type for block in turns[0].content] == ["thinking", "tool_use"], turns[0]


def check_streamed_turns() -> None:
    """The runner with stream=True: events of two turns."""
    called.clear()
    runner = client.beta.messages.tool_runner(messages=WEATHER, tools=[get_weather], stream=True, **FIELDS)
    finals = []
    for stream in runner:
        assert any(event.type == "message_stop" for event in stream)
        finals.append(stream.get_final_message())
    assert called == ["Paris"] and finals[-1].content[-1].text == "It is sunny in Paris.", finals


async def check_async_runner() -> None:
    """AsyncAnthropic with an asynchronous tool."""

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: The city's name.
        """
        return f"Sun in {city}"

    async with AsyncAnthropic(base_url=URL, api_key="none", max_retries=0, timeout=120) as other:
        final = await other.beta.messages.tool_runner(messages=WEATHER, tools=[get_weather], **FIELDS).until_done()
    assert final.content[-1].text == "It is sunny in Paris.", final


def check_history() -> None:
    """A second question after the first run's whole history, with the package's own blocks."""
    runner = client.beta.messages.tool_runner(messages=WEATHER, tools=[get_weather], **FIELDS)
    final = runner.until_done()
    history = [*WEATHER, {"role": "assistant", "content": final.content}, *ASK]
    again = client.beta.messages.tool_runner(messages=history, tools=[get_weather], **FIELDS).until_done()
    assert again.content[-1].text == "Hello there, and good day.", again


def check_structured() -> None:
    """output_format of the runner: an object of a class."""
    ask = [{"role": "user", "content": "Is anybody there?"}]
    runner = client.beta.messages.tool_runner(messages=ask, tools=[], output_format=Person, **FIELDS)
    assert runner.until_done().parsed_output == Person(name="Ada", is_tall=True)


def check_thread() -> None:
    """messages.thread: ThreadUnsupportedRequestError by default; two turns where it may go on without a thread."""
    try:
        client.beta.messages.thread(**FIELDS).send(*ASK)
    except ThreadUnsupportedRequestError as error:
        assert error.body["error"]["details"]["unsupported"], error.body
    else:
        raise AssertionError("a thread was made")
    thread = client.beta.messages.thread(unsupported_request_behavior="continue_unthreaded", **FIELDS)
    first = thread.send(*ASK)
    second = thread.send(*ASK)
    assert first.content[0].text == second.content[0].text == "Hello there, and good day."
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens > first.usage.input_tokens


def check_without_thread() -> None:
    """thread=False sends no thread."""
    fields = {"messages": WEATHER, "tools": [get_weather], "thread": False, **FIELDS}
    assert client.beta.messages.tool_runner(**fields).until_done().content[-1].text == "It is sunny in Paris."


def check_errors() -> None:
    """A prompt that is too long and a mistake are the package's exceptions, in the runner too."""
    long = [{"role": "user", "content": "hi " * 60_000}]
    for fields, word in (({"messages": long}, "prompt is too long"), ({"max_tokens": -1}, "max_tokens")):
        runner = client.beta.messages.tool_runner(**{"messages": ASK, "tools": [get_weather], **FIELDS, **fields})
        try:
            runner.until_done()
        except anthropic.BadRequestError as error:
            assert word in str(error), error
        else:
            raise AssertionError(f"{word}: it was answered")


if __name__ == "__main__":
    sys.exit(run(__name__))
