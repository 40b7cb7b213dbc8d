"""POST /v1/responses, and what is stored of its answers: GET, DELETE, input items, cancel; counting of input tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo.server.auth import KEY
from octavo.server.bodies.checks import field_notes, inline_schema
from octavo.server.bodies.response_items import MAX_ITEM_ID_CHARACTERS
from octavo.server.bodies.responses import (
    IGNORED_RESPONSES,
    NOT_HERE,
    REFUSED_RESPONSES,
    ResponsesBody,
    read_responses,
)
from octavo.server.context import Context, context_of
from octavo.server.faults import ApiError, bad_field
from octavo.server.idempotency import Begun, IdempotentRequest, RetryKey, key_of
from octavo.server.json_body import OFF_LOOP_BYTES, read_json
from octavo.server.keys import KeyInfo
from octavo.server.offload import parse_off_loop
from octavo.server.reply import EventStream, body_hash, open_run, reply
from octavo.server.responses.store import Stored
from octavo.server.responses.task import ResponseRequest, response_request
from octavo.server.routes.posting import add_post
from octavo.server.shapes.responses import ResponseEncoder

if TYPE_CHECKING:
    from octavo.server.encoding import Json

MAX_LISTED = 100
_RETRIES = (
    "With a header `Idempotency-Key` the request runs once, however often it is asked for. A stream in the background "
    "is continued with GET, `stream=true` and `starting_after`."
)
_READING = ("include", "include[]", "stream", "starting_after", "include_obfuscation")
_LISTING = ("after", "include", "include[]", "limit", "order")


async def create(request: Request) -> Response:
    """Answer a conversation of items."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_responses)
    context.check_model(body.model)
    asked = await response_request(context, _tenant(request), body)
    return await _in_background(request, asked) if body.background else await reply(request, asked)


async def _in_background(request: Request, asked: ResponseRequest) -> Response:
    """Begin a response that runs on by itself; give it as it begins, or its events."""
    context, tenant = context_of(request), _tenant(request)
    key, event = key_of(request)
    if event is not None:
        raise bad_field("Last-Event-ID", "Last-Event-ID: continue with GET, stream and starting_after; leave it out")
    if key is None:
        retry = RetryKey(tenant, f"background {asked.response_id}", b"", is_lasting=False)
    else:
        retry = RetryKey(tenant, key, await body_hash(asked))
    replay = await open_run(request, context, asked, retry)

    def keep(response: Json) -> None:
        if response["status"] == "in_progress" or context.responses.has(tenant, response["id"]):
            asked.keep(response)

    encoder = replay.encoder
    assert isinstance(encoder, ResponseEncoder)
    begun = encoder.begun()
    if context.responses.has(tenant, encoder.response_id):
        await replay.close()  # it is asked for again
    else:
        context.background.start(retry, replay, keep)
    if asked.stream:
        return await _events(context, retry, -1)
    if context.responses.has(tenant, encoder.response_id):
        return _json(context.responses.get(tenant, encoder.response_id).response())
    return _json(msgspec.json.encode(begun))


async def _events(context: Context, retry: RetryKey, behind: int) -> Response:
    """The events of a run, from its beginning or behind one that its reader has."""

    async def refuse(_: IdempotentRequest) -> Begun:
        raise bad_field("stream", "stream: the events of this response are not kept any more; leave it out")

    replay = await context.runs.replay(retry, refuse)
    assert isinstance(replay.encoder, ResponseEncoder)
    replay.encoder.behind = behind
    return EventStream(replay, replay, context)


async def count(request: Request) -> Response:
    """Count the tokens of what would be answered."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_responses)
    context.check_model(body.model)
    asked = await response_request(context, _tenant(request), body)
    num_tokens = sum(map(len, await asked.read_prompts()))
    context.admission.charge(request.scope[KEY], num_tokens)
    return _json(msgspec.json.encode({"object": "response.input_tokens", "input_tokens": num_tokens}))


async def retrieve(request: Request) -> Response:
    """Give a stored response again, or the events of one that runs in the background."""
    _check_query(request, _READING)
    query = request.query_params
    stream, behind = query.get("stream", "false"), query.get("starting_after", "")
    if stream not in ("true", "false"):
        raise bad_field("stream", f"stream is {stream[:32]!r}; give true or false")
    if behind and not (behind.isascii() and behind.isdigit() and len(behind) < 10 and stream == "true"):
        raise bad_field("starting_after", f"starting_after is {behind[:32]!r}; give an event's number, with stream")
    if query.get("include_obfuscation", "false") != "false":
        message = "include_obfuscation: this server does not support it; leave it out"
        raise bad_field("include_obfuscation", message, "unsupported_field")
    context, stored = _found(request)
    if stream == "false":
        return _json(stored.response())
    retry = context.background.key_of(_tenant(request), stored.response_id)
    if retry is None:
        raise bad_field("stream", "stream: only the events of a response in the background are kept; leave it out")
    return await _events(context, retry, int(behind or -1))


async def delete(request: Request) -> Response:
    """Forget a stored response, and end one that runs. What went on from it still does."""
    context, stored = _found(request)
    await context.background.cancel(_tenant(request), stored.response_id)
    context.responses.delete(_tenant(request), stored.response_id)
    return _json(msgspec.json.encode({"id": stored.response_id, "object": "response", "deleted": True}))


async def list_input_items(request: Request) -> Response:
    """List what a stored response answered: its input, and all that went before it."""
    _check_query(request, _LISTING)
    query = request.query_params
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= MAX_LISTED):
        raise bad_field("limit", f"limit is {limit[:32]!r}; give 1 to {MAX_LISTED}")
    if order not in ("asc", "desc"):
        raise bad_field("order", f"order is {order[:32]!r}; give asc or desc")
    _, stored = _found(request)
    lists = stored.history()[:-1]  # without its own output

    def page() -> bytes:
        items = [item for each in lists for item in msgspec.json.decode(each)]
        return msgspec.json.encode(_page(items if order == "asc" else items[::-1], int(limit), after))

    size = sum(map(len, lists))
    return _json(page() if size <= OFF_LOOP_BYTES else await parse_off_loop(page, size))


async def cancel(request: Request) -> Response:
    """End a response that runs in the background; one that has ended stays as it is."""
    context, stored = _found(request)
    if not msgspec.json.decode(stored.rest)["background"]:
        message = "only a response that runs in the background can be cancelled; end others by closing their connection"
        raise ApiError(400, message, code="invalid_request")
    await context.background.cancel(_tenant(request), stored.response_id)
    return _json(context.responses.get(_tenant(request), stored.response_id).response())


def _page(items: list[dict[str, object]], limit: int, after: str | None) -> dict[str, object]:
    begin = 0
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            shown = after[:MAX_ITEM_ID_CHARACTERS]
            raise bad_field("after", f"after is {shown!r}; give the id of one of the response's input items")
        begin = places[0] + 1
    shown_items = items[begin : begin + limit]
    return {
        "object": "list",
        "data": shown_items,
        "first_id": shown_items[0]["id"] if shown_items else "",
        "last_id": shown_items[-1]["id"] if shown_items else "",
        "has_more": len(items) > begin + limit,
    }


def _check_query(request: Request, known: Collection[str]) -> None:
    for name in request.query_params:
        if name not in known:
            raise bad_field(name[:64], f"{name[:64]} is not a parameter that this endpoint knows", "unknown_field")


def _tenant(request: Request) -> str:
    key: KeyInfo = request.scope[KEY]
    return key.tenant


async def compact(request: Request) -> Response:
    """Say that there is no such endpoint: it is no response's id."""
    raise ApiError(404, f"no endpoint at {request.url.path!r}: conversations are not compacted here", code="not_found")


def _found(request: Request) -> tuple[Context, Stored]:
    context = context_of(request)
    return context, context.responses.get(_tenant(request), request.path_params["response_id"])


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


def _notes() -> str:
    return field_notes({**REFUSED_RESPONSES, **NOT_HERE}, IGNORED_RESPONSES)


def _schema() -> dict[str, object]:
    """The body's schema without the fields that it shares with other bodies but has no place for."""
    schema = inline_schema(ResponsesBody)
    properties = schema["properties"]
    assert isinstance(properties, dict)
    left_out = (*NOT_HERE, "stream_options")
    return {**schema, "properties": {name: each for name, each in properties.items() if name not in left_out}}


def add_routes(app: FastAPI) -> None:
    """Add this module's endpoints."""
    path, schema = "/v1/responses", _schema()
    add_post(app, path, create, schema, "Answer a conversation of items.", _RETRIES, _notes())
    add_post(app, f"{path}/input_tokens", count, schema)
    app.add_api_route(f"{path}/compact", compact, methods=["POST"], response_model=None, include_in_schema=False)
    one = path + "/{response_id}"
    app.add_api_route(one, retrieve, methods=["GET"], response_model=None)
    app.add_api_route(one, delete, methods=["DELETE"], response_model=None)
    app.add_api_route(f"{one}/input_items", list_input_items, methods=["GET"], response_model=None)
    app.add_api_route(f"{one}/cancel", cancel, methods=["POST"], response_model=None)
