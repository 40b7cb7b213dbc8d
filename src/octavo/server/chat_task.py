"""From a conversation to what is to be answered, whichever interface it came through.

Owns: the task of a ChatBody. Does not: know how the answer looks (its form's kind says it) or submit anything.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from octavo.errors import RequestError
from octavo.grammar.answer import AnswerSource, CallSource
from octavo.server.bodies.chat import ChatBody
from octavo.server.bodies.structure import STRUCTURE_FIELDS, given_structures
from octavo.server.bodies.tools import Tool
from octavo.server.context import Context
from octavo.server.encoding import AnswerSpec, Identity
from octavo.server.faults import bad_field, from_exception, with_field
from octavo.server.grammars import Structure, refusal, structure_of
from octavo.server.params import read_params
from octavo.server.reply import Task, answer_facts, wants_usage
from octavo.text.answer_format import AnswerFormat
from octavo.text.dialect import Dialect, Tags

if TYPE_CHECKING:
    pass

FORCED_AS = {"qwen3_coder": "hermes"}  # under a grammar: its values have no form that a schema could be held to
TAIL_IDS = 32  # of a prompt: tags and blank space at its end are spelled with fewer
MAX_FORCED_CALLS = 16  # of one answer that a grammar holds to calls


def read_grammar(
    context: Context, body: ChatBody, prompt_end: Callable[[], str]
) -> Callable[[], Awaitable[str]] | None:
    """The `read_grammar` of a conversation's task; `prompt_end` is asked once the prompt is known. Raises ApiError."""
    if not body.tools and STRUCTURE_FIELDS.isdisjoint(body.model_fields_set):
        return None
    structure = structure_of(body)
    dialect = context.dialect
    has_calls = bool(body.usable_tools) and dialect.calls is not None
    if body.forced:
        _check_beside(body)
        if not has_calls:
            message = "tool_choice asks for a call, but --tool-call-parser none was given; no calls are read here"
            raise bad_field("tool_choice", message, "unsupported_field")
    if not body.forced and structure is None:
        return None
    if structure is not None and not has_calls and dialect.reasoning is None:
        return context.grammars.reader(structure)

    async def read() -> str:
        source = _source(context, body, structure, prompt_end())
        try:
            return await context.grammars.read("answer", msgspec.json.encode(source).decode())
        except RequestError as error:
            if structure is not None and not body.forced and not (error.param or "").startswith("tools"):
                raise refusal(error, structure) from None
            param = error.param or "tools"
            raise from_exception(type(error)(with_field(str(error), param, param), param)) from None

    return read


def _source(context: Context, body: ChatBody, structure: Structure | None, prompt_end: str) -> AnswerSource:
    dialect, tokenizer = context.dialect, context.text.tokenizer
    tools = body.usable_tools if dialect.calls is not None else []
    calls = None
    if tools and dialect.calls is not None:
        may_be_more = body.parallel_tool_calls is not False if body.forced is None else body.parallel_tool_calls
        most = MAX_FORCED_CALLS if may_be_more and body.forced != "named" else 1
        schemas = [(tool.function.name, tool.function.parameters) for tool in tools]
        calls = CallSource(FORCED_AS.get(dialect.calls, dialect.calls), schemas, most)
    reasoning, starts_inside = reasoning_of(dialect, prompt_end)
    markers = dialect.markers(bool(tools))
    ids = {marker: tokenizer.backend.token_to_id(marker) for marker in markers}
    asked = None
    if structure is not None and not body.forced:
        asked = (structure.kind, structure.source, structure.whitespace)
    return AnswerSource(
        reasoning=reasoning,
        starts_inside=starts_inside,
        calls=calls,
        structure=asked,
        special={marker: token_id for marker, token_id in ids.items() if token_id in tokenizer.special_ids},
    )


def _check_beside(body: ChatBody) -> None:
    """Refuse the fields that cannot be kept together with a forced call."""
    for name, is_given in (
        ("min_tokens", bool(body.min_tokens)),
        ("ignore_eos", body.ignore_eos),
        ("use_beam_search", body.use_beam_search),
    ):
        if is_given:
            raise bad_field(name, f"{name} cannot be kept while tool_choice asks for a call; leave {name} out")


Facts = dict[str, object]


async def chat_task(
    context: Context, body: ChatBody, form: str = "chat", id_prefix: str = "chatcmpl", facts: Facts | None = None
) -> Task:
    """What answers a conversation in the given form; `facts` are what that form needs besides. Raises ApiError.

    The form's facts also hold how its parts are told apart (answer.read_format).
    """
    tokenizer = context.text.tokenizer
    prompt: list[int] = []

    async def read_prompts() -> list[list[int]]:
        prompt[:] = await context.prompts.chat(body, params.num_kept(context.max_model_len))
        return [prompt]

    def prompt_end() -> str:
        has_reasoning = context.dialect.reasoning is not None
        return tokenizer.decode(prompt[-TAIL_IDS:], skip_special_tokens=False) if has_reasoning else ""

    def make_form(identity: Identity, num_prompt_tokens: int) -> AnswerSpec:
        answer_format = format_of(context.dialect, body, prompt_end())
        told = {} if answer_format is None else {"format": answer_format}
        own = {"num_prompt_tokens": num_prompt_tokens, **told, **answer_facts(body, [prompt]), **(facts or {})}
        return AnswerSpec(form, identity, wants_usage(body), facts=own)

    params = await read_params(body, context.params.chat)
    return Task(
        kind=id_prefix,
        body=body,
        params=params,
        num_prompts=1,
        num_characters=body.num_characters,
        num_ids=0,
        prompt_param="messages",
        read_prompts=read_prompts,
        make_form=make_form,
        read_grammar=read_grammar(context, body, prompt_end),
        can_continue=form == "chat",
    )


def format_of(dialect: Dialect, body: ChatBody, prompt_end: str) -> AnswerFormat | None:
    """How the answer to a body is told apart, None when all of it is content; `prompt_end` is the prompt's end."""
    tools = body.usable_tools if body.tools else []
    calls = dialect.calls if tools else None
    reasoning, starts_inside = reasoning_of(dialect, prompt_end)
    if calls is None:
        return None if reasoning is None else AnswerFormat(reasoning, starts_inside)
    return AnswerFormat(
        reasoning=reasoning,
        starts_inside=starts_inside,
        calls=FORCED_AS.get(calls, calls) if body.forced or given_structures(body) else calls,
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
