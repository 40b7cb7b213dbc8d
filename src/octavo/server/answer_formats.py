"""From a conversation's body to how its answer is read: the format, and the tokens that must be shown for it.

Owns: what the fields of tools say of an answer. Does not: read answers (text.answer_reader does).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.server.bodies.structure import given_structures
from octavo.text.answer_format import AnswerFormat

if TYPE_CHECKING:
    from octavo.server.bodies.chat import ChatBody
    from octavo.server.bodies.tools import Tool
    from octavo.text.dialect import Dialect, Tags
    from octavo.text.tokenizer import Tokenizer

FORMAT = "format"  # of a form's facts
FORCED_AS = {"qwen3_coder": "hermes"}  # under a grammar: its values have no form that a schema could be held to
TAIL_IDS = 32  # of a prompt: tags and blank space at its end are spelled with fewer


def format_of(dialect: Dialect, body: ChatBody, prompt_end: str) -> AnswerFormat | None:
    """How the answer to a body is told apart, None when all of it is content; `prompt_end` is the prompt's end."""
    tools = body.usable_tools
    calls = dialect.calls if tools else None
    reasoning, starts_inside = reasoning_of(dialect, prompt_end)
    if calls is None and reasoning is None:
        return None
    return AnswerFormat(
        reasoning=reasoning,
        starts_inside=starts_inside,
        calls=FORCED_AS.get(calls or "", calls) if body.forced or given_structures(body) else calls,
        forced=body.forced,
        names=tuple(tool.function.name for tool in tools),
        texts=tuple(text for tool in tools for text in _texts(tool)) if calls == "qwen3_coder" else (),
        is_single=body.parallel_tool_calls is False,
    )


def reasoning_of(dialect: Dialect, prompt_end: str) -> tuple[Tags | None, bool]:
    """The tags to be looked for, and whether the prompt has opened them."""
    tags, end = dialect.reasoning, prompt_end.rstrip()
    if tags is None or end.endswith(tags[1]):  # it is over before the answer begins
        return None, False
    return tags, end.endswith(tags[0])


def shown_ids(dialect: Dialect, body: ChatBody, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Special tokens that are shown all the same: those that tell the parts of this answer apart."""
    ids = [tokenizer.backend.token_to_id(marker) for marker in dialect.markers(bool(body.usable_tools))]
    return tuple(sorted({token_id for token_id in ids if token_id in tokenizer.special_ids}))


def format_fact(answer_format: AnswerFormat | None) -> dict[str, object]:
    """The format among a form's facts."""
    return {} if answer_format is None else {FORMAT: msgspec.to_builtins(answer_format)}


def read_format(facts: Mapping[str, Any]) -> AnswerFormat | None:
    """The format that a form's facts hold."""
    return None if facts.get(FORMAT) is None else msgspec.convert(facts[FORMAT], AnswerFormat)


def _texts(tool: Tool) -> list[str]:
    """The arguments that are strings, by their schema."""
    properties = json.loads(tool.function.parameters).get("properties")
    if not isinstance(properties, dict):
        return []
    name = tool.function.name
    return [f"{name}.{key}" for key, schema in properties.items() if isinstance(schema, dict) and _is_text(schema)]


def _is_text(schema: Mapping[str, object]) -> bool:
    if "enum" in schema and isinstance(schema["enum"], list):
        return all(isinstance(value, str) for value in schema["enum"])
    return schema.get("type") == "string"
