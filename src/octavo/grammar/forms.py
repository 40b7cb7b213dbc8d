"""Grammars for Python callers: one function for every form that an output may have.

Owns: grammar_from. Does not: compile (compile.py does), or bound sources, which the caller trusts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import InvalidRequestError
from octavo.grammar.compile import compile_grammar


def grammar_from(
    *,
    json_schema: object = None,
    json_object: bool = False,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    lark: str | None = None,
) -> str:
    """Make the grammar of one form, for SamplingParams(grammar=...).

    `json_schema` is a schema as a mapping or as JSON text, or a class with `model_json_schema()`, as pydantic's have.
    Exactly one form must be given. Raises InvalidRequestError for any other number, and for an invalid grammar.
    """
    given = {
        "json_schema": None if json_schema is None else _schema_text(json_schema),
        "json_object": "" if json_object else None,
        "regex": regex,
        "choice": None if choice is None else json.dumps(list(choice)),
        "lark": lark,
    }
    forms = [(kind, source) for kind, source in given.items() if source is not None]
    if len(forms) != 1:
        raise InvalidRequestError(f"{len(forms)} forms are given; give one of {', '.join(given)}", "grammar")
    return compile_grammar(*forms[0])


def _schema_text(schema: Any) -> str:
    if isinstance(schema, str):
        return schema
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, (Mapping, bool)):
        reason = f"json_schema is a {type(schema).__name__}; give a mapping, JSON text or a pydantic model"
        raise InvalidRequestError(reason, "grammar")
    return json.dumps(schema if isinstance(schema, bool) else dict(schema))
