"""A path in front of every endpoint, for a server that a proxy shows under one (--root-path).

Owns: taking it off. Does not: route. Requests with it and without it are the same: proxies may take it off, or not.
Invariant: it is gone from the path and the raw path alike, byte for byte, before anything looks at either; a path that
spells it in any other way is left as it is, and no policy knows it.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """Outermost."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._path = root_path
        self._raw = root_path.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, without the path in front."""
        if scope["type"] == "http":
            path: str = scope["path"]
            raw: bytes = scope.get("raw_path") or path.encode()
            if path.startswith(self._path + "/") and raw.startswith(self._raw + b"/"):
                scope = {**scope, "path": path[len(self._path) :], "raw_path": raw[len(self._raw) :]}
        await self._app(scope, receive, send)
