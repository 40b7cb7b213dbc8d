"""A request's body: received within its limits, and parsed as strict JSON; the threads for large inputs.

Owns: the checks for UTF-8, repeated keys, depth and counts; msgspec refuses NaN, Infinity and lone surrogates.
Does not: know the meaning of fields.
Invariants: no body costs memory or time out of proportion to its size before it is refused. No call holds the GIL for
long, since values are counted before they are made.
Measured: 8 MB of `[],[],...` would keep the parser, and every thread, busy for a second; a million numbers take it
40 ms. One thread does all long parsing, so that the event loop never waits for two long calls in a row.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.server.api.fields import IGNORED_FIELDS, collect_ignored
from octavo.server.http.endpoints import ENDPOINT, Endpoint
from octavo.server.http.errors import ApiError, bad_field
from octavo.server.http.limits import HttpLimits, JsonLimits

T = TypeVar("T")
OFF_LOOP_BYTES = 32 * 1024  # a longer body is not parsed in the event loop
LONG_BYTES = 512 * 1024  # a body of this size takes a few milliseconds to parse
LONG_CHARS = 64 * 1024  # a text of this length takes 50 ms to tokenize
_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json", re.ASCII | re.IGNORECASE)


# A pool's threads start with its first work.
_PARSING = ThreadPoolExecutor(1, thread_name_prefix="octavo-bodies")
_PARSING_LONG = ThreadPoolExecutor(1, thread_name_prefix="octavo-long-bodies")
_TOKENIZING = ThreadPoolExecutor(2, thread_name_prefix="octavo-prompts")
_TOKENIZING_LONG = ThreadPoolExecutor(1, thread_name_prefix="octavo-long-prompts")


async def read_json(request: Request, limits: HttpLimits, check: Callable[[dict[str, object]], T]) -> T:
    """Read a body that must be one strict JSON object, and return `check` of that object. Raises ApiError.

    A browser's body must have a JSON content type: browsers send other types across sites without a preflight.
    A long body is parsed and checked on another thread. Ignored fields are recorded in the request's scope.
    """
    if "origin" in request.headers or "sec-fetch-site" in request.headers:
        _check_content_type(request)
    body = await read_body(request, limits)

    def read() -> T:
        with collect_ignored(request.scope[IGNORED_FIELDS]):
            return check(parse_object(body, limits.json))

    return await parse_off_loop(read, len(body)) if len(body) > OFF_LOOP_BYTES else read()


async def read_body(request: Request, limits: HttpLimits) -> bytes:
    """Read a body within its endpoint's bound, or else the server's bound. Raises ApiError."""
    endpoint: Endpoint | None = request.scope.get(ENDPOINT)
    max_bytes = (endpoint and endpoint.max_body_bytes) or limits.max_body_bytes
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
    """Refuse a browser's body without a JSON content type. Programs such as curl need not send one."""
    given = ", ".join(request.headers.getlist("content-type"))
    if not _JSON_TYPE.fullmatch(given.partition(";")[0].strip()):
        message = f"Content-Type is {given[:128]!r}; send the body as application/json"
        raise ApiError(415, message, code="unsupported_media_type")


def check_coding(request: Request) -> None:
    """Refuse a compressed body. Raises ApiError (415 with Accept-Encoding: RFC 9110, section 12.5.3)."""
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


def parse_object(body: bytes, limits: JsonLimits) -> dict[str, object]:
    """Parse a body that must be one JSON object. Raises ApiError."""
    num_keys = _count_keys(body, limits)
    try:
        value = _DECODER.decode(body)
    except RecursionError:
        raise _too_deep(limits) from None
    except UnicodeDecodeError:
        raise _bad_json("a string is not UTF-8") from None
    except msgspec.MsgspecError as error:
        raise _bad_json(str(error)) from None
    if not isinstance(value, dict):
        raise _bad_json('the body must be an object, such as {"model": ...}')
    if _count_different_keys(value, limits) != num_keys:
        raise _bad_json("an object has a key twice")
    return value


def _read_float(text: str) -> float:
    """Return a number with a fraction or an exponent.

    msgspec would parse a number in up to 6 us without releasing the GIL; a Python function releases it.
    """
    return float(text)


_MAX_DIGITS = 400  # the time to parse an integer is quadratic in its digits
_ALL_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
_DECODER = msgspec.json.Decoder(float_hook=_read_float)


def _count_keys(body: bytes, limits: JsonLimits) -> int:
    """Count the values of a body before it is parsed, and return the number of its keys. Raises ApiError.

    Once escapes are removed, every quotation mark begins or ends a string. The counts are exact for valid JSON, except
    that an empty list also counts as a number; the parser stops where the JSON is invalid.
    """
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    pieces = body.split(b'"', 2 * limits.max_parts + 2)
    num_strings = len(pieces) // 2
    structure = b'"'.join(pieces[::2])  # all that is outside strings
    if num_strings + structure.count(b"[") + structure.count(b"{") > limits.max_parts:
        raise _too_many("strings, objects and lists", limits.max_parts)
    if b"0" * _MAX_DIGITS in structure.translate(_ALL_ZERO):
        raise _bad_json(f"a number has {_MAX_DIGITS} digits or more")
    num_keys = structure.count(b":")
    if 1 + structure.count(b",") + num_keys - num_strings > limits.max_values:
        raise _too_many("numbers and constants", limits.max_values)
    return num_keys


def _count_different_keys(value: dict[str, object], limits: JsonLimits) -> int:
    """Return the number of keys in all objects. Raises ApiError if objects or lists are nested too deep."""
    num_keys = 0
    level: list[Any] = [value]
    for _ in range(limits.max_depth):
        inner: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                num_keys += len(node)
                node = node.values()
            inner += [child for child in node if isinstance(child, (dict, list))]
        if not inner:
            return num_keys
        level = inner
    raise _too_deep(limits)


def _bad_json(reason: str) -> ApiError:
    return bad_field(None, f"the body is not valid JSON: {reason}", "invalid_json")


def _too_deep(limits: JsonLimits) -> ApiError:
    return bad_field(None, f"the body is nested more than {limits.max_depth} deep", "invalid_json")


def _too_many(what: str, bound: int) -> ApiError:
    return bad_field(None, f"the body holds more than {bound} {what}", "body_too_complex")


async def parse_off_loop(work: Callable[[], T], num_bytes: int) -> T:
    """Run work that holds the GIL on the parsing thread. It runs to its end even if the caller is cancelled."""
    lane = _PARSING_LONG if num_bytes > LONG_BYTES else _PARSING
    return await asyncio.get_running_loop().run_in_executor(lane, work)


async def off_loop(work: Callable[[], T], num_characters: int = 0) -> T:
    """Run work that mostly releases the GIL on another thread. It runs to its end even if the caller is cancelled."""
    lane = _TOKENIZING_LONG if num_characters > LONG_CHARS else _TOKENIZING
    return await asyncio.get_running_loop().run_in_executor(lane, work)


def json_response(
    value: object, is_private: bool = False, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a value, or bytes that are JSON, as a JSON response. With `is_private`, caches may not store it."""
    data = value if isinstance(value, bytes) else msgspec.json.encode(value)
    headers = {"cache-control": "no-store", **(headers or {})} if is_private else headers
    return Response(data, status, headers, media_type="application/json")
