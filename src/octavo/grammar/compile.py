"""Compile a client's constraint on an output to the text for SamplingParams.grammar.

Owns: the kinds of sources, the translation of common notations to llguidance's, the result of each kind, and
grammar_from for Python callers. A grammar that does not compile is refused with the reason.
Does not: bound the time or the size of a source (the sandbox process and server/api do), or know more of a vocabulary
than the names of its special tokens.
Invariants: equal kinds and sources give equal texts. The text is llguidance's own: JSON with "grammars".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.errors import InvalidRequestError
from octavo.grammar.answer import answer_grammars
from octavo.grammar.json_schema import prepare, subschemas
from octavo.grammar.limits import Specials, find_error, grammar_error

# No free whitespace: a small model, or any at a high temperature, would fill its tokens with it. As json.dumps writes.
JSON_OPTIONS: Mapping[str, object] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
COMPACT_OPTIONS: Mapping[str, object] = {"whitespace_flexible": False}
_MAX_PLACES = 256  # subschemas compiled one by one to find the faulty one, at a tenth of a millisecond each
_UNSATISFIABLE = "Unsatisfiable schema"
_NAMES = {
    "json_schema": "schema",
    "json_object": "object",
    "regex": "expression",
    "choice": "choice",
    "lark": "grammar",
    "answer": "answer",
}
_LARK_START = re.compile(r"^[ \t]*[?!]?start[ \t]*(?:\[[^\]\n]*\])?[ \t]*:(?!:)", re.MULTILINE)
_PIECE = re.compile(r"\\.|\[\^?|\]|[^\\\[\]]+", re.DOTALL)
_GBNF_PIECE = re.compile(r'#[^\n]*|\[(?:[^\]\\]|\\.)*\]|"(?:[^"\\]|\\.)*"', re.DOTALL)


def grammar_from(
    *,
    json_schema: object = None,
    json_object: bool = False,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    lark: str | None = None,
) -> str:
    """Return the grammar of one constraint, for SamplingParams(grammar=...).

    `json_schema` is a schema as a mapping or as JSON text, or a class with `model_json_schema()` such as a pydantic
    model. Raises InvalidRequestError unless exactly one argument is given, and for an invalid grammar.
    """
    given = {
        "json_schema": None if json_schema is None else _schema_text(json_schema),
        "json_object": "" if json_object else None,
        "regex": regex,
        "choice": None if choice is None else json.dumps(list(choice)),
        "lark": lark,
    }
    forms = [(kind, source) for kind, source in given.items() if source is not None]
    if len(forms) != 1:
        raise InvalidRequestError(f"{len(forms)} forms are given; give one of {', '.join(given)}", "grammar")
    return compile_grammar(*forms[0])


def _schema_text(schema: Any) -> str:
    if isinstance(schema, str):
        return schema
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, (Mapping, bool)):
        reason = f"json_schema is a {type(schema).__name__}; give a mapping, JSON text or a pydantic model"
        raise InvalidRequestError(reason, "grammar")
    return json.dumps(schema if isinstance(schema, bool) else dict(schema))


def compile_grammar(kind: str, source: str, whitespace: str | None = None, specials: Specials | None = None) -> str:
    """Compile a source of one of KINDS. Raises InvalidRequestError, which says what is wrong and where.

    "json_schema" takes a schema's JSON text, "json_object" an empty text, "regex" an expression, "choice" a JSON list
    of strings, "lark" a grammar in llguidance's variant of Lark or in llama.cpp's GBNF. `whitespace` is for JSON: None
    means one space after "," and ":", "" means none, and any other text is an expression for the whitespace between
    the parts. `specials` are the special tokens that a Lark text may name.
    """
    if kind not in KINDS:
        raise InvalidRequestError(f"no kind of grammar {kind!r}; known are {', '.join(KINDS)}")
    if whitespace is not None and not kind.startswith("json"):
        raise InvalidRequestError(f"whitespace is given for a {kind}; it is for JSON only")
    text = KINDS[kind](source, whitespace)
    reason = find_error(text, specials)
    if reason and kind.startswith("json"):
        where, reason = _find_place(json.loads(text)["grammars"][0]["json_schema"], reason)
        raise grammar_error(f"schema: {where}", reason, "schema")
    if reason:
        raise _refused(kind, reason)
    return text


def _refused(kind: str, reason: str) -> InvalidRequestError:
    return grammar_error(f"the {_NAMES[kind]} cannot be followed", reason)


def _json_schema(source: str, whitespace: str | None) -> str:
    try:
        schema = json.loads(source)
    except ValueError as error:
        raise _refused("json_schema", f"not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise _refused("json_schema", "a schema is an object, or true")
    options = JSON_OPTIONS if whitespace is None else COMPACT_OPTIONS
    if whitespace:
        options = {"whitespace_pattern": whitespace}
    return _top_level({"json_schema": {**prepare(schema), "x-guidance": options}})


def _json_object(source: str, whitespace: str | None) -> str:
    if source:
        raise _refused("json_object", "it has no source; give a json_schema to say which object")
    return _json_schema('{"type": "object"}', whitespace)


def _find_place(schema: dict[str, Any], reason: str) -> tuple[str, str]:
    """Return the place of the innermost schema that is faulty by itself, and its error."""
    shared = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
    for where, each in list(subschemas(schema))[::-1][:_MAX_PLACES]:
        if isinstance(each, dict):
            error = find_error(_top_level({"json_schema": {**each, **shared}}), num_walks=0)
            if error == reason or (error.startswith(_UNSATISFIABLE) and reason.startswith(_UNSATISFIABLE)):
                return where[:200], error
    return "#", reason


def _regex(source: str, _: str | None) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(ascii_digits(source))


def _choice(source: str, _: str | None) -> str:
    try:
        choices = json.loads(source)
    except ValueError as error:
        raise _refused("choice", f"not JSON: {error}") from None
    if not (isinstance(choices, list) and choices and all(isinstance(each, str) and each for each in choices)):
        raise _refused("choice", "give a list of at least one string, none of them empty")
    return _top_level({"lark_grammar": "start: " + " | ".join(json.dumps(each) for each in choices)})


def _lark(source: str, _: str | None) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    if is_lark(source):
        return _top_level({"lark_grammar": source})
    try:
        text = any_to_lark(escape_line_breaks(source))
    except Exception as error:  # a shell: the converter raises bare Exceptions for errors in the text
        raise _refused("lark", str(error) or type(error).__name__) from None
    return _top_level({"lark_grammar": text})


def _answer(source: str, _: str | None) -> str:
    def part(kind: str, inner: str, whitespace: str | None) -> dict[str, Any]:
        [grammar] = json.loads(KINDS[kind](inner, whitespace))["grammars"]
        return dict(grammar)

    return _top_level(*answer_grammars(source, part))


def _top_level(*grammars: dict[str, object]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def ascii_digits(pattern: str) -> str:
    r"""Replace `\d` by [0-9], which authors mean; llguidance's `\d` matches the digits of all scripts.

    `\d` is kept in a negated class, so the new expression matches no text that the old one does not match.
    """
    pieces: list[str] = []
    negations: list[bool] = []  # whether each enclosing class is negated
    for piece in _PIECE.findall(pattern):
        if piece.startswith("["):
            negations.append(piece == "[^")
        elif piece == "]" and negations and pieces[-1] not in ("[", "[^"):  # a class's first "]" is a character
            negations.pop()
        elif piece == r"\d" and not any(negations):
            piece = "0-9" if negations else "[0-9]"
        pieces.append(piece)
    return "".join(pieces)


def is_lark(source: str) -> bool:
    """Return True if a grammar has a start rule in Lark's syntax."""
    return _LARK_START.search(source) is not None


def escape_line_breaks(gbnf: str) -> str:
    r"""Return the grammar with each line break in a quoted text replaced by \n."""

    def escaped(match: re.Match[str]) -> str:
        piece = match[0]
        return piece.replace("\r", r"\r").replace("\n", r"\n") if piece.startswith('"') else piece

    return _GBNF_PIECE.sub(escaped, gbnf)


KINDS: dict[str, Callable[[str, str | None], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
    "answer": _answer,
}
