"""langchain-anthropic's ChatAnthropic: whole and streamed, tools, structured output, counting."""

import sys

from checking import MODEL, URL, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

CLIENT = "langchain-anthropic"
PACKAGES = ["langchain-anthropic<1.7.10"]  # later ones need a langchain-core that is not everywhere yet

chat = ChatAnthropic(model=MODEL, base_url=URL, api_key="none", max_tokens=60, max_retries=0, timeout=120)


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    is_tall: bool


@tool
def get_weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"rain in {city}"


def check_invoke() -> None:
    """An answer with its usage."""
    answer = chat.invoke("Name three colours.")
    assert answer.content and answer.usage_metadata["output_tokens"] > 0


def check_stream() -> None:
    """Chunks add up to an answer with a reason."""
    whole = None
    for chunk in chat.stream("Name three colours."):
        whole = chunk if whole is None else whole + chunk
    assert whole.content and whole.response_metadata["stop_reason"] in ("end_turn", "max_tokens")


def check_forced_tool() -> None:
    """A named tool is called, whole and streamed."""
    asked = chat.bind_tools([get_weather], tool_choice="get_weather")
    (call,) = asked.invoke("The weather in Paris?").tool_calls
    assert call["name"] == "get_weather" and set(call["args"]) == {"city"}
    assert any(chunk.tool_call_chunks for chunk in asked.stream("The weather in Paris?"))


def check_tool_result() -> None:
    """A call and its result are shown to the model."""
    call = {"name": "get_weather", "args": {"city": "Paris"}, "id": "call_1"}
    turns = [
        SystemMessage("Be brief."),
        HumanMessage("The weather in Paris?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("rain", tool_call_id="call_1"),
    ]
    assert chat.bind_tools([get_weather]).invoke(turns).content


def check_structured_output() -> None:
    """An object of a class, by a tool and by a schema."""
    assert isinstance(chat.with_structured_output(Person, method="json_schema").invoke("A person."), Person)
    short = chat.with_structured_output(Person, method="function_calling")
    assert isinstance(short.invoke("A person."), Person)


def check_count() -> None:
    """count_tokens answers."""
    assert chat.get_num_tokens_from_messages([HumanMessage("Hello")]) > 5


if __name__ == "__main__":
    sys.exit(run(__name__))
