"""A path before every endpoint's, for a server behind a proxy that publishes it there (--root-path).

Owns: removing it. Does not: route. Requests with it and without it are the same: proxies may remove it, or not.
Invariant: it is removed from the path and the raw path alike, byte for byte, before anything reads either; a path that
spells it in another way is unchanged, and has no policy.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """The outermost middleware, which removes the root path."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._path = root_path
        self._raw = root_path.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, without the root path."""
        if scope["type"] == "http":
            path: str = scope["path"]
            raw: bytes = scope.get("raw_path") or path.encode()
            if path.startswith(self._path + "/") and raw.startswith(self._raw + b"/"):
                scope = {**scope, "path": path[len(self._path) :], "raw_path": raw[len(self._raw) :]}
        await self._app(scope, receive, send)
