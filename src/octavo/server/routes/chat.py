"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo.server.bodies.chat import REFUSED_CHAT, ChatBody, read_chat
from octavo.server.bodies.checks import IGNORED_FIELDS, IgnoredFields, field_notes
from octavo.server.chat_task import chat_task
from octavo.server.context import context_of
from octavo.server.limits import read_json
from octavo.server.ollama_chat import SENT_NAMES, with_ollama_names
from octavo.server.reply import RETRY_NOTE, reply
from octavo.server.routes.posting import add_post


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)

    def read(fields: dict[str, object]) -> ChatBody:
        is_plain = fields.keys().isdisjoint(SENT_NAMES)
        return read_chat(fields if is_plain else with_ollama_names(fields, context.dialect))

    body = await read_json(request, context.limits, read)
    context.check_model(body.model)
    if not context.dialect.effort_variables and body.effort_field is not None:
        ignored: IgnoredFields = request.scope[IGNORED_FIELDS]
        if body.effort != "none" or context.dialect.reasoning is not None:  # else there is nothing to switch off
            ignored.add(body.effort_field)
    num_top = body.prompt_logprobs
    if num_top is None:
        return await reply(request, await chat_task(context, body))
    facts: dict[str, object] = {"num_prompt_logprobs": num_top}
    return await reply(request, await chat_task(context, body, facts=facts))


def add_routes(app: FastAPI) -> None:
    """Add this module's endpoint."""
    add_post(
        app,
        "/v1/chat/completions",
        chat_completions,
        ChatBody,
        "Answer a conversation.",
        RETRY_NOTE,
        field_notes(REFUSED_CHAT),
    )
