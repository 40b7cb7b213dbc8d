"""What a client may send: sizes, times and counts of heads and bodies.

Owns: the bounds, and receiving a body under them. Does not: know JSON (json_reader does) or what the fields mean.
Invariant: a body is refused before memory or time beyond its own size is spent on it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from octavo.server.bodies.checks import IGNORED_FIELDS, collecting
from octavo.server.faults import ApiError
from octavo.server.json_reader import JsonLimits, parse_object
from octavo.server.offload import parse_off_loop

T = TypeVar("T")
UPLOADS = "/v1/files"
_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json", re.ASCII | re.IGNORECASE)
OFF_LOOP_BYTES = 32 * 1024  # beyond this, parsing a body leaves the event loop


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one request, one connection and all of them.

    A body that comes without a valid key, where keys are set, has `stranger_body_timeout_s`, and at most
    `max_stranger_bodies` of them may be unfinished.
    `max_header_bytes` get an answer (431); a head of more than `max_head_bytes` is cut. The application answers a slow
    body after `body_timeout_s`; a connection whose body nobody reads is cut `body_grace_s` later.
    `max_upload_bytes` are of a file (--max-upload-bytes, where there is a --batch-dir); after `upload_grace_s` it must
    have come at `min_upload_bytes_per_s` on average.
    A client that does not read its stream is cut after `stall_timeout_s`, or once `max_unread_bytes` wait for it.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    max_upload_bytes: int = 0
    max_header_bytes: int = 16 * 1024
    max_headers: int = 100
    json: JsonLimits = field(default_factory=JsonLimits)
    max_prompts: int = 256
    max_choices: int = 16
    max_head_bytes: int = 64 * 1024
    head_timeout_s: float = 10.0
    handshake_timeout_s: float = 5.0
    max_connections: int = 1024
    max_pipelined: int = 4
    body_timeout_s: float = 30.0
    body_grace_s: float = 5.0
    upload_grace_s: float = 5.0
    min_upload_bytes_per_s: int = 8192
    stranger_body_timeout_s: float = 2.0
    max_stranger_bodies: int = 16
    stall_timeout_s: float = 30.0
    max_unread_bytes: int = 128 * 1024
    keep_alive_s: float = 10.0


async def read_json(request: Request, limits: HttpLimits, check: Callable[[dict[str, object]], T]) -> T:
    """Read a body that must be one strict JSON object, and have it checked. Raises ApiError.

    Where a browser sent it, its content type must say that it is JSON: other types are sent across sites unasked.
    A long body is parsed and checked on another thread. Fields that are ignored are noted in the request's scope.
    """
    if "origin" in request.headers or "sec-fetch-site" in request.headers:
        _check_content_type(request)
    body = await read_body(request, limits, limits.max_body_bytes)

    def read() -> T:
        with collecting(request.scope[IGNORED_FIELDS]):
            return check(parse_object(body, limits.json))

    return await parse_off_loop(read, len(body)) if len(body) > OFF_LOOP_BYTES else read()


async def read_body(request: Request, limits: HttpLimits, max_bytes: int) -> bytes:
    """Read a body of at most `max_bytes`. Raises ApiError."""
    if "content-encoding" in request.headers:
        check_coding(request)
    declared = request.headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdigit()) or int(declared[:19]) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {limits.body_timeout_s:g} s", code="body_timeout"
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before the body was complete", code="client_disconnected") from None
    return b"".join(parts)


def _check_content_type(request: Request) -> None:
    """Refuse a browser's body that is not declared as JSON; programs such as curl need not declare it."""
    given = ", ".join(request.headers.getlist("content-type"))
    if not _JSON_TYPE.fullmatch(given.partition(";")[0].strip()):
        message = f"Content-Type is {given[:128]!r}; send the body as application/json"
        raise ApiError(415, message, code="unsupported_media_type")


def check_coding(request: Request) -> None:
    """Refuse a body that is compressed. Raises ApiError (415, which says what is taken: RFC 9110, section 12.5.3)."""
    codings = ", ".join(request.headers.getlist("content-encoding"))
    if codings.strip().lower() not in ("", "identity"):
        raise ApiError(
            415,
            f"Content-Encoding is {codings[:64]!r}; send the body as it is, with identity or without the header",
            code="unsupported_content_encoding",
        )


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes, the most this server takes"
    return ApiError(413, message, code="body_too_large")
