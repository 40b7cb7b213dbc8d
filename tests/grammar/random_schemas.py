"""JSON schemas made at random from what the keywords may hold: odd ones, some of them refused, none malformed."""

from __future__ import annotations

import random
from typing import Any

_TYPES = ("string", "object", "array", "number", "integer", "boolean", "null")
_NAMES = ("a", "b", "^a", "c/d", "é", "")
_LEAVES: tuple[Any, ...] = (
    {}, True, False, {"enum": ["a", 1]}, {"const": 2.5}, {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "string", "maxLength": 3}, {"type": "null"}, {"$ref": "#"}, {"$ref": "#/$defs/a"},
)  # fmt: skip
_VALUES: dict[str, tuple[Any, ...]] = {
    "type": (*_TYPES, ["string", "null"], ["integer", "array"]),
    "enum": (["a"], [1, 2.5, None], [True, {"a": [1]}], []),
    "const": ("x", 3, {"a": 1}, 1e300, 0.1, -0.0, "é\n\""),
    "required": ([], ["a"], ["a", "b"], ["c/d"]),
    "$ref": ("#", "#/$defs/a", "#/$defs/b"),
    "pattern": ("a+", "^[a-z]{1,3}$", "(a|b)*", r"\d", r"^\S$", "[^a]", "a{3}"),
    "format": ("date", "uuid", "email", "time", "hostname", "ipv4", "of-my-own"),
    "uniqueItems": (False,),
    "title": ("t",),
    **{name: (0, 1, 2, 3) for name in ("minItems", "maxItems", "minLength", "maxLength", "minProperties",
                                       "maxProperties")},
    **{name: (-3, 0, 0.5, 2, 100) for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
    "multipleOf": (1, 3, 0.5),
}  # fmt: skip
_ONE = ("items", "additionalProperties", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_TABLES = ("properties", "properties", "patternProperties", "$defs")
_KEYWORDS = (*_VALUES, *_ONE, *_LISTS, *_TABLES)


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """One schema; at most a few levels deep."""
    if depth > 4 or (depth and rng.random() < 0.25):
        return rng.choice(_LEAVES)
    made: dict[str, Any] = {}
    for name in rng.sample(_KEYWORDS, rng.randrange(1, 5)):
        if name in _VALUES:
            made[name] = rng.choice(_VALUES[name])
        elif name in _ONE:
            made[name] = random_schema(rng, depth + 1)
        elif name in _LISTS:
            made[name] = [random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
        else:
            made[name] = {rng.choice(_NAMES): random_schema(rng, depth + 1) for _ in range(rng.randrange(3))}
    return made
