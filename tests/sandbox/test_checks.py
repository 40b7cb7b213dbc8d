"""Regular expressions and JSON schemas: what is fine passes, what costs too much is refused before it costs."""

import json
import random
import re

import pytest

from octavo.errors import InvalidRequestError, TooComplexError
from octavo.sandbox.checks import MAX_WEIGHT, check_regex, check_schema


@pytest.mark.parametrize(
    "pattern",
    ["", "a+b", r"\d{4}-\d{2}-\d{2}", "(yes|no)", r"[A-Za-z_]\w*", r"(?i)straße", r"\p{Greek}+", "a{2,}", "[]a]",
     r"[^\]x]", r"\x{1F600}", "(?P<year>[0-9]{4})", "(a*)*b", "[[:alpha:]]+"],
)  # fmt: skip
def test_plain_patterns_pass(pattern: str) -> None:
    assert check_regex(pattern) <= MAX_WEIGHT


@pytest.mark.parametrize(
    "pattern",
    ["(a{1000}){1000}", "(((a{99}){99}){99}){99}", r"\w{1000}", r"(\p{L}{100}){10}", "a{99999}", "(" * 500, "a" * 3000,
     "é" * 1025, "(?:.{1,200}){1,1000}", r"[\w&&[^a]]{1000}"],
)  # fmt: skip
def test_patterns_that_grow_are_too_complex(pattern: str) -> None:
    with pytest.raises(TooComplexError) as caught:
        check_regex(pattern, "field")
    assert caught.value.param == "field"


@pytest.mark.parametrize(
    "pattern", ["(", ")", "*", r"\1", "(?=a)b", "(?<!x)y", "[", "a{2,1}", "\\", "(?P<", r"\p{Nix}", "a{,3}", "\ud800"]
)
def test_what_is_no_pattern_or_needs_backtracking_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequestError):
        check_regex(pattern)


def test_the_weight_is_no_less_than_the_length_of_what_a_pattern_must_match() -> None:
    rng = random.Random(3)

    def grow(depth: int) -> tuple[str, int]:
        """A pattern, and the characters of its longest bounded match."""
        kind = rng.randrange(5 if depth else 2)
        if kind == 0:
            return rng.choice("abc"), 1
        if kind == 1:
            return rng.choice((r"\d", "[a-z]", ".", r"\p{L}")), 1
        left, left_size = grow(depth - 1)
        if kind == 2:
            count = rng.randrange(1, 4)
            return f"(?:{left}){{{count}}}", left_size * count
        right, right_size = grow(depth - 1)
        return (
            (left + right, left_size + right_size) if kind == 3 else (f"({left}|{right})", max(left_size, right_size))
        )

    for _ in range(500):
        pattern, size = grow(5)
        re.compile(pattern.replace(r"\p{L}", "x"))
        try:
            assert check_regex(pattern) >= size
        except TooComplexError:
            assert len(pattern) > 500 or size > 50


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": ["integer", "null"], "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
TREE = {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"}


@pytest.mark.parametrize(
    "schema",
    [{}, True, PERSON, TREE, {"anyOf": [PERSON, {"type": "array", "items": PERSON}]}, {"items": {"$ref": "#"}},
     {"enum": [1, "a", None]}, {"const": {"a": [1]}}],
)  # fmt: skip
def test_plain_schemas_pass(schema: object) -> None:
    assert check_schema(json.dumps(schema))["values"] >= 1


def doubling(depth: int) -> dict[str, object]:
    table = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**table, f"a{depth}": {}}, "$ref": "#/$defs/a0"}


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


CHAIN = {"$defs": {**{f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(900)}, "a900": {}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize(
    "text",
    [json.dumps(doubling(40)), json.dumps(nested(40)), json.dumps(CHAIN), "[" * 60_000, '{"a":' * 5000,
     " " * 70_000 + "{}",
     json.dumps({"maxItems": 10**9}), json.dumps({"pattern": "(a{1000}){1000}"}),
     json.dumps({"properties": {str(i): {"pattern": "a"} for i in range(100)}}),
     json.dumps({"items": {"properties": {str(i): {} for i in range(1201)}}}),
     json.dumps({"propertyNames": {"enum": [str(i) for i in range(1201)]}})],
    ids=range(11),
)  # fmt: skip
def test_schema_bombs_are_too_complex(text: str) -> None:
    with pytest.raises(TooComplexError) as caught:
        check_schema(text)
    assert caught.value.param == "schema"


@pytest.mark.parametrize(
    "schema",
    [1, [], "x", {"type": "strin"}, {"type": 7}, {"type": ["string", {}]}, {"properties": []}, {"anyOf": []},
     {"anyOf": {}}, {"items": 3}, {"$ref": "http://localhost/x"}, {"$ref": "#/nowhere"}, {"$ref": 5}, {"$ref": "#x"},
     {"$ref": "other.json"}, {"minItems": -1}, {"maxItems": True}, {"maxLength": 1.5}, {"enum": "x"}, {"pattern": 3},
     {"pattern": "("}, {"patternProperties": {"(": {}}}, {"properties": {"a": 1}}, {"not": None},
     {"format": {"a": 1}}, {"minimum": "猫" * 100}, {"multipleOf": 0}, {"maximum": True}, {"required": "a"},
     {"required": [1]}, {"propertyNames": {"format": []}}, {"exclusiveMinimum": None}],
    ids=str,
)  # fmt: skip
def test_wrong_schemas_are_refused_with_the_place(schema: object) -> None:
    with pytest.raises(InvalidRequestError, match="schema"):
        check_schema(json.dumps(schema))


@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', "nul", '{"minItems": ' + "9" * 5000 + "}"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        check_schema(text)
