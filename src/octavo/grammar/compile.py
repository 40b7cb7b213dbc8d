"""From what a client asks an output to be to the one text that SamplingParams.grammar holds.

Owns: the kinds of sources and what each compiles to; a grammar that does not compile is refused with the reason.
Does not: bound the time or the size of a source (the tool process and server/bodies do), or know a vocabulary:
special tokens that a Lark text names are looked up by the engine.
Invariants: equal kinds and sources give equal texts. The text is llguidance's own: JSON with "grammars".
"""

from __future__ import annotations

import json
from collections.abc import Callable

from octavo.errors import InvalidRequestError

# No free whitespace: a small or hot model would fill its tokens with it. json.dumps writes the same.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_REASON_CHARACTERS = 600


def compile_grammar(kind: str, source: str) -> str:
    """Compile a source of one of KINDS. Raises InvalidRequestError with what is wrong and where.

    "json_schema" takes a schema's JSON text, "json_object" nothing, "regex" an expression, "choice" a JSON list of
    strings, "lark" a grammar in llguidance's variant of Lark or in llama.cpp's GBNF.
    """
    if kind not in KINDS:
        raise InvalidRequestError(f"no kind of grammar {kind!r}; known are {', '.join(KINDS)}")
    text = KINDS[kind](source)
    from llguidance import LLMatcher  # a tenth of a second, and seven megabytes, only where grammars are made

    has_error, messages = LLMatcher.validate_grammar_with_warnings(text)
    if has_error:
        raise _refused(kind, messages[0])
    return text


def _refused(kind: str, reason: str) -> InvalidRequestError:
    reason = reason.strip()
    if len(reason) > MAX_REASON_CHARACTERS:
        reason = reason[:MAX_REASON_CHARACTERS] + "..."
    return InvalidRequestError(f"the {kind.replace('_', ' ')} cannot be followed: {reason}")


def _json_schema(source: str) -> str:
    try:
        schema = json.loads(source)
    except ValueError as error:
        raise _refused("json_schema", f"not JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise _refused("json_schema", "a schema is an object, or true")
    if not isinstance(schema, dict):
        schema = {} if schema else {"not": {}}
    return _top_level({"json_schema": {**schema, "x-guidance": JSON_OPTIONS}})


def _json_object(source: str) -> str:
    if source:
        raise _refused("json_object", "it takes no source; give a json_schema to say which object")
    return _json_schema('{"type": "object"}')


def _regex(source: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(source)


def _choice(source: str) -> str:
    try:
        choices = json.loads(source)
    except ValueError as error:
        raise _refused("choice", f"not JSON: {error}") from None
    if not (isinstance(choices, list) and choices and all(isinstance(each, str) and each for each in choices)):
        raise _refused("choice", "give a list of at least one string, none of them empty")
    return _top_level({"lark_grammar": "start: " + " | ".join(json.dumps(each) for each in choices)})


def _lark(source: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        text = any_to_lark(source)
    except Exception as error:  # a shell: the converter raises bare Exceptions for what is wrong with the text
        raise _refused("lark", str(error) or type(error).__name__) from None
    return _top_level({"lark_grammar": text})


def _top_level(grammar: dict[str, object]) -> str:
    return json.dumps({"grammars": [grammar]}, ensure_ascii=False)


KINDS: dict[str, Callable[[str], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
}
