"""Ollama's API: /api/chat, /api/generate, /api/embed, /api/embeddings, its endpoints for models, and `/`.

Owns: the routes; the lines, durations and finish reasons of answers. Does not: translate bodies (bodies does), or
separate thinking and calls from text (AnswerReader does).
Invariants: each delta makes at most one line. A call is sent when it is complete. Durations add up to the total.
The lines follow Ollama's public API description and the types of its Python package. Browsers get a page at `/`. Models
can be listed and described, but not fetched, made or removed over HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.server.api.completions.bodies import ChatBody, CompletionBody
from octavo.server.api.completions.requests import ChatRequest, CompletionRequest
from octavo.server.api.embeddings import Embedded, Inputs, check_dimensions, compute, embed, shortened
from octavo.server.api.fields import Body, Refused, field_notes, read
from octavo.server.api.models import moment, ollama_card, ollama_running, ollama_show
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
from octavo.server.encoding import (
    REASONS,
    AnswerSpec,
    Choice,
    Json,
    Pieces,
    StreamFormat,
    call_input,
    chat_logprobs,
    encodes,
    reader_of,
)
from octavo.server.http.auth import wants_html
from octavo.server.http.body import json_response, read_json
from octavo.server.http.endpoints import Endpoint, Limit, queued
from octavo.server.http.errors import ApiError, bad_field, ollama_error, renamed_fields
from octavo.server.http.middleware import ARRIVAL
from octavo.server.reply import RETRY_NOTE, reply
from octavo.text.answer_format import CallArguments, CallBegin, Part, Reasoning, Text
from octavo.text.dialect import Dialect

if TYPE_CHECKING:
    from octavo.frontend.outputs import TextDelta, Usage

_B = TypeVar("_B", bound=ServedFields)
_T = TypeVar("_T")


async def chat(request: Request) -> Response:
    """Answer a conversation. One without messages requests loading the model, or unloading it with keep_alive 0."""
    context, body, chat_body, keep_alive_s = await _read(request, _read_chat)
    if chat_body is None:
        return await _loaded(context, body, keep_alive_s, {"message": {"role": "assistant", "content": ""}})
    with renamed_fields(SPELLING):
        made = await ChatRequest.of(context, chat_body, "ollama", "chat", facts={"is_chat": True}, can_continue=False)
        return await reply(request, made)


async def generate(request: Request) -> Response:
    """Answer a prompt. An empty one requests loading the model, or unloading it with keep_alive 0."""
    context, body, text_body, keep_alive_s = await _read(request, _read_generate)
    if text_body is None:
        return await _loaded(context, body, keep_alive_s, {"response": ""})
    with renamed_fields(GENERATE_SPELLING):
        options: dict[str, Any] = {"facts": {"is_chat": False}, "can_continue": False}
        if isinstance(text_body, CompletionBody):
            return await reply(request, await CompletionRequest.of(context, text_body, "ollama", "gen", **options))
        return await reply(request, await ChatRequest.of(context, text_body, "ollama", "gen", **options))


async def _read(
    request: Request, reader: Callable[[dict[str, object], Dialect], tuple[_B, _T]]
) -> tuple[Context, _B, _T, float | None]:
    """Return the Context of the model that a body names, what `reader` makes of the body, and keep_alive in seconds.

    keep_alive replaces --keep-alive for the model until that is unloaded. Where the only model is always loaded, or
    --no-client-keep-alive is given, the field is ignored.
    """
    context, served = context_of(request), context_of(request).served
    seconds: float | None = None

    def read(fields: dict[str, object]) -> tuple[_B, _T]:
        nonlocal seconds
        if served is not None and served.config.models.client_keep_alive and "keep_alive" in fields:
            seconds = read_keep_alive(fields.pop("keep_alive"))
        return reader(fields, context.dialect_of(fields))

    body, made = await read_json(request, context.limits, read)
    context = context.for_model(model_of(body))
    if seconds is not None and context.served is not None:
        context.served.set_keep_alive(seconds)
    return context, body, made, seconds


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


async def _loaded(context: Context, body: ServedFields, keep_alive_s: float | None, members: Json) -> Response:
    """Load the request's model, or leave it to be unloaded, and say which. Raises ModelLoadError."""
    reason = "unload" if keep_alive_s == 0 else "load"
    if context.served is not None and reason == "load":
        (await context.served.acquire())()
    head = line_begin(model_of(body) or context.model, int(time.time()))
    return json_response({**head, **members, "done": True, "done_reason": reason})


_OPTIONS = f"Of `options`: {field_notes({}, IGNORED_OPTIONS)}"


async def embed_texts(request: Request) -> Response:
    """Return each text's vector, as /v1/embeddings does."""
    context, body, _, keep_alive_s = await _read(request, lambda fields, _: (read_embed(fields), None))
    model = model_of(body) or context.model
    check_dimensions(context, body.dimensions)
    if not body.input:  # an empty input requests loading the model
        await _loaded(context, body, keep_alive_s, {})
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
    context, body, _, keep_alive_s = await _read(request, lambda fields, _: (read_embeddings(fields), None))
    if not body.prompt:
        await _loaded(context, body, keep_alive_s, {})
        return json_response({"embedding": []})
    inputs = Inputs([body.prompt], ["prompt"], keep=context.max_model_len, keeps_start=True)
    found = await embed(request, context, "embed", body, inputs)
    return await _vectors(lambda: {"embedding": found.vectors[0].tolist()}, found)


async def _vectors(answer: Callable[[], Json], found: Embedded) -> Response:
    return json_response(await compute(lambda: msgspec.json.encode(answer()), sum(map(len, found.vectors))))


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


def line(body: Json) -> bytes:
    """Return one line of a stream."""
    return msgspec.json.encode(body) + b"\n"


OLLAMA = StreamFormat("application/x-ndjson", b"", b"", lambda error: line(ollama_error(error, {})), has_ids=False)


@encodes("ollama")
class OllamaEncoder:
    """The encoder of /api/chat and /api/generate. It uses the facts is_chat and format."""

    stream_format = OLLAMA
    head = b""

    def __init__(self, spec: AnswerSpec, pieces: Pieces) -> None:
        self._spec = spec
        self._pieces = pieces
        self._head = line_begin(spec.identity[2], spec.identity[1])
        self._reader = reader_of(spec)
        self._calls = Calls()
        self._end: TextDelta | None = None

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return the answer as one object."""
        reader, calls = reader_of(self._spec), Calls()
        deltas = choices[0].deltas
        parts = [*reader.push(choices[0].text), *reader.finish()]
        whole = [*calls.take(parts), *calls.finish()]
        body = {**self._head, **self._members(parts, whole), **ending(deltas[-1], choices[0].usage)}
        logprobs = chat_logprobs(deltas, self._pieces)
        return body if logprobs is None else {**body, "logprobs": logprobs["content"]}

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """Return a line with the delta's text and completed calls; b"" if it has neither."""
        parts = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            self._end = delta
            parts = [*parts, *self._reader.finish()]
        whole = self._calls.take(parts)
        if delta.finish_reason is not None:
            whole += self._calls.finish()
        logprobs = chat_logprobs((delta,), self._pieces) if delta.logprobs else None
        if not whole and logprobs is None and not any(isinstance(part, Text | Reasoning) for part in parts):
            return b""
        body = {**self._head, **self._members(parts, whole), "done": False}
        return line(body if logprobs is None else {**body, "logprobs": logprobs["content"]})

    def last(self) -> bytes:
        """Return the line with the finish reason and the durations."""
        assert self._end is not None
        return line({**self._head, **self._members([], []), **ending(self._end, self._end.usage)})

    def _members(self, parts: Iterable[Part], calls: list[Json]) -> Json:
        text = "".join(part.text for part in parts if isinstance(part, Text))
        thinking = "".join(part.text for part in parts if isinstance(part, Reasoning))
        thought: Json = {"thinking": thinking} if thinking else {}
        if not self._spec.facts["is_chat"]:
            return {"response": text, **thought}
        return {
            "message": {"role": "assistant", "content": text, **thought, **({"tool_calls": calls} if calls else {})}
        }


class Calls:
    """The calls of an answer. It collects each call's arguments until the call is complete."""

    def __init__(self) -> None:
        self._open_call: CallBegin | None = None
        self._arguments: list[str] = []

    def take(self, parts: Iterable[Part]) -> list[Json]:
        """Add parts; return the calls that these parts complete."""
        done: list[Json] = []
        for part in parts:
            if isinstance(part, CallArguments):
                self._arguments.append(part.text)
                continue
            done += self.finish()
            if isinstance(part, CallBegin):
                self._open_call = part
        return done

    def finish(self) -> list[Json]:
        """Return the open call as a list; empty if there is none."""
        open_call, text = self._open_call, "".join(self._arguments)
        self._open_call, self._arguments = None, []
        if open_call is None:
            return []
        function = {"index": open_call.index, "name": open_call.name, "arguments": call_input(text)}
        return [{"id": open_call.call_id, "function": function}]


def line_begin(model: str, created: int) -> Json:
    """Return the fields that begin every line. `created` is in Unix seconds."""
    return {"model": model, "created_at": moment(created)}


def ending(end: TextDelta, usage: Usage | None) -> Json:
    """Return the finish reason, the counts and the durations in nanoseconds. load_duration is the time in the queue."""
    assert end.finish_reason is not None
    over: Json = {"done": True, "done_reason": REASONS[end.finish_reason]}
    if usage is None:
        return over
    queued, first, total = (round(seconds * 1e9) for seconds in (usage.queue_s, usage.ttft_s, usage.e2e_s))
    first = min(max(first, queued), total) if usage.completion_tokens else total
    return {
        **over,
        "total_duration": total,
        "load_duration": queued,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": max(0, first - queued),
        "eval_count": usage.completion_tokens,
        "eval_duration": total - first,
    }


_ABOUT_CHAT = (str(chat.__doc__), RETRY_NOTE, field_notes(REFUSED_CHAT, IGNORED_OLLAMA), _OPTIONS)
_ABOUT_GENERATE = (str(generate.__doc__), RETRY_NOTE, field_notes(REFUSED_GENERATE, IGNORED_OLLAMA), _OPTIONS)
ENDPOINTS = [
    queued("/api/chat", chat, OllamaChatBody, *_ABOUT_CHAT),
    queued("/api/generate", generate, OllamaGenerateBody, *_ABOUT_GENERATE),
    queued("/api/embed", embed_texts, OllamaEmbedBody, str(embed_texts.__doc__), _NOTES),
    queued("/api/embeddings", embed_prompt, OllamaEmbeddingsBody, str(embed_prompt.__doc__), _NOTES),
    *(Endpoint("GET", path, handler, limit=Limit.NONE) for path, handler in _READ),
    *(Endpoint("HEAD", path, handler, limit=Limit.NONE, is_documented=False) for path, handler in _READ),
    Endpoint("POST", "/api/show", show),
    Endpoint("POST", "/api/pull", pull),
    *(Endpoint("POST", path, refuse, is_documented=False) for path in ("/api/push", "/api/create", "/api/copy")),
    Endpoint("DELETE", "/api/delete", refuse, limit=Limit.NONE, is_documented=False),
    Endpoint("GET", "/", root, limit=Limit.NONE, is_documented=False),
    Endpoint("HEAD", "/", root, limit=Limit.NONE, is_documented=False),
]
