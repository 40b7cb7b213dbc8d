"""Grammars of whole answers: what they allow is read back as it was meant; nothing else is allowed."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tests.grammar.random_walk import walk
from tests.grammar.validity import Validity

from octavo.errors import InvalidRequestError
from octavo.grammar.compile import compile_grammar
from octavo.text.answer_format import AnswerFormat, CallArguments, CallBegin, Reasoning, Text
from octavo.text.dialect import AnswerReader

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "$defs": {"days": {"type": "integer"}},
}
TOOLS = [["weather", json.dumps(CITY)], ["weather_now", '{"type": "object", "properties": {}}']]
STRUCTURE = ["json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}', None]
THINK = ("<think>", "</think>")
SPECIAL = {"[TOOL_CALLS]": 300, "[ARGS]": 301, "</think>": 302}
WRITTEN = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather_now", "arguments": {}}\n</tool_call>'
    ),
    "llama3": (
        '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}; '
        '{"name": "weather_now", "parameters": {}}'
    ),
    "json": '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}; {"name": "weather_now", "arguments": {}}',
    "mistral": (
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}, '
        '{"name": "weather_now", "arguments": {}}]'
    ),
}  # fmt: skip


class Bytes:
    """A vocabulary of the bytes, an end, and special tokens."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self) -> None:
        names = {number: name.encode() for name, number in SPECIAL.items()}
        self.tokens = [names.get(i, bytes((i,)) if i < 256 else f"<{i}>".encode()) for i in range(303)]
        self.special_token_ids = [256, *SPECIAL.values()]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


VOCABULARY = LLTokenizer(TokenizerWrapper(Bytes()))


def compiled(**source: Any) -> str:
    return compile_grammar("answer", json.dumps(source))


def allows(grammar: str, *pieces: str | int) -> bool:
    """Whether an answer of these texts and special tokens is whole."""
    ids = [i for piece in pieces for i in ([piece] if isinstance(piece, int) else piece.encode())]
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def calls_of(form: str, text: str) -> list[tuple[str, Any]]:
    reader = AnswerReader(AnswerFormat(calls=form, names=("weather", "weather_now")), "seed")
    parts = [*reader.push(text), *reader.finish()]
    assert not [part for part in parts if isinstance(part, Text | Reasoning)]
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    arguments = ["".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == i) for i in range(9)]
    return [(name, json.loads(text)) for name, text in zip(names, arguments, strict=False)]


@pytest.mark.parametrize("form", WRITTEN)
def test_what_is_allowed_is_read_as_calls(form: str) -> None:
    text = WRITTEN[form]
    grammar = compiled(calls={"form": form, "tools": TOOLS, "max_calls": 2})
    assert allows(grammar, text)
    assert calls_of(form, text) == [("weather", {"city": "Oslo", "days": 2}), ("weather_now", {})]
    single = compiled(calls={"form": form, "tools": TOOLS})
    assert not allows(single, text), "one call, unless more are asked for"
    for wrong in (
        "Hello",
        text.replace('"city"', '"town"'),
        text.replace("2", '"2"'),
        text.replace('"weather"', '"rain"'),
        text.replace('": {}', '": {"x": 1}'),
        text[:-3],
    ):
        assert not allows(grammar, wrong), wrong


@pytest.mark.parametrize("form", WRITTEN)
def test_whatever_is_allowed_is_read_as_valid_calls(form: str) -> None:
    grammar = compiled(calls={"form": form, "tools": TOOLS, "max_calls": 3})
    validity = {name: Validity({**json.loads(schema), "additionalProperties": False}) for name, schema in TOOLS}
    texts = [said.decode(errors="replace") for seed in range(40) if (said := walk(grammar, seed)) is not None]
    assert len(texts) > 20
    for text in texts:
        calls = calls_of(form, text)
        assert 1 <= len(calls) <= 3, text
        assert [validity[name].fault(json.dumps(arguments)) for name, arguments in calls] == [""] * len(calls), text


@pytest.mark.parametrize("form", WRITTEN)
def test_reasoning_comes_first_and_a_structure_is_an_alternative(form: str) -> None:
    parts = {"calls": {"form": form, "tools": TOOLS, "max_calls": 2}, "structure": STRUCTURE, "reasoning": THINK}
    inside, before = compiled(**parts, starts_inside=True), compiled(**parts)
    for answer in (WRITTEN[form], '{"a": 1}'):
        assert allows(inside, 'Hm, <tool_call> { "a"\n</think>\n\n' + answer)
        assert not allows(inside, answer)
        assert allows(before, "<think>\nHm</think>" + answer)
        assert allows(before, answer)
    assert not allows(before, '{"a": "x"}')


def test_markers_that_are_special_tokens_are_those_tokens() -> None:
    calls = {"form": "mistral", "tools": TOOLS, "max_calls": 2}
    grammar = compiled(calls=calls, special={"[TOOL_CALLS]": 300})
    assert allows(grammar, 300, WRITTEN["mistral"].removeprefix("[TOOL_CALLS]"))
    assert not allows(grammar, WRITTEN["mistral"])
    named = compiled(calls=calls, special=SPECIAL, reasoning=("[THINK]", "</think>"), starts_inside=True)
    assert allows(named, "Hm", 302, "\n", 300, "weather", 301, '{"city": "Oslo"}', 300, "weather_now", 301, "{}")


def test_a_schema_that_cannot_be_promised_is_named() -> None:
    tools = [TOOLS[0], ["f", '{"type": "object", "properties": {"x": {"not": {}}}}']]
    with pytest.raises(InvalidRequestError, match="properties/x/not: not is not supported") as caught:
        compiled(calls={"form": "hermes", "tools": tools})
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    "source",
    [{}, {"calls": {"form": "x", "tools": TOOLS}}, {"calls": 1}, {"structure": STRUCTURE, "more": 1}],
)
def test_a_source_that_makes_no_sense_is_refused(source: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        compiled(**source)
