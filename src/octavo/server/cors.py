"""Cross-origin requests: other sites' pages that may use this server from a browser (the Fetch standard's CORS).

Owns: the headers of answers to allowed origins, and answers to preflights. Does not: replace a key, which is needed as
ever; a preflight has no key, and its answer is the same for every path.
Invariant: without allowed origins nothing here is installed, and no answer names an origin.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config import WebConfig
from octavo.server.web_settings import TOKENS

PREFLIGHT = "octavo.preflight"  # the headers of the answer, in the scope of a request that is one
MAX_ASKED_HEADERS = 1024  # characters that a preflight may ask for
MAX_AGE_S = 600
_METHODS = "GET, POST, DELETE, OPTIONS"
_EXPOSED = "X-Request-Id, Retry-After, X-Should-Retry, X-Octavo-Ignored"
Pairs = list[tuple[bytes, bytes]]


class CorsMiddleware:
    """An outer middleware that adds the headers to every answer for an allowed origin."""

    def __init__(self, app: ASGIApp, web: WebConfig) -> None:
        self._app = app
        self._web = web
        self._is_any = "*" in web.allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the headers to the answer, and mark a preflight."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origins = headers.getlist("origin")
        is_allowed = len(origins) == 1 and (self._is_any or origins[0] in self._web.allowed_origins)
        vary: Pairs = [] if self._is_any else [(b"vary", b"Origin")]
        extra = [*vary, *self._origin(origins[0])] if is_allowed else vary
        if is_allowed and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            scope[PREFLIGHT] = self._preflight(headers)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        await self._app(scope, receive, sending)

    def _origin(self, origin: str) -> Pairs:
        pairs = [
            (b"access-control-allow-origin", b"*" if self._is_any else origin.encode("latin-1")),
            (b"access-control-expose-headers", _EXPOSED.encode()),
        ]
        if self._web.allow_credentials:
            pairs.append((b"access-control-allow-credentials", b"true"))
        return pairs

    def _preflight(self, headers: Headers) -> dict[str, str]:
        web = self._web
        asked = headers.get("access-control-request-headers", "")
        is_any = "*" in web.allowed_headers
        is_plain = len(asked) <= MAX_ASKED_HEADERS and TOKENS.fullmatch(asked) is not None
        names = (asked if is_plain else "") if is_any else ", ".join(web.allowed_headers)
        found = {
            "access-control-allow-methods": _METHODS if "*" in web.allowed_methods else ", ".join(web.allowed_methods),
            "access-control-max-age": str(MAX_AGE_S),
            "vary": "Access-Control-Request-Headers",
        }
        return {**found, "access-control-allow-headers": names} if names else found


class PreflightMiddleware:
    """A middleware outside of auth that answers preflights, the same for every path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight, pass on any other request."""
        headers = scope.get(PREFLIGHT)
        if headers is None:
            await self._app(scope, receive, send)
        else:
            await Response(status_code=204, headers=headers)(scope, receive, send)
