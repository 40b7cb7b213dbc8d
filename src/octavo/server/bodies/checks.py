"""Checking a body: what is left out, what is refused by name, what is ignored, and messages that name the field.

Owns: sifting and validating any body, and what the API description says of it. Does not: know one body's fields.
Invariant: every field is honoured (declared in a body), refused by name, or documented as ignored; nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from octavo.server.faults import ApiError, bad_field

Refused = Mapping[str, tuple[object, ...]]  # field -> the values with which it asks for nothing; null always does
IGNORED: Mapping[str, str] = {
    "user": "kept for the caller's own records; nothing here depends on it",
    "metadata": "nothing is stored, so there is nothing to label",
    "store": "nothing is stored",
    "safety_identifier": "no such checks are made here",
    "prompt_cache_key": "prefixes are found by their content",
    "prompt_cache_retention": "the prefix cache evicts by use",
}


class Body(BaseModel):
    """What all bodies and their parts share: no unknown fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


B = TypeVar("B", bound=BaseModel)


def read(body: type[B], fields: dict[str, object], refused: Refused) -> B:
    """Check a body. Raises ApiError naming the field."""
    return validate(body, sift(fields, refused, body))


def sift_if_object(value: object, refused: Refused, body: type[BaseModel], where: str) -> object:
    """`sift` of what is an object; anything else as it is, for validation to refuse."""
    return sift(value, refused, body, where) if isinstance(value, dict) else value


def sift(
    fields: Mapping[str, object],
    refused: Refused,
    body: type[BaseModel],
    where: str = "",
    ignored: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Take out ignored fields, nulls and refused fields that ask for nothing; refuse the others by name.

    `where` is what comes before a field's name in a message; parts of a body ignore nothing unless told.
    """
    if ignored is None:
        ignored = {} if where else IGNORED
    known = _known(body)
    kept: dict[str, object] = {}
    for name, value in fields.items():
        shown = where + name[:64]
        if name in known:
            if value is not None:
                kept[name] = value
        elif name in refused:
            if value is not None and not any(
                type(value) is type(neutral) and value == neutral for neutral in refused[name]
            ):
                message = f"{shown}: this server does not support it; leave it out"
                raise bad_field(shown, message, "unsupported_field")
        elif name not in ignored:
            raise bad_field(shown, f"{shown} is not a field that this endpoint knows", "unknown_field")
    return kept


@cache
def _known(body: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def validate(body: type[B], fields: Mapping[str, object], where: str = "") -> B:
    """Check types and lengths. Raises ApiError naming the field, `where` in front of its name."""
    try:
        return body.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error, fields, where) from None


def _refusal(error: ValidationError, fields: Mapping[str, object], where: str) -> ApiError:
    first, *others = error.errors(include_url=False, include_context=False)
    is_missing = first["type"] == "missing"
    place = _place(first["loc"], fields, is_missing)
    param = where + place if place else where.removesuffix(".")
    if is_missing:
        return bad_field(param, f"{param} is missing", "missing_field")
    told = [first["msg"], *(other["msg"] for other in others if _place(other["loc"], fields, False) == place)]
    message = ", or: ".join(dict.fromkeys(told)).replace("Value error, ", "")
    return bad_field(param, f"{param} is {_shown(first['input'])}; {message}")


def _place(loc: tuple[int | str, ...], fields: Mapping[str, object], is_missing: bool) -> str:
    """A field's path as the client wrote it: without the names of a union's members, which are in no body."""
    param = ""
    node: object = fields
    for index, part in enumerate(loc):
        if isinstance(part, int):
            param += f"[{part}]"
            node = node[part] if isinstance(node, list) and part < len(node) else None
        elif (isinstance(node, dict) and part in node) or (is_missing and index == len(loc) - 1):
            param += f".{part}" if param else part
            node = node.get(part) if isinstance(node, dict) else None
    return param or (str(loc[0]) if loc else "")


def _shown(value: object) -> str:
    shown = repr(value) if not isinstance(value, (dict, list)) else f"a {type(value).__name__} of {len(value)}"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def field_notes(refused: Refused, ignored_fields: Mapping[str, str] = IGNORED) -> str:
    """What the API description says of fields that do nothing here."""
    ignored = "; ".join(f"`{name}` ({reason})" for name, reason in ignored_fields.items())
    names = ", ".join(f"`{name}`" for name in refused)
    return f"Taken and ignored: {ignored}.\n\nNot supported yet, refused unless left at their neutral value: {names}."


def inline_schema(body: type[BaseModel]) -> dict[str, object]:
    """The body's JSON schema with its definitions put in place, for the API description."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def placed(node: object) -> object:
        if isinstance(node, list):
            return [placed(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return placed(definitions[node["$ref"].rsplit("/", 1)[-1]])
        return {key: placed(value) for key, value in node.items()}

    return {str(key): placed(value) for key, value in schema.items()}
