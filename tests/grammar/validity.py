"""Whether a text is valid under a schema, by two validators that share no code with the grammar or each other."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import jsonschema
import jsonschema_rs


class Validity:
    """One schema's two validators. Numbers are decimal for the first: multiples of 0.01 are no binary fractions."""

    def __init__(self, schema: dict[str, Any]) -> None:
        kind = jsonschema.Draft202012Validator
        self._first = kind(_as_decimals(json.dumps(schema)), format_checker=kind.FORMAT_CHECKER)
        self._second = jsonschema_rs.validator_for(schema, validate_formats=True, ignore_unknown_formats=True)

    def fault(self, text: str) -> str:
        """What is wrong with a text, "" for nothing."""
        try:
            value = json.loads(text)
            self._first.validate(_as_decimals(text))
            self._second.validate(value)
        except (ValueError, jsonschema.ValidationError) as error:  # jsonschema_rs raises ValueErrors
            return str(error).splitlines()[0]
        return ""


def _as_decimals(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)
