"""GET explain and POST cancel under /v1/requests/{id}: open requests, by the ids that their clients know."""

from __future__ import annotations

import re

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo.server.auth import KEY
from octavo.server.context import Context, context_of
from octavo.server.faults import ApiError
from octavo.server.keys import KeyInfo

_BEHIND = re.compile(r", behind (\S+)(?=: \w+$)")


async def explain(request: Request) -> Response:
    """Say where an open request stands, one sentence for each of its prompts. Only its own tenant finds it."""
    context, name, ids = _found(request)
    said = [_said(str(await context.sessions.client.control("explain", one)), one, ids) for one in ids]
    return _json({"id": name, "explanations": said})


async def cancel(request: Request) -> Response:
    """End an open request; whoever waits for it gets an error. Only its own tenant finds it."""
    context, name, ids = _found(request)
    await context.sessions.client.cancel(ids)
    return _json({"id": name, "cancelled": True})


def _found(request: Request) -> tuple[Context, str, list[str]]:
    context, name = context_of(request), request.path_params["request_id"]
    key: KeyInfo = request.scope[KEY]
    ids = context.directory.find(name, key.tenant)
    if not ids:
        raise ApiError(404, f"no request {name[:128]!r} of yours is open", code="request_not_found")
    return context, name, ids


def _said(sentence: str, engine_id: str, own_ids: list[str]) -> str:
    """The engine's sentence, without its own names and without those of others' requests."""
    behind = _BEHIND.search(sentence)
    if behind is not None and behind[1] not in own_ids:
        sentence = sentence[: behind.start()] + sentence[behind.end() :]
    return sentence.removeprefix(engine_id).strip()


def _json(body: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers={"cache-control": "no-store"})


def add_routes(app: FastAPI) -> None:
    """Add this module's endpoints."""
    app.add_api_route("/v1/requests/{request_id}/explain", explain, methods=["GET"], response_model=None)
    app.add_api_route("/v1/requests/{request_id}/cancel", cancel, methods=["POST"], response_model=None)
