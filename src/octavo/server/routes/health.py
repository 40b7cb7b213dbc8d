"""GET /livez, /readyz and /health."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import EngineError
from octavo.server.auth import KEY
from octavo.server.context import Context, context_of
from octavo.server.faults import RETRY_ENGINE_S, ApiError
from octavo.server.http.endpoints import Access, Endpoint, Limit
from octavo.server.keys import ANONYMOUS, KeyInfo
from octavo.server.trusted_hosts import UNTRUSTED

PROBE_TIMEOUT_S = 2.0


async def live(request: Request) -> Response:
    """Answer 200: this process runs, whatever the state of the engine."""
    return _json({"status": "alive"})


async def ready(request: Request) -> Response:
    """Answer 200 if new requests are accepted, else 503 with the reason."""
    await _check_ready(context_of(request))
    return _json({"status": "ready"})


async def health(request: Request) -> Response:
    """Return the status and, if the key may read metrics, the model, the open requests and the journal.

    If keys are set, a request without one, or with one of several keys without `metrics = true`, gets the bare status.
    `open_requests` counts requests that are queued or generate, not this one.
    """
    context = context_of(request)
    holder: KeyInfo = request.scope[KEY]
    is_allowed = not context.keys.keys or (holder is not ANONYMOUS and context.keys.may_measure(holder))
    has_details = is_allowed and UNTRUSTED not in request.scope
    try:
        await _check_ready(context)
    except ApiError as error:
        body = {"status": error.code, **(error.body() if has_details else {})}
        return _json(body, error.status, error.headers())
    if not has_details:
        return _json({"status": "ready"})
    return _json(
        {
            "status": "ready",
            "model": context.model,
            "open_requests": context.queue.num_requests,
            "journal": context.runs.report()["journal"],
        }
    )


async def _check_ready(context: Context) -> None:
    """Raise ApiError if new work is refused or the engine makes no progress. A recovering engine is still ready."""
    context.lifecycle.check_ready()
    ask = context.lifecycle.engine_trouble
    if ask is not None:
        trouble = ask()
        if trouble is not None:
            raise ApiError(503, trouble, code="engine_unavailable", retry_after_s=RETRY_ENGINE_S)
        return
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await context.engine_statistics()
    except (EngineError, TimeoutError):
        message = "the engine does not answer"
        raise ApiError(503, message, code="engine_unavailable", retry_after_s=RETRY_ENGINE_S) from None


def _json(body: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    sent = {"cache-control": "no-store", **(headers or {})}
    return Response(msgspec.json.encode(body), status, sent, media_type="application/json")


ENDPOINTS = [
    Endpoint("GET", "/livez", live, Access.OPEN, Limit.NONE),
    Endpoint("GET", "/readyz", ready, Access.OPEN, Limit.NONE),
    Endpoint("GET", "/health", health, Access.STATUS, Limit.NONE),
]
