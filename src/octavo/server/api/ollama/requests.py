"""/api/chat and /api/generate: the routes, and the answer to a body without a prompt."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.api.completions.bodies import ChatBody, CompletionBody
from octavo.server.api.completions.requests import ChatRequest, CompletionRequest
from octavo.server.api.ollama.answers import line_begin
from octavo.server.api.ollama.bodies import (
    GENERATE_SPELLING,
    IGNORED_OLLAMA,
    IGNORED_OPTIONS,
    REFUSED_CHAT,
    REFUSED_GENERATE,
    SPELLING,
    OllamaChatBody,
    OllamaGenerateBody,
    chat_of,
    generate_of,
    model_of,
    raw_of,
    read_ollama_chat,
    read_ollama_generate,
)
from octavo.server.bodies.checks import field_notes
from octavo.server.context import context_of
from octavo.server.http.body import read_json
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.http.errors import ApiError, rename_field
from octavo.server.reply import RETRY_NOTE, reply
from octavo.text.dialect import Dialect


async def chat(request: Request) -> Response:
    """Answer a conversation; one without messages asks to load the model, which is loaded already."""
    context = context_of(request)
    body, asked = await read_json(request, context.limits, lambda fields: _chat_asked(fields, context.dialect))
    model = context.check_model(model_of(body))
    if asked is None:
        return _loaded(model, {"message": {"role": "assistant", "content": ""}})
    try:
        made = await ChatRequest.of(context, asked, "ollama", "chat", facts={"is_chat": True}, can_continue=False)
        return await reply(request, made)
    except ApiError as error:
        raise rename_field(error, SPELLING) from None


async def generate(request: Request) -> Response:
    """Answer a prompt; an empty one asks to load the model, which is loaded already."""
    context = context_of(request)
    body, asked = await read_json(request, context.limits, lambda fields: _generate_asked(fields, context.dialect))
    model = context.check_model(model_of(body))
    if asked is None:
        return _loaded(model, {"response": ""})
    try:
        told: dict[str, Any] = {"facts": {"is_chat": False}, "can_continue": False}
        if isinstance(asked, CompletionBody):
            return await reply(request, await CompletionRequest.of(context, asked, "ollama", "gen", **told))
        return await reply(request, await ChatRequest.of(context, asked, "ollama", "gen", **told))
    except ApiError as error:
        raise rename_field(error, GENERATE_SPELLING) from None


def _chat_asked(fields: dict[str, object], dialect: Dialect) -> tuple[OllamaChatBody, ChatBody | None]:
    body = read_ollama_chat(fields)
    return body, chat_of(body, dialect) if body.messages else None


def _generate_asked(
    fields: dict[str, object], dialect: Dialect
) -> tuple[OllamaGenerateBody, ChatBody | CompletionBody | None]:
    body = read_ollama_generate(fields)
    if not body.prompt:
        return body, None
    return body, raw_of(body) if body.raw else generate_of(body, dialect)


def _loaded(model: str, said: dict[str, object]) -> Response:
    body = {**line_begin(model, int(time.time())), **said, "done": True, "done_reason": "load"}
    return Response(msgspec.json.encode(body), media_type="application/json")


_OPTIONS = f"Of `options`: {field_notes({}, IGNORED_OPTIONS)}"
ENDPOINTS = [
    Endpoint(
        "POST",
        "/api/chat",
        chat,
        limit=Limit.QUEUE,
        body=OllamaChatBody,
        description=f"{chat.__doc__}\n\n{RETRY_NOTE}\n\n{field_notes(REFUSED_CHAT, IGNORED_OLLAMA)}\n\n{_OPTIONS}",
    ),
    Endpoint(
        "POST",
        "/api/generate",
        generate,
        limit=Limit.QUEUE,
        body=OllamaGenerateBody,
        description=f"{generate.__doc__}\n\n{RETRY_NOTE}\n\n{field_notes(REFUSED_GENERATE, IGNORED_OLLAMA)}"
        f"\n\n{_OPTIONS}",
    ),
]
