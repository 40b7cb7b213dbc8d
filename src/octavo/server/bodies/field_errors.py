"""Messages for fields that pydantic refuses: the field, its value, what to give instead.

Owns: the plain sentence for each kind of error. Does not: check anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from octavo.server.http.errors import ApiError, bad_field

Details = Mapping[str, Any]  # one of pydantic's errors
_REMEDIES: Mapping[str, Callable[[Details], str]] = {  # type of error -> what to give instead
    "string_type": lambda _: "give a string",
    "int_type": lambda _: "give a whole number",
    "int_parsing": lambda _: "give a whole number",
    "int_from_float": lambda _: "give a whole number",
    "int_parsing_size": lambda _: "give a smaller number",
    "float_type": lambda _: "give a number",
    "float_parsing": lambda _: "give a number",
    "finite_number": lambda _: "give a finite number",
    "bool_type": lambda _: "give true or false",
    "bool_parsing": lambda _: "give true or false",
    "list_type": lambda _: "give a list",
    "dict_type": lambda _: "give an object",
    "model_type": lambda _: "give an object",
    "model_attributes_type": lambda _: "give an object",
    "literal_error": lambda each: f"give {each['ctx']['expected']}",
    "enum": lambda each: f"give {each['ctx']['expected']}",
    "none_required": lambda _: "leave it out",
    "greater_than": lambda each: f"give more than {each['ctx']['gt']:g}",
    "greater_than_equal": lambda each: f"give at least {each['ctx']['ge']:g}",
    "less_than": lambda each: f"give less than {each['ctx']['lt']:g}",
    "less_than_equal": lambda each: f"give at most {each['ctx']['le']:g}",
    "string_pattern_mismatch": lambda each: f"give a text that matches {each['ctx']['pattern']}",
    "extra_forbidden": lambda _: "leave it out",
}
_SIZES = {"too_short": "items", "too_long": "items", "string_too_short": "characters", "string_too_long": "characters"}


def refusal_of(error: ValidationError, fields: Mapping[str, object], where: str) -> ApiError:
    """Return the refusal of a body for the first field at fault, with `where` before its name."""
    found = sorted(error.errors(include_url=False), key=lambda each: each["type"] == "extra_forbidden")
    first, *others = found
    is_missing = first["type"] == "missing"
    place = place_of(first["loc"], fields, is_missing)
    param = where + place if place else where.removesuffix(".")
    if is_missing:
        return bad_field(param, f"{param} is missing", "missing_field")
    if first["type"] in _SIZES:
        return bad_field(param, _of_size(param, first))
    same = [first, *(other for other in others if place_of(other["loc"], fields, False) == place)]
    remedies = list(dict.fromkeys(_remedy(each) for each in same if each["type"] not in _SIZES))
    told = " or ".join([remedies[0], *(remedy.removeprefix("give ") for remedy in remedies[1:])])
    return bad_field(param, f"{param} is {shown_value(first['input'])}; {told}")


def _remedy(each: Details) -> str:
    remedy = _REMEDIES.get(each["type"])
    return str(each["msg"]).removeprefix("Value error, ") if remedy is None else remedy(each)


def _of_size(param: str, each: Details) -> str:
    """Return the message for a text or list with too few or too many parts."""
    size, unit = len(each["input"]), _SIZES[each["type"]]
    if size == 0:
        return f"{param} is empty"
    least, most = each["ctx"].get("min_length"), each["ctx"].get("max_length")
    return f"{param} has {size} {unit}; give at {f'most {most}' if least is None else f'least {least}'}"


def place_of(loc: tuple[int | str, ...], fields: Mapping[str, object], is_missing: bool) -> str:
    """Return a field's path as the client wrote it: without the names of a union's members."""
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


def shown_value(value: object) -> str:
    """Return a value for a message: short, and without the contents of lists and objects."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
