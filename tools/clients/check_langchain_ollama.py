"""langchain-ollama: ChatOllama, OllamaLLM and OllamaEmbeddings."""

import sys

from checking import MODEL, URL, run
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel, Field

CLIENT = "langchain-ollama"
PACKAGES = ["langchain-ollama"]

OPTIONS = {"num_predict": 60, "num_ctx": 2048, "repeat_last_n": 64, "temperature": 0}
chat = ChatOllama(model=MODEL, base_url=URL, validate_model_on_init=True, **OPTIONS)


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
    """Chunks add up to the whole answer."""
    assert (
        "".join(chunk.content for chunk in chat.stream("Name three colours."))
        == chat.invoke("Name three colours.").content
    )


def check_tool_result() -> None:
    """A call and its result are shown to the model."""
    call = {"name": "get_weather", "args": {"city": "Paris"}, "id": "call_1"}
    turns = [
        HumanMessage("The weather in Paris?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("rain", tool_call_id="call_1"),
    ]
    assert chat.bind_tools([get_weather]).invoke(turns).content


def check_structured_output() -> None:
    """An object of a class."""
    assert isinstance(chat.with_structured_output(Person).invoke("A person."), Person)


def check_reasoning() -> None:
    """Asking for reasoning changes nothing for a model without it."""
    assert ChatOllama(model=MODEL, base_url=URL, num_predict=16, reasoning=True).invoke("Hello").content


def check_llm() -> None:
    """A prompt to go on with."""
    assert OllamaLLM(model=MODEL, base_url=URL, num_predict=8).invoke("One, two,")


def check_embeddings() -> None:
    """Vectors of one length."""
    vectors = OllamaEmbeddings(model=MODEL, base_url=URL).embed_documents(["a", "b"])
    assert len(vectors) == 2 and len(vectors[0]) == len(vectors[1])


if __name__ == "__main__":
    sys.exit(run(__name__))
