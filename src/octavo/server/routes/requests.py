"""GET explain and POST cancel under /v1/requests/{id}: requests by the ids that their clients know."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import Context, context_of
from octavo.server.explanations import explain_own
from octavo.server.http.auth import KEY
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.http.errors import ApiError
from octavo.server.http.keys import KeyInfo


async def explain(request: Request) -> Response:
    """Explain the state of a request, or how it ended, for each of its prompts. Only its own tenant finds it."""
    context, name, key = _asked(request)
    told = await explain_own(context, name, key.tenant)
    if told is None:
        kept = context.explain_kept
        text = f"no request {name[:128]!r} of yours is open or can still be explained: {kept} are, after their end"
        raise ApiError(404, text, code="request_not_found")
    return _json(told)


async def cancel(request: Request) -> Response:
    """Cancel an open request; a client that waits for it gets an error. Only its own tenant finds it."""
    context, name, key = _asked(request)
    ids = context.request_index.find(name, key.tenant)
    if not ids:
        raise ApiError(404, f"no request {name[:128]!r} of yours is open", code="request_not_found")
    context.sessions.client.cancel(ids)
    return _json({"id": name, "cancelled": True})


def _asked(request: Request) -> tuple[Context, str, KeyInfo]:
    key: KeyInfo = request.scope[KEY]
    return context_of(request), request.path_params["request_id"], key


def _json(body: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers={"cache-control": "no-store"})


ENDPOINTS = [
    Endpoint("GET", "/v1/requests/{request_id}/explain", explain),
    Endpoint("POST", "/v1/requests/{request_id}/cancel", cancel, limit=Limit.NONE),
]
