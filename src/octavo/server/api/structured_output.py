"""Structured output: the fields that constrain an answer's form, and the grammars that these fields are compiled to.

Owns: response_format, structured_outputs and vLLM's guided_* fields, with their bounds and the choice among them; the
cache of compiled grammars; sharing one compilation among equal concurrent requests.
Does not: compile (the sandbox process does, within its bounds on time and memory).
Invariants: an accepted schema is a text of at most MAX_SCHEMA_BYTES characters. The cache holds at most MAX_CACHED
grammars and, including their sources, MAX_CACHED_CHARACTERS characters.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from octavo.errors import InvalidRequestError, OctavoError
from octavo.sandbox.checks import MAX_PATTERN_BYTES, MAX_SCHEMA_BYTES
from octavo.sandbox.pool import Sandbox
from octavo.sandbox.wire import CompileGrammar
from octavo.server.api.fields import Body, Refused, reject_unsupported_in
from octavo.server.http.errors import ApiError, bad_field, from_exception, with_field

if TYPE_CHECKING:
    from octavo.text.text_model import TextModel

MAX_ALTERNATIVES = 1024
MAX_ALTERNATIVE_CHARACTERS = 1024
MAX_GRAMMAR_CHARACTERS = 65_536
MAX_WHITESPACE_CHARACTERS = 64
MAX_FORMAT_NAME_CHARACTERS = 256
MAX_FORMAT_DESCRIPTION_CHARACTERS = 16_384

_REFUSED_OUTPUTS: Refused = {"disable_additional_properties": (False,)}


def schema_text(value: object) -> str:
    """Return a schema as JSON text. A text is assumed to be JSON. Raises ValueError naming the fault."""
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
    """Refuse a value whose JSON text would be too long, after a bounded number of steps. Raises ValueError."""
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
    """OpenAI's wrapper of a schema. Every schema is enforced, whatever `strict` is."""

    name: str = Field("", max_length=MAX_FORMAT_NAME_CHARACTERS, description="for the caller's own records")
    description: str = Field(
        "", max_length=MAX_FORMAT_DESCRIPTION_CHARACTERS, description="not shown to the model: say it in a message"
    )
    definition: SchemaText = Field(alias="schema")
    strict: bool = Field(True, description="every schema is enforced, strict or not")


def _read_schema(value: object) -> object:
    return reject_unsupported_in(value, {}, NamedSchema, "response_format.json_schema.")


class ResponseFormat(Body):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[NamedSchema, BeforeValidator(_read_schema)] | None = None
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


def _read_format(value: object) -> object:
    return reject_unsupported_in(value, {}, ResponseFormat, "response_format.")


def _read_outputs(value: object) -> object:
    return reject_unsupported_in(value, _REFUSED_OUTPUTS, StructuredOutputs, "structured_outputs.")


class StructureFields(Body):
    """The fields that constrain an answer. A request may have at most one of them."""

    response_format: Annotated[ResponseFormat, BeforeValidator(_read_format)] | None = None
    structured_outputs: Annotated[StructuredOutputs, BeforeValidator(_read_outputs)] | None = None
    guided_json: SchemaText | None = Field(None, description="as structured_outputs.json")
    guided_regex: Pattern | None = Field(None, description="as structured_outputs.regex")
    guided_choice: Alternatives | None = Field(None, description="as structured_outputs.choice")
    guided_grammar: GrammarText | None = Field(None, description="as structured_outputs.grammar")
    guided_whitespace_pattern: Whitespace | None = Field(None, description="as structured_outputs.whitespace_pattern")


STRUCTURE_FIELDS = frozenset(StructureFields.model_fields)


def given_structures(body: StructureFields) -> list[tuple[str, str, Any]]:
    """Return the constraints in a body, each as (field, kind of grammar, source)."""
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
        found += _named_sources("structured_outputs.", given)
        if outputs.json_object:
            found.append(("structured_outputs.json_object", "json_object", ""))
    guided = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    return [*found, *_named_sources("guided_", guided)]


def _named_sources(prefix: str, sources: tuple[object, ...]) -> list[tuple[str, str, Any]]:
    names = (("json", "json_schema"), ("regex", "regex"), ("choice", "choice"), ("grammar", "lark"))
    return [
        (prefix + name, kind, source) for (name, kind), source in zip(names, sources, strict=True) if source is not None
    ]


MAX_CACHED = 256
MAX_CACHED_CHARACTERS = 4 << 20
_Key = tuple[str, str, str | None]


@dataclass(frozen=True, slots=True)
class Structure:
    """The constraint of an answer: a kind of grammar and its source. `param` is the client's field.

    `whitespace` is a regular expression for the whitespace between parts of JSON; None is a space after , and :.
    """

    kind: str
    source: str
    param: str
    whitespace: str | None = None
    whitespace_param: str = ""


def structure_of(body: StructureFields) -> Structure | None:
    """Return the constraint in a body; None without one. Raises ApiError naming the field."""
    given = given_structures(body)
    if len(given) > 1:
        (first, *_), (second, *_) = given[:2]
        raise bad_field(second, f"{second} says what the answer must be, and so does {first}; leave one of them out")
    whitespace_param, whitespace = _whitespace(body)
    if not given:
        if body.structured_outputs is not None:
            message = "structured_outputs asks for nothing; give json, json_object, regex, choice or grammar"
            raise bad_field("structured_outputs", message)
        if whitespace is not None:
            raise bad_field(whitespace_param, f"{whitespace_param} goes with a JSON schema; none is given")
        return None
    param, kind, source = given[0]
    if source is None:
        param = param.removesuffix(".schema")
        raise bad_field(param, f"{param} is missing", "missing_field")
    if whitespace is not None and not kind.startswith("json"):
        raise bad_field(whitespace_param, f"{whitespace_param} goes with JSON; {param} is not about JSON")
    return Structure(kind, json.dumps(source) if kind == "choice" else source, param, whitespace, whitespace_param)


def _whitespace(body: StructureFields) -> tuple[str, str | None]:
    outputs = body.structured_outputs
    if outputs is not None and outputs.disable_any_whitespace:
        if outputs.whitespace_pattern:
            message = "disable_any_whitespace and whitespace_pattern are given; leave one of them out"
            raise bad_field("structured_outputs.whitespace_pattern", message)
        return "structured_outputs.disable_any_whitespace", ""
    if outputs is not None and outputs.whitespace_pattern is not None:
        return "structured_outputs.whitespace_pattern", outputs.whitespace_pattern
    return "guided_whitespace_pattern", body.guided_whitespace_pattern


class GrammarReader:
    """A cache that compiles grammars, used in one event loop."""

    def __init__(self, sandbox: Sandbox, text: TextModel) -> None:
        self._sandbox = sandbox
        self._vocab_size = text.spec.vocab_size
        ids = sorted(token for token in text.tokenizer.special_ids if token < self._vocab_size)
        self._specials = {token: text.tokenizer.id_to_piece(token) for token in ids}
        self._compiled: OrderedDict[_Key, str] = OrderedDict()
        self._num_characters = 0
        self._running: dict[_Key, asyncio.Task[str]] = {}

    async def read(self, kind: str, source: str, whitespace: str | None = None) -> str:
        """Return a source compiled as one of octavo.grammar.compile.KINDS. Raises RequestError, EngineError."""
        key = (kind, source, whitespace)
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return self._compiled[key]
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._compile(key))
            task.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(task)

    async def read_structure(self, structure: Structure) -> str:
        """Return the compiled constraint of a body. Raises ApiError naming the body's field."""
        try:
            return await self.read(structure.kind, structure.source, structure.whitespace)
        except OctavoError as error:
            raise refusal(error, structure) from None

    async def _compile(self, key: _Key) -> str:
        kind, source, whitespace = key
        order = CompileGrammar(kind, source, whitespace, self._vocab_size, self._specials)
        return str(await self._sandbox.run("compile_grammar", order))

    def _ended(self, key: _Key, task: asyncio.Task[str]) -> None:
        self._running.pop(key, None)
        if task.cancelled() or task.exception() is not None:
            return
        self._compiled[key] = task.result()
        self._num_characters += _size(key, task.result())
        while len(self._compiled) > MAX_CACHED or self._num_characters > MAX_CACHED_CHARACTERS:
            oldest, grammar = self._compiled.popitem(last=False)
            self._num_characters -= _size(oldest, grammar)


def refusal(error: OctavoError, structure: Structure) -> ApiError:
    """Return the refusal for a grammar that did not compile, with the client's field name."""
    if not isinstance(error, InvalidRequestError):
        return from_exception(error)
    param = structure.whitespace_param if error.param == "whitespace_pattern" else structure.param
    return bad_field(param, with_field(str(error), error.param, param), error.code)


def _size(key: _Key, grammar: str) -> int:
    return len(key[1]) + len(grammar)
