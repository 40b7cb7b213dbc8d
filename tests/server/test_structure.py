"""What an answer must be: response_format, structured_outputs, guided_*; compiled once, refused with the place."""

import asyncio
import json
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from octavo.errors import InvalidRequestError, TooComplexError
from octavo.sandbox.child import JOBS
from octavo.sandbox.pool import Sandbox
from octavo.server.api.structured_output import MAX_CACHED, MAX_CACHED_CHARACTERS, GrammarReader
from tests.grammar.random_walk import allows
from tests.server.fakes import FakeClient, Harness, make_text
from tests.server.test_reasoning import OPENS, saying

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "x", "schema": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": NAMED}


class ToolHere:
    """Does the jobs in this process: what they say is the same, and no process has to start for each case."""

    async def run(self, job: str, argument: Any, limit_s: float | None = None) -> object:
        return JOBS[job].run(argument)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    made = Harness()
    monkeypatch.setattr(made.context.grammars, "_sandbox", ToolHere())
    return made


@pytest.fixture
async def with_tool() -> AsyncIterator[Harness]:
    """A harness with the real sandbox process."""
    made = Harness()
    yield made
    await made.context.sandbox.close()


def grammar_of(harness: Harness) -> str:
    return harness.engine.requests[-1].params.grammar


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": FORMAT}, '{"a": 5}', '{"a": "5"}'),
        ({"response_format": {**FORMAT, "json_schema": {**NAMED, "strict": False, "description": "d"}}}, '{"a": 5}',
         "5"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, '{"a": 5}', "5"),
        ({"response_format": {"type": "json_object"}}, '{"x": [1, null]}', "[1]"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": 5}', '{"b": 5}'),
        ({"structured_outputs": {"json": SCHEMA}}, '{"a": 5}', '{"a":5}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 5}', "{}"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, '{"a":5}', '{"a": 5}'),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " {0,2}"}}, '{ "a":  5}', '{"a":   5}'),
        ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, "{}", "[]"),
        ({"structured_outputs": {"regex": "[a-c]{2}"}}, "ab", "abc"),
        ({"structured_outputs": {"choice": ["yes", "n\"o\n", "да"]}}, "n\"o\n", "no"),
        ({"structured_outputs": {"grammar": 'start: "a" b\nb: "b" | "c" b'}}, "accb", "a"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [b-d]+'}}, "abcd", "ae"),
        ({"guided_json": SCHEMA}, '{"a": 5}', "{}"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, '{"a":5}', '{"a": 5}'),
        ({"guided_regex": "x+"}, "xxx", "y"),
        ({"guided_choice": ["да"]}, "да", "нет"),
        ({"guided_grammar": 'start: /[0-9]+/'}, "12", "a"),
    ],
    ids=str,
)  # fmt: skip
async def test_P06_the_engine_is_given_the_compiled_grammar(
    harness: Harness, fields: dict[str, Any], good: str, bad: str
) -> None:
    for post in (harness.chat, harness.complete):
        response = await post(**fields)
        assert response.status_code == 200, response.text
        assert allows(grammar_of(harness), good) and not allows(grammar_of(harness), bad)


@pytest.mark.parametrize("value", [{"type": "text"}, None])
async def test_text_asks_for_nothing(harness: Harness, value: object) -> None:
    assert (await harness.chat(response_format=value)).status_code == 200
    assert grammar_of(harness) == "" and harness.context.sandbox.counters.starts == 0


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {}}, "response_format.type", "missing"),
        ({"response_format": "json"}, "response_format", "json"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "structural_tag"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema", "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
         "response_format.json_schema.schema", "JSON schema"),
        ({"response_format": {**FORMAT, "json_schema": {"schema": {"properties": {"t": {"uniqueItems": True}}}}}},
         "response_format.json_schema.schema", "#/properties/t/uniqueItems: uniqueItems is not supported"),
        ({"response_format": {**FORMAT, "json_schema": {"schema": {"type": "strin"}}}},
         "response_format.json_schema.schema", "#/type: 'strin' is not a type; give array"),
        ({"response_format": {**FORMAT, "json_schema": {"schema": DEEP}}}, "response_format.json_schema.schema",
         "32 deep"),
        ({"structured_outputs": {}}, "structured_outputs", "asks for nothing"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "does not support"),
        ({"structured_outputs": {"disable_additional_properties": True}},
         "structured_outputs.disable_additional_properties", "does not support"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "leave one of them out"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs.regex", "leave one"),
        ({"structured_outputs": {"json_object": True}, "guided_choice": ["a"]}, "guided_choice", "json_object"),
        ({"structured_outputs": {"json": '{"type":'}}, "structured_outputs.json", "is not JSON"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern",
         "JSON"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "structured_outputs.whitespace_pattern",
         "unclosed"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
         "structured_outputs.whitespace_pattern", "leave one"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "JSON schema"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "choice is empty"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]", "choice[1] is empty"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice", "1024"),
        ({"structured_outputs": {"choice": ["a" * 1000] * 80}}, "structured_outputs.choice", "65536"),
        ({"structured_outputs": {"grammar": "start: a"}}, "structured_outputs.grammar", '"a"'),
        ({"structured_outputs": {"grammar": "start: <|nope|>"}}, "structured_outputs.grammar", "<|nope|>"),
        ({"guided_regex": "a" * 2049}, "guided_regex", "2048"),
        ({"guided_regex": "(a{1000}){1000}"}, "guided_regex", "repeats too much"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json", "65536"),
        ({"guided_json": {"enum": list(range(40_000))}}, "guided_json", "65536"),
        ({"guided_json": {"$ref": "https://example.com/x.json"}}, "guided_json", "only references into the schema"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no finite value"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "guided_regex says when an answer ends"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "leave ignore_eos out"),
        ({"guided_regex": "a", "n": 2, "use_beam_search": True}, "use_beam_search", "beams"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
async def test_mistakes_name_the_field_and_the_place(
    harness: Harness, fields: dict[str, Any], param: str, words: str
) -> None:
    response = await harness.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert words in error["message"] and len(error["message"]) < 1200
    assert not harness.engine.requests, "nothing may reach the engine"


async def test_P06_grammars_are_compiled_in_the_tool_process(with_tool: Harness) -> None:
    sources: dict[str, Any] = {"regex": "a+", "choice": ["a"], "json": SCHEMA, "json_object": True}
    for name, source in {**sources, "grammar": 'start: "a" <s>'}.items():
        assert (await with_tool.complete(structured_outputs={name: source})).status_code == 200
    assert "<s>" in grammar_of(with_tool), "a special token of the model may be named"
    for name, source in {"regex": "(a", "grammar": "start: <|nope|>", "json": {"format": "iri", "not": {}}}.items():
        response = await with_tool.chat(structured_outputs={name: source})
        assert (response.status_code, response.json()["error"]["param"]) == (400, f"structured_outputs.{name}")
    counters = with_tool.context.sandbox.counters
    assert (counters.jobs, counters.refused, counters.starts, counters.deaths) == (8, 3, 1, 0)


async def test_R15_a_schema_that_takes_too_long_is_refused_in_time(with_tool: Harness) -> None:
    multiples = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23, 29)]}
    response = await with_tool.chat(guided_json=multiples)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "too_complex", "guided_json")
    assert with_tool.context.sandbox.counters.kills == 1
    assert (await with_tool.chat(guided_regex="a")).status_code == 200


async def test_an_engine_that_follows_no_grammar_refuses_the_field_that_asked(harness: Harness) -> None:
    harness.engine.submit_error = InvalidRequestError(
        "this engine holds outputs to no grammar; leave it out", "grammar"
    )
    for fields, param in (
        ({"response_format": FORMAT}, "response_format.json_schema.schema"),
        ({"guided_choice": ["a"]}, "guided_choice"),
    ):
        error = (await harness.chat(**fields)).json()["error"]
        assert (error["param"], error["code"]) == (param, "invalid_value") and "no grammar" in error["message"]


async def test_mistakes_are_told_the_same_way_behind_reasoning_and_beside_tools() -> None:
    harness = saying("{}", OPENS)
    bad = {"type": "array", "uniqueItems": True}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    try:
        for more in ({}, {"tools": [tool]}):
            for fields, param in (
                ({"response_format": {**FORMAT, "json_schema": {"schema": bad}}}, "response_format.json_schema.schema"),
                ({"structured_outputs": {"json": bad}}, "structured_outputs.json"),
                ({"guided_json": {}, "guided_whitespace_pattern": "("}, "guided_whitespace_pattern"),
            ):
                error = (await harness.chat(**fields, **more)).json()["error"]
                assert error["param"] == param and error["message"].startswith(param)
                assert "unclosed" in error["message"] or "#/uniqueItems: uniqueItems is not" in error["message"]
        tool["function"] = {"name": "f", "parameters": {"type": "object", "properties": {"a": bad}}}
        error = (await harness.chat(tools=[tool], tool_choice="required")).json()["error"]
        assert error["param"] == "tools[0].function.parameters" and "#/properties/a/uniqueItems" in error["message"]
    finally:
        await harness.context.sandbox.close()


async def test_those_who_ask_for_the_same_at_once_wait_for_one_compilation() -> None:
    tool = Sandbox()
    try:
        reader = GrammarReader(tool, make_text())
        grammars = await asyncio.gather(*(reader.read("regex", "a+") for _ in range(20)))
        assert len(set(grammars)) == 1 and tool.counters.jobs == 1
        assert await reader.read("regex", "a+") == grammars[0] and tool.counters.jobs == 1
        assert await reader.read("json_object", "") != await reader.read("json_object", "", "")
        assert tool.counters.jobs == 3
        first = asyncio.create_task(reader.read("regex", "b+"))
        second = asyncio.create_task(reader.read("regex", "b+"))
        await asyncio.sleep(0)
        first.cancel()
        assert "b+" in await second, "whoever goes away disturbs nobody else"
        with pytest.raises(TooComplexError):
            await reader.read("regex", "(a{1000}){1000}")
        with pytest.raises(TooComplexError):
            await reader.read("regex", "(a{1000}){1000}")
        assert tool.counters.refused == 2, "a refusal is not kept"
    finally:
        await tool.close()


class CountingTool:
    """Plays the sandbox process: every source compiles to itself."""

    def __init__(self) -> None:
        self.num_jobs = 0

    async def run(self, job: str, argument: Any, limit_s: float | None = None) -> object:
        self.num_jobs += 1
        return argument.source


async def test_the_cache_is_bounded_in_number_and_size() -> None:
    tool = CountingTool()
    reader = GrammarReader(tool, make_text())  # type: ignore[arg-type]
    for number in range(MAX_CACHED + 1):
        await reader.read("regex", str(number))
    await reader.read("regex", str(MAX_CACHED))
    assert tool.num_jobs == MAX_CACHED + 1
    await reader.read("regex", "0")
    assert tool.num_jobs == MAX_CACHED + 2, "the oldest one went"
    half = "x" * (MAX_CACHED_CHARACTERS // 2 - 10)
    for source in (half, half, half + "y", half + "y", half):
        await reader.read("regex", source)
    assert tool.num_jobs == MAX_CACHED + 5, "one goes for another"
    for _ in range(2):
        await reader.read("regex", half + "x" * 20)
    assert tool.num_jobs == MAX_CACHED + 7, "what is larger than the cache is not kept"


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str | None


class Home(BaseModel):
    """What people write: nested models, enums, optional values, unions told apart by a field."""

    colour: Colour
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]
    rooms: tuple[int, int] | None = None
    tags: dict[str, bool] = {}


HOME = (
    '{"colour": "red", "pets": [{"kind": "cat", "lives": 9}, {"kind": "dog", "name": null}], "rooms": null, "tags": {}}'
)


async def test_openais_client_parses_into_a_pydantic_model() -> None:
    harness = Harness(engine=FakeClient(HOME))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(harness.app))
    try:
        async with openai.AsyncOpenAI(api_key="none", base_url="http://localhost/v1", http_client=http) as client:
            completion = await client.chat.completions.parse(
                model="tiny", messages=[{"role": "user", "content": "a home"}], response_format=Home
            )
            home = completion.choices[0].message.parsed
            assert isinstance(home, Home) and home.pets[0] == Cat(kind="cat", lives=9)
            assert allows(grammar_of(harness), HOME) and not allows(grammar_of(harness), HOME.replace("red", "green"))
            async with client.chat.completions.stream(
                model="tiny", messages=[{"role": "user", "content": "a home"}], response_format=Home
            ) as stream:
                streamed = (await stream.get_final_completion()).choices[0].message.parsed
            assert streamed == home
    finally:
        await harness.context.sandbox.close()


async def test_a_retry_with_the_same_key_runs_once_and_another_structure_is_another_body(harness: Harness) -> None:
    key = {"idempotency-key": "k1"}
    first = await harness.chat(headers=key, response_format=FORMAT)
    again = await harness.chat(headers=key, response_format=FORMAT)
    assert first.json() == again.json() and len(harness.engine.requests) == 1
    other = await harness.chat(headers=key, response_format={"type": "json_object"})
    assert other.status_code in (400, 409, 422) and len(harness.engine.requests) == 1
