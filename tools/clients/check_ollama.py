"""Ollama's Python package: chat, generate, tools, formats, embeddings, models, sync and async."""

import json
import sys

import ollama
from checking import MODEL, URL, run

CLIENT = "ollama"
PACKAGES = ["ollama"]

client = ollama.Client(URL)
ASK = [{"role": "user", "content": "Name three colours."}]
SHORT = {"num_predict": 16, "temperature": 0.0}
SCHEMA = {
    "type": "object",
    "properties": {"is_tall": {"type": "boolean"}},
    "required": ["is_tall"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
      city: where
    """
    return f"rain in {city}"


def check_models() -> None:
    """The served model is listed, shown and loaded."""
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    assert "completion" in client.show(MODEL).capabilities
    assert client.pull(MODEL).status == "success"


def check_chat() -> None:
    """A chat answer, whole and streamed, with counts and durations."""
    whole = client.chat(MODEL, ASK, options=SHORT)
    parts = list(client.chat(MODEL, ASK, options=SHORT, stream=True))
    assert whole.message.content == "".join(part.message.content for part in parts)
    assert parts[-1].done and parts[-1].eval_count == whole.eval_count > 0
    assert whole.total_duration == whole.load_duration + whole.prompt_eval_duration + whole.eval_duration


def check_generate() -> None:
    """A prompt through the template, and a raw one."""
    assert client.generate(MODEL, "Say hello.", system="Be brief.", options=SHORT).response
    raw = list(client.generate(MODEL, "One, two,", raw=True, options=SHORT, stream=True))
    assert raw[-1].prompt_eval_count < 10


async def check_async() -> None:
    """AsyncClient, streamed."""
    parts = [part async for part in await ollama.AsyncClient(URL).chat(MODEL, ASK, options=SHORT, stream=True)]
    assert "".join(part.message.content for part in parts) and parts[-1].done


def check_format() -> None:
    """An answer that obeys a schema."""
    answer = client.chat(MODEL, ASK, format=SCHEMA, options={"num_predict": 60})
    assert isinstance(json.loads(answer.message.content)["is_tall"], bool)


def check_tools() -> None:
    """A function as a tool, a call in the conversation and its result."""
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    turns = [
        {"role": "user", "content": "How is the weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": get_weather("Paris")},
    ]
    assert client.chat(MODEL, turns, tools=[get_weather], options=SHORT).done


def check_embed() -> None:
    """Vectors of length one, one for each text."""
    vectors = client.embed(MODEL, ["a", "b"]).embeddings
    assert len(vectors) == 2 and all(abs(sum(x * x for x in vector) - 1) < 1e-3 for vector in vectors)
    assert len(client.embed(MODEL, "a", dimensions=32).embeddings[0]) == 32


def check_logprobs() -> None:
    """Log-probabilities beside the text."""
    answer = client.chat(MODEL, ASK, options=SHORT, logprobs=True, top_logprobs=2)
    assert answer.logprobs and len(answer.logprobs[0].top_logprobs) == 2


def check_errors() -> None:
    """Refusals are the package's own exception."""
    try:
        client.chat("no-such-model", ASK)
    except ollama.ResponseError as error:
        assert error.status_code == 404 and MODEL in error.error
    else:
        raise AssertionError("no ResponseError")


if __name__ == "__main__":
    sys.exit(run(__name__))
