"""Check that a JSON schema is small and simple enough to become a grammar.

Owns: the bounds on size, depth, counts and references, and the shape of the keywords that hold schemas.
Does not: compile, or check documents against a schema.
Invariants: nothing is fetched; the work is bounded by the text's size, since each reference is followed once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from octavo.errors import InvalidRequestError, TooComplexError
from octavo.grammar.json_schema import EQUIVALENT_PATTERNS
from octavo.grammar.limits import MAX_OPTIONAL_PROPERTIES
from octavo.grammar.pointer import NOWHERE, target_of
from octavo.tool.regex_check import check_regex

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32
MAX_EXPANDED = 100_000  # schemas, after every reference that is not recursive is expanded
MAX_COUNT = 65_536  # of items, properties or characters that a keyword may require
MAX_PATTERNS = 64
MAX_REFERENCES_IN_ROW = 300  # each referring to the next
_PARAM = "schema"
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_TABLES = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains",
           "maxContains")  # fmt: skip
_TEXTS = ("format", "$schema", "$id", "title", "description")
_NUMBERS = ("minimum", "maximum", "multipleOf")
_BOUNDS = ("exclusiveMinimum", "exclusiveMaximum")  # numbers, or true and false in draft 4
_TYPES = frozenset(("null", "boolean", "object", "array", "number", "integer", "string"))


def check_schema(text: str) -> dict[str, int]:
    """Return the schema's counts of values, depth and expanded schemas. Raises TooComplexError, InvalidRequestError."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_SCHEMA_BYTES:
        raise TooComplexError(f"{_PARAM} has {size} bytes; at most {MAX_SCHEMA_BYTES} are taken", _PARAM)
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise InvalidRequestError(f"{_PARAM} is not JSON ({error})", _PARAM) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(f"{_PARAM} must be an object, or true or false", _PARAM)
    num_values, depth = _measure(schema)
    checker = _Checker(schema)
    checker.check(schema, "#")
    try:
        return {"values": num_values, "depth": depth, "expanded": checker.expanded()}
    except RecursionError:
        raise _too_long_row() from None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _too_deep() -> TooComplexError:
    return TooComplexError(f"{_PARAM} is nested more than {MAX_SCHEMA_DEPTH} deep", _PARAM)


def _too_long_row() -> TooComplexError:
    message = f"{_PARAM} has more than {MAX_REFERENCES_IN_ROW} references in a row, each leading to the next"
    return TooComplexError(message, _PARAM)


def _measure(schema: object) -> tuple[int, int]:
    """Return the number of values and the depth."""
    level, num_values = [schema], 0
    for depth in range(MAX_SCHEMA_DEPTH + 1):
        if not level:
            return num_values, depth
        num_values += len(level)
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
        ]
    raise _too_deep()


class _Checker:
    """One walk over the schemas of a document, each once; the text's depth bounds the recursion."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._num_patterns = 0
        self._references: dict[str, Any] = {}

    def check(self, schema: object, where: str) -> None:
        """Check one schema and those inside it."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise _wrong(where, "a schema must be an object, or true or false")
        for name, table in ((name, schema[name]) for name in _TABLES if name in schema):
            if not isinstance(table, dict):
                raise _wrong(f"{where}/{name}", "an object of schemas is needed")
        for name, listed in ((name, schema[name]) for name in _LISTS if name in schema):
            if not isinstance(listed, list) or not listed:
                raise _wrong(f"{where}/{name}", "a list of at least one schema is needed")
        self._check_values(schema, where)
        _check_optional(schema, where)
        for name, child in _children(schema):
            self.check(child, f"{where}/{name}")

    def _check_values(self, schema: dict[str, Any], where: str) -> None:
        kinds = schema.get("type", [])
        listed = kinds if isinstance(kinds, list) else [kinds]
        if not all(isinstance(kind, str) and kind in _TYPES for kind in listed):
            raise _wrong(f"{where}/type", f"types are {', '.join(sorted(_TYPES))}")
        for name in _COUNTS:
            count = schema.get(name, 0)
            if type(count) is not int or count < 0:
                raise _wrong(f"{where}/{name}", "a whole number of 0 or more is needed")
            if count > MAX_COUNT:
                raise TooComplexError(f"{_PARAM}: {where}/{name} is {count}; at most {MAX_COUNT} is taken", _PARAM)
        _check_kinds(schema, where)
        patterns = [("pattern", schema["pattern"])] if "pattern" in schema else []
        for name, pattern in [*patterns, *(("patternProperties", key) for key in schema.get("patternProperties", ()))]:
            self._check_pattern(pattern, f"{where}/{name}")
        for name in ("$ref", "$dynamicRef", "$recursiveRef"):
            if name in schema:
                self._resolve(schema[name], f"{where}/{name}")

    def _check_pattern(self, pattern: object, where: str) -> None:
        self._num_patterns += 1
        if not isinstance(pattern, str):
            raise _wrong(where, "a string is needed")
        if self._num_patterns > MAX_PATTERNS:
            raise TooComplexError(f"{_PARAM} has more than {MAX_PATTERNS} patterns", _PARAM)
        try:
            check_regex(EQUIVALENT_PATTERNS.get(pattern, pattern), where)
        except InvalidRequestError as error:
            raise type(error)(f"{_PARAM}: {error}", _PARAM) from None

    def _resolve(self, reference: object, where: str) -> None:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise _wrong(where, "only references into the schema itself (#/...) are followed")
        target = target_of(self._root, reference)
        if target is NOWHERE:
            raise _wrong(where, f"{reference[:80]!r} leads nowhere")
        if (not reference.startswith("#/") and reference != "#") or not isinstance(target, dict | bool):
            raise _wrong(where, f"{reference[:80]!r} is no schema of this document")
        self._references[reference] = target

    def expanded(self) -> int:
        """Return the number of schemas after expanding each reference; a recursive reference counts once."""
        sizes: dict[str, int] = {}
        open_references: set[str] = set()

        def size_of(schema: Any) -> int:
            if not isinstance(schema, dict):
                return 1
            total = 1
            pending = [schema]
            while pending:
                node = pending.pop()
                total += 1
                pending += [child for name, child in _children(node) if _stands_here(name, child)]
                reference = node.get("$ref")
                if isinstance(reference, str):
                    total += referred(reference)
                if total > MAX_EXPANDED:
                    message = f"{_PARAM} grows to over {MAX_EXPANDED} schemas when its references are put in place"
                    raise TooComplexError(message, _PARAM)
            return total

        def referred(reference: str) -> int:
            if reference in sizes or reference in open_references:
                return sizes.get(reference, 1)
            if len(open_references) >= MAX_REFERENCES_IN_ROW:
                raise _too_long_row()
            open_references.add(reference)
            size = sizes[reference] = size_of(self._references[reference])
            open_references.discard(reference)
            return size

        return size_of(self._root)


def _check_kinds(schema: dict[str, Any], where: str) -> None:
    """Check keywords whose values the compiler expects to be texts, numbers or lists."""
    for name in _TEXTS:
        if not isinstance(schema.get(name, ""), str):
            raise _wrong(f"{where}/{name}", "a text is needed")
    for name in (*_NUMBERS, *_BOUNDS):
        value = schema.get(name, 0)
        if not isinstance(value, int | float) or (isinstance(value, bool) and name not in _BOUNDS):
            raise _wrong(f"{where}/{name}", "a number is needed")
    if schema.get("multipleOf", 1) <= 0:
        raise _wrong(f"{where}/multipleOf", "a number above 0 is needed")
    if "enum" in schema and not isinstance(schema["enum"], list):
        raise _wrong(f"{where}/enum", "a list is needed")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _wrong(f"{where}/required", "a list of names is needed")


def _check_optional(schema: dict[str, Any], where: str) -> None:
    """Bound the optional properties: each one is an alternative at every place before it."""
    names = schema.get("propertyNames")
    listed = names.get("enum", ()) if isinstance(names, dict) else ()
    optional = len(schema.get("properties", {}).keys() - set(schema.get("required", ())))
    optional = max(optional, len(listed) if isinstance(listed, list) else 0)
    if optional > MAX_OPTIONAL_PROPERTIES:
        most = f"at most {MAX_OPTIONAL_PROPERTIES} are taken; have more of them required, or group them in objects"
        raise TooComplexError(f"{_PARAM}: {where[:120]} has {optional} optional properties; {most}", _PARAM)


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _ONE:
        if name in schema:
            child = schema[name]
            if isinstance(child, list) and name == "items":
                yield from ((f"{name}/{index}", each) for index, each in enumerate(child))
            else:
                yield name, child
    for name in _LISTS:
        yield from ((f"{name}/{index}", each) for index, each in enumerate(schema.get(name, ())))
    for name in _TABLES:
        yield from ((f"{name}/{key}", each) for key, each in schema.get(name, {}).items())


def _stands_here(name: str, child: object) -> bool:
    """Return True if the child is part of the schema itself, not only a definition in it."""
    return isinstance(child, dict) and not name.startswith(("$defs/", "definitions/"))


def _wrong(where: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{_PARAM}: {where[:120]}: {reason}", _PARAM)
