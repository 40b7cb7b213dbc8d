"""The answers of a server that does not serve yet: 503 to every request, so that a load balancer chooses another one.

Owns: reading a request's head, within bounds, and the fixed answers. Does not: read bodies, or keep connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from octavo.server.http.errors import ApiError

_HEAD_LIMIT_S = 5.0
_MAX_HEAD_BYTES = 16 << 10
_RETRY_AFTER_S = 5


@asynccontextmanager
async def answering_unready(listener: socket.socket, code: str, why: str) -> AsyncIterator[None]:
    """Answer 503 with this reason on an open socket while the block runs; /livez gets 200. The socket stays open."""
    error = ApiError(503, why, code=code, retry_after_s=_RETRY_AFTER_S)
    refusal = _response("503 Service Unavailable", error.body(), f"Retry-After: {_RETRY_AFTER_S}\r\n")
    alive = _response("200 OK", {"status": "ok"})

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_HEAD_LIMIT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(alive if head.startswith((b"GET /livez ", b"HEAD /livez ")) else refusal)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, sock=listener.dup(), limit=_MAX_HEAD_BYTES)
    try:
        yield
    finally:
        server.close()


def _response(status: str, body: object, headers: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{headers}"
    return f"{head}Connection: close\r\n\r\n".encode() + data
