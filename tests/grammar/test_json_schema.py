"""Schemas made ready for the compiler: what they allow is valid, and what cannot be promised is refused."""

import json
import re
from datetime import date
from decimal import Decimal
from typing import Any

import jsonschema
import jsonschema_rs
import pytest
from tests.grammar.random_walk import allows, walk

from octavo.errors import InvalidRequestError
from octavo.grammar.compile import compile_grammar
from octavo.grammar.json_schema import EQUIVALENT_PATTERNS, FORMAT_PATTERNS, prepare
from octavo.grammar.schema_facts import SchemaFacts, json_key

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "puppy"]}}, "required": ["kind"]}
PETS = {"$defs": {"Cat": CAT, "Dog": DOG}, "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                       "required": ["value"], "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip


def compiled(schema: object) -> str:
    return compile_grammar("json_schema", json.dumps(schema))


FAIR: list[Any] = [
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "date", "pattern": "^2"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "email", "maxLength": 40},
    {"type": "string", "format": "hostname", "maxLength": 40},
    {"type": "string", "format": "password", "maxLength": 5},
    {"type": "integer", "format": "int32", "minimum": -5, "exclusiveMaximum": 1000},
    {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3, "exclusiveMinimum": True,
     "maximum": 5},
    {"type": "number", "multipleOf": 0.25, "minimum": -3, "maximum": 9},
    {"type": ["string", "null", "boolean"], "maxLength": 4, "pattern": "^[a-z]*$"},
    {"type": "array", "uniqueItems": False, "items": {"enum": [1, "two", None, {"three": [3]}]}, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "é\n\"😀"}], "items": False, "minItems": 2},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}, "minProperties": 1,
     "maxProperties": 3},
    {"type": "object", "patternProperties": {"^[a-c]{1,3}$": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}, "propertyNames": {"$ref": "#/$defs/C"},
     "$defs": {"C": {"enum": ["red", "blue"], "title": "C", "type": "string"}}},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,4}$"}, "additionalProperties": {"type": "null"},
     "maxProperties": 3},
    {"type": "object", "propertyNames": {"format": "uuid"}, "additionalProperties": {"type": "null"},
     "maxProperties": 2},
    {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": {"type": "null"},
     "maxProperties": 2},
    {"oneOf": [{"const": 1, "title": "one"}, {"const": 2, "title": "two"}, {"const": "1"}]},
    {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "Age"},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 5}, {"pattern": "^a"}]},
    PETS,
    {"type": "array", "items": {"oneOf": [{"$ref": "#/$defs/Cat"}, {"type": "null"}]}, "$defs": {"Cat": CAT}},
    TREE,
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]},
]  # fmt: skip


def as_read(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)  # or multipleOf would be asked of binary fractions


@pytest.mark.parametrize("schema", FAIR, ids=lambda schema: json.dumps(schema)[:60])
def test_whatever_is_allowed_is_valid(schema: Any) -> None:
    grammar = compiled(schema)
    ours = jsonschema.Draft202012Validator(
        as_read(json.dumps(schema).replace('"exclusiveMinimum": true', '"not": {"const": 3}')),
        format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
    )
    theirs = jsonschema_rs.validator_for(schema, validate_formats=True, ignore_unknown_formats=True)
    num_ended = 0
    for seed in range(12):
        said = walk(grammar, seed)
        if said is not None:
            num_ended += 1
            ours.validate(as_read(said.decode()))
            theirs.validate(json.loads(said))
    assert num_ended >= 6, "the walk itself must not be the reason that nothing was found wrong"


@pytest.mark.parametrize(
    ("schema", "place", "remedy"),
    [
        ({"properties": {"a/b": {"items": {"not": {"type": "string"}}}}}, "#/properties/a~1b/items/not", "anyOf"),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems", "check the answer"),
        ({"anyOf": [{}, {"contains": {"type": "null"}}]}, "#/anyOf/1/contains", "prefixItems"),
        ({"if": {}, "then": {}}, "#/if", "anyOf"),
        ({"$defs": {"x": {"propertyNames": {"minLength": 3}}}, "type": "null"}, "#/$defs/x/propertyNames", "pattern"),
        ({"properties": {"abc": {}}, "propertyNames": {"pattern": "^a"}}, "#/propertyNames", "without properties"),
        ({"properties": {"x": {"format": "idn-email"}}}, "#/properties/x/format", "pattern"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf", "anyOf"),
        ({"oneOf": [{"const": 1}, {"enum": [3, 1.0]}]}, "#/oneOf", "schemas 0 and 1"),
        ({"oneOf": [DOG, DOG]}, "#/oneOf", "const of its own"),
        ({"type": "object", "minProperties": 3, "required": ["a"]}, "#/minProperties", "required"),
        ({"x-guidance": {"lenient": True}}, "#/x-guidance", "beside"),
        (False, "#", "no value"),
        ({"$ref": "#"}, "#", "no finite value"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#", "no finite value"),
        ({"properties": {"a": {"type": "array", "items": {"$ref": "#/properties/a"}, "minItems": 1}}},
         "#/properties/a", "no finite value"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}},
         "#/anyOf/1", "no finite value"),
        ({"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 2}}, "required": ["a"], "type": "object"},
         "#/properties/a", "minimum (5) is greater than maximum (2)"),
        ({"enum": [1, {"a": [2**53 + 1]}]}, "#/enum", "as a string"),
        ({"type": "integer", "minimum": 2**60}, "#/minimum", "53 bits"),
        ({"items": {"type": "string", "pattern": "a^b"}}, "#/items", "a^b"),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, "#", "required"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_promised_is_refused_with_its_place(schema: Any, place: str, remedy: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiled(schema)
    assert caught.value.param == "schema"
    assert str(caught.value).startswith(f"schema: {place}: ") and remedy in str(caught.value)


@pytest.mark.parametrize(
    ("text", "is_date"),
    [("2024-02-29", True), ("2023-02-29", False), ("1900-02-29", False), ("2000-02-29", True), ("2024-04-31", False),
     ("2024-12-31", True), ("0000-01-01", False), ("2024-13-01", False), ("0004-02-29", True)],
)  # fmt: skip
def test_dates_know_the_calendar(text: str, is_date: bool) -> None:
    assert allows(compiled({"type": "string", "format": "date"}), json.dumps(text)) is is_date


def test_every_day_of_the_calendar_is_a_date_and_no_other() -> None:
    pattern = compile_grammar("regex", FORMAT_PATTERNS["date"][0].removeprefix("^").removesuffix("$"))
    for year in (1, 4, 100, 400, 1999, 2000, 2100, 2024, 9999):
        for month in range(0, 14):
            for day in range(27, 33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    is_date = date.fromisoformat(text).isoformat() == text
                except ValueError:
                    is_date = False
                assert allows(pattern, text) is is_date, text


def test_the_decimals_of_pydantic_are_read_without_their_look_ahead() -> None:
    [(given, made)] = EQUIVALENT_PATTERNS.items()
    grammar = compiled({"type": "string", "pattern": given})
    for text in ("1", "-1.", "+.5", "007.50", "", ".", "-", "+.", "1.2.3", "1e5", "--1"):
        is_decimal = re.search(given, text) is not None
        assert (re.search(made, text) is not None) is is_decimal
        assert allows(grammar, json.dumps(text)) is is_decimal, text


def test_bounds_of_64_bits_are_drawn_in_to_what_is_exact() -> None:
    grammar = compiled({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1})
    for number, is_allowed in ((0, True), (2**53, True), (-(2**53), True), (2**53 + 2, False), (2**63, False)):
        assert allows(grammar, str(number)) is is_allowed


def test_whitespace_is_one_space_none_or_as_asked() -> None:
    source = '{"type": "object", "properties": {"a": {"type": "array"}, "b": {}}, "required": ["a", "b"]}'
    spaced, compact, wide = '{"a": [1, 2], "b": {}}', '{"a":[1,2],"b":{}}', '{ "a":  [1 ,2],\n "b": {} }'
    for whitespace, allowed in ((None, spaced), ("", compact), (r"[ \n]{1,2}", wide)):
        grammar = compile_grammar("json_schema", source, whitespace)
        found = [text for text in (spaced, compact, wide) if allows(grammar, text)]
        assert allowed in found and (whitespace or len(found) == 1), (whitespace, found)
    with pytest.raises(InvalidRequestError, match="is for JSON only"):
        compile_grammar("regex", "a", "")


def test_notes_are_left_out_of_the_grammar_but_not_properties_of_their_names() -> None:
    schema = {"title": "T", "description": "long", "type": "object", "properties": {"title": {"type": "null"}}}
    assert prepare(schema) == {"type": "object", "properties": {"title": {"type": "null"}}}


@pytest.mark.parametrize(
    ("left", "right", "are_disjoint"),
    [
        ({"type": "string"}, {"type": "null"}, True),
        ({"type": "integer"}, {"type": "number"}, False),
        ({"type": ["integer", "null"]}, {"type": ["null", "string"]}, False),
        ({"const": 1}, {"const": 1.0}, False),
        ({"const": True}, {"const": 1}, True),
        ({"enum": ["a", {"b": 1, "c": 2}]}, {"const": {"c": 2.0, "b": 1}}, False),
        ({"const": "a"}, {"type": "integer"}, True),
        (CAT, DOG, True),
        (CAT, {**DOG, "required": []}, False),
        ({"anyOf": [CAT, {"type": "null"}]}, DOG, True),
        ({"anyOf": [CAT, {"type": "null"}]}, {"type": ["null", "string"]}, False),
        (False, {}, True),
        (True, {"type": "null"}, False),
        ({"allOf": [{"type": "string"}, {}]}, {"type": "array"}, True),
    ],
    ids=str,
)
def test_schemas_are_told_apart(left: Any, right: Any, are_disjoint: bool) -> None:
    facts = SchemaFacts({"anyOf": [left, right]})
    assert facts.are_disjoint(left, right) is are_disjoint
    assert facts.are_disjoint(right, left) is are_disjoint


def test_equal_values_have_equal_keys() -> None:
    assert json_key({"a": [1.0, None], "b": "x"}) == json_key({"b": "x", "a": [1, None]})
    assert len({json_key(value) for value in (0, False, None, "", [], {}, "0", 0.5)}) == 8
