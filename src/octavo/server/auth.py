"""Access to endpoints: a request is refused unless its endpoint or its key allows it.

Owns: finding a request's key (in a header, else by its session), the answers to wrong keys.
Does not: hold keys (keys does), sessions (logins does) or the access of paths (endpoints does).
Invariant: an unknown path needs a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.dashboard.page import HEADERS, login_page
from octavo.sandbox.pool import current_tenant
from octavo.server.connection import JUDGED
from octavo.server.faults import ApiError
from octavo.server.http.endpoints import Access, Endpoints
from octavo.server.keys import ANONYMOUS, KeyInfo, KeyRing
from octavo.server.logins import Logins
from octavo.server.pages import wants_html

KEY = "octavo.key"  # the KeyInfo of the request
SESSION = "octavo.session"  # the id of the session that gave access, if one did
_NO_KEY = "give a valid key in the header: Authorization: Bearer KEY (or x-api-key: KEY)"
PAGES = {"/": "", "/dashboard": "dashboard", "/docs": "docs"}  # where a browser is shown the login form


def given_key(scope: Scope) -> bytes | None:
    """Return the key of an `Authorization: Bearer` header, else of `x-api-key`; None if absent or repeated."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if not values:
        plain = [value for name, value in scope["headers"] if name == b"x-api-key"]
        return plain[0].strip() if len(plain) == 1 else None
    scheme, _, key = values[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" and len(values) == 1 else None


def source_of(scope: Scope) -> str:
    """Return the address by which wrong keys are counted: the connection's, not one from a header."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def login_form(status: int, message: str, next_page: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the page that asks for a key and then opens `next_page`."""
    page, policy = login_page(message, next_page)
    sent = {**HEADERS, "content-security-policy": policy, "cache-control": "no-store", **(headers or {})}
    return Response(page, status, sent, media_type="text/html")


def wrong_key_error(message: str, wait_s: float) -> ApiError:
    """Return a 401, or a 429 if WrongKeys says that the address must wait before its next wrong key."""
    if wait_s <= 0:
        return ApiError(401, message, code="invalid_api_key")
    text = f"{message}; there were too many wrong keys from this address, so try again later"
    return ApiError(429, text, code="too_many_wrong_keys", retry_after_s=math.ceil(wait_s), is_final=True)


def _refusal(scope: Scope, error: ApiError) -> Response:
    """Return the error as JSON; a 401 for a browser that requests one of the pages is the login form."""
    page = PAGES.get(scope["path"])
    accept = ", ".join(Headers(scope=scope).getlist("accept"))
    if error.status != 401 or page is None or scope["method"] not in ("GET", "HEAD") or not wants_html(accept):
        return error.response()
    return login_form(401, "", page, error.headers())


class AuthMiddleware:
    """Middleware that passes a request if its path's access and its key or session allow it; else 401 or 429."""

    def __init__(
        self, app: ASGIApp, endpoints: Endpoints, keys: KeyRing, logins: Logins, note: Callable[[str], None]
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._keys = keys
        self._logins = logins
        self._note = note  # counts a refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Decide on the raw path, before any routing."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        # The first: called from inside (batches.inner_call); a client cannot set it.
        error = None if isinstance(scope.get(KEY), KeyInfo) else self._check(scope)
        if JUDGED in scope:  # set by a connection
            scope[JUDGED](scope[KEY] is not ANONYMOUS)
        if error is None:
            current_tenant.set(scope[KEY].tenant)
            await self._app(scope, receive, send)
        else:
            self._note(error.code)
            await _refusal(scope, error)(scope, receive, send)

    def _check(self, scope: Scope) -> ApiError | None:
        """Return the refusal, if any, and set the scope's KEY: ANONYMOUS if no key is needed and none was valid."""
        access = self._endpoints.open_access(scope) if self._keys.keys else Access.OPEN
        error = None if access is Access.OPEN else self._identify(scope)
        if error is not None or access is Access.OPEN:
            scope[KEY] = ANONYMOUS
        return error if access is None else None

    def _identify(self, scope: Scope) -> ApiError | None:
        """Set the scope's KEY by the given key, else by the session; return the refusal if that is not valid."""
        is_given = any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
        if is_given:
            key = given_key(scope)
            holder = None if key is None else self._keys.find(key)
        else:
            found = self._logins.holder(scope)
            holder, scope[SESSION] = (None, None) if found is None else found
        if holder is None:
            return wrong_key_error(_NO_KEY, self._logins.wrong_keys.note(source_of(scope)) if is_given else 0.0)
        scope[KEY] = holder
        return None
