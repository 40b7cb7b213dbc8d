"""GateMiddleware: the first admission check, before a request is routed, read or parsed.

Owns: the gated endpoints (they need a place in the queue), the requests that count in their key's rates, the first of
admission's three checks (`glance`), its refusals, and each tenant's number of open requests.
Does not: know a body (admission's later checks do).
Measured: a refusal here takes a third of the time of one in a route, and at 5 times the load most are refused.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import BusyError
from octavo.server.auth import KEY
from octavo.server.connection import CUT, max_connections
from octavo.server.faults import ApiError, from_exception
from octavo.server.shares import Shares
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
_UNCOUNTED = frozenset({"/login", "/logout"})  # and cancelling, which must not wait for a key's rate
_RETRY_HEADER = b"idempotency-key"


def is_counted(scope: Scope) -> bool:
    """Return True if a request counts in its key's rate: POSTs but logins and cancelling, and costly GETs."""
    path: str = scope["path"]
    if scope["method"] == "POST":
        return path not in _UNCOUNTED and not path.endswith("/cancel")
    if scope["method"] not in ("GET", "HEAD"):
        return False
    is_stream = path.startswith("/v1/responses/") and bool(scope["query_string"])  # a poll has no query
    return (
        path in ("/v1/files", "/tokenizer_info") or path.endswith(("/content", "/explain", "/input_items")) or is_stream
    )


class GateMiddleware:
    """Middleware that passes a request for new work, or refuses it at once."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context
        self._shares = Shares(context.keys)
        self._open: Counter[str] = Counter()  # requests with a connection, by tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the counts of the request's key and tenant, then pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tenant = scope[KEY].tenant if CUT in scope else None  # requests of batches have no connection
        try:
            if tenant is not None:
                self._check_connections(tenant)
            if scope["path"] in GATED and scope["method"] == "POST":
                self._admit(scope)
            elif is_counted(scope):
                key = scope[KEY]
                scope[METER] = self._context.admission.meter(key)
                self._context.admission.count(key)
        except (ApiError, BusyError) as error:
            refusal = from_exception(error)
            self._context.metrics.failed(refusal.code)
            await refusal.response()(scope, receive, send)
            return
        if tenant is None:
            await self._app(scope, receive, send)
            return
        self._open[tenant] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]

    def _check_connections(self, tenant: str) -> None:
        """Refuse a request whose tenant has its share of the connections open (ApiError)."""
        most = max_connections(self._context.limits)
        if self._open.total() < most // 2 or len(self._context.keys.tenants) < 2:
            return
        if self._shares.free(tenant, self._open, most) < 1:
            message = f"{self._open[tenant]} of your requests are open, and the other connections are for others"
            raise ApiError(429, f"{message}; wait for one to end", code="too_many_connections", retry_after_s=1)

    def _admit(self, scope: Scope) -> None:
        """Refuse new work for which there is no room. Raises ApiError, BusyError."""
        context, key = self._context, scope[KEY]
        context.lifecycle.check_ready()
        scope[METER] = context.admission.meter(key)
        # A retry's answer may be running or done: that is known only when its Idempotency-Key is looked up.
        context.admission.glance(key, may_be_known=_RETRY_HEADER in dict(scope["headers"]))
