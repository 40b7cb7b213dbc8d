"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo.server.context import context_of
from octavo.server.limits import read_json
from octavo.server.params import read_params
from octavo.server.reply import RETRY_NOTE, Task, reply, wants_usage
from octavo.server.schema import REFUSED_CHAT, ChatBody, field_notes, inline_schema, read_chat
from octavo.server.shapes import Form


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_chat)
    context.check_model(body.model)

    async def read_prompts() -> list[list[int]]:
        return [await context.prompts.chat(body)]

    task = Task(
        kind="chatcmpl",
        body=body,
        params=await read_params(body, context.params.chat),
        num_prompts=1,
        num_characters=sum(len(part.text) for message in body.messages for part in message.content),
        num_ids=0,
        prompt_param="messages",
        read_prompts=read_prompts,
        make_form=lambda identity: Form("chat", identity, wants_usage(body)),
    )
    return await reply(request, task)


def add_routes(app: FastAPI) -> None:
    """Add this module's endpoint."""
    content = {"application/json": {"schema": inline_schema(ChatBody)}}
    app.add_api_route(
        "/v1/chat/completions",
        chat_completions,
        methods=["POST"],
        response_model=None,
        description=f"Answer a conversation.\n\n{RETRY_NOTE}\n\n{field_notes(REFUSED_CHAT)}",
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
