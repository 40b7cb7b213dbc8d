"""Forms given in Python are the grammars that the same sources compile to."""

import json
from typing import Any

import pydantic
import pytest

import octavo
from octavo.errors import InvalidRequestError
from octavo.grammar.compile import compile_grammar, grammar_from


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.mark.parametrize(
    ("form", "kind", "source"),
    [
        ({"json_schema": {"type": "integer"}}, "json_schema", '{"type": "integer"}'),
        ({"json_schema": '{"type": "integer"}'}, "json_schema", '{"type": "integer"}'),
        ({"json_schema": Person}, "json_schema", json.dumps(Person.model_json_schema())),
        ({"json_schema": True}, "json_schema", "true"),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ("yes", "no")}, "choice", '["yes", "no"]'),
        ({"lark": 'start: "a"'}, "lark", 'start: "a"'),
    ],
)
def test_a_form_is_what_its_source_compiles_to(form: dict[str, Any], kind: str, source: str) -> None:
    assert grammar_from(**form) == compile_grammar(kind, source)
    assert octavo.SamplingParams(grammar=octavo.grammar_from(**form)).grammar


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({}, "0 forms"),
        ({"regex": "a", "choice": ["b"]}, "2 forms"),
        ({"json_schema": 5}, "json_schema is a int"),
        ({"regex": "["}, "unclosed"),
    ],
)
def test_what_is_no_form_is_refused(form: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        grammar_from(**form)
