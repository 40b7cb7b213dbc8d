"""create_app: the HTTP application over Sessions.

Owns: assembling routes, middleware and error handlers. Does not: start a server or an engine.
Order from outside: root path and CORS (if set), shell (id, limits, last catch), trusted hosts, auth (default
deny), gate (room for new work), router.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo.errors import EngineError, RequestError
from octavo.server.api.anthropic import requests as anthropic
from octavo.server.api.completions import requests as completions
from octavo.server.api.ollama import requests as ollama
from octavo.server.api.responses import requests as responses
from octavo.server.auth import AuthMiddleware, check_policies
from octavo.server.context import EngineStatistics, build_context
from octavo.server.cors import CorsMiddleware, PreflightMiddleware
from octavo.server.faults import ApiError, from_exception
from octavo.server.gate import GateMiddleware
from octavo.server.lifecycle import Lifecycle
from octavo.server.limits import HttpLimits
from octavo.server.root_path import RootPathMiddleware
from octavo.server.routes import (
    batches,
    docs,
    embeddings,
    files,
    health,
    login,
    metrics,
    models,
    ollama_embed,
    ollama_models,
    pages,
    requests,
    tokenize,
)
from octavo.server.shell import ShellMiddleware
from octavo.server.trusted_hosts import TrustedHostMiddleware

if TYPE_CHECKING:
    from octavo.config import Config
    from octavo.frontend.sessions import Sessions
    from octavo.text.text_model import TextModel


def create_app(
    sessions: Sessions,
    text: TextModel,
    config: Config,
    engine_statistics: EngineStatistics,
    *,
    limits: HttpLimits | None = None,
    lifecycle: Lifecycle | None = None,
) -> FastAPI:
    """Return the application; its shared parts are `app.state.context`."""
    context = build_context(
        sessions,
        text,
        config,
        engine_statistics,
        limits=limits or HttpLimits(max_upload_bytes=config.batch.max_upload_bytes if config.batch.batch_dir else 0),
        lifecycle=lifecycle or Lifecycle(),
    )
    web = config.web
    servers = [{"url": web.root_path}] if web.root_path else None
    app = FastAPI(title="Octavo", docs_url=None, redoc_url=None, redirect_slashes=False, servers=servers)
    app.state.context = context
    for module in (
        completions,
        embeddings,
        tokenize,
        files,
        batches,
        anthropic,
        ollama,
        ollama_embed,
        ollama_models,
        responses,
        requests,
        pages,
        login,
        models,
        health,
        metrics,
        docs,
    ):
        module.add_routes(app)
    context.batches.connect(app)
    check_policies(getattr(route, "path", repr(route)) for route in app.routes)
    for kind in (ApiError, RequestError, EngineError):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_middleware(GateMiddleware, context=context)
    app.add_middleware(AuthMiddleware, keys=context.keys, logins=context.logins, note=context.metrics.failed)
    if web.allowed_origins:
        app.add_middleware(PreflightMiddleware)
    app.add_middleware(TrustedHostMiddleware, config=config, keys=context.keys, note=context.metrics.failed)
    app.add_middleware(
        ShellMiddleware,
        limits=context.limits,
        lifecycle=context.lifecycle,
        metrics=context.metrics,
        has_strict_fields=config.serving.strict_fields,
    )
    if web.allowed_origins:
        app.add_middleware(CorsMiddleware, web=web)
    if web.root_path:
        app.add_middleware(RootPathMiddleware, root_path=web.root_path)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    refusal = from_exception(error)
    request.app.state.context.metrics.failed(refusal.code)
    return refusal.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        refusal = ApiError(405, f"{request.method} is not allowed here; use {allowed}", code="method_not_allowed")
    else:
        refusal = ApiError(error.status_code, f"no endpoint at {request.url.path[:128]!r}", code="not_found")
    return refusal.response(error.headers)
