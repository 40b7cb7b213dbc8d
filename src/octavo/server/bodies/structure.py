"""The fields that constrain an answer's form: response_format, structured_outputs, and vLLM's guided_* names.

Owns: their shapes and the bounds on their sizes. Does not: choose among them (server/grammars.py) or compile them.
Invariant: an accepted schema is a text of at most MAX_SCHEMA_BYTES characters.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from octavo.sandbox.checks import MAX_PATTERN_BYTES, MAX_SCHEMA_BYTES
from octavo.server.bodies.checks import Body, Refused, sift_if_object

MAX_ALTERNATIVES = 1024
MAX_ALTERNATIVE_CHARACTERS = 1024
MAX_GRAMMAR_CHARACTERS = 65_536
MAX_WHITESPACE_CHARACTERS = 64
MAX_FORMAT_NAME_CHARACTERS = 256
MAX_FORMAT_DESCRIPTION_CHARACTERS = 16_384

_REFUSED_OUTPUTS: Refused = {"disable_additional_properties": (False,)}


def schema_text(value: object) -> str:
    """Return a schema as JSON text; a text is assumed to be JSON. Raises ValueError naming the fault."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, dict | bool):
        _check_size(value)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    else:
        raise ValueError("give a JSON schema: an object, or its text")
    if len(text) > MAX_SCHEMA_BYTES:
        raise ValueError(f"a schema of {len(text)} characters is given; at most {MAX_SCHEMA_BYTES} bytes are taken")
    return text


def _check_size(value: object) -> None:
    """Refuse, after a bounded number of steps, a value whose text would be too long."""
    pending, left = [value], MAX_SCHEMA_BYTES
    while pending:
        node = pending.pop()
        left -= len(node) if isinstance(node, str) else 1
        if isinstance(node, dict):
            left -= len(node)
            pending += [*node.keys(), *node.values()] if left > 0 else []
        elif isinstance(node, list):
            left -= len(node)
            pending += node if left > 0 else []
        if left < 0:
            raise ValueError(f"the schema is too long; at most {MAX_SCHEMA_BYTES} bytes are taken")


SchemaText = Annotated[
    str, BeforeValidator(schema_text), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}]})
]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_BYTES)]
Alternatives = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_ALTERNATIVE_CHARACTERS)]],
    Field(min_length=1, max_length=MAX_ALTERNATIVES),
]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Whitespace = Annotated[str, Field(max_length=MAX_WHITESPACE_CHARACTERS)]


class NamedSchema(Body):
    """OpenAI's wrapper of a schema. Every schema is enforced, `strict` or not."""

    name: str = Field("", max_length=MAX_FORMAT_NAME_CHARACTERS, description="for the caller's own records")
    description: str = Field(
        "", max_length=MAX_FORMAT_DESCRIPTION_CHARACTERS, description="not shown to the model: say it in a message"
    )
    definition: SchemaText = Field(alias="schema")
    strict: bool = Field(True, description="every schema is enforced, strict or not")


def _sift_schema(value: object) -> object:
    return sift_if_object(value, {}, NamedSchema, "response_format.json_schema.")


class ResponseFormat(Body):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[NamedSchema, BeforeValidator(_sift_schema)] | None = None
    definition: SchemaText | None = Field(None, alias="schema", description="of json_object: what the object must be")


class StructuredOutputs(Body):
    """vLLM's structured_outputs: exactly one of json, json_object, regex, choice and grammar."""

    definition: SchemaText | None = Field(None, alias="json", description="a JSON schema, or its text")
    json_object: bool = False
    regex: Pattern | None = None
    choice: Alternatives | None = None
    grammar: GrammarText | None = Field(None, description="in Lark, or in llama.cpp's GBNF")
    whitespace_pattern: Whitespace | None = Field(
        None, description="of JSON: an expression for the whitespace that may stand between its parts"
    )
    disable_any_whitespace: bool = Field(False, description="of JSON: no whitespace at all")


def _sift_format(value: object) -> object:
    return sift_if_object(value, {}, ResponseFormat, "response_format.")


def _sift_outputs(value: object) -> object:
    return sift_if_object(value, _REFUSED_OUTPUTS, StructuredOutputs, "structured_outputs.")


class StructureFields(Body):
    """The fields that constrain an answer. At most one of them may be given."""

    response_format: Annotated[ResponseFormat, BeforeValidator(_sift_format)] | None = None
    structured_outputs: Annotated[StructuredOutputs, BeforeValidator(_sift_outputs)] | None = None
    guided_json: SchemaText | None = Field(None, description="as structured_outputs.json")
    guided_regex: Pattern | None = Field(None, description="as structured_outputs.regex")
    guided_choice: Alternatives | None = Field(None, description="as structured_outputs.choice")
    guided_grammar: GrammarText | None = Field(None, description="as structured_outputs.grammar")
    guided_whitespace_pattern: Whitespace | None = Field(None, description="as structured_outputs.whitespace_pattern")


STRUCTURE_FIELDS = frozenset(StructureFields.model_fields)


def given_structures(body: StructureFields) -> list[tuple[str, str, Any]]:
    """Return the structures that a body gives: for each the field, the kind of grammar, and its source."""
    found: list[tuple[str, str, Any]] = []
    answer = body.response_format
    if answer is not None and answer.type == "json_schema":
        source = None if answer.json_schema is None else answer.json_schema.definition
        found.append(("response_format.json_schema.schema", "json_schema", source))
    elif answer is not None and answer.type == "json_object":
        kind = "json_object" if answer.definition is None else "json_schema"
        found.append(("response_format", kind, answer.definition or ""))
    outputs = body.structured_outputs
    if outputs is not None:
        given = (outputs.definition, outputs.regex, outputs.choice, outputs.grammar)
        found += _listed("structured_outputs.", given)
        if outputs.json_object:
            found.append(("structured_outputs.json_object", "json_object", ""))
    guided = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    return [*found, *_listed("guided_", guided)]


def _listed(prefix: str, sources: tuple[object, ...]) -> list[tuple[str, str, Any]]:
    names = (("json", "json_schema"), ("regex", "regex"), ("choice", "choice"), ("grammar", "lark"))
    return [
        (prefix + name, kind, source) for (name, kind), source in zip(names, sources, strict=True) if source is not None
    ]
