"""Prepare JSON schemas for the compiler: rewrite what it would misread, or refuse it with its place.

Owns: the treatment of each keyword: enforced unchanged, rewritten to an enforced form, ignored, or refused.
Does not: bound sizes or check the shapes of keywords (sandbox/checks does), or compile.
Invariant: the original schema allows every value that the prepared schema allows; if that is uncertain, the schema is
refused.
Sources: JSON Schema 2020-12 (core, validation); from drafts 4 to 7, the boolean exclusiveMinimum and lists in items;
RFC 3339 for dates and times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.errors import InvalidRequestError
from octavo.grammar.schema_facts import SchemaFacts, json_key

_SCHEMA_KEYWORDS = ("items", "additionalProperties", "additionalItems")
_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OBJECT_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
# Annotations do not constrain a value; they are removed to make the grammar's text shorter.
_ANNOTATIONS = frozenset((
    "$schema", "$comment", "$id", "id", "title", "description", "default", "examples", "example", "deprecated",
    "readOnly", "writeOnly", "discriminator", "contentEncoding", "contentMediaType", "contentSchema", "nullable",
))  # fmt: skip
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,),
    "minContains": (0,),
    "exclusiveMinimum": (False,),
    "exclusiveMaximum": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": (True, {}, {"type": "string"}),
}
_REFUSED: Mapping[str, str] = {
    "not": "say with enum, pattern or anyOf what is allowed",
    "if": "write the cases as anyOf",
    "then": "write the cases as anyOf",
    "else": "write the cases as anyOf",
    "contains": "say with items or prefixItems what each item is",
    "minContains": "say with items or prefixItems what each item is",
    "maxContains": "say with items or prefixItems what each item is",
    "uniqueItems": "leave it out and check the answer, or ask for an object with one boolean property for each value",
    "dependentRequired": "write the cases as anyOf",
    "dependentSchemas": "write the cases as anyOf",
    "dependencies": "write the cases as anyOf",
    "unevaluatedItems": "use items",
    "unevaluatedProperties": "use additionalProperties",
    "$dynamicRef": "use $ref",
    "$dynamicAnchor": "use $ref with a path",
    "$recursiveRef": "use $ref",
    "$anchor": "use $ref with a path",
    "divisibleBy": "use multipleOf",
    "disallow": "say with enum, pattern or anyOf what is allowed",
    "extends": "use allOf",
    "x-guidance": "how JSON is written is set beside the schema",
}
_KEPT_FORMATS = ("duration", "ipv4", "ipv6", "uri")
_REFUSED_FORMATS = ("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "relative-json-pointer",
                    "regex", "uri-reference", "uri-template")  # fmt: skip
_MAX_EXACT = 2**53
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
FORMAT_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "date": (f"^{_DATE}$",),
    "time": (f"^{_TIME}$",),
    "date-time": (f"^{_DATE}T{_TIME}$",),
    "uuid": (f"^{_UUID}$",),
    "email": (rf"^{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}\.)+[A-Za-z]{{2,63}}$", "^[^@]{1,64}@.{1,189}$"),
    "hostname": (rf"^{_LABEL}(?:\.{_LABEL})*$", "^.{1,253}$"),
}
# Pydantic's pattern for Decimal has a look-ahead; the replacement matches the same texts without one.
EQUIVALENT_PATTERNS: Mapping[str, str] = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
}


def refused(where: str, reason: str) -> InvalidRequestError:
    """Return the error for a refused keyword, with the keyword's place in the schema."""
    return InvalidRequestError(f"schema: {where[:200]}: {reason}", "schema")


def prepare(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """Return the schema in the compiler's form. Raises InvalidRequestError, which names the place of the fault."""
    if isinstance(schema, bool):
        if not schema:
            raise refused("#", "false allows no value")
        return {}
    facts = SchemaFacts(schema)
    prepared = _prepared(schema, "#", facts)
    assert isinstance(prepared, dict)
    for where, each in subschemas(schema):
        if not facts.allows_finite(each):
            raise refused(where, "no finite value is allowed: each one would contain another of the same kind")
    return prepared


def subschemas(schema: object, where: str = "#") -> Iterator[tuple[str, Any]]:
    """Yield the schema and every schema inside it, each with its place; outer schemas precede inner ones."""
    yield where, schema
    if isinstance(schema, dict):
        for place, child in _children(schema):
            yield from subschemas(child, f"{where}/{place}")


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in schema.items():
        if name in _LIST_KEYWORDS and isinstance(value, list):
            yield from ((f"{name}/{index}", each) for index, each in enumerate(value))
        elif name in _SCHEMA_KEYWORDS and isinstance(value, dict | bool):
            yield name, value
        elif name in _OBJECT_KEYWORDS and isinstance(value, dict):
            yield from ((f"{name}/{_escaped(key)}", each) for key, each in value.items())


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _prepared(schema: object, where: str, facts: SchemaFacts) -> object:
    if not isinstance(schema, dict):
        return schema
    prepared: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _ANNOTATIONS or _is_neutral(name, value):
            continue
        if name in _REFUSED:
            raise refused(f"{where}/{name}", f"{name} is not supported; {_REFUSED[name]}")
        if name != "propertyNames":
            prepared[name] = _prepared_value(name, value, f"{where}/{name}", facts)
    _set_exclusive(prepared, schema)
    _set_format(prepared, where)
    _set_one_of(prepared, schema, where, facts)
    _set_names(prepared, schema, where, facts)
    _check_counts(schema, where)
    _set_numbers(prepared, where)
    return prepared


def _prepared_value(name: str, value: object, where: str, facts: SchemaFacts) -> object:
    if name in _LIST_KEYWORDS and isinstance(value, list):
        return [_prepared(each, f"{where}/{index}", facts) for index, each in enumerate(value)]
    if name in _SCHEMA_KEYWORDS:
        return _prepared(value, where, facts)
    if name in _OBJECT_KEYWORDS and isinstance(value, dict):
        return {key: _prepared(each, f"{where}/{_escaped(key)}", facts) for key, each in value.items()}
    return EQUIVALENT_PATTERNS.get(value, value) if name == "pattern" and isinstance(value, str) else value


def _is_neutral(name: str, value: object) -> bool:
    return any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ()))


def _set_exclusive(prepared: dict[str, Any], schema: dict[str, Any]) -> None:
    """Rewrite draft 4's `exclusiveMinimum: true`, which makes `minimum` exclusive, and the same for `maximum`."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if schema.get(exclusive) is True:
            prepared.pop(exclusive, None)
            if bound in prepared:
                prepared[exclusive] = prepared.pop(bound)


def _set_format(prepared: dict[str, Any], where: str) -> None:
    """Replace a format by patterns (dates obey the calendar), or remove it if it is only an annotation."""
    name = prepared.get("format")
    if name is None or name in _KEPT_FORMATS:
        return
    if not isinstance(name, str):
        raise refused(f"{where}/format", "a string is needed")
    if name in _REFUSED_FORMATS:
        raise refused(f"{where}/format", f"the format {name} is not supported; leave it out, or give a pattern")
    del prepared["format"]
    if name not in FORMAT_PATTERNS:
        return
    prepared["allOf"] = [*prepared.get("allOf", ()), *({"pattern": pattern} for pattern in FORMAT_PATTERNS[name])]


def _set_one_of(prepared: dict[str, Any], schema: dict[str, Any], where: str, facts: SchemaFacts) -> None:
    """Replace `oneOf` by `anyOf` if no value can match two of its schemas; else refuse it."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list):
        return
    pair = facts.overlapping(branches)
    if pair is not None:
        reason = f"schemas {pair[0]} and {pair[1]} may allow the same value"
        remedy = "use anyOf, or have both require a property with a const of its own"
        raise refused(f"{where}/oneOf", f"{reason}; {remedy}")
    alternatives = prepared.pop("oneOf")
    if "anyOf" in prepared:
        prepared["allOf"] = [*prepared.get("allOf", ()), {"anyOf": alternatives}]
    else:
        prepared["anyOf"] = alternatives


def _set_names(prepared: dict[str, Any], schema: dict[str, Any], where: str, facts: SchemaFacts) -> None:
    """Rewrite `propertyNames` with an enum or one pattern, as pydantic writes dict[Colour, int]; refuse any other."""
    names = schema.get("propertyNames")
    if names is None or _is_neutral("propertyNames", names):
        return
    known = facts.followed(names)
    known = (
        {name: value for name, value in known.items() if name not in _ANNOTATIONS} if isinstance(known, dict) else {}
    )
    value = prepared.pop("additionalProperties", True)
    listed = known.get("enum", [known["const"]] if "const" in known else None)
    if len(patterns := FORMAT_PATTERNS.get(str(known.get("format", "")), ())) == 1:
        del known["format"]
        known["pattern"] = patterns[0]
    is_plain = len(known) - (known.get("type") == "string") == 1
    if "properties" in prepared or "patternProperties" in prepared or not is_plain:
        pass
    elif isinstance(listed, list):
        prepared["properties"] = {name: value for name in listed if isinstance(name, str)}
        prepared["additionalProperties"] = False
        return
    elif "pattern" in known:
        prepared["patternProperties"] = {known["pattern"]: value}
        prepared["additionalProperties"] = False
        return
    reason = "only names from an enum or of one pattern, without properties beside them, are supported"
    raise refused(f"{where}/propertyNames", f"{reason}; use patternProperties with additionalProperties false")


def _check_counts(schema: dict[str, Any], where: str) -> None:
    """Refuse a `minProperties` that repeated names could miss: an unlisted name can occur twice but counts once."""
    min_properties = schema.get("minProperties", 0)
    required = schema.get("required", [])
    if not isinstance(min_properties, int) or not isinstance(required, list):
        return
    num_required = len(set(map(json_key, required)))
    if min_properties > num_required + 1:
        reason = f"{min_properties} properties are required and {num_required} of them are required by name"
        raise refused(f"{where}/minProperties", f"{reason}; name at least {min_properties - 1} in required")


def _set_numbers(prepared: dict[str, Any], where: str) -> None:
    """Tighten bounds to the 53 bits that the compiler supports; refuse other numbers that need more bits."""
    for name, limit in (("minimum", -_MAX_EXACT), ("exclusiveMinimum", -_MAX_EXACT), ("maximum", _MAX_EXACT),
                           ("exclusiveMaximum", _MAX_EXACT)):  # fmt: skip
        bound = prepared.get(name)
        if isinstance(bound, int) and abs(bound) > _MAX_EXACT and (bound < 0) is (limit < 0):
            prepared[name] = limit
    for name in ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        pending = [prepared[name]] if name in prepared else []
        while pending:
            value = pending.pop()
            if isinstance(value, int) and abs(value) > _MAX_EXACT:
                raise refused(f"{where}/{name}", f"{value} has more than 53 bits; have it written as a string")
            if isinstance(value, list | dict):
                pending += value.values() if isinstance(value, dict) else value
