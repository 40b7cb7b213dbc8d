"""create_app: the HTTP application over Sessions.

Owns: putting endpoints, middleware and error handlers together; the admission gate in front of each endpoint.
Does not: start a server or an engine, or name an endpoint (`find_endpoints` finds the modules that declare them).
Order from the outermost layer: root path (if set), RequestMiddleware (id, header limits, catch-all for errors),
trusted hosts, CORS (if set; a preflight needs no key), auth (refuses by default), router, gate (rates, room in the
queue), endpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from octavo.errors import EngineError, ModelLoadError, RequestError
from octavo.server.context import Context, EngineStatistics, build_context
from octavo.server.http.auth import KEY
from octavo.server.http.connection import CUT, max_connections
from octavo.server.http.endpoints import ENDPOINT, Endpoint, Limit, find_endpoints
from octavo.server.http.errors import ApiError, from_exception
from octavo.server.http.lifecycle import Lifecycle
from octavo.server.http.limits import HttpLimits, Shares
from octavo.server.http.middleware import (
    METER,
    AuthMiddleware,
    RequestMiddleware,
    RootPathMiddleware,
    TrustedHostMiddleware,
)

if TYPE_CHECKING:
    from octavo.config import Config
    from octavo.frontend.sessions import Sessions
    from octavo.text.text_model import TextModel

IMAGE_BODY_BYTES = 32 << 20  # of a request to a server whose (first) model takes images
_RETRY_HEADER = b"idempotency-key"
_EXPOSED_HEADERS = ("X-Request-Id", "Retry-After", "X-Should-Retry", "X-Octavo-Ignored")  # for pages of other sites


def create_app(
    sessions: Sessions,
    text: TextModel,
    config: Config,
    engine_statistics: EngineStatistics,
    *,
    limits: HttpLimits | None = None,
    lifecycle: Lifecycle | None = None,
) -> Starlette:
    """Return the application. `app.state` has its `context` and its `endpoints`."""
    context = build_context(
        sessions,
        text,
        config,
        engine_statistics,
        limits=limits or _limits(text, config),
        lifecycle=lifecycle or Lifecycle(),
    )
    web = config.web
    endpoints = find_endpoints()
    gate = RequestGate(context)
    app = Starlette(routes=[EndpointRoute(each, endpoints.methods[each.path], gate) for each in endpoints])
    app.router.redirect_slashes = False
    app.state.context = context
    app.state.endpoints = endpoints
    app.state.root_path = web.root_path
    context.batches.connect(app)
    for kind in (ApiError, RequestError, EngineError, ModelLoadError):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    note = context.metrics.failed
    app.add_middleware(AuthMiddleware, endpoints=endpoints, keys=context.keys, logins=context.logins, note=note)
    if web.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=web.allowed_origins,
            allow_methods=web.allowed_methods,
            allow_headers=web.allowed_headers,
            allow_credentials=web.allow_credentials,
            expose_headers=_EXPOSED_HEADERS,
        )
    app.add_middleware(TrustedHostMiddleware, endpoints=endpoints, config=config, keys=context.keys, note=note)
    app.add_middleware(
        RequestMiddleware,
        limits=context.limits,
        lifecycle=context.lifecycle,
        metrics=context.metrics,
        has_strict_fields=config.serving.strict_fields,
    )
    if web.root_path:
        app.add_middleware(RootPathMiddleware, root_path=web.root_path)
    return app


def _limits(text: TextModel, config: Config) -> HttpLimits:
    """Return the bounds of requests; bodies with images may be larger."""
    limits = HttpLimits(max_upload_bytes=config.batch.max_upload_bytes if config.batch.batch_dir else 0)
    return limits if text.spec.vision is None else replace(limits, max_body_bytes=IMAGE_BODY_BYTES)


class EndpointRoute(Route):
    """The route of one endpoint, for the endpoint's method only: Starlette's Route would add HEAD to GET."""

    def __init__(self, endpoint: Endpoint, allowed: Sequence[str], gate: RequestGate) -> None:
        super().__init__(endpoint.path, endpoint.handler)
        self.methods = {endpoint.method}
        self._endpoint = endpoint
        self._allowed = allowed
        self._gate = gate

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint if the gate admits the request. Raises HTTPException (405) for any other method."""
        scope[ENDPOINT] = self._endpoint
        if scope["method"] != self._endpoint.method:
            raise HTTPException(405, headers={"Allow": ", ".join(self._allowed)})
        with self._gate.admitted(scope, self._endpoint.limit):
            await self.app(scope, receive, send)


class RequestGate:
    """The first admission check, before a body is read: rates, room in the queue, the tenant's open connections.

    The body's size and fields are checked later, by AdmissionControl.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._shares = Shares(context.keys)
        self._open: Counter[str] = Counter()  # requests that came over a connection, by tenant

    @contextmanager
    def admitted(self, scope: Scope, limit: Limit) -> Iterator[None]:
        """Count a request as open while the block runs. Raises ApiError or BusyError if a limit is exceeded."""
        tenant = scope[KEY].tenant if CUT in scope else None  # a batch's requests have no connection
        if tenant is not None:
            self._check_connections(tenant)
        if limit is not Limit.NONE and (limit is not Limit.RATE_WITH_QUERY or scope["query_string"]):
            context, key = self._context, scope[KEY]
            if limit is Limit.QUEUE:
                context.lifecycle.check_ready()
            scope[METER] = context.admission.meter(key)
            # The answer of a retry may exist already; only the lookup of its Idempotency-Key shows that.
            is_retry = _RETRY_HEADER in dict(scope["headers"])
            # Of several models the body names the one whose queue counts; `admit` checks that one.
            has_one_model = not context.by_name or len(context.each_model) == 1
            needs_place = limit is Limit.QUEUE and not is_retry and has_one_model
            context.admission.check_arrival(key, needs_place=needs_place)
        if tenant is None:
            yield
            return
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]

    def _check_connections(self, tenant: str) -> None:
        """Refuse a request whose tenant uses its whole share of the connections. Raises ApiError."""
        bound = max_connections(self._context.limits)
        if self._open.total() < bound // 2 or len(self._context.keys.tenants) < 2:
            return
        if self._shares.free(tenant, self._open, bound) < 1:
            message = f"{self._open[tenant]} of your requests are open, and the other connections are for others"
            raise ApiError(429, f"{message}; wait for one to end", code="too_many_connections", retry_after_s=1)


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
        path = request.url.path
        known = {route.path for route in request.app.routes if isinstance(route, EndpointRoute)}
        meant = next(
            (each for each in (f"/v1{path}", path.removeprefix("/v1")) if each in known and each != path), None
        )
        hint = "" if meant is None else f"; did you mean {meant!r}? Correct the client's base URL"
        refusal = ApiError(error.status_code, f"no endpoint at {path[:128]!r}{hint}", code="not_found")
    return refusal.response(error.headers)
