"""The openai package against a real server with a scripted model: responses, streams, parsing, calls, chains."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from tests.fake_server import RealServer
from tests.source_tree import ROOT

SCRIPT = """
rules:
  - {regex: "[Ww]eather", role: user, call: {name: get_weather, arguments: {city: Paris}}}
  - {contains: both, role: user, say: "Two calls.", call: [{name: get_weather, arguments: {city: Rome}},
      {name: get_weather, arguments: {city: Oslo}}]}
  - {role: tool, say: "It is sunny in Paris."}
  - {contains: think, think: "Let me see.", say: "Done."}
  - {contains: person, say: '{"name": "Ann", "age": 30}'}
  - {regex: "my name", where: prompt, say: "Your name is Zed."}
  - {contains: boom, say: "This will not end well", fail_after: 10}
  - {say: "Hello from the script."}
"""
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("script")
    (folder / "answers.yaml").write_text(SCRIPT, encoding="utf-8")
    with RealServer(f"scripted:{folder / 'answers.yaml'}", folder / "log", "--served-model-name", "smollm2") as server:
        yield server.url + "/v1"


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def ask(client: openai.OpenAI, text: Any, **fields: Any) -> Response:
    return client.responses.create(model=client.models.list().data[0].id, input=text, **fields)


def test_I02_responses_are_created_retrieved_and_deleted(client: openai.OpenAI) -> None:
    response = ask(client, "hi", metadata={"topic": "greeting"})
    assert response.output_text == "Hello from the script."
    again = client.responses.retrieve(response.id)
    assert (again.output_text, again.metadata) == (response.output_text, {"topic": "greeting"})
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    assert client.responses.input_tokens.count(input="hi").input_tokens == response.usage.input_tokens  # type: ignore[union-attr]


def test_I02_responses_are_streamed(client: openai.OpenAI) -> None:
    events = list(ask(client, "hi", stream=True))  # type: ignore[call-overload]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta").startswith("Hello")
    assert events[-1].type == "response.completed" and events[-1].response.output_text == "Hello from the script."
    with client.responses.stream(model=client.models.list().data[0].id, input="think") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.reasoning_text.delta" in kinds
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output[0].content[0].text == "Let me see."  # type: ignore[union-attr,index]
    assert final.usage.output_tokens_details.reasoning_tokens > 0  # type: ignore[union-attr]


def test_parsing_into_a_model(client: openai.OpenAI) -> None:
    response = client.responses.parse(model=client.models.list().data[0].id, input="a person", text_format=Person)
    assert response.output_parsed == Person(name="Ann", age=30)


def test_I02_a_function_call_and_its_result_by_items_and_by_id(client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "What is the weather in Paris?"}
    response = ask(client, [question], tools=[WEATHER])
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    for others in ({"input": [question, *response.output, result]}, {"input": [result], "previous": response.id}):
        previous = others.get("previous", openai.omit)
        answer = ask(client, others["input"], tools=[WEATHER], previous_response_id=previous)
        assert answer.output_text == "It is sunny in Paris."


def test_streamed_calls(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    with client.responses.stream(model=model, input="both of them", tools=[WEATHER]) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
        final = stream.get_final_response()
    assert [json.loads(event.arguments)["city"] for event in done] == ["Rome", "Oslo"]
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert len({item.call_id for item in final.output if item.type == "function_call"}) == 2


def test_I02_a_chain_of_responses(client: openai.OpenAI) -> None:
    first = ask(client, "my name is Zed")
    second = ask(client, "and now?", previous_response_id=first.id)
    assert second.output_text == "Your name is Zed."
    items = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [getattr(item, "role", None) for item in items] == ["user", "assistant", "user"]


def test_mistakes_and_failures_are_told(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "hi", tools=[{"type": "web_search"}], tool_choice="required")
    assert (refused.value.param, refused.value.code) == ("tools[0].type", "unsupported_field")
    assert ask(client, "hi", tools=[{"type": "web_search"}]).output_text, "left out, and told"
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, "hi", previous_response_id="resp_no")
    assert missing.value.param == "previous_response_id"
    with pytest.raises(openai.InternalServerError):
        ask(client, "boom")
    events = list(ask(client, "boom", stream=True))  # type: ignore[call-overload]
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1].response.error.code == "server_error"


def test_the_asynchronous_client(url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            answers = await asyncio.gather(*(client.responses.create(model=model, input=f"hi {i}") for i in range(5)))
            assert {answer.output_text for answer in answers} == {"Hello from the script."}
            stream = await client.responses.create(model=model, input="hi", stream=True)
            assert [event.type async for event in stream][-1] == "response.completed"

    asyncio.run(run())


def sections_code(title: str, url: str) -> list[str]:
    """Return the Python blocks of a section of docs/apis.md, with the server's address."""
    page = (ROOT / "docs" / "apis.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert "http://127.0.0.1:8000" in blocks[0]
    return [block.replace("http://127.0.0.1:8000", url.removesuffix("/v1")) for block in blocks]


def test_I02_the_guides_code_runs_as_it_stands(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = sections_code("Responses", url)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/apis.md", "exec"), names)
    said = capsys.readouterr().out
    assert "Hello from the script." in said and "It is sunny in Paris." in said and "completed" in said
    names["client"].close()


@pytest.mark.parametrize("title", ["Anthropic", "Ollama"])
def test_I03_the_guides_code_for_other_apis_runs_as_it_stands(
    url: str, capsys: pytest.CaptureFixture[str], title: str
) -> None:
    [block] = sections_code(title, url)
    names: dict[str, Any] = {}
    exec(compile(block, "docs/apis.md", "exec"), names)
    assert capsys.readouterr().out.count("Hello from the script.") == 2
    close = getattr(names["client"], "close", None)  # Ollama's client has none
    if close is not None:
        close()
