"""Shell: the outermost layer around every request.

Owns: arrival time, the request id, header limits, counting open requests and responses, the header of ignored fields,
and the catch-all: an unexpected error becomes a 500 without details. Does not: log bodies or headers.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.observe.metrics.requests import RequestMetrics
from octavo.server.bodies.checks import HEADER, IGNORED_FIELDS, IgnoredFields
from octavo.server.faults import ApiError, bad_field, disk_full_error, internal_error, is_disk_full
from octavo.server.http.endpoints import ENDPOINT, Endpoint
from octavo.server.lifecycle import Lifecycle
from octavo.server.limits import HttpLimits

ARRIVAL = "octavo.arrival"
REQUEST_ID = "octavo.request_id"
GIVEN_ID = "octavo.given_id"
METER = "octavo.meter"  # of the request's key, set by the gate
CLIENT_CLOSED_REQUEST = 499  # never sent; the logs and metrics of proxies use it
MAX_LOGGED_FIELDS = 256
_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_log = logging.getLogger(__name__)


class ShellMiddleware:
    """The middleware around the whole app."""

    def __init__(
        self,
        app: ASGIApp,
        limits: HttpLimits,
        lifecycle: Lifecycle,
        metrics: RequestMetrics,
        has_strict_fields: bool = False,
    ) -> None:
        self._app = app
        self._limits = limits
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._has_strict_fields = has_strict_fields
        self._logged: set[str] = set()  # ignored fields, each of which is logged once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; an unexpected error becomes an answer and a log line."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[ARRIVAL] = time.monotonic()
        ignored = scope[IGNORED_FIELDS] = IgnoredFields(self._has_strict_fields)
        refusal = _read_headers(scope, self._limits)
        has_started = has_left = False
        status = CLIENT_CLOSED_REQUEST  # of a client that left before the response started

        async def watched(message: Message) -> None:
            nonlocal has_started, has_left, status
            if message["type"] == "http.response.start":
                has_started = True
                status = message["status"]
                self._metrics.response_started(status)
                message["headers"] = [*message["headers"], *self._headers(scope, ignored)]
            try:
                await send(message)
            except OSError:
                has_left = True
                raise

        with self._lifecycle.opened():
            try:
                if refusal is not None:
                    await refusal.response()(scope, receive, watched)
                else:
                    await self._app(scope, receive, watched)
            except Exception as error:  # the shell of every route
                if has_left:
                    _log.debug("client left request %s", scope[REQUEST_ID])
                else:
                    failure = _logged(error, scope)
                    if not has_started:
                        await failure.response()(scope, receive, watched)
            finally:
                seconds = time.monotonic() - scope[ARRIVAL]
                self._metrics.response_ended(_handler(scope), scope["method"], status, seconds)

    def _headers(self, scope: Scope, ignored: IgnoredFields) -> list[tuple[bytes, bytes]]:
        """Return the headers of every answer: the id, the key's rates, the ignored fields."""
        headers = [(b"x-request-id", scope[REQUEST_ID].encode())]
        meter = scope.get(METER)
        if meter is not None:
            headers += meter.headers(time.monotonic())
        if ignored.paths:
            headers.append((HEADER.lower().encode(), ", ".join(ignored.paths).encode()))
            self._note_ignored(ignored)
        return headers

    def _note_ignored(self, ignored: IgnoredFields) -> None:
        for path, label in zip(ignored.paths, ignored.labels, strict=True):
            self._metrics.ignored_field(label)
            if path not in self._logged and len(self._logged) < MAX_LOGGED_FIELDS:
                self._logged.add(path)
                _log.warning("field %s of a request was ignored: this server does not know it (logged once)", path)


def _logged(error: Exception, scope: Scope) -> ApiError:
    """Log an unexpected error and return its answer: a full disk in one line, others with a traceback."""
    meter = scope.get(METER)
    whose = f" of key {meter.info.name!r}" if meter is not None else ""
    if is_disk_full(error):
        _log.error("request %s%s failed: %s", scope[REQUEST_ID], whose, error)
        return disk_full_error(error)
    _log.error("request %s%s failed", scope[REQUEST_ID], whose, exc_info=error)
    return internal_error()


def _handler(scope: Scope) -> str:
    """Return the path template of the request's endpoint; "none" without one."""
    endpoint: Endpoint | None = scope.get(ENDPOINT)
    return "none" if endpoint is None else endpoint.path


def _read_headers(scope: Scope, limits: HttpLimits) -> ApiError | None:
    """Set the request's id, the client's X-Request-Id or a new one; return the refusal of its headers, or None."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    given: list[bytes] = []
    num_bytes = 0
    for name, value in headers:
        num_bytes += len(name) + len(value)
        if name == b"x-request-id":
            given.append(value)
    scope[REQUEST_ID] = uuid.uuid4().hex
    scope[GIVEN_ID] = None
    if given and (len(given) > 1 or not _ID.fullmatch(given[0])):
        return bad_field(
            "X-Request-Id", "X-Request-Id: give one id of 1 to 128 letters, digits, dots, colons, dashes or underscores"
        )
    if given:
        scope[REQUEST_ID] = scope[GIVEN_ID] = given[0].decode()
    if len(headers) > limits.max_headers or num_bytes > limits.max_header_bytes:
        message = f"more than {limits.max_headers} headers or {limits.max_header_bytes} bytes of them"
        return ApiError(431, message, code="headers_too_large")
    return None
