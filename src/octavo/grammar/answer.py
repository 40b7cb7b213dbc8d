"""The grammar of a whole answer: reasoning, followed by tool calls, by content of a given structure, or by either.

Owns: the grammar of calls in each format. Does not: parse calls (text/calls does), or bound the size of sources.
Invariant: text/calls parses every allowed output as calls whose arguments obey their schemas.
The source is the JSON text of an AnswerSource.
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
    """The allowed calls: at most `max_calls` calls of `tools`, which are (name, schema as JSON text)."""

    form: str
    tools: list[tuple[str, str]]
    max_calls: int = 1


class AnswerSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The source of an answer's grammar.

    `reasoning` is the pair of tags. `structure` is (kind of grammar, source, whitespace). `special` has the ids of
    the markers that are special tokens.
    """

    reasoning: tuple[str, str] | None = None
    starts_inside: bool = False
    calls: CallSource | None = None
    structure: tuple[str, str, str | None] | None = None
    special: dict[str, int] = {}


_SOURCE = msgspec.json.Decoder(AnswerSource)  # made here: the first use of a Struct is not safe for threads


class _CallFormat(msgspec.Struct, frozen=True):
    """The format of calls, as sequences of texts and markers.

    JSON is split into the same lexemes as in JSON schemas. The lexer does not reread the beginning of a longer lexeme,
    so otherwise calls could not be an alternative to a structure.
    """

    begin: tuple[str, ...]
    head: tuple[str, ...]
    tail: tuple[str, ...]
    between: tuple[str, ...]
    end: tuple[str, ...]


QUOTED, BARE = "<quoted name>", "<bare name>"  # placeholders for the function's name


def _object(arguments: str) -> tuple[str, ...]:
    return ("{", '"name"', ": ", QUOTED, ", ", json.dumps(arguments), ": ")


_CALL_FORMATS: dict[str, _CallFormat] = {
    "hermes": _CallFormat(
        begin=("<tool_call>", "\n"),
        head=_object("arguments"),
        tail=("}",),
        between=("\n", "</tool_call>", "\n", "<tool_call>", "\n"),
        end=("\n", "</tool_call>"),
    ),
    "llama3": _CallFormat((), _object("parameters"), ("}",), ("; ",), ()),
    "json": _CallFormat((), _object("arguments"), ("}",), ("; ",), ()),
    "mistral": _CallFormat(("[TOOL_CALLS]", "["), _object("arguments"), ("}",), (", ",), ("]",)),
    "mistral_named": _CallFormat(("[TOOL_CALLS]",), (BARE, "[ARGS]"), (), ("[TOOL_CALLS]",), ()),
}


def read_answer(source: str) -> AnswerSource:
    """Read the source of an answer. Raises InvalidRequestError."""
    try:
        return _SOURCE.decode(source)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequestError(f"the source of an answer is invalid: {error}") from None


def answer_grammars(
    source: str, compile_part: Callable[[str, str, str | None], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the list of grammars of an answer. `compile_part(kind, source, whitespace)` compiles one grammar.

    Raises InvalidRequestError.
    """
    answer = read_answer(source)
    writer = _LarkWriter(answer.special)
    rules: list[str] = []
    parts: list[dict[str, Any]] = []
    choices: list[str] = []
    if answer.calls is not None:
        choices.append("calls")
        _add_calls(answer.calls, writer, rules, parts, compile_part)
    if answer.structure is not None:
        choices.append("@structure")
        parts.append({**compile_part(*answer.structure), "name": "structure"})
    if not choices:
        raise InvalidRequestError("the source of an answer holds neither calls nor a structure")
    start = f"({' | '.join(choices)})"
    if answer.reasoning is not None:
        start = _reasoning(answer.reasoning, answer.starts_inside, writer, rules) + start
    return [{"lark_grammar": "\n".join((f"start: {start}", *rules)) + "\n"}, *parts]


class _LarkWriter:
    """Writes texts in Lark. Markers that are special tokens are written as ids."""

    def __init__(self, special: dict[str, int]) -> None:
        self.special = special

    def lark(self, *texts: str) -> str:
        """Return a sequence of texts and markers, in Lark."""
        return " ".join(f"<[{self.special[t]}]>" if t in self.special else json.dumps(t) for t in texts)


def _reasoning(tags: tuple[str, str], starts_inside: bool, writer: _LarkWriter, rules: list[str]) -> str:
    opening, closing = tags
    if closing in writer.special:
        rules.append(f"thought: /(?s:.*)/ {writer.lark(closing)}")
    else:
        rules.append(f"thought[suffix={json.dumps(closing)}]: /(?s:.*)/")
    rules.append(r"BLANK: /[ \n]{0,4}/")
    return "thought BLANK " if starts_inside else f"({writer.lark(opening)} thought BLANK)? "


def _add_calls(
    calls: CallSource,
    writer: _LarkWriter,
    rules: list[str],
    parts: list[dict[str, Any]],
    compile_part: Callable[[str, str, str | None], dict[str, Any]],
) -> None:
    named = calls.form == "mistral" and "[ARGS]" in writer.special
    form = _CALL_FORMATS.get("mistral_named" if named else calls.form)
    if form is None:
        raise InvalidRequestError(f"no grammar of calls {calls.form!r}; known are {', '.join(_CALL_FORMATS)}")
    alternatives = []
    for index, (name, schema) in enumerate(calls.tools):
        names = {QUOTED: json.dumps(name), BARE: name}
        head = writer.lark(*(names.get(text, text) for text in form.head))
        alternatives.append(" ".join(filter(None, (head, f"@arguments_{index}", writer.lark(*form.tail)))))
        try:
            part = compile_part("json_schema", closed(schema), None)
        except InvalidRequestError as error:
            path = f"tools[{index}].function.parameters"
            raise InvalidRequestError(f"{path}: {str(error).removeprefix('schema: ')}", path) from None
        parts.append({**part, "name": f"arguments_{index}"})
    rules.append("call: " + " | ".join(alternatives))
    more = f" ({writer.lark(*form.between)} call){{0,{calls.max_calls - 1}}}" if calls.max_calls > 1 else ""
    rules.append(" ".join(filter(None, ("calls:", writer.lark(*form.begin), f"call{more}", writer.lark(*form.end)))))


def closed(schema: str) -> str:
    """Return a tool's schema that forbids arguments that it does not name, since a model would invent some."""
    value = json.loads(schema)
    if not isinstance(value, dict) or "additionalProperties" in value or any(name in value for name in _CLOSED):
        return schema
    return json.dumps({"type": "object", "properties": {}, **value, "additionalProperties": False}, ensure_ascii=False)
