"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's interface."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo.server.anthropic_chat import SPELLING, chat_of
from octavo.server.api.completions.requests import ChatRequest
from octavo.server.auth import KEY
from octavo.server.bodies.anthropic import (
    IGNORED_MESSAGES,
    REFUSED_MESSAGES,
    CountBody,
    MessagesBody,
    read_count,
    read_messages,
)
from octavo.server.bodies.chat import ChatBody
from octavo.server.bodies.checks import field_notes
from octavo.server.context import context_of
from octavo.server.faults import ApiError
from octavo.server.json_body import read_json
from octavo.server.reply import RETRY_NOTE, reply
from octavo.server.routes.posting import add_post
from octavo.server.shell import REQUEST_ID
from octavo.server.spelling import rename_field
from octavo.text.dialect import Dialect


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body, chat = await read_json(request, context.limits, lambda fields: _asked(fields, context.dialect))
    context.check_model(body.model)
    shows_thinking = body.thinking is None or body.thinking.display != "omitted"
    facts: dict[str, object] = {"max_tokens": body.max_tokens, "shows_thinking": shows_thinking}
    try:
        asked = await ChatRequest.of(context, chat, "anthropic", "msg", facts=facts, can_continue=False)
        response = await reply(request, asked)
    except ApiError as error:
        raise rename_field(error, SPELLING) from None
    response.headers["request-id"] = request.scope[REQUEST_ID]  # where Anthropic's clients look for it
    return response


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation's prompt, tools and all."""
    context = context_of(request)
    chat = await read_json(request, context.limits, lambda fields: chat_of(read_count(fields), context.dialect))
    context.check_model(chat.model)
    try:
        count = len(await context.prompts.chat(chat))
    except ApiError as error:
        raise rename_field(error, SPELLING) from None
    context.admission.charge(request.scope[KEY], count)
    return Response(msgspec.json.encode({"input_tokens": count}), media_type="application/json")


def _asked(fields: dict[str, object], dialect: Dialect) -> tuple[MessagesBody, ChatBody]:
    body = read_messages(fields)
    return body, chat_of(body, dialect)


def add_routes(app: FastAPI) -> None:
    """Add this module's endpoints."""
    notes = field_notes(REFUSED_MESSAGES, IGNORED_MESSAGES)
    answered = "Answer a conversation in Anthropic's form."
    add_post(app, "/v1/messages", messages, MessagesBody, answered, RETRY_NOTE, notes)
    counted = "Count the tokens of a prompt in Anthropic's form."
    add_post(app, "/v1/messages/count_tokens", count_tokens, CountBody, counted, notes)
