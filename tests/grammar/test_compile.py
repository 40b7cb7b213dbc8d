"""Sources compile to one text each; what cannot be followed is refused with the reason."""

import json

import pytest
from llguidance import LLMatcher

from octavo.errors import InvalidRequestError
from octavo.grammar.compile import KINDS, compile_grammar
from octavo.grammar.limits import MAX_REASON_CHARACTERS

SOURCES = {
    "json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
    "json_object": "",
    "regex": r"\d{4}-\d\d",
    "choice": '["yes", "no", "\\u00e4 \\" \\\\ /"]',
    "answer": '{"structure": ["regex", "a+", null]}',
    "lark": 'start: "a" NUMBER\nNUMBER: /[0-9]+/',
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_source_compiles_to_the_engines_own_text(kind: str) -> None:
    text = compile_grammar(kind, SOURCES[kind])
    assert "grammars" in json.loads(text)
    assert LLMatcher.validate_grammar(text) == ""
    assert text == compile_grammar(kind, SOURCES[kind])


def test_gbnf_is_taken_as_lark_is() -> None:
    assert LLMatcher.validate_grammar(compile_grammar("lark", 'root ::= "a" | "b" [0-9]+')) == ""


def test_true_is_a_schema() -> None:
    assert LLMatcher.validate_grammar(compile_grammar("json_schema", "true")) == ""


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("json_schema", '{"type": "object"', "not JSON"),
        ("json_schema", "[1]", "a schema is an object"),
        ("json_schema", '{"type": "foo"}', "foo"),
        ("json_schema", '{"$ref": "#/x"}', "/x"),
        ("json_schema", '{"uniqueItems": true, "type": "array"}', "uniqueItems"),
        ("json_schema", "false", "allows no value"),
        ("json_object", "{}", "takes no source"),
        ("regex", "[", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("choice", "[]", "at least one"),
        ("choice", '["a", ""]', "none of them empty"),
        ("choice", '["a", 1]', "list"),
        ("choice", "a", "not JSON"),
        ("lark", 'start: "a" b', '"b"'),
        ("lark", "", "cannot be followed"),
        ("lark", "}{", "cannot be followed"),
        ("yaml", "", "json_schema"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(kind: str, source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compile_grammar(kind, source)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < MAX_REASON_CHARACTERS + 100
