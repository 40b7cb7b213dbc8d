"""The grammar of a whole answer: reasoning first, then tool calls, or content of a given structure, or either.

Owns: the text of calls in each format, as a grammar. Does not: parse calls (text/calls does) or bound sources.
Invariant: text/calls parses every allowed output as calls whose arguments obey their schemas.
The source is the JSON text of an object: see AnswerSource.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.errors import InvalidRequestError

_CLOSED = (
    "allOf", "anyOf", "oneOf", "enum", "const", "$ref", "patternProperties", "unevaluatedProperties", "not", "if",
)  # fmt: skip


class CallSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The allowed calls: `tools` are names and schemas (JSON text); at most `most` calls are made."""

    form: str
    tools: list[tuple[str, str]]
    most: int = 1


class AnswerSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The source of an answer's grammar. `reasoning` are tags; `structure` is a kind of grammar, its source and its

    whitespace. `special` are the ids of the markers that are special tokens.
    """

    reasoning: tuple[str, str] | None = None
    starts_inside: bool = False
    calls: CallSource | None = None
    structure: tuple[str, str, str | None] | None = None
    special: dict[str, int] = {}


class _Form(msgspec.Struct, frozen=True):
    """The format of calls, as sequences of texts and markers.

    JSON is split into the same lexemes as in JSON schemas; otherwise calls could not be an alternative to a structure,
    because the lexer does not read the beginning of a longer lexeme again.
    """

    begin: tuple[str, ...]
    head: tuple[str, ...]
    tail: tuple[str, ...]
    between: tuple[str, ...]
    end: tuple[str, ...]


QUOTED, BARE = "<quoted name>", "<bare name>"  # placeholders for the function's name


def _object(arguments: str) -> tuple[str, ...]:
    return ("{", '"name"', ": ", QUOTED, ", ", json.dumps(arguments), ": ")


_FORMS: dict[str, _Form] = {
    "hermes": _Form(
        begin=("<tool_call>", "\n"),
        head=_object("arguments"),
        tail=("}",),
        between=("\n", "</tool_call>", "\n", "<tool_call>", "\n"),
        end=("\n", "</tool_call>"),
    ),
    "llama3": _Form((), _object("parameters"), ("}",), ("; ",), ()),
    "json": _Form((), _object("arguments"), ("}",), ("; ",), ()),
    "mistral": _Form(("[TOOL_CALLS]", "["), _object("arguments"), ("}",), (", ",), ("]",)),
    "mistral_named": _Form(("[TOOL_CALLS]",), (BARE, "[ARGS]"), (), ("[TOOL_CALLS]",), ()),
}


def read_answer(source: str) -> AnswerSource:
    """Read the source of an answer. Raises InvalidRequestError."""
    try:
        return msgspec.json.decode(source, type=AnswerSource)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequestError(f"the source of an answer makes no sense: {error}") from None


def answer_grammars(
    source: str, compile_part: Callable[[str, str, str | None], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Make the list of grammars of an answer; `compile_part` compiles a kind, its source and its whitespace.

    Raises InvalidRequestError.
    """
    asked = read_answer(source)
    marks = _Marks(asked.special)
    rules: list[str] = []
    parts: list[dict[str, Any]] = []
    choices: list[str] = []
    if asked.calls is not None:
        choices.append("calls")
        _add_calls(asked.calls, marks, rules, parts, compile_part)
    if asked.structure is not None:
        choices.append("@structure")
        parts.append({**compile_part(*asked.structure), "name": "structure"})
    if not choices:
        raise InvalidRequestError("the source of an answer holds neither calls nor a structure")
    start = f"({' | '.join(choices)})"
    if asked.reasoning is not None:
        start = _reasoning(asked.reasoning, asked.starts_inside, marks, rules) + start
    return [{"lark_grammar": "\n".join((f"start: {start}", *rules)) + "\n"}, *parts]


class _Marks:
    """Writer of texts in Lark; markers that are special tokens are written as ids."""

    def __init__(self, special: dict[str, int]) -> None:
        self.special = special

    def lark(self, *texts: str) -> str:
        """Return a sequence of texts and markers, in Lark."""
        return " ".join(f"<[{self.special[t]}]>" if t in self.special else json.dumps(t) for t in texts)


def _reasoning(tags: tuple[str, str], starts_inside: bool, marks: _Marks, rules: list[str]) -> str:
    opening, closing = tags
    if closing in marks.special:
        rules.append(f"thought: /(?s:.*)/ {marks.lark(closing)}")
    else:
        rules.append(f"thought[suffix={json.dumps(closing)}]: /(?s:.*)/")
    rules.append(r"BLANK: /[ \n]{0,4}/")
    return "thought BLANK " if starts_inside else f"({marks.lark(opening)} thought BLANK)? "


def _add_calls(
    calls: CallSource,
    marks: _Marks,
    rules: list[str],
    parts: list[dict[str, Any]],
    compile_part: Callable[[str, str, str | None], dict[str, Any]],
) -> None:
    named = calls.form == "mistral" and "[ARGS]" in marks.special
    form = _FORMS.get("mistral_named" if named else calls.form)
    if form is None:
        raise InvalidRequestError(f"no grammar of calls {calls.form!r}; known are {', '.join(_FORMS)}")
    one = []
    for index, (name, schema) in enumerate(calls.tools):
        spelled = {QUOTED: json.dumps(name), BARE: name}
        head = marks.lark(*(spelled.get(text, text) for text in form.head))
        one.append(" ".join(filter(None, (head, f"@arguments_{index}", marks.lark(*form.tail)))))
        try:
            part = compile_part("json_schema", closed(schema), None)
        except InvalidRequestError as error:
            place = f"tools[{index}].function.parameters"
            raise InvalidRequestError(f"{place}: {str(error).removeprefix('schema: ')}", place) from None
        parts.append({**part, "name": f"arguments_{index}"})
    rules.append("call: " + " | ".join(one))
    more = f" ({marks.lark(*form.between)} call){{0,{calls.most - 1}}}" if calls.most > 1 else ""
    rules.append(" ".join(filter(None, ("calls:", marks.lark(*form.begin), f"call{more}", marks.lark(*form.end)))))


def closed(schema: str) -> str:
    """Return a tool's schema which forbids arguments that it does not name: a model would invent some."""
    value = json.loads(schema)
    if not isinstance(value, dict) or "additionalProperties" in value or any(name in value for name in _CLOSED):
        return schema
    return json.dumps({"type": "object", "properties": {}, **value, "additionalProperties": False}, ensure_ascii=False)
