"""Compile a client's constraint on an output to the text that SamplingParams.grammar holds.

Owns: the kinds of sources and what each compiles to; a grammar that does not compile is refused with the reason.
Does not: bound the time or the size of a source (the sandbox process and server/bodies do), or know of a vocabulary
more than the names of its special tokens.
Invariants: equal kinds and sources give equal texts. The text is llguidance's own: JSON with "grammars".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import InvalidRequestError
from octavo.grammar.answer import answer_grammars
from octavo.grammar.dialects import ascii_digits, is_lark, with_escaped_lines
from octavo.grammar.json_schema import prepare, subschemas
from octavo.grammar.limits import grammar_error
from octavo.grammar.trial import Specials, fault_of

# No free whitespace: a small model, or one at a high temperature, would fill its tokens with it. As json.dumps writes.
JSON_OPTIONS: Mapping[str, object] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
COMPACT_OPTIONS: Mapping[str, object] = {"whitespace_flexible": False}
_MAX_PLACES = 256  # subschemas compiled one by one to find the faulty one; each takes a tenth of a millisecond
_UNSATISFIABLE = "Unsatisfiable schema"
_NAMES = {
    "json_schema": "schema",
    "json_object": "object",
    "regex": "expression",
    "choice": "choice",
    "lark": "grammar",
    "answer": "answer",
}


def compile_grammar(kind: str, source: str, whitespace: str | None = None, specials: Specials | None = None) -> str:
    """Compile a source of one of KINDS. Raises InvalidRequestError with what is wrong and where.

    "json_schema" takes a schema's JSON text, "json_object" nothing, "regex" an expression, "choice" a JSON list of
    strings, "lark" a grammar in llguidance's variant of Lark or in llama.cpp's GBNF. `whitespace` is for JSON: None
    for one space after , and :, "" for none, else an expression for what may be between the parts. `specials`
    are the special tokens that a Lark text may name.
    """
    if kind not in KINDS:
        raise InvalidRequestError(f"no kind of grammar {kind!r}; known are {', '.join(KINDS)}")
    if whitespace is not None and not kind.startswith("json"):
        raise InvalidRequestError(f"whitespace is given for a {kind}; it goes with JSON")
    text = KINDS[kind](source, whitespace)
    reason = fault_of(text, specials)
    if reason and kind.startswith("json"):
        where, reason = _place(json.loads(text)["grammars"][0]["json_schema"], reason)
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
        raise _refused("json_object", "it takes no source; give a json_schema to say which object")
    return _json_schema('{"type": "object"}', whitespace)


def _place(schema: dict[str, Any], reason: str) -> tuple[str, str]:
    """Return the place of the innermost schema that is faulty by itself, and what is wrong with it."""
    shared = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
    for where, each in list(subschemas(schema))[::-1][:_MAX_PLACES]:
        if isinstance(each, dict):
            found = fault_of(_top_level({"json_schema": {**each, **shared}}), num_walks=0)
            if found == reason or (found.startswith(_UNSATISFIABLE) and reason.startswith(_UNSATISFIABLE)):
                return where[:200], found
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
        text = any_to_lark(with_escaped_lines(source))
    except Exception as error:  # a shell: the converter raises bare Exceptions for faults of the text
        raise _refused("lark", str(error) or type(error).__name__) from None
    return _top_level({"lark_grammar": text})


def _answer(source: str, _: str | None) -> str:
    def part(kind: str, inner: str, whitespace: str | None) -> dict[str, Any]:
        [grammar] = json.loads(KINDS[kind](inner, whitespace))["grammars"]
        return dict(grammar)

    return _top_level(*answer_grammars(source, part))


def _top_level(*grammars: dict[str, object]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


KINDS: dict[str, Callable[[str, str | None], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
    "answer": _answer,
}
