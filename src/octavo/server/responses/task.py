"""From a Responses body to the task that answers it, through the chat that asks for the same.

Owns: putting the conversation together, what of the request the answer repeats, and keeping the answer.
Does not: submit anything, or know how the answer looks.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.server.api.completions.bodies import ChatBody, read_chat
from octavo.server.api.completions.requests import ChatRequest
from octavo.server.bodies.response_items import Item
from octavo.server.bodies.responses import ResponsesBody
from octavo.server.context import Context
from octavo.server.encoding import AnswerEncoder, AnswerSpec, Identity
from octavo.server.faults import ApiError, bad_field
from octavo.server.json_body import OFF_LOOP_BYTES
from octavo.server.offload import parse_off_loop
from octavo.server.responses.messages import SPELLING, chat_fields
from octavo.server.responses.store import Given, Link, Stored
from octavo.server.responses.truncation import fitted
from octavo.server.shapes.responses import ID_PREFIX, ResponseEncoder
from octavo.server.spelling import rename_field

if TYPE_CHECKING:
    from octavo.server.encoding import Json

_ITEM_CHARACTERS = 64  # that an item counts beside its text
_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_"}


@dataclass(frozen=True, slots=True)
class ResponseConversation:
    """What is to be answered: the chat that asks for it, what is kept of it with the answer, and what the answer
    repeats of the request (JSON by field, for it may be long and is told several times)."""

    chat: ChatBody
    given: Given
    echo: dict[str, str]


@dataclass(kw_only=True)
class ResponseRequest(ChatRequest):
    """The answer to a Responses body. `keep` puts a response into the store, unless whoever runs it in the background
    does."""

    response_id: str
    echo: Mapping[str, str]
    keep: Callable[[Json], None]
    is_kept: bool

    async def read_prompts(self) -> Sequence[Sequence[int]]:
        """Return the ids of the rendered conversation."""
        try:
            return await super().read_prompts()
        except ApiError as error:
            raise rename_field(error, SPELLING) from None

    async def read_grammar(self) -> str:
        """Return what the answer must obey."""
        try:
            return await super().read_grammar()
        except ApiError as error:
            raise rename_field(error, SPELLING) from None

    def answer_spec(self, identity: Identity) -> AnswerSpec:
        """Return the spec, with what the response repeats of its request."""
        spec = super().answer_spec(identity)
        given = {"store": self.is_kept, "temperature": self.params.temperature, "top_p": self.params.top_p}
        facts = {**spec.facts, "id": self.response_id, "echo": {**self.echo, **_texts(given)}}
        return msgspec.structs.replace(spec, facts=facts)


async def response_request(context: Context, tenant: str, body: ResponsesBody) -> ResponseRequest:
    """Return what answers a Responses body. Raises ApiError."""
    if body.store and "store" in body.model_fields_set and not context.responses.is_on:
        raise bad_field("store", "store is true, but this server is set up to keep no responses; leave it out")
    is_kept = body.store and context.responses.is_on
    if body.background and not is_kept:
        raise bad_field("background", "background is true, but the response is not stored; let it be, with store")
    previous = previous_of(context, tenant, body)
    response_id = ID_PREFIX + uuid.uuid4().hex
    conversation = await read_conversation(context, tenant, body, previous, response_id)

    def keep(response: Json) -> None:
        context.responses.put(tenant, response, conversation.given, previous)

    def keep_answer(encoder: AnswerEncoder) -> None:
        assert isinstance(encoder, ResponseEncoder)
        encoder.keep = keep

    try:
        chat = await fitted(context, conversation.chat) if body.truncation == "auto" else conversation.chat
        return await ResponseRequest.of(
            context,
            chat,
            "response",
            "resp",
            name=response_id,
            prompt_param="input",
            can_continue=False,
            response_id=response_id,
            echo=conversation.echo,
            keep=keep,
            is_kept=is_kept,
            prepare=keep_answer if is_kept and not body.background else None,
        )
    except ApiError as error:
        raise rename_field(error, SPELLING) from None


def previous_of(context: Context, tenant: str, body: ResponsesBody) -> Stored | None:
    """The response that this one goes on from. Raises ApiError."""
    if body.previous_response_id is None:
        return None
    previous = context.responses.get(tenant, body.previous_response_id, "previous_response_id")
    if previous.status not in ("completed", "incomplete"):
        message = (
            f"previous_response_id is {body.previous_response_id!r}, which is {previous.status}; nothing to go on from"
        )
        raise bad_field("previous_response_id", message)
    return previous


async def read_conversation(
    context: Context, tenant: str, body: ResponsesBody, previous: Stored | None, seed: str
) -> ResponseConversation:
    """Put together all items up to and with the input; `seed` makes the ids of those without one. Raises ApiError."""
    wanted = {item["id"] for item in body.items if item["type"] == "item_reference"}
    history = previous.history() if previous is not None else ()
    links = context.responses.links(tenant, wanted)

    def read() -> ResponseConversation:
        before: list[Item] = [item for items in history for item in msgspec.json.decode(items)]
        known = _found(links, wanted)
        own = [known[item["id"]] if item["type"] == "item_reference" else item for item in body.items]
        own = [item if "id" in item else _named(item, f"{seed[len(ID_PREFIX) :]}i{i}") for i, item in enumerate(own)]
        try:
            chat = read_chat(chat_fields(body, before + own))
        except ApiError as error:
            raise rename_field(error, SPELLING) from None
        ids = tuple(item["id"] for item in own)
        return ResponseConversation(chat, Given(msgspec.json.encode(own), ids), _echo(body))

    size = _size(body.items) + sum(map(len, history)) + sum(link.num_bytes for link in links)
    size += len(body.instructions or "")
    has_schemas = bool(body.tools) or body.text.format.schema_ is not None  # of which nobody knows how large they are
    is_short = size <= OFF_LOOP_BYTES and not has_schemas
    return read() if is_short else await parse_off_loop(read, size)


def _found(links: Sequence[Link], wanted: set[str]) -> dict[str, Item]:
    items = [item for link in links for part in (link.given, link.output) for item in msgspec.json.decode(part)]
    return {item["id"]: item for item in items if item["id"] in wanted}


def _named(item: Item, name: str) -> Item:
    return {"id": _PREFIXES[item["type"]] + name, **item}


def _size(items: Sequence[Item]) -> int:
    """About how many characters there are to look at."""
    size = 0
    for item in items:
        content: Any = item.get("content", item.get("output", ""))
        size += _ITEM_CHARACTERS + len(item.get("arguments", ""))
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        size += sum(map(len, parts))
    return size


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {name: msgspec.json.encode(value).decode() for name, value in values.items()}


def _echo(body: ResponsesBody) -> dict[str, str]:
    """What the answer repeats of the request, with the values that hold where it says nothing."""
    choice, asked = body.tool_choice, body.text.format
    shown = asked.model_dump(exclude_none=True, by_alias=True)
    if asked.type == "json_schema":
        shown = {"name": "answer", **shown}
    values = {
        "background": body.background,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "text": {"format": shown, "verbosity": "medium"},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation,
        "user": body.user,
    }
    return _texts(values)
