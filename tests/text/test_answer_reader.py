"""Content, reasoning and calls: told apart, however the text is split, with nothing lost."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import CALL_PARSERS, REASONING_PARSERS
from octavo.text.answer_format import AnswerFormat, CallArguments, CallBegin, Part, Reasoning, Text
from octavo.text.dialect import (
    CALL_ALIASES,
    CALL_MARKERS,
    CALL_READERS,
    REASONING_ALIASES,
    REASONING_TAGS,
    AnswerReader,
)

THINK = ("<think>", "</think>")
NAMES = ("f", "get_weather")
FORMATS = [AnswerFormat(calls=name, names=NAMES, texts=("f.s",)) for name in CALL_READERS]
Seen = list[tuple[str, Any]]


def read(known: AnswerFormat | None, pieces: list[str], seed: str = "seed") -> Seen:
    """The parts with those of the same kind joined: ("text", ...), ("thought", ...), ("call", [name, arguments])."""
    reader = AnswerReader(known, seed)
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.push(piece)
    parts += reader.finish()
    seen: Seen = []
    for part in parts:
        if isinstance(part, CallBegin):
            assert part.index == sum(kind == "call" for kind, _ in seen)
            seen.append(("call", [part.name, ""]))
        elif isinstance(part, CallArguments):
            seen[-1][1][1] += part.text
        else:
            kind = "text" if isinstance(part, Text) else "thought"
            assert part.text, "no part is empty"
            if seen and seen[-1][0] == kind:
                seen[-1] = (kind, seen[-1][1] + part.text)
            else:
                seen.append((kind, part.text))
    assert reader.has_calls == any(kind == "call" for kind, _ in seen)
    return seen


def of(name: str, **fields: Any) -> AnswerFormat:
    return AnswerFormat(calls=name, names=NAMES, texts=("f.s",), **fields)


def call(name: str, arguments: str) -> tuple[str, list[str]]:
    return "call", [name, arguments]


CASES: list[tuple[AnswerFormat, str, Seen]] = [
    (
        of("hermes"),
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"{", "b": [1, {"c": 2}]}}\n</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{}}</tool_call>\n',
        [("text", "Sure."), call("f", '{"a": "x}\\"{", "b": [1, {"c": 2}]}'), call("g", "{}")],
    ),
    (of("hermes"), '<tool_call>{"name": "f"}</tool_call>', [call("f", "{}")]),
    (of("hermes"), '<tool_call>{"arguments": {"a": 1}, "name": "f", "id": 7}</tool_call>', [call("f", '{"a": 1}')]),
    (of("hermes"), '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [call("f", '{"a": 1}')]),
    (of("hermes"), '<tool_call>{"name": "f", "arguments": null}</tool_call>ok', [call("f", "{}"), ("text", "ok")]),
    (of("hermes"), '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', [call("f", "{}"), call("g", "{}")]),
    (of("hermes"), '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', [call("f", '{"a": "x\\ny"}')]),
    (of("hermes"), '<tool_call>{"name": "f", "arguments": {"a": "cut of', [call("f", '{"a": "cut of')]),
    (
        of("hermes"),
        'a <tool_call>{"name": bad <tool_call>{"name": "f"}</tool_call> tail ',
        [("text", 'a <tool_call>{"name": bad'), call("f", "{}"), ("text", "tail ")],
    ),
    (
        of("hermes"),
        '<tool_call>{"name": "f", "arguments": {"a": 1}, garbage}</tool_call>',
        [call("f", '{"a": 1}'), ("text", "garbage}</tool_call>")],
    ),
    (of("llama3"), '{"name": "f", "parameters": {"a": 1}}', [call("f", '{"a": 1}')]),
    (of("llama3"), '<|python_tag|>{"name": "f", "parameters": {}}', [call("f", "{}")]),
    (of("llama3"), 'Hm. <|python_tag|>{"name": "f"}', [("text", "Hm."), call("f", "{}")]),
    (
        of("llama3"),
        '{"type": "function", "name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"x": 2}}\n',
        [call("f", "{}"), call("get_weather", '{"x": 2}')],
    ),
    (of("json"), '[{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]\nbye', [
        call("f", '{"a": 1}'), call("f", "{}"), ("text", "bye"),
    ]),
    (
        of("mistral"),
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "123456789"}, {"name": "g", "arguments": {}}]',
        [call("f", '{"a": 1}'), call("g", "{}")],
    ),
    (
        of("mistral"),
        'ok[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{"b": "[TOOL_CALLS]"}',
        [("text", "ok"), call("f", '{"a": 1}'), call("g", '{"b": "[TOOL_CALLS]"}')],
    ),
    (of("mistral"), '[TOOL_CALLS]f{"a": 1}', [call("f", '{"a": 1}')]),
    (
        of("qwen3_coder"),
        "Hi\n<tool_call>\n<function=f>\n<parameter=s>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
        "<parameter=t>\na<b\n\nc\n</parameter>\n</function>\n</tool_call>\n<function=g>\n</function>",
        [("text", "Hi"), call("f", '{"s": "12", "n": 12, "t": "a<b\\n\\nc"}'), call("g", "{}")],
    ),
    (of("qwen3_coder"), "<tool_call><function=f><parameter=s>cut of", [call("f", '{"s": "cut of')]),
    (AnswerFormat(THINK), "<think>\nHm, a < b.\n</think>\n\nYes.", [("thought", "Hm, a < b."), ("text", "Yes.")]),
    (AnswerFormat(THINK), "<think>\n\n</think>\n\nYes.", [("text", "Yes.")]),
    (AnswerFormat(THINK), "<think>cut </thi", [("thought", "cut </thi")]),
    (AnswerFormat(THINK, True), "Hm.\n</think>Yes </think>", [("thought", "Hm."), ("text", "Yes </think>")]),
    (AnswerFormat(THINK, True), "<think>\nHm.</think>Yes", [("thought", "Hm."), ("text", "Yes")]),
    (AnswerFormat(THINK, True), "</think>Yes", [("text", "Yes")]),
    (
        of("hermes", reasoning=THINK),
        '<think>A call? <tool_call></think>\n<tool_call>{"name": "f"}</tool_call>',
        [("thought", "A call? <tool_call>"), call("f", "{}")],
    ),
    (
        of("hermes", is_single=True),
        'So: <tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call> bye',
        [("text", "So:"), call("f", "{}")],
    ),
]  # fmt: skip
# Texts without a call or reasoning: they come out as they went in.
PLAIN: list[tuple[AnswerFormat | None, str]] = [
    (None, "<think>x</think> <tool_call>"),
    (of("hermes"), 'x <tool_call> {"foo": 1} </tool_call> y\n'),
    (of("hermes"), ' <tool_call>{"name": "f"'),
    (of("hermes"), " <tool_"),
    (of("hermes"), '<tool_call>["name"]</tool_call>'),
    (of("llama3"), '{"name": "Alice", "age": 3}'),
    (of("llama3"), '{"city": "Oslo"}\n'),
    (of("llama3"), '{"' + "x" * 300 + '": 1, "name": "f"}'),
    (of("llama3"), "<|python_tag|>print(1)"),
    (of("llama3"), 'See {"name": "f"}'),
    (of("json"), '[1, {"name": "f"}]'),
    (of("json"), "  \n"),
    (of("mistral"), "[TOOL_CALLS]f(x)"),
    (of("mistral"), "[TOOL_CALLS]f[ARGS]"),
    (of("mistral"), "a [TOOL_C"),
    (of("qwen3_coder"), "<tool_call>\n<funct"),
    (of("qwen3_coder"), '<tool_call>{"name": "f"}</tool_call>'),
    (AnswerFormat(THINK), " <thin"),
    (AnswerFormat(THINK), "Well <think>no</think>"),
]


@pytest.mark.parametrize(("known", "text", "seen"), CASES, ids=[f"{k.calls}-{i}" for i, (k, _, _) in enumerate(CASES)])
def test_parts_are_told_apart(known: AnswerFormat, text: str, seen: Seen) -> None:
    assert read(known, [text]) == seen
    assert read(known, list(text)) == seen
    for size in (2, 3, 5, 7, 11):
        assert read(known, [text[at : at + size] for at in range(0, len(text), size)]) == seen


@pytest.mark.parametrize(("known", "text"), PLAIN, ids=[f"{i}" for i in range(len(PLAIN))])
def test_what_is_no_call_comes_out_as_it_came(known: AnswerFormat | None, text: str) -> None:
    assert read(known, [text]) == [("text", text)]
    assert read(known, list(text)) == [("text", text)]


PIECES = sorted(
    {marker for markers in CALL_MARKERS.values() for marker in markers}
    | {*THINK, "<function=f>", "<parameter=s>", "</parameter>", "</function>", '{"name": "f", ', '"arguments": {', "}}"}
    | {
        '{"name": "f", "arguments": {"a": 1}}',
        "[",
        "]",
        "{",
        "}",
        '"',
        ",",
        ";",
        " ",
        "\n",
        "f",
        "\\",
        ":",
        "word ",
        "é",
    }
)
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
JSON_VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=3)
SOUP = st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(PIECES).map(lambda piece: piece[:-1])), max_size=14)
ANY_FORMAT = st.builds(
    AnswerFormat,
    reasoning=st.sampled_from([None, THINK]),
    starts_inside=st.booleans(),
    calls=st.sampled_from([None, *CALL_READERS]),
    names=st.sampled_from([(), NAMES]),
    texts=st.just(("f.s",)),
    is_single=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(ANY_FORMAT, SOUP, st.data())
def test_any_split_gives_the_same_parts(known: AnswerFormat, soup: list[str], data: st.DataObject) -> None:
    text = "".join(soup)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(known, [text])
    assert read(known, pieces) == whole
    assert read(known, list(text)) == whole


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FORMATS), SOUP)
def test_no_text_is_lost_where_nothing_is_called(known: AnswerFormat, soup: list[str]) -> None:
    text = "".join(soup)
    seen = read(known, [text])
    if not any(kind == "call" for kind, _ in seen):
        assert "".join(said for _, said in seen) == text


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([known for known in FORMATS if known.calls != "qwen3_coder"]),
    st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=4),
    st.integers(1, 9),
)
def test_arguments_come_out_as_they_were_written(known: AnswerFormat, arguments: dict[str, Any], size: int) -> None:
    written = json.dumps(arguments, ensure_ascii=False)
    key = "parameters" if known.calls == "llama3" else "arguments"
    text = f'{{"name": "f", "{key}": {written}}}'
    text = {"hermes": f"<tool_call>{text}</tool_call>", "mistral": f"[TOOL_CALLS][{text}]"}.get(known.calls or "", text)
    seen = read(known, [text[at : at + size] for at in range(0, len(text), size)])
    assert seen == [call("f", written)]
    assert json.loads(seen[0][1][1]) == arguments


def test_arguments_are_given_as_they_come() -> None:
    reader = AnswerReader(of("hermes"), "seed")
    assert reader.push('<tool_call>{"name": "f", "arguments"') == []
    begun = reader.push(': {"city": "Os')
    assert [type(part) for part in begun] == [CallBegin, CallArguments]
    assert begun[1] == CallArguments(0, '{"city": "Os')
    assert reader.push('lo"}') == [CallArguments(0, 'lo"}')]


def test_ids_of_calls_follow_from_the_answer() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}</tool_call>'

    def ids(known: AnswerFormat, seed: str) -> list[str]:
        parts = AnswerReader(known, seed).push(text)
        return [part.call_id for part in parts if isinstance(part, CallBegin)]

    first = ids(of("hermes"), "a:0")
    assert first == ids(of("hermes"), "a:0")
    assert len({*first, *ids(of("hermes"), "a:1")}) == 4
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", call_id) for call_id in first)
    [begin] = [p for p in AnswerReader(of("mistral"), "a").push('[TOOL_CALLS]f{"a":1}') if isinstance(p, CallBegin)]
    assert re.fullmatch(r"[0-9a-z]{9}", begin.call_id), "Mistral's templates take no other ids"


def test_reasoning_is_given_as_it_comes() -> None:
    reader = AnswerReader(AnswerFormat(THINK, True), "seed")
    assert reader.push("Let me ") == [Reasoning("Let me")]
    assert reader.push("see </") == [Reasoning(" see")]
    assert reader.push("think>\n") == []
    assert reader.push("So") == [Text("So")]


def test_the_settings_name_every_format() -> None:
    assert {*CALL_PARSERS} == {"auto", "none", *CALL_READERS, *CALL_ALIASES}
    assert {*REASONING_PARSERS} == {"auto", "none", *REASONING_TAGS, *REASONING_ALIASES}
