"""Facts about JSON schemas that are found without compiling them.

Owns: the targets of references (RFC 6901, as a fragment); whether two schemas may allow the same value; whether a
schema allows any finite value.
Does not: rewrite or refuse schemas.
Invariants: "disjoint" and "not finite" are certain, their opposites are not. The depth of references is bounded.
"""

from __future__ import annotations

import json
from typing import Any, Final

_TYPES = frozenset(("null", "boolean", "object", "array", "number", "string"))
_MAX_DEPTH = 8  # references and properties followed in the proof that two schemas are disjoint
NOWHERE: Final = object()


def target_of(root: object, reference: str) -> Any:
    """Return the target of a reference such as `#/$defs/a` in the document `root`, or NOWHERE if there is none."""
    target: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and len(key) < 6 and int(key) < len(target):
            target = target[int(key)]
        elif isinstance(target, dict) and key in target:
            target = target[key]
        else:
            return NOWHERE
    return target


def json_key(value: object) -> str:
    """Return a text that is equal for values that JSON Schema treats as equal: 1 and 1.0, but not 1 and true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(json_key, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{json_key(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)


class SchemaFacts:
    """Facts about the schemas of one document."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._finite: set[int] = set()  # id() of schemas; `_root` keeps the schemas alive
        self._has_finite = False

    def overlapping(self, schemas: list[Any]) -> tuple[int, int] | None:
        """Return the indexes of the first two schemas that may allow the same value, or None."""
        values = [_values(each) if isinstance(each, dict) else None for each in schemas]
        listed = [each for each in values if each is not None]
        if len(listed) == len(schemas) and len(frozenset().union(*listed)) == sum(map(len, listed)):
            return None
        for later in range(len(schemas)):
            for earlier in range(later):
                if not self.are_disjoint(schemas[earlier], schemas[later]):
                    return earlier, later
        return None

    def are_disjoint(self, left: object, right: object, depth: int = 0) -> bool:
        """Return True if it is certain that no value is allowed by both schemas."""
        if depth > _MAX_DEPTH:
            return False
        lefts, rights = self._parts(left), self._parts(right)
        if any(part is False for part in (*lefts, *rights)):
            return True
        return any(
            self._are_disjoint_parts(a, b, depth)
            for a in lefts
            for b in rights
            if isinstance(a, dict) and isinstance(b, dict)
        )

    def _parts(self, schema: object) -> list[Any]:
        """Return a schema and the schemas (`$ref`, `allOf`) with which it is intersected."""
        parts, pending, seen = [], [schema], 0
        while pending and seen < 64:
            seen += 1
            each = pending.pop()
            parts.append(each)
            if isinstance(each, dict):
                if isinstance(each.get("$ref"), str):
                    pending.append(self._target(each["$ref"]))
                if isinstance(each.get("allOf"), list):
                    pending += each["allOf"]
        return parts

    def _are_disjoint_parts(self, left: dict[str, Any], right: dict[str, Any], depth: int) -> bool:
        for one, other in ((left, right), (right, left)):
            branches = one.get("anyOf", one.get("oneOf"))
            if (
                isinstance(branches, list)
                and branches
                and len(branches) <= 64
                and all(self.are_disjoint(branch, other, depth + 1) for branch in branches)
            ):
                return True
        if not _types(left) & _types(right):
            return True
        left_values, right_values = _values(left), _values(right)
        if left_values is not None and right_values is not None:
            return not left_values & right_values
        if _types(left) | _types(right) != {"object"}:
            return False
        tables = left.get("properties", {}), right.get("properties", {})
        needed = set(_names(left.get("required"))) & set(_names(right.get("required")))
        return any(
            self.are_disjoint(tables[0][name], tables[1][name], depth + 1)
            for name in needed
            if all(isinstance(table, dict) and name in table for table in tables)
        )

    def followed(self, schema: object) -> object:
        """Return the target if a schema is only a reference, else the schema itself."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or set(schema) != {"$ref"} or not isinstance(schema["$ref"], str):
                break
            schema = self._target(schema["$ref"])
        return schema

    def _target(self, reference: str) -> Any:
        target = target_of(self._root, reference)
        return True if target is NOWHERE else target

    def allows_finite(self, schema: object) -> bool:
        """Return True if a schema of the document may allow a finite value, or allows no value at all."""
        if not self._has_finite:
            self._find_finite()
        return not isinstance(schema, dict) or id(schema) in self._finite

    def _find_finite(self) -> None:
        """Find the schemas that allow a finite value: the smallest set closed under `_is_finite`."""
        schemas = _dicts(self._root)
        self._has_finite = True
        num_before = -1
        while num_before != len(self._finite):
            num_before = len(self._finite)
            for schema in reversed(schemas):  # inner schemas first, so that one round decides most of them
                if id(schema) not in self._finite and self._is_finite(schema):
                    self._finite.add(id(schema))

    def _is_finite(self, schema: dict[str, Any]) -> bool:
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._is_known_finite(self._target(reference)):
            return False
        for name in ("anyOf", "oneOf"):
            branches = schema.get(name)
            if isinstance(branches, list) and branches and not any(map(self._is_known_finite, branches)):
                return False
        if not all(map(self._is_known_finite, _listed(schema.get("allOf")))):
            return False
        if _values(schema) is not None:
            return True
        return any(self._type_is_finite(schema, kind) for kind in _types(schema)) or not _types(schema)

    def _type_is_finite(self, schema: dict[str, Any], kind: str) -> bool:
        if kind == "object":
            table = schema.get("properties", {})
            named = [
                table[name] for name in _names(schema.get("required")) if isinstance(table, dict) and name in table
            ]
            return all(map(self._is_known_finite, named))
        min_items = schema.get("minItems", 0)
        if kind == "array" and isinstance(min_items, int) and min_items > 0:
            first = schema.get("prefixItems", schema.get("items") if isinstance(schema.get("items"), list) else [])
            needed = [*_listed(first)][:min_items]
            if len(needed) < min_items:
                needed.append(schema.get("items", schema.get("additionalItems", True)))
            return all(map(self._is_known_finite, needed))
        return True

    def _is_known_finite(self, schema: object) -> bool:
        return not isinstance(schema, dict) or id(schema) in self._finite


def _dicts(node: object) -> list[dict[str, Any]]:
    """Return all objects of a document, outer ones first. Objects that are not schemas do no harm."""
    objects, level = [], [node]
    while level:
        objects += [each for each in level if isinstance(each, dict)]
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
    return objects


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a schema itself allows; "integer" counts as "number"."""
    kinds = schema.get("type")
    if kinds is None:
        values = _values(schema)
        return _TYPES if values is None else frozenset(map(_type_of, values))
    listed = kinds if isinstance(kinds, list) else [kinds]
    return frozenset("number" if kind == "integer" else kind for kind in listed if isinstance(kind, str))


def _type_of(key: str) -> str:
    first = key[0]
    return {"n": "null", "t": "boolean", "f": "boolean", '"': "string", "[": "array", "{": "object"}.get(
        first, "number"
    )


def _values(schema: dict[str, Any]) -> frozenset[str] | None:
    """Return the json_key of each value that a schema lists, or None if it lists none."""
    if "const" in schema:
        return frozenset((json_key(schema["const"]),))
    return frozenset(map(json_key, schema["enum"])) if isinstance(schema.get("enum"), list) else None


def _names(value: object) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
