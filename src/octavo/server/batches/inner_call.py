"""Calls of the application from inside: the same routes, limits and answers as over HTTP, without a connection.

Owns: the scope of such a request, and collecting its answer.
Does not: check a key: the key's KeyInfo is in the scope, which clients cannot set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from octavo.server.http.auth import KEY
from octavo.server.http.keys import KeyInfo


@dataclass(slots=True)
class InnerResponse:
    """A whole response. Header names are lower case."""

    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


InnerCall = Callable[[str, bytes], Awaitable[InnerResponse]]  # of a path and a JSON body


def inner_call(app: ASGIApp, holder: KeyInfo) -> InnerCall:
    """Return a function that posts to the app with the rights of a key."""

    async def call(path: str, body: bytes) -> InnerResponse:
        return await _post(app, holder, path, body)

    return call


async def _post(app: ASGIApp, holder: KeyInfo, path: str, body: bytes) -> InnerResponse:
    answer = InnerResponse()
    parts: list[bytes] = []
    is_sent = False

    async def receive() -> Message:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()  # this client stays connected: a call is ended by cancelling it
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]
            }
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": headers,
        "server": ("batch", 0),
        "client": ("batch", 0),
        KEY: holder,
    }
    await app(scope, receive, send)
    answer.body = b"".join(parts)
    return answer
