"""POST /v1/responses, and what is stored of its answers: GET, DELETE, input items, cancel; counting of input tokens."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo.server.auth import KEY
from octavo.server.bodies.checks import inline_schema
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
from octavo.server.keys import KeyInfo
from octavo.server.limits import OFF_LOOP_BYTES, read_json
from octavo.server.offload import parse_off_loop
from octavo.server.reply import RETRY_NOTE, reply
from octavo.server.responses.store import Stored
from octavo.server.responses.task import response_task

MAX_LISTED = 100
_READING = ("include", "include[]", "stream", "starting_after", "include_obfuscation")
_LISTING = ("after", "include", "include[]", "limit", "order")


async def create(request: Request) -> Response:
    """Answer a conversation of items."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_responses)
    context.check_model(body.model)
    return await reply(request, await response_task(context, _tenant(request), body))


async def count(request: Request) -> Response:
    """Count the tokens of what would be answered."""
    context = context_of(request)
    body = await read_json(request, context.limits, read_responses)
    context.check_model(body.model)
    task = await response_task(context, _tenant(request), body)
    num_tokens = sum(map(len, await task.read_prompts()))
    return _json(msgspec.json.encode({"object": "response.input_tokens", "input_tokens": num_tokens}))


async def retrieve(request: Request) -> Response:
    """Give a stored response again."""
    _check_query(request, _READING)
    if request.query_params.get("stream", "false") != "false":
        raise bad_field("stream", "stream: this server streams a response once, as it is made; leave it out")
    _, stored = _found(request)
    return _json(stored.response())


async def delete(request: Request) -> Response:
    """Forget a stored response. What went on from it still does."""
    context, stored = _found(request)
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
    """Refuse: what is stored has ended, and what has not is ended by closing its connection."""
    _found(request)
    message = "only a response that runs in the background can be cancelled; this one has ended"
    raise ApiError(400, message, code="invalid_request")


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


def _found(request: Request) -> tuple[Context, Stored]:
    context = context_of(request)
    return context, context.responses.get(_tenant(request), request.path_params["response_id"])


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


def _notes() -> str:
    ignored = "; ".join(f"`{name}` ({reason})" for name, reason in IGNORED_RESPONSES.items())
    refused = ", ".join(f"`{name}`" for name in (*REFUSED_RESPONSES, *NOT_HERE))
    return f"Taken and ignored: {ignored}.\n\nNot supported, refused unless left at their neutral value: {refused}."


def _schema() -> dict[str, object]:
    """The body's schema without the fields that it shares with other bodies but has no place for."""
    schema = inline_schema(ResponsesBody)
    properties = schema["properties"]
    assert isinstance(properties, dict)
    left_out = (*NOT_HERE, "stream_options")
    return {**schema, "properties": {name: each for name, each in properties.items() if name not in left_out}}


def add_routes(app: FastAPI) -> None:
    """Add this module's endpoints."""
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema()}}}}
    path = "/v1/responses"
    description = "\n\n".join(("Answer a conversation of items.", RETRY_NOTE, _notes()))
    app.add_api_route(path, create, methods=["POST"], response_model=None, description=description, openapi_extra=body)
    app.add_api_route(f"{path}/input_tokens", count, methods=["POST"], response_model=None, openapi_extra=body)
    one = path + "/{response_id}"
    app.add_api_route(one, retrieve, methods=["GET"], response_model=None)
    app.add_api_route(one, delete, methods=["DELETE"], response_model=None)
    app.add_api_route(f"{one}/input_items", list_input_items, methods=["GET"], response_model=None)
    app.add_api_route(f"{one}/cancel", cancel, methods=["POST"], response_model=None)
