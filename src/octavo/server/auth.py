"""Who may use which route: refused unless a policy lets in.

Owns: the routes' policies, the keys' digests, the tenant of a key and its prefix-cache salt.
Does not: keep a key itself, look at Host, or trust a path in any spelling but the exact one.
Invariant: a route without a policy cannot be served (`check_policies` at start), and an unknown path needs a key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from enum import Enum

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.faults import ApiError

TENANT = "octavo.tenant"


class Access(Enum):
    """Who gets in."""

    OPEN = "anyone"
    KEY = "holders of a key, when keys are set"


POLICIES: dict[str, Access] = {
    "/livez": Access.OPEN,
    "/readyz": Access.OPEN,
    "/health": Access.KEY,
    "/metrics": Access.KEY,
    "/docs": Access.KEY,
    "/openapi.json": Access.KEY,
    "/v1/models": Access.KEY,
    "/v1/models/{model_id:path}": Access.KEY,
    "/v1/chat/completions": Access.KEY,
    "/v1/completions": Access.KEY,
}


def check_policies(paths: Iterable[str]) -> None:
    """Refuse to serve a route that nobody decided about."""
    missing = [path for path in paths if path not in POLICIES]
    assert not missing, f"routes without a policy in server/auth.py: {missing}"


class KeyRing:
    """Digests of the keys. A tenant is the hex digest of its key; without keys everyone is tenant ""."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in dict.fromkeys(keys))
        self._secret = secrets.token_bytes(32)

    @property
    def is_empty(self) -> bool:
        """Whether no key is asked for."""
        return not self._digests

    def tenant_of(self, key: bytes) -> str | None:
        """The key's tenant, or None. Takes the same time whichever key matches."""
        given = hashlib.sha256(key).digest()
        found = None
        for digest in self._digests:
            if hmac.compare_digest(digest, given):
                found = digest
        return None if found is None else found.hex()

    def salt(self, tenant: str, given: str | None) -> bytes:
        """Prefix-cache salt: with several keys tenants never share; a client's own salt only narrows."""
        asked = (given or "").encode()
        if len(self._digests) < 2:
            return asked
        return hmac.digest(self._secret, tenant.encode() + b"\0" + asked, "sha256")


def bearer_key(scope: Scope) -> bytes | None:
    """The key of an `Authorization: Bearer` header; None when there is no or more than one such header."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    raw: bytes = scope.get("raw_path") or path.encode()
    return POLICIES.get(path) is Access.OPEN and raw.split(b"?", 1)[0] == path.encode() and not scope.get("root_path")


class AuthMiddleware:
    """Lets a request through when its path's policy and its key allow it; else 401."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Decide on the raw path, before any routing."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif self._keys.is_empty or _is_open(scope):
            scope[TENANT] = ""
            await self._app(scope, receive, send)
        else:
            key = bearer_key(scope)
            tenant = None if key is None else self._keys.tenant_of(key)
            if tenant is None:
                message = "give a valid key in the header: Authorization: Bearer KEY"
                await ApiError(401, message, code="invalid_api_key").response()(scope, receive, send)
                return
            scope[TENANT] = tenant
            await self._app(scope, receive, send)
