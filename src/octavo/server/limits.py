"""What a client may send: sizes, depth and strictness of a body.

Owns: the bounds and the reading of a JSON body under them. Does not: know what the fields mean.
Invariant: a body is refused before memory or time beyond its own size is spent on it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from octavo.server.faults import ApiError, bad_field

OFF_LOOP_BYTES = 32 * 1024  # beyond this, parsing and tokenising leave the event loop


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one request and one connection."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_header_bytes: int = 16 * 1024
    max_headers: int = 100
    max_json_depth: int = 64
    max_prompts: int = 256
    max_choices: int = 16
    body_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0
    keep_alive_s: float = 10.0


async def read_json(request: Request, limits: HttpLimits) -> dict[str, object]:
    """Read a body that must be one strict JSON object. Raises ApiError."""
    body = await _read_body(request, limits)
    if len(body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(parse_object, body, limits.max_json_depth)
    return parse_object(body, limits.max_json_depth)


async def _read_body(request: Request, limits: HttpLimits) -> bytes:
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > limits.max_body_bytes:
        raise _too_large(limits)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limits.max_body_bytes:
                    raise _too_large(limits)
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {limits.body_timeout_s:g} s", code="body_timeout"
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before the body was complete", code="client_disconnected") from None
    return b"".join(parts)


def _too_large(limits: HttpLimits) -> ApiError:
    message = f"the body is larger than {limits.max_body_bytes} bytes, the most this server takes"
    return ApiError(413, message, code="body_too_large")


def parse_object(body: bytes, max_depth: int) -> dict[str, object]:
    """Parse strict JSON: UTF-8, no NaN or Infinity, no repeated keys, no lone surrogates, bounded depth."""
    try:
        text = body.decode()
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except UnicodeDecodeError as error:
        raise _bad_json(f"byte {error.start} is not UTF-8") from None
    except ValueError as error:  # malformed, or an integer of thousands of digits
        raise _bad_json(str(error)) from None
    if text.count("[") + text.count("{") > max_depth:
        _check_depth(value, max_depth)
    if "\\u" in text:
        _check_surrogates(value)
    if not isinstance(value, dict):
        raise _bad_json('the body must be an object, such as {"model": ...}')
    return value


def _bad_json(reason: str) -> ApiError:
    return bad_field(None, f"the body is not valid JSON: {reason}", "invalid_json")


def _too_deep(max_depth: int) -> ApiError:
    return bad_field(None, f"the body is nested more than {max_depth} deep", "invalid_json")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _bad_json(f"the key {repeated[:64]!r} is given twice")
    return made


def _no_constant(name: str) -> object:
    raise _bad_json(f"{name} is not a JSON number")


def _children(level: list[object]) -> list[object]:
    return [
        child
        for node in level
        for child in (node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
        if isinstance(child, (dict, list))
    ]


def _check_depth(value: object, max_depth: int) -> None:
    level = [value]
    for _ in range(max_depth):
        level = _children(level)
        if not level:
            return
    raise _too_deep(max_depth)


def _check_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad_json("a string holds half a surrogate pair") from None


def check_headers(headers: list[tuple[bytes, bytes]], limits: HttpLimits) -> ApiError | None:
    """Give the refusal of too many or too large headers, or None."""
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) <= limits.max_headers and size <= limits.max_header_bytes:
        return None
    message = f"more than {limits.max_headers} headers or {limits.max_header_bytes} bytes of them"
    return ApiError(431, message, code="headers_too_large")
