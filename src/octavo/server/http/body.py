"""A request's body: received within its limits, and read as strict JSON; the threads for large inputs.

Owns: UTF-8, no NaN or Infinity, no repeated keys, no lone surrogates, bounded depth and counts, and the two readers
that keep these rules. Does not: know what the fields mean.
Invariants: a body is refused before memory or time beyond its own size is spent on it; both readers give the same
value or refuse the same text; neither holds the interpreter's lock for long: the library's C reader only gets few
values, the patient one releases the lock between values.
Measured: 8 MB of `[],[],...` keep the C reader, and with it every thread, busy for a second. 6 MB of escapes in one
string hold the lock for 30 ms, so one thread does all long parsing: the event loop never waits for two such pieces.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from octavo.server.bodies.checks import IGNORED_FIELDS, collecting
from octavo.server.http.endpoints import ENDPOINT, Endpoint
from octavo.server.http.errors import ApiError, bad_field
from octavo.server.http.limits import HttpLimits, JsonLimits

T = TypeVar("T")
LONG_BYTES = 512 * 1024  # of a body: a few milliseconds to parse
LONG_CHARS = 64 * 1024  # of a text: a twentieth of a second to tokenize
# No thread is started before its first work.
_PARSING = ThreadPoolExecutor(1, thread_name_prefix="octavo-bodies")
_PARSING_LONG = ThreadPoolExecutor(1, thread_name_prefix="octavo-long-bodies")
_TOKENIZING = ThreadPoolExecutor(2, thread_name_prefix="octavo-prompts")
_TOKENIZING_LONG = ThreadPoolExecutor(1, thread_name_prefix="octavo-long-prompts")


async def parse_off_loop(work: Callable[[], T], num_bytes: int) -> T:
    """Run work that holds the interpreter's lock. If the caller is cancelled, the work still runs to its end."""
    lane = _PARSING_LONG if num_bytes > LONG_BYTES else _PARSING
    return await asyncio.get_running_loop().run_in_executor(lane, work)


async def off_loop(work: Callable[[], T], num_characters: int = 0) -> T:
    """Run work that mostly releases the interpreter's lock. If the caller is cancelled, the work still ends."""
    lane = _TOKENIZING_LONG if num_characters > LONG_CHARS else _TOKENIZING
    return await asyncio.get_running_loop().run_in_executor(lane, work)


OFF_LOOP_BYTES = 32 * 1024  # beyond this, parsing a body leaves the event loop
_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json", re.ASCII | re.IGNORECASE)

_QUICK_SEPARATORS = 100_000  # commas; numbers take the C reader 0.3 us each
_QUICK_BRACKETS = 20_000  # containers take it 0.4 us, and more by way of the collector


async def read_json(request: Request, limits: HttpLimits, check: Callable[[dict[str, object]], T]) -> T:
    """Read a body that must be one strict JSON object, and return what `check` makes of it. Raises ApiError.

    A browser's body must have a JSON content type: browsers send other types across sites without a preflight.
    A long body is parsed and checked on another thread. Ignored fields are recorded in the request's scope.
    """
    if "origin" in request.headers or "sec-fetch-site" in request.headers:
        _check_content_type(request)
    body = await read_body(request, limits)

    def read() -> T:
        with collecting(request.scope[IGNORED_FIELDS]):
            return check(parse_object(body, limits.json))

    return await parse_off_loop(read, len(body)) if len(body) > OFF_LOOP_BYTES else read()


async def read_body(request: Request, limits: HttpLimits) -> bytes:
    """Read a body within the bound of its endpoint, else of the server. Raises ApiError."""
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
    """Refuse a browser's body that is not declared as JSON; programs such as curl need not declare it."""
    given = ", ".join(request.headers.getlist("content-type"))
    if not _JSON_TYPE.fullmatch(given.partition(";")[0].strip()):
        message = f"Content-Type is {given[:128]!r}; send the body as application/json"
        raise ApiError(415, message, code="unsupported_media_type")


def check_coding(request: Request) -> None:
    """Refuse a body that is compressed. Raises ApiError (415 with Accept-Encoding: RFC 9110, section 12.5.3)."""
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
    """Parse a body that must be one object. Raises ApiError."""
    try:
        text = body.decode()
        is_quick = text.count(",") <= _QUICK_SEPARATORS and text.count("[") + text.count("{") <= _QUICK_BRACKETS
        value = _read_quickly(text, limits) if is_quick else PatientReader(text, limits).read()
    except RecursionError:
        raise _too_deep(limits) from None
    except UnicodeDecodeError as error:
        raise _bad_json(f"byte {error.start} is not UTF-8") from None
    except ValueError as error:  # malformed, or an integer of thousands of digits
        raise _bad_json(str(error)) from None
    if not isinstance(value, dict):
        raise _bad_json('the body must be an object, such as {"model": ...}')
    return value


def _bad_json(reason: str) -> ApiError:
    return bad_field(None, f"the body is not valid JSON: {reason}", "invalid_json")


def _too_deep(limits: JsonLimits) -> ApiError:
    return bad_field(None, f"the body is nested more than {limits.max_depth} deep", "invalid_json")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _bad_json(f"the key {repeated[:64]!r} is given twice")
    return made


def _no_constant(name: str) -> object:
    raise _bad_json(f"{name} is not a JSON number")


def _read_quickly(text: str, limits: JsonLimits) -> object:
    """Parse with the library's C reader, then check depth and surrogates."""
    value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    if text.count("[") + text.count("{") > limits.max_depth:
        _check_depth(value, limits)
    if "\\ud" in text or "\\uD" in text:  # only these escapes make one
        _check_surrogates(value)
    return value


def _check_depth(value: object, limits: JsonLimits) -> None:
    level = [value]
    for _ in range(limits.max_depth):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise _too_deep(limits)


def _check_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad_json("a string holds half a surrogate pair") from None


class PatientReader:
    """A reader of one value at a time; the C reader parses runs of up to 4096 numbers and constants."""

    _space = re.compile(r"[ \t\n\r]*")
    _scalar = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null|NaN|-?Infinity")
    # Up to 4096 numbers, constants or invalid words, each with a comma: the C reader refuses invalid ones.
    _run = re.compile(r"(?:[-+.0-9Ea-z \t\n\r]{1,48}+,){1,4096}+")

    def __init__(self, text: str, limits: JsonLimits) -> None:
        self._text = text
        self._limits = limits
        self._at = 0
        self._depth = 0
        self._num_parts = 0
        self._num_values = 0
        self._field: str | None = None  # the outermost object's field that is being read

    def read(self) -> object:
        """Return the whole text's value. Raises ValueError, ApiError."""
        value = self._value()
        if self._peek():
            raise self._wrong("the end")
        return value

    def _peek(self) -> str:
        """Skip spaces and return the next character; "" at the end."""
        match = self._space.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def _wrong(self, expected: str) -> ValueError:
        return ValueError(f"{expected} was expected at character {self._at}")

    def _value(self) -> object:
        first = self._peek()
        if first == '"':
            return self._string()
        if first in ("{", "["):
            self._count_part()
            if self._depth == self._limits.max_depth:
                raise _too_deep(self._limits)
            self._at += 1
            self._depth += 1
            made: object = self._object() if first == "{" else self._list()
            self._depth -= 1
            return made
        match = self._scalar.match(self._text, self._at)
        if match is None:
            raise self._wrong("a value")
        self._at = match.end()
        self._count_values(1)
        found = match.group()
        return int(found) if found.isdigit() else json.loads(found, parse_constant=_no_constant)

    def _string(self) -> str:
        self._count_part()
        begun = self._at
        text: str
        text, self._at = scanstring(self._text, begun + 1, True)
        if "\\" in self._text[begun : self._at]:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise _bad_json("a string holds half a surrogate pair") from None
        return text

    def _object(self) -> dict[str, object]:
        pairs: list[tuple[str, object]] = []
        if self._peek() == "}":
            self._at += 1
            return {}
        while True:
            if self._peek() != '"':
                raise self._wrong("a key")
            key = self._string()
            if self._peek() != ":":
                raise self._wrong("a colon")
            self._at += 1
            if self._depth == 1:
                self._field = key[:64]
            pairs.append((key, self._value()))
            if self._has_ended("}"):
                return _unique(pairs)

    def _list(self) -> list[object]:
        items: list[object] = []
        if self._peek() == "]":
            self._at += 1
            return items
        item: object = items
        while True:
            if isinstance(item, (str, list, dict)):  # after a number there is no run, or it was taken
                self._take_run(items)
            items.append(item := self._value())
            if self._has_ended("]"):
                return items

    def _take_run(self, items: list[object]) -> None:
        while match := self._run.match(self._text, self._at):
            values = json.loads(f"[{match.group()[:-1]}]")
            if not values:  # spaces alone
                raise self._wrong("a value")
            self._count_values(len(values))
            items += values
            self._at = match.end()

    def _has_ended(self, closing: str) -> bool:
        """Take the comma or the closing bracket after an item; return True for the bracket."""
        found = self._peek()
        if found not in (",", closing) or not found:
            raise self._wrong(f"a comma or {closing}")
        self._at += 1
        return found == closing

    def _count_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > self._limits.max_parts:
            raise self._too_many("strings, objects and lists", self._limits.max_parts)

    def _count_values(self, num: int) -> None:
        self._num_values += num
        if self._num_values > self._limits.max_values:
            raise self._too_many("numbers", self._limits.max_values)

    def _too_many(self, what: str, most: int) -> ApiError:
        where = "the body" if self._field is None else f"the body, up to {self._field},"
        return bad_field(self._field, f"{where} holds more than {most} {what}", "body_too_complex")
