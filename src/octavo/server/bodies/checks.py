"""Checks of a body: fields are accepted, refused by name or ignored, with messages that name the field.

Owns: sifting and validating any body, and its part of the API description. Does not: know one body's fields.
Invariant: every field is honoured (declared in a body), refused by name (it would change what the answer means),
documented as ignored, or ignored and named in the answer's header (IgnoredFields).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from octavo.server.bodies.field_errors import place_of, refusal_of
from octavo.server.bodies.field_table import HINTS, KNOWN_NAMES, MEANINGFUL
from octavo.server.http.errors import bad_field

HEADER = "X-Octavo-Ignored"
IGNORED_FIELDS = "octavo.ignored_fields"  # of the request's scope
MAX_PATHS = 16
MAX_PATH_CHARACTERS = 64
OTHER = "other"  # the label of names that are in no table
_INDEX = re.compile(r"\[\d+\]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_NAME = re.compile(r"[A-Za-z0-9_]+")


@dataclass(slots=True)
class IgnoredFields:
    """The ignored fields of one request. `is_strict`: they are refused instead (--strict-fields)."""

    is_strict: bool = False
    paths: dict[str, None] = field(default_factory=dict)  # in the order in which they were met

    def add(self, path: str) -> None:
        """Add a field; after MAX_PATHS of them, add only that there are more."""
        path = _UNSAFE.sub("_", _INDEX.sub("[]", path[: 4 * MAX_PATH_CHARACTERS]))[:MAX_PATH_CHARACTERS]
        self.paths[path if path in self.paths or len(self.paths) < MAX_PATHS else "..."] = None

    @property
    def labels(self) -> list[str]:
        """The fields' names as labels of a metric: known names, or OTHER."""
        names = (_NAME.findall(path) for path in self.paths)
        return [found[-1] if found and found[-1] in KNOWN_NAMES else OTHER for found in names]


_CURRENT: ContextVar[IgnoredFields | None] = ContextVar("octavo_ignored_fields", default=None)


@contextmanager
def collecting(ignored: IgnoredFields) -> Iterator[None]:
    """Have `ignore` add fields to `ignored`, in this context."""
    token = _CURRENT.set(ignored)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def ignore(path: str, is_known: bool = False) -> None:
    """Ignore a field, or refuse it: under --strict-fields, and outside of `collecting`. Raises ApiError.

    `is_known`: it is a field of the API that has no effect here.
    """
    current = _CURRENT.get()
    if current is not None and not current.is_strict:
        current.add(path)
    elif is_known:
        raise bad_field(path, f"{path}: this server does not support it; leave it out", "unsupported_field")
    else:
        raise bad_field(path, f"{path} is not a field that this endpoint knows", "unknown_field")


def are_unknown_refused() -> bool:
    """Return True if `ignore` would raise."""
    current = _CURRENT.get()
    return current is None or current.is_strict


Refused = Mapping[str, tuple[object, ...]]  # field -> its values without an effect, which are accepted; null always is
IGNORED: Mapping[str, str] = {
    "user": "kept for the caller's own records; nothing here depends on it",
    "metadata": "nothing is stored, so there is nothing to label",
    "store": "nothing is stored",
    "safety_identifier": "no such checks are made here",
    "prompt_cache_key": "prefixes are found by their content",
    "prompt_cache_retention": "the prefix cache evicts by use",
}


class Body(BaseModel):
    """The base of all bodies and their parts: no unknown fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


B = TypeVar("B", bound=BaseModel)
_MAX_PASSES = 8  # of validation, each without the unknown fields that the one before found


def read(body: type[B], fields: dict[str, object], refused: Refused) -> B:
    """Check a body. Raises ApiError naming the field."""
    return validate(body, sift(fields, refused, body))


def sift_if_object(
    value: object,
    refused: Refused,
    body: type[BaseModel],
    where: str,
    ignored: Mapping[str, str] | None = None,
) -> object:
    """Return the `sift` of an object; return anything else unchanged, for validation to refuse."""
    return sift(value, refused, body, where, ignored) if isinstance(value, dict) else value


def sift(
    fields: Mapping[str, object],
    refused: Refused,
    body: type[BaseModel],
    where: str = "",
    ignored: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Return the fields that `body` declares and that are not null; refuse or ignore the others.

    `where` is the prefix of a field's name in a message; with one, no field is ignored silently but `ignored`.
    `refused` are fields of this body, in addition to MEANINGFUL. Raises ApiError.
    """
    if ignored is None:
        ignored = {} if where else IGNORED
    known = _known(body)
    kept: dict[str, object] = {}
    for name, value in fields.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif name not in ignored:
            _leave_out(name, value, refused, where + name[:64])
    return kept


def _leave_out(name: str, value: object, refused: Refused, shown: str) -> None:
    """Ignore a field that is not declared. Raises ApiError if it changes the meaning of an answer."""
    meaningful = MEANINGFUL.get(name)
    if name in refused:
        _refuse_unless(value, refused[name], shown, "")
    elif meaningful is not None:
        _refuse_unless(value, meaningful.neutral, shown, f" ({meaningful.means})")
    elif name in HINTS:
        if value is not None and not _is_one_of(value, HINTS[name]):
            ignore(shown, is_known=True)
    elif value is not None or are_unknown_refused():
        ignore(shown)


def _refuse_unless(value: object, neutral: tuple[object, ...], shown: str, why: str) -> None:
    if value is not None and not _is_one_of(value, neutral):
        raise bad_field(shown, f"{shown}: this server does not support it{why}; leave it out", "unsupported_field")


def _is_one_of(value: object, values: tuple[object, ...]) -> bool:
    return any(type(value) is type(each) and value == each for each in values)


@cache
def _known(body: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def validate(body: type[B], fields: Mapping[str, object], where: str = "") -> B:
    """Check types and lengths. Raises ApiError naming the field, with `where` before its name.

    Unknown fields of parts that were not sifted are ignored here, and removed from `fields`.
    """
    for _ in range(_MAX_PASSES):
        try:
            return body.model_validate(fields)
        except ValidationError as error:
            if any(each["type"] != "extra_forbidden" for each in error.errors(include_url=False)):
                raise refusal_of(error, fields, where) from None
            extra = [each["loc"] for each in error.errors(include_url=False)]
        for loc in extra:
            _drop(loc, fields, where)
    raise bad_field(where.removesuffix(".") or None, "the body has too many unknown fields; leave them out")


def _drop(loc: tuple[int | str, ...], fields: Any, where: str) -> None:
    shown = where + place_of(loc, fields, False)
    *path, name = loc
    node = fields
    for part in path:
        is_there = part in node if isinstance(node, dict) else isinstance(part, int)
        node = node[part] if is_there else node  # else it is the name of a union's member
    _leave_out(str(name), node.pop(name), {}, shown)


def field_notes(refused: Refused, ignored_fields: Mapping[str, str] = IGNORED) -> str:
    """Return the API description's text on ignored and refused fields."""
    ignored = "; ".join(f"`{name}` ({reason})" for name, reason in ignored_fields.items())
    names = ", ".join(f"`{name}`" for name in (*refused, *MEANINGFUL))
    return (
        f"Taken and ignored: {ignored}.\n\nNot supported, refused unless left at their neutral value: {names}.\n\n"
        f"Any other field is ignored, and named in the answer's header `{HEADER}`; --strict-fields refuses it."
    )


def inline_schema(body: type[BaseModel]) -> dict[str, object]:
    """Return the body's JSON schema for the API description: definitions inlined, other fields allowed."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def placed(node: object) -> object:
        if isinstance(node, list):
            return [placed(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return placed(definitions[node["$ref"].rsplit("/", 1)[-1]])
        return {key: placed(value) for key, value in node.items() if (key, value) != ("additionalProperties", False)}

    made = placed(schema)
    assert isinstance(made, dict)
    return made
