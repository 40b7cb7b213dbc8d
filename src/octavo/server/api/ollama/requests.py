"""Ollama's API: /api/chat, /api/generate, /api/embed, /api/embeddings, its endpoints for models, and `/`.

Browsers get a page at `/`. Models can be listed and described, but not fetched, made or removed over HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.server.api.completions.bodies import ChatBody, CompletionBody
from octavo.server.api.completions.requests import ChatRequest, CompletionRequest
from octavo.server.api.embeddings import Embedded, Inputs, check_dimensions, compute, embed, shortened
from octavo.server.api.fields import Body, Refused, field_notes, read
from octavo.server.api.models import ollama_card, ollama_running, ollama_show
from octavo.server.api.ollama.answers import line_begin
from octavo.server.api.ollama.bodies import (
    GENERATE_SPELLING,
    IGNORED_EMBED,
    IGNORED_OLLAMA,
    IGNORED_OPTIONS,
    REFUSED_CHAT,
    REFUSED_EMBED,
    REFUSED_GENERATE,
    SPELLING,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    chat_of,
    generate_of,
    model_of,
    raw_of,
    read_embed,
    read_embeddings,
    read_keep_alive,
    read_ollama_chat,
    read_ollama_generate,
)
from octavo.server.api.pages import file_response
from octavo.server.api.sampling import ServedFields
from octavo.server.context import Context, context_of
from octavo.server.encoding import Json
from octavo.server.http.auth import wants_html
from octavo.server.http.body import json_response, read_json
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.http.errors import ApiError, bad_field, renamed_fields
from octavo.server.http.middleware import ARRIVAL
from octavo.server.reply import RETRY_NOTE, reply
from octavo.text.dialect import Dialect


async def chat(request: Request) -> Response:
    """Answer a conversation. One without messages requests loading the model, or unloading it with keep_alive 0."""
    context = context_of(request)
    keep_alive = KeepAlive(context)
    body, chat_body = await read_json(
        request, context.limits, lambda fields: _read_chat(keep_alive.take(fields), context.dialect_of(fields))
    )
    context = context.for_model(model_of(body))
    keep_alive.apply(context)
    if chat_body is None:
        return await _loaded(context, body, keep_alive, {"message": {"role": "assistant", "content": ""}})
    with renamed_fields(SPELLING):
        made = await ChatRequest.of(context, chat_body, "ollama", "chat", facts={"is_chat": True}, can_continue=False)
        return await reply(request, made)


async def generate(request: Request) -> Response:
    """Answer a prompt. An empty one requests loading the model, or unloading it with keep_alive 0."""
    context = context_of(request)
    keep_alive = KeepAlive(context)
    body, text_body = await read_json(
        request, context.limits, lambda fields: _read_generate(keep_alive.take(fields), context.dialect_of(fields))
    )
    context = context.for_model(model_of(body))
    keep_alive.apply(context)
    if text_body is None:
        return await _loaded(context, body, keep_alive, {"response": ""})
    with renamed_fields(GENERATE_SPELLING):
        options: dict[str, Any] = {"facts": {"is_chat": False}, "can_continue": False}
        if isinstance(text_body, CompletionBody):
            return await reply(request, await CompletionRequest.of(context, text_body, "ollama", "gen", **options))
        return await reply(request, await ChatRequest.of(context, text_body, "ollama", "gen", **options))


def _read_chat(fields: dict[str, object], dialect: Dialect) -> tuple[OllamaChatBody, ChatBody | None]:
    body = read_ollama_chat(fields, dialect.takes_images)
    return body, chat_of(body, dialect) if body.messages else None


def _read_generate(
    fields: dict[str, object], dialect: Dialect
) -> tuple[OllamaGenerateBody, ChatBody | CompletionBody | None]:
    body = read_ollama_generate(fields, dialect.takes_images)
    if not body.prompt and not body.images:
        return body, None
    return body, raw_of(body) if body.raw else generate_of(body, dialect)


class KeepAlive:
    """The field keep_alive of one request, which replaces --keep-alive for its model until that is unloaded.

    Where the only model is always loaded, or --no-client-keep-alive is given, the field is ignored.
    """

    def __init__(self, context: Context) -> None:
        served = context.served
        self._is_used = served is not None and served.config.models.client_keep_alive
        self.seconds: float | None = None

    def take(self, fields: dict[str, object]) -> dict[str, object]:
        """Remove the field from a body, if it is used; return the body. Raises ApiError."""
        if self._is_used and "keep_alive" in fields:
            self.seconds = read_keep_alive(fields.pop("keep_alive"))
        return fields

    def apply(self, context: Context) -> None:
        """Set the time for the request's model."""
        if self.seconds is not None and context.served is not None:
            context.served.set_keep_alive(self.seconds)


async def _loaded(context: Context, body: ServedFields, keep_alive: KeepAlive, members: Json) -> Response:
    """Load the request's model, or leave it to be unloaded, and say which. Raises ModelLoadError."""
    reason = "unload" if keep_alive.seconds == 0 else "load"
    if context.served is not None and reason == "load":
        (await context.served.acquire())()
    head = line_begin(model_of(body) or context.model, int(time.time()))
    return json_response({**head, **members, "done": True, "done_reason": reason})


_OPTIONS = f"Of `options`: {field_notes({}, IGNORED_OPTIONS)}"


async def embed_texts(request: Request) -> Response:
    """Return each text's vector, as /v1/embeddings does."""
    context = context_of(request)
    keep_alive = KeepAlive(context)
    body = await read_json(request, context.limits, lambda fields: read_embed(keep_alive.take(fields)))
    context = context.for_model(model_of(body))
    keep_alive.apply(context)
    model = model_of(body) or context.model
    check_dimensions(context, body.dimensions)
    if not body.input:  # an empty input requests loading the model
        await _loaded(context, body, keep_alive, {})
        return json_response({"model": model, "embeddings": []})
    params = ["input"] if len(body.input) == 1 else [f"input[{index}]" for index in range(len(body.input))]
    keep = context.max_model_len if body.truncate else None
    found = await embed(request, context, "embed", body, Inputs(body.input, params, keep=keep, keeps_start=True))
    total_ns = round((time.monotonic() - request.scope[ARRIVAL]) * 1e9)

    def answer() -> Json:
        return {
            "model": model,
            "embeddings": [vector.tolist() for vector in shortened(found.vectors, body.dimensions)],
            "total_duration": total_ns,
            "load_duration": 0,
            "prompt_eval_count": sum(found.num_tokens),
        }

    return await _vectors(answer, found)


async def embed_prompt(request: Request) -> Response:
    """Return the vector of one text, as /v1/embeddings does."""
    context = context_of(request)
    keep_alive = KeepAlive(context)
    body = await read_json(request, context.limits, lambda fields: read_embeddings(keep_alive.take(fields)))
    context = context.for_model(model_of(body))
    keep_alive.apply(context)
    if not body.prompt:
        await _loaded(context, body, keep_alive, {})
        return Response(b'{"embedding":[]}', media_type="application/json")
    inputs = Inputs([body.prompt], ["prompt"], keep=context.max_model_len, keeps_start=True)
    found = await embed(request, context, "embed", body, inputs)
    return await _vectors(lambda: {"embedding": found.vectors[0].tolist()}, found)


async def _vectors(answer: Callable[[], Json], found: Embedded) -> Response:
    content = await compute(lambda: msgspec.json.encode(answer()), sum(map(len, found.vectors)))
    return Response(content, media_type="application/json")


_NOTES = field_notes(REFUSED_EMBED, IGNORED_EMBED)


API_VERSION = "0.12.11"  # of Ollama's API that this server follows; clients require a minimum version
_REFUSED_NAMED: Refused = {"system": ("",), "template": ("",), "options": ({},)}
_IGNORED_NAMED = {"verbose", "stream", "insecure", "keep_alive"}
_NO_HTML_FROM_TEXT = "; require-trusted-types-for 'script'; trusted-types 'none'"  # a model's text never becomes HTML
_ELSEWHERE = {
    "/api/push": "no registry is written to",
    "/api/create": "models are made elsewhere, and served by starting octavo with them",
    "/api/copy": "a server has the one model that it was started with; --served-model-name gives it another name",
    "/api/delete": "nothing is removed over HTTP; delete its files where they are kept",
}


class ModelNameBody(Body):
    """A body with a model's name, in the field `model` or the older field `name`."""

    model: str | None = None
    name: str | None = None

    @property
    def requested(self) -> str:
        """The model's name without the tag that Ollama's clients add. Raises ApiError."""
        name = self.model or self.name
        if not name:
            raise bad_field("model", "model is missing", "missing_field")
        return name.removesuffix(":latest")


async def version(request: Request) -> Response:
    """Return the version of Ollama's API that this server follows."""
    return json_response({"version": API_VERSION, "server": "octavo"})


async def tags(request: Request) -> Response:
    """List every served model under each of its names."""
    context = context_of(request)
    return json_response({"models": [ollama_card(context.for_model(name), name) for name in context.all_names]})


async def running(request: Request) -> Response:
    """List every loaded model under each of its names."""
    loaded = [context for context in context_of(request).each_model if context.is_loaded]
    return json_response({"models": [ollama_running(context, name) for context in loaded for name in context.models]})


async def show(request: Request) -> Response:
    """Describe the served model. Any other name gets a 404."""
    context = context_of(request)
    name = (await _read_name(request)).requested
    return json_response(ollama_show(context.for_model(name), name))


async def pull(request: Request) -> Response:
    """Answer "success" for the served model. No other model is fetched."""
    context = context_of(request)
    context.for_model((await _read_name(request)).requested)
    return Response(b'{"status":"success"}\n', media_type="application/x-ndjson")


async def refuse(request: Request) -> Response:
    """Refuse an operation that a server of one model does not support."""
    path = request.url.path
    raise ApiError(400, f"{path} is not done here: {_ELSEWHERE[path]}", code="unsupported_endpoint")


async def root(request: Request) -> Response:
    """Return the chat page to browsers and a line of text to other clients. Ollama's clients call this first."""
    if not wants_html(request.headers.get("accept", "")):
        return PlainTextResponse("Octavo is running", headers={"vary": "Accept"})
    page = file_response(request, "chat.html")
    page.headers["content-security-policy"] += _NO_HTML_FROM_TEXT
    page.headers["vary"] = "Accept"
    return page


async def _read_name(request: Request) -> ModelNameBody:
    def check(fields: dict[str, object]) -> ModelNameBody:
        return read(ModelNameBody, {k: v for k, v in fields.items() if k not in _IGNORED_NAMED}, _REFUSED_NAMED)

    return await read_json(request, context_of(request).limits, check)


_READ = (("/api/version", version), ("/api/tags", tags), ("/api/ps", running))


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
    Endpoint(
        "POST",
        "/api/embed",
        embed_texts,
        limit=Limit.QUEUE,
        body=OllamaEmbedBody,
        description=f"{embed_texts.__doc__}\n\n{_NOTES}",
    ),
    Endpoint(
        "POST",
        "/api/embeddings",
        embed_prompt,
        limit=Limit.QUEUE,
        body=OllamaEmbeddingsBody,
        description=f"{embed_prompt.__doc__}\n\n{_NOTES}",
    ),
    *(Endpoint("GET", path, handler, limit=Limit.NONE) for path, handler in _READ),
    *(Endpoint("HEAD", path, handler, limit=Limit.NONE, is_documented=False) for path, handler in _READ),
    Endpoint("POST", "/api/show", show),
    Endpoint("POST", "/api/pull", pull),
    *(Endpoint("POST", path, refuse, is_documented=False) for path in ("/api/push", "/api/create", "/api/copy")),
    Endpoint("DELETE", "/api/delete", refuse, limit=Limit.NONE, is_documented=False),
    Endpoint("GET", "/", root, limit=Limit.NONE, is_documented=False),
    Endpoint("HEAD", "/", root, limit=Limit.NONE, is_documented=False),
]
