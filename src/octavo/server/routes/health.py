"""GET /livez, /readyz and /health."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo.errors import EngineError
from octavo.server.context import Context, context_of
from octavo.server.faults import RETRY_ENGINE_S, ApiError

PROBE_TIMEOUT_S = 2.0


async def live(request: Request) -> Response:
    """Say that this process answers, whatever the engine does."""
    return _json({"status": "alive"})


async def ready(request: Request) -> Response:
    """Say whether new requests are taken: 200, or 503 with the reason."""
    await _check_ready(context_of(request))
    return _json({"status": "ready"})


async def health(request: Request) -> Response:
    """Like /readyz, with the model, the number of open requests, and how the journal is."""
    context = context_of(request)
    await _check_ready(context)
    return _json(
        {
            "status": "ready",
            "model": context.model,
            "open_requests": context.lifecycle.num_open,
            "journal": context.runs.report()["journal"],
        }
    )


async def _check_ready(context: Context) -> None:
    """Refuse when new work is refused, or the engine makes no progress. While it recovers, requests are still taken."""
    context.check_admitting()
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


def _json(body: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers={"cache-control": "no-store"})


def add_routes(app: FastAPI) -> None:
    """Add this module's endpoints."""
    for path, endpoint in (("/livez", live), ("/readyz", ready), ("/health", health)):
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
