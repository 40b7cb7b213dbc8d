"""Middleware around every request, outermost first: root path, request, trusted hosts and, after CORS, auth.

Root path (--root-path, for a server behind a proxy): removed from the path and the raw path, byte for byte, before any
other code reads them. A path that spells the root path in another way stays unchanged, and is not found.
Request: arrival time, request id, header limits, count of open requests, header of ignored fields, and catch-all: an
unexpected error becomes a 500 without details. It does not log bodies or headers.
Trusted hosts: without keys, only Hosts and sites of this machine or of the settings are answered, for every path; only
the probes' bare status is open. With keys, only the Host is checked, and only if --allowed-hosts is set: pages of other
sites have no key, and auth checks cookies.
Auth: a request is refused unless its endpoint, its key or its session allows it. An unknown path needs a key.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import time
import uuid
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.observe.metrics.prometheus import RequestMetrics
from octavo.sandbox.pool import current_tenant
from octavo.server.api.fields import HEADER, IGNORED_FIELDS, IgnoredFields
from octavo.server.http.auth import KEY, PAGES, SESSION, Logins, login_form, source_of, wants_html, wrong_key_error
from octavo.server.http.connection import ON_AUTH
from octavo.server.http.endpoints import ENDPOINT, Access, Endpoint, Endpoints
from octavo.server.http.errors import (
    ANTHROPIC,
    ANTHROPIC_VERSION,
    ApiError,
    bad_field,
    disk_full_error,
    internal_error,
    is_disk_full,
)
from octavo.server.http.keys import ANONYMOUS, KeyInfo, KeyRing
from octavo.server.http.lifecycle import Lifecycle
from octavo.server.http.limits import HttpLimits

if TYPE_CHECKING:
    from octavo.config import Config


# In a request's scope:
ARRIVAL = "octavo.arrival"
REQUEST_ID = "octavo.request_id"
GIVEN_ID = "octavo.given_id"
METER = "octavo.meter"  # the Meter of the request's key, set by the gate
UNTRUSTED = "octavo.untrusted"  # set for a probe that gets only the bare status
CLIENT_CLOSED_REQUEST = 499  # never sent; logged and counted as proxies do
MAX_LOGGED_FIELDS = 256
MAX_SHOWN = 64  # characters of a client's header in a message
_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{0,5})?")
_MAX_HOST = 262  # characters: the longest name, a final dot and a port
_MAX_CACHED = 256
_SAFE = ("GET", "HEAD")
_NO_KEY = "give a valid key in the header: Authorization: Bearer KEY (or x-api-key: KEY)"
_log = logging.getLogger(__name__)


class RootPathMiddleware:
    """The outermost middleware. It removes the root path."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._path = root_path
        self._raw = root_path.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on without the root path."""
        if scope["type"] == "http":
            path: str = scope["path"]
            raw: bytes = scope.get("raw_path") or path.encode()
            if path.startswith(self._path + "/") and raw.startswith(self._raw + b"/"):
                scope = {**scope, "path": path[len(self._path) :], "raw_path": raw[len(self._raw) :]}
        await self._app(scope, receive, send)


class RequestMiddleware:
    """The middleware around the whole app: the request's id, headers and metrics, and the catch-all for errors."""

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
        self._logged: set[str] = set()  # ignored fields that were logged; each is logged once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. An unexpected error becomes an answer and a log entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[ARRIVAL] = time.monotonic()
        ignored = scope[IGNORED_FIELDS] = IgnoredFields(self._has_strict_fields)
        refusal = _read_headers(scope, self._limits)
        has_started = has_left = False
        status = CLIENT_CLOSED_REQUEST  # stays if the client leaves before the response starts

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
            except Exception as error:  # no error of a route may pass
                if has_left:
                    _log.debug("client left request %s", scope[REQUEST_ID])
                else:
                    failure = _logged(error, scope)
                    if not has_started:
                        await failure.response()(scope, receive, watched)
            finally:
                endpoint: Endpoint | None = scope.get(ENDPOINT)
                handler, seconds = "none" if endpoint is None else endpoint.path, time.monotonic() - scope[ARRIVAL]
                self._metrics.response_ended(handler, scope["method"], status, seconds)

    def _headers(self, scope: Scope, ignored: IgnoredFields) -> list[tuple[bytes, bytes]]:
        """Return the headers that every answer gets: the id, the key's rates, the ignored fields."""
        headers = [(b"x-request-id", scope[REQUEST_ID].encode())]
        if scope["path"].startswith(ANTHROPIC) or ANTHROPIC_VERSION in dict(scope["headers"]):
            headers.append((b"request-id", scope[REQUEST_ID].encode()))  # Anthropic's clients read this header
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
    """Log an unexpected error and return its answer. A full disk is logged in one line, others with a traceback."""
    meter = scope.get(METER)
    owner = f" of key {meter.info.name!r}" if meter is not None else ""
    if is_disk_full(error):
        _log.error("request %s%s failed: %s", scope[REQUEST_ID], owner, error)
        return disk_full_error(error)
    _log.error("request %s%s failed", scope[REQUEST_ID], owner, exc_info=error)
    return internal_error()


def _read_headers(scope: Scope, limits: HttpLimits) -> ApiError | None:
    """Set the request's id: the client's X-Request-Id or a new one. Return the refusal of its headers, or None."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    given_ids: list[bytes] = []
    num_bytes = 0
    for name, value in headers:
        num_bytes += len(name) + len(value)
        if name == b"x-request-id":
            given_ids.append(value)
    scope[REQUEST_ID] = uuid.uuid4().hex
    scope[GIVEN_ID] = None
    if given_ids and (len(given_ids) > 1 or not _ID.fullmatch(given_ids[0])):
        return bad_field(
            "X-Request-Id", "X-Request-Id: give one id of 1 to 128 letters, digits, dots, colons, dashes or underscores"
        )
    if given_ids:
        scope[REQUEST_ID] = scope[GIVEN_ID] = given_ids[0].decode()
    if len(headers) > limits.max_headers or num_bytes > limits.max_header_bytes:
        message = f"more than {limits.max_headers} headers or {limits.max_header_bytes} bytes of them"
        return ApiError(431, message, code="headers_too_large")
    return None


class TrustedHostMiddleware:
    """The middleware before CORS and keys. It takes this machine's address from the connection."""

    def __init__(
        self, app: ASGIApp, endpoints: Endpoints, config: Config, keys: KeyRing, note: Callable[[str], None]
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._keys = keys
        self._note = note  # counts a refusal
        serving, web = config.serving, config.web
        names = ("localhost", serving.host, socket.gethostname(), *web.allowed_hosts)
        self._names = frozenset(map(_normal, names)) - {""}
        self._allowed_hosts = web.allowed_hosts
        self._origins = frozenset(web.allowed_origins)
        self._is_own = lru_cache(_MAX_CACHED)(self._is_own_host)  # clients send the same few Hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        if scope["type"] != "http" or isinstance(scope.get(KEY), KeyInfo):  # a batch's inner call has no Host
            await self._app(scope, receive, send)
            return
        headers, has_keys = Headers(scope=scope), bool(self._keys.keys)
        refusal = None if has_keys and not self._allowed_hosts else self._host_refusal(headers, scope)
        if refusal is None and not has_keys:
            refusal = self._site_refusal(headers, scope)
        if refusal is not None and scope["path"] != "/login" and self._endpoints.open_access(scope) is not None:
            scope[UNTRUSTED] = True  # a probe
            refusal = None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            self._note(refusal.code)
            await refusal.response()(scope, receive, send)

    def _host_refusal(self, headers: Headers, scope: Scope) -> ApiError | None:
        """Return the refusal of a Host that is missing, repeated, or neither this machine's nor listed; else None."""
        if "*" in self._allowed_hosts:
            return None
        hosts = headers.getlist("host")
        local = str(scope["server"][0]) if scope.get("server") else ""
        if len(hosts) == 1 and len(hosts[0]) <= _MAX_HOST and self._is_own(hosts[0], local):
            return None
        message = (
            f"Host is {' and '.join(hosts)[:MAX_SHOWN]!r}, which is neither an address of this machine nor listed; "
            "add the name to --allowed-hosts, or serve with a key (OCTAVO_API_KEY)"
        )
        return ApiError(403, message, code="host_not_allowed")

    def _site_refusal(self, headers: Headers, scope: Scope) -> ApiError | None:
        """Return the refusal of a browser's request from another site's page or link; else None."""
        origins, sites = headers.getlist("origin"), headers.getlist("sec-fetch-site")
        if not (origins or sites) or "*" in self._origins:
            return None
        if len(origins) == 1 and origins[0] in self._origins:
            return None
        if origins and not (len(origins) == 1 and _is_same_origin(origins[0], headers, scope)):
            message = (
                f"Origin is {' and '.join(origins)[:MAX_SHOWN]!r}, a page of another site; add it to "
                "--allowed-origins, or serve with a key (OCTAVO_API_KEY)"
            )
            return ApiError(403, message, code="cross_site")
        if sites in ([], ["same-origin"]) or (sites == ["none"] and scope["method"] in _SAFE):
            return None
        message = (
            f"Sec-Fetch-Site is {' and '.join(sites)[:MAX_SHOWN]!r}: the request is from another site's page or link; "
            "type this server's address into the browser; a page that fetches needs its origin in --allowed-origins"
        )
        return ApiError(403, message, code="cross_site")

    def _is_own_host(self, host: str, local: str) -> bool:
        """Return True if a Host names this machine. `local` is the address that the client connected to."""
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = _normal(match[1].strip("[]"))
        address = _address(name)
        if address is None:
            return name in self._names
        return address.is_loopback or name in self._names or address == _address(local.partition("%")[0])


class AuthMiddleware:
    """Middleware that passes a request on if the path's access, its key or its session allows that; else 401 or 429."""

    def __init__(
        self, app: ASGIApp, endpoints: Endpoints, keys: KeyRing, logins: Logins, note: Callable[[str], None]
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._keys = keys
        self._logins = logins
        self._note = note  # counts a refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Decide by the raw path, before any routing."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        # A KeyInfo in the scope means a batch's inner call (batches.run); clients cannot set the scope.
        error: ApiError | None = None
        if not isinstance(scope.get(KEY), KeyInfo):
            access = self._endpoints.open_access(scope) if self._keys.keys else Access.OPEN
            error = None if access is Access.OPEN else self._identify(scope)
            if error is not None or access is Access.OPEN:
                scope[KEY] = ANONYMOUS  # no key is needed, or none was valid
            error = error if access is None else None
        if ON_AUTH in scope:  # only connections set it
            scope[ON_AUTH](scope[KEY] is not ANONYMOUS)
        if error is None:
            current_tenant.set(scope[KEY].tenant)
            await self._app(scope, receive, send)
        else:
            self._note(error.code)
            await _refusal(scope, error)(scope, receive, send)

    def _identify(self, scope: Scope) -> ApiError | None:
        """Set the scope's KEY from the key in a header, or else from the session; return a refusal if invalid."""
        is_given = any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
        if is_given:
            key = given_key(scope)
            info = None if key is None else self._keys.find(key)
        else:
            info, scope[SESSION] = self._logins.identify(scope) or (None, None)
        if info is None:
            return wrong_key_error(_NO_KEY, self._logins.wrong_keys.note(source_of(scope)) if is_given else 0.0)
        scope[KEY] = info
        return None


def given_key(scope: Scope) -> bytes | None:
    """Return the key in `Authorization: Bearer`, or else in `x-api-key`; None if the header is absent or repeated."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if not values:
        plain = [value for name, value in scope["headers"] if name == b"x-api-key"]
        return plain[0].strip() if len(plain) == 1 else None
    scheme, _, key = values[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" and len(values) == 1 else None


def _refusal(scope: Scope, error: ApiError) -> Response:
    """Return the error as JSON, or the login form for a 401 when a browser requests one of PAGES."""
    page = PAGES.get(scope["path"])
    accept = ", ".join(Headers(scope=scope).getlist("accept"))
    if error.status != 401 or page is None or scope["method"] not in ("GET", "HEAD") or not wants_html(accept):
        return error.response()
    return login_form(401, "", page, error.headers())


def _is_same_origin(origin: str, headers: Headers, scope: Scope) -> bool:
    """Return True for this server's own origin, which has the (checked) Host. A proxy may terminate TLS."""
    scheme, _, host = origin.partition("://")
    schemes = ("https",) if scope["scheme"] == "https" else ("http", "https")
    return scheme in schemes and host.lower() == headers.get("host", "").lower()


def _normal(name: str) -> str:
    """Return a name or address in normal form, for comparisons."""
    plain = name.lower().removesuffix(".")
    address = _address(plain)
    return plain if address is None else str(address)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
