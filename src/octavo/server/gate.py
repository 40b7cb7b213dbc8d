"""GateMiddleware: new work is looked at before anything of it is routed, read or parsed.

Owns: which endpoints are gated, the first of admission's two looks, and its refusals.
Does not: know a body (admission's second look does), or decide anything itself.
Measured: a refusal here takes a third of the time that one in a route does, and 5 times the load is mostly refusals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import BusyError
from octavo.server.auth import KEY
from octavo.server.faults import ApiError, from_exception
from octavo.server.shell import METER

if TYPE_CHECKING:
    from octavo.server.context import Context

_ANSWERS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
        "/v1/responses",
    }
)
_VECTORS = frozenset(
    {"/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/api/embed", "/api/embeddings"}
)
GATED = _ANSWERS | _VECTORS
_RETRY_HEADER = b"idempotency-key"


class GateMiddleware:
    """Lets a request for new work through, or answers it at once."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the request's key and at the counts."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in GATED:
            try:
                self._check(scope)
            except (ApiError, BusyError) as error:
                refusal = from_exception(error)
                self._context.metrics.failed(refusal.code)
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        context = self._context
        context.check_admitting()
        key = scope[KEY]
        scope[METER] = context.admission.meter(key)
        # What is asked again may be running or done: whether it is new is seen when its key is looked up.
        is_retry = any(name == _RETRY_HEADER for name, _ in scope["headers"])
        context.admission.glance(key, may_be_known=is_retry)
