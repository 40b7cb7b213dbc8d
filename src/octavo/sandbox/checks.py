"""Check that a grammar's source is small and simple enough, then compile it.

Owns: the bounds on regular expressions, JSON schemas and the other kinds of source.
Does not: compile (octavo.grammar.compile does), bound time and memory, or check documents against a schema.
Invariants: a grammar accepted here also compiles in the engine, in a fraction of a job's time. Nothing is fetched.
Each reference of a schema is followed once. A pattern's weight is known before anything is compiled; it is about the
number of states that a compiler makes (a repetition multiplies the weight, everything else adds to it).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

from octavo.errors import InvalidRequestError, TooComplexError
from octavo.grammar.answer import read_answer
from octavo.grammar.compile import compile_grammar
from octavo.grammar.json_schema import EQUIVALENT_PATTERNS
from octavo.grammar.limits import MAX_OPTIONAL_PROPERTIES, Specials
from octavo.grammar.schema_facts import NOWHERE, target_of
from octavo.sandbox.wire import CompileGrammar

MAX_SOURCE_BYTES = 65_536
MAX_ANSWER_BYTES = 1 << 20  # all schemas of an answer's tools together
MAX_COMPILED_CHARACTERS = 1 << 20  # the bound of SamplingParams
MAX_COMPILE_S = 0.5  # of processor time; the engine compiles the grammar again for every request

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32
MAX_EXPANDED = 100_000  # schemas after every reference that is not recursive is expanded
MAX_COUNT = 65_536  # items, properties or characters that a keyword may require
MAX_PATTERNS = 64
MAX_REFERENCES_IN_ROW = 300  # length of a chain in which each reference leads to the next

MAX_PATTERN_BYTES = 2048
MAX_WEIGHT = 50_000
MAX_GROUP_DEPTH = 32

_PARAM = "schema"
# Keywords of JSON Schema, by the type of the keyword's value.
_SCHEMA_KEYWORDS = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if",
                    "then", "else", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems")  # lists of schemas
_OBJECT_KEYWORDS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # schemas by name
_COUNT_KEYWORDS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains",
                   "maxContains")  # fmt: skip
_STRING_KEYWORDS = ("format", "$schema", "$id", "title", "description")
_NUMBER_KEYWORDS = ("minimum", "maximum", "multipleOf")
_EXCLUSIVE_KEYWORDS = ("exclusiveMinimum", "exclusiveMaximum")  # numbers; in draft 4, true or false
_TYPES = frozenset(("null", "boolean", "object", "array", "number", "integer", "string"))

_CLASS_WEIGHT = 4
_PYDANTIC_PREFIX = 'Error building "str" validator:\n  SchemaError: '  # precedes an expression's error
_REPEAT = re.compile(r"\{\s*(\d{0,9})\s*(,?)\s*(\d{0,9})\s*\}")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^{}]{0,64}\}|[pPxuU].|.)", re.DOTALL)


def compile_checked(order: CompileGrammar) -> str:
    """Compile a source that is within the bounds. Raises TooComplexError or InvalidRequestError."""
    kind = order.kind
    _check_source(kind, order.source)
    if order.whitespace:
        check_regex(order.whitespace, "whitespace_pattern")
    specials = Specials(order.vocab_size, tuple(order.specials.items())) if order.specials else None
    start_s = time.process_time()
    text = compile_grammar(kind, order.source, order.whitespace, specials)
    cpu_s = time.process_time() - start_s
    if cpu_s > MAX_COMPILE_S:
        raise TooComplexError(f"it takes {cpu_s:.1f} s to compile; at most {MAX_COMPILE_S} s are allowed")
    if len(text) > MAX_COMPILED_CHARACTERS:
        raise TooComplexError(
            f"it has {len(text)} characters when compiled; at most {MAX_COMPILED_CHARACTERS} are allowed"
        )
    return text


def _check_source(kind: str, source: str) -> None:
    size = len(source.encode("utf-8", "surrogatepass"))
    max_bytes = MAX_ANSWER_BYTES if kind == "answer" else MAX_SOURCE_BYTES
    if size > max_bytes:
        raise TooComplexError(f"it has {size} bytes; at most {max_bytes} are allowed")
    if kind == "json_schema":
        check_schema(source)
    elif kind == "regex":
        check_regex(source)
    elif kind == "answer":
        _check_answer(source)


def _check_answer(source: str) -> None:
    """Check the parts of an answer. Compiling checks the form of the answer itself."""
    answer = read_answer(source)
    for index, (_, schema) in enumerate([] if answer.calls is None else answer.calls.tools):
        path = f"tools[{index}].function.parameters"
        try:
            check_schema(schema)
        except InvalidRequestError as error:
            raise type(error)(f"{path}: {str(error).removeprefix('schema').lstrip(': ')}", path) from None
    if answer.structure is not None:
        kind, inner, whitespace = answer.structure
        if kind != "answer":
            _check_source(kind, inner)
        if whitespace:
            check_regex(whitespace, "whitespace_pattern")


def check_schema(text: str) -> dict[str, int]:
    """Return the schema's counts of values, depth and expanded schemas. Raises TooComplexError, InvalidRequestError."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_SCHEMA_BYTES:
        raise TooComplexError(f"{_PARAM} has {size} bytes; at most {MAX_SCHEMA_BYTES} are allowed", _PARAM)
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise InvalidRequestError(f"{_PARAM} is not JSON ({error})", _PARAM) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(f"{_PARAM} must be an object, or true or false", _PARAM)
    num_values, depth = _measure(schema)
    checker = _SchemaChecker(schema)
    checker.check(schema, "#")
    try:
        return {"values": num_values, "depth": depth, "expanded": checker.expanded()}
    except RecursionError:
        raise _too_many_references() from None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _too_deep() -> TooComplexError:
    return TooComplexError(f"{_PARAM} is nested more than {MAX_SCHEMA_DEPTH} deep", _PARAM)


def _too_many_references() -> TooComplexError:
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


class _SchemaChecker:
    """Checks every schema of a document once. The depth of the text bounds the recursion."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._num_patterns = 0
        self._references: dict[str, Any] = {}

    def check(self, schema: object, path: str) -> None:
        """Check one schema and the schemas inside it."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise _schema_error(path, "a schema must be an object, or true or false")
        for name, table in ((name, schema[name]) for name in _OBJECT_KEYWORDS if name in schema):
            if not isinstance(table, dict):
                raise _schema_error(f"{path}/{name}", "an object of schemas is needed")
        for name, listed in ((name, schema[name]) for name in _LIST_KEYWORDS if name in schema):
            if not isinstance(listed, list) or not listed:
                raise _schema_error(f"{path}/{name}", "a list of at least one schema is needed")
        self._check_values(schema, path)
        _check_optional(schema, path)
        for name, child in _children(schema):
            self.check(child, f"{path}/{name}")

    def _check_values(self, schema: dict[str, Any], path: str) -> None:
        kinds = schema.get("type", [])
        listed = kinds if isinstance(kinds, list) else [kinds]
        for kind in listed:
            if not (isinstance(kind, str) and kind in _TYPES):
                reason = f"{str(kind)[:64]!r} is not a type; give {', '.join(sorted(_TYPES))}"
                raise _schema_error(f"{path}/type", reason)
        for name in _COUNT_KEYWORDS:
            count = schema.get(name, 0)
            if type(count) is not int or count < 0:
                raise _schema_error(f"{path}/{name}", "a whole number of 0 or more is needed")
            if count > MAX_COUNT:
                raise TooComplexError(f"{_PARAM}: {path}/{name} is {count}; at most {MAX_COUNT} is allowed", _PARAM)
        _check_kinds(schema, path)
        patterns = [("pattern", schema["pattern"])] if "pattern" in schema else []
        for name, pattern in [*patterns, *(("patternProperties", key) for key in schema.get("patternProperties", ()))]:
            self._check_pattern(pattern, f"{path}/{name}")
        for name in ("$ref", "$dynamicRef", "$recursiveRef"):
            if name in schema:
                self._resolve(schema[name], f"{path}/{name}")

    def _check_pattern(self, pattern: object, path: str) -> None:
        self._num_patterns += 1
        if not isinstance(pattern, str):
            raise _schema_error(path, "a string is needed")
        if self._num_patterns > MAX_PATTERNS:
            raise TooComplexError(f"{_PARAM} has more than {MAX_PATTERNS} patterns", _PARAM)
        try:
            check_regex(EQUIVALENT_PATTERNS.get(pattern, pattern), path)
        except InvalidRequestError as error:
            raise type(error)(f"{_PARAM}: {error}", _PARAM) from None

    def _resolve(self, reference: object, path: str) -> None:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise _schema_error(path, "only references into the schema itself (#/...) are followed")
        target = target_of(self._root, reference)
        if target is NOWHERE:
            raise _schema_error(path, f"{reference[:80]!r} refers to nothing")
        if (not reference.startswith("#/") and reference != "#") or not isinstance(target, dict | bool):
            raise _schema_error(path, f"{reference[:80]!r} is not a schema of this document")
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
                pending += [child for name, child in _children(node) if _is_inline(name, child)]
                reference = node.get("$ref")
                if isinstance(reference, str):
                    total += referred(reference)
                if total > MAX_EXPANDED:
                    message = f"{_PARAM} grows to over {MAX_EXPANDED} schemas when its references are expanded"
                    raise TooComplexError(message, _PARAM)
            return total

        def referred(reference: str) -> int:
            if reference in sizes or reference in open_references:
                return sizes.get(reference, 1)
            if len(open_references) >= MAX_REFERENCES_IN_ROW:
                raise _too_many_references()
            open_references.add(reference)
            size = sizes[reference] = size_of(self._references[reference])
            open_references.discard(reference)
            return size

        return size_of(self._root)


def _check_kinds(schema: dict[str, Any], path: str) -> None:
    """Check the keywords for which the compiler expects strings, numbers or lists."""
    for name in _STRING_KEYWORDS:
        if not isinstance(schema.get(name, ""), str):
            raise _schema_error(f"{path}/{name}", "a string is needed")
    for name in (*_NUMBER_KEYWORDS, *_EXCLUSIVE_KEYWORDS):
        value = schema.get(name, 0)
        if not isinstance(value, int | float) or (isinstance(value, bool) and name not in _EXCLUSIVE_KEYWORDS):
            raise _schema_error(f"{path}/{name}", "a number is needed")
    if schema.get("multipleOf", 1) <= 0:
        raise _schema_error(f"{path}/multipleOf", "a number above 0 is needed")
    if "enum" in schema and not isinstance(schema["enum"], list):
        raise _schema_error(f"{path}/enum", "a list is needed")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _schema_error(f"{path}/required", "a list of names is needed")


def _check_optional(schema: dict[str, Any], path: str) -> None:
    """Bound the number of optional properties: each is an alternative at every position before it."""
    names = schema.get("propertyNames")
    listed = names.get("enum", ()) if isinstance(names, dict) else ()
    optional = len(schema.get("properties", {}).keys() - set(schema.get("required", ())))
    optional = max(optional, len(listed) if isinstance(listed, list) else 0)
    if optional > MAX_OPTIONAL_PROPERTIES:
        limit = f"at most {MAX_OPTIONAL_PROPERTIES} are allowed; have more of them required, or group them in objects"
        raise TooComplexError(f"{_PARAM}: {path[:120]} has {optional} optional properties; {limit}", _PARAM)


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _SCHEMA_KEYWORDS:
        if name in schema:
            child = schema[name]
            if isinstance(child, list) and name == "items":
                yield from ((f"{name}/{index}", each) for index, each in enumerate(child))
            else:
                yield name, child
    for name in _LIST_KEYWORDS:
        yield from ((f"{name}/{index}", each) for index, each in enumerate(schema.get(name, ())))
    for name in _OBJECT_KEYWORDS:
        yield from ((f"{name}/{key}", each) for key, each in schema.get(name, {}).items())


def _is_inline(name: str, child: object) -> bool:
    """Return True if the child is part of the schema itself rather than a definition inside it."""
    return isinstance(child, dict) and not name.startswith(("$defs/", "definitions/"))


def _schema_error(path: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{_PARAM}: {path[:120]}: {reason}", _PARAM)


def check_regex(pattern: str, param: str = "regex") -> int:
    """Return the pattern's weight. Raises TooComplexError or InvalidRequestError, which names `param`."""
    try:
        size = len(pattern.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{param} contains half of a surrogate pair", param) from None
    if size > MAX_PATTERN_BYTES:
        raise TooComplexError(f"{param} has {size} bytes; at most {MAX_PATTERN_BYTES} are allowed", param)
    weight = _PatternWeigher(pattern, param).weigh()
    if weight > MAX_WEIGHT:
        raise TooComplexError(f"{param} needs about {weight} states; at most {MAX_WEIGHT} are allowed", param)
    try:
        SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        reason = " ".join(str(error).removeprefix(_PYDANTIC_PREFIX).split())[-200:]
        if "size limit" in reason:
            raise TooComplexError(f"{param} needs more than 10 MiB when compiled", param) from None
        raise InvalidRequestError(f"{param} is not a supported regular expression ({reason})", param) from None
    return weight


class _PatternWeigher:
    """Weighs a pattern in one pass, with a stack of open groups. The compiler reports malformed patterns."""

    def __init__(self, pattern: str, param: str) -> None:
        self._pattern = pattern
        self._param = param
        self._position = 0
        self._groups: list[int] = []  # weights of the enclosing groups
        self._total = 0  # weight of the innermost group so far
        self._atom = 0  # weight of the last atom, which a repetition after the atom multiplies

    def weigh(self) -> int:
        """Return the weight of the pattern."""
        while self._position < len(self._pattern):
            character = self._pattern[self._position]
            if character == "(":
                self._open()
            elif character == ")":
                self._close()
            elif character in "*+?":
                self._take(self._atom, 1)
                self._position += 1
            elif character == "{" and (match := _REPEAT.match(self._pattern, self._position)):
                self._repeat(match)
            elif character == "[":
                self._class()
            else:
                self._single(character)
        return self._total + sum(self._groups)

    def _take(self, atom: int, more: int) -> None:
        """Set the last atom's weight to `atom + more`, and add `more` to the total."""
        self._atom = atom + more
        self._total += more

    def _open(self) -> None:
        if len(self._groups) >= MAX_GROUP_DEPTH:
            raise TooComplexError(f"{self._param} has groups nested more than {MAX_GROUP_DEPTH} deep", self._param)
        self._groups.append(self._total)
        self._total = self._atom = 0
        self._position += 1
        if self._pattern.startswith("?", self._position):
            self._position += 1

    def _close(self) -> None:
        inner = self._total + 1
        self._total = (self._groups.pop() if self._groups else 0) + inner
        self._atom = inner
        self._position += 1

    def _repeat(self, match: re.Match[str]) -> None:
        low, _, high = match.groups()
        times = max(int(low or 0), int(high or 0), 1)
        self._take(self._atom, self._atom * (times - 1))
        if self._total > MAX_WEIGHT:  # bounds the numbers at any depth of nesting
            message = f"{self._param} repeats too much: over {MAX_WEIGHT} states at character {self._position}"
            raise TooComplexError(message, self._param)
        self._position = match.end()

    def _class(self) -> None:
        """Read a bracketed class, including the classes inside it."""
        depth, weight = 0, _CLASS_WEIGHT
        while self._position < len(self._pattern):
            character = self._pattern[self._position]
            escape = _ESCAPE.match(self._pattern, self._position)
            self._position = escape.end() if escape else self._position + 1
            depth += (character == "[") - (character == "]")
            weight += 1
            if depth == 0:
                break
        self._atom = 0
        self._take(0, weight)

    def _single(self, character: str) -> None:
        escape = _ESCAPE.match(self._pattern, self._position)
        self._position = escape.end() if escape else self._position + 1
        self._atom = 0
        self._take(0, _CLASS_WEIGHT if escape or character == "." else 1)
