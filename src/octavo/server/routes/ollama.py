"""POST /api/chat and /api/generate: Ollama's interface to answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo.server.bodies.chat import ChatBody
from octavo.server.bodies.checks import field_notes
from octavo.server.bodies.completion import CompletionBody
from octavo.server.bodies.ollama import (
    IGNORED_OLLAMA,
    IGNORED_OPTIONS,
    REFUSED_CHAT,
    REFUSED_GENERATE,
    OllamaChatBody,
    OllamaGenerateBody,
    read_ollama_chat,
    read_ollama_generate,
)
from octavo.server.chat_task import chat_task
from octavo.server.context import Context, context_of
from octavo.server.encoding import AnswerSpec
from octavo.server.faults import ApiError
from octavo.server.limits import read_json
from octavo.server.ollama_chat import GENERATE_SPELLING, SPELLING, chat_of, generate_of, model_of, raw_of
from octavo.server.params import read_params
from octavo.server.reply import RETRY_NOTE, Task, reply
from octavo.server.routes.posting import add_post
from octavo.server.shapes.ollama import line_begin
from octavo.server.spelling import rename_field
from octavo.text.dialect import Dialect


async def chat(request: Request) -> Response:
    """Answer a conversation; one without messages asks for the model to be loaded, which it is."""
    context = context_of(request)
    body, asked = await read_json(request, context.limits, lambda fields: _chat_asked(fields, context.dialect))
    model = context.check_model(model_of(body))
    if asked is None:
        return _loaded(model, {"message": {"role": "assistant", "content": ""}})
    try:
        return await reply(request, await chat_task(context, asked, "ollama", "chat", {"is_chat": True}))
    except ApiError as error:
        raise rename_field(error, SPELLING) from None


async def generate(request: Request) -> Response:
    """Answer a prompt; an empty one asks for the model to be loaded, which it is."""
    context = context_of(request)
    body, asked = await read_json(request, context.limits, lambda fields: _generate_asked(fields, context.dialect))
    model = context.check_model(model_of(body))
    if asked is None:
        return _loaded(model, {"response": ""})
    try:
        if isinstance(asked, CompletionBody):
            task = await _raw_task(context, asked)
        else:
            task = await chat_task(context, asked, "ollama", "gen", {"is_chat": False})
        return await reply(request, task)
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


async def _raw_task(context: Context, body: CompletionBody) -> Task:
    """What goes on with a text as it is."""

    async def read_prompts() -> Sequence[Sequence[int]]:
        return await context.prompts.completion(body.prompt)

    return Task(
        kind="gen",
        body=body,
        params=await read_params(body, context.params.completion),
        num_prompts=1,
        num_characters=len(body.prompt[0]),
        num_ids=0,
        prompt_param="prompt",
        read_prompts=read_prompts,
        make_form=lambda identity, _: AnswerSpec("ollama", identity, facts={"is_chat": False}),
        can_continue=False,
    )


def _loaded(model: str, said: dict[str, object]) -> Response:
    body = {**line_begin(model, int(time.time())), **said, "done": True, "done_reason": "load"}
    return Response(msgspec.json.encode(body), media_type="application/json")


def add_routes(app: FastAPI) -> None:
    """Add this module's endpoints."""
    options = f"Of `options`: {field_notes({}, IGNORED_OPTIONS)}"
    chat_notes, generate_notes = (field_notes(each, IGNORED_OLLAMA) for each in (REFUSED_CHAT, REFUSED_GENERATE))
    add_post(app, "/api/chat", chat, OllamaChatBody, str(chat.__doc__), RETRY_NOTE, chat_notes, options)
    add_post(
        app, "/api/generate", generate, OllamaGenerateBody, str(generate.__doc__), RETRY_NOTE, generate_notes, options
    )
