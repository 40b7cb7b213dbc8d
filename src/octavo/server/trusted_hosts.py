"""The Hosts and sites that a server without keys answers: this machine's and the listed ones.

Owns: the decision by Host, Origin and Sec-Fetch-Site, and the 403. Does not: add CORS headers (cors does), check keys
(auth does), or read X-Forwarded-Host and similar headers, which any client may send.
Invariants: decided on the raw request before routing, for every path; only the bare status of the probes is open.
With keys these checks are not needed: other sites' pages have no key, and cookies are checked (logins). Then only the
Host is checked, and only if --allowed-hosts is given.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.auth import KEY
from octavo.server.faults import ApiError
from octavo.server.http.endpoints import Endpoints
from octavo.server.keys import KeyInfo, KeyRing

if TYPE_CHECKING:
    from octavo.config import Config

UNTRUSTED = "octavo.untrusted"  # in the scope of a probe that gets the bare status only
MAX_SHOWN = 64  # characters of a client's header that a message repeats
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{0,5})?")
_MAX_HOST = 262  # characters of the longest name, its dot and a port
_MAX_CACHED = 256
_SAFE = ("GET", "HEAD")


class TrustedHosts:
    """The names and origins of one server. This machine's address is taken from the connection."""

    def __init__(self, config: Config) -> None:
        serving, web = config.serving, config.web
        names = ("localhost", serving.host, socket.gethostname(), *web.allowed_hosts)
        self._names = frozenset(map(_normal, names)) - {""}
        self._is_any_host = "*" in web.allowed_hosts
        self._origins = frozenset(web.allowed_origins)
        self.has_listed = bool(web.allowed_hosts)
        self._is_own = lru_cache(_MAX_CACHED)(self._is_own_host)  # clients send the same few

    def host_refusal(self, scope: Scope) -> ApiError | None:
        """Return the refusal of a Host that is missing, repeated, or neither this machine nor listed; else None."""
        hosts = Headers(scope=scope).getlist("host")
        if self._is_any_host:
            return None
        local = str(scope["server"][0]) if scope.get("server") else ""
        if len(hosts) == 1 and len(hosts[0]) <= _MAX_HOST and self._is_own(hosts[0], local):
            return None
        message = (
            f"Host is {' and '.join(hosts)[:MAX_SHOWN]!r}, which is neither an address of this machine nor listed; "
            "add the name to --allowed-hosts, or serve with a key (OCTAVO_API_KEY)"
        )
        return ApiError(403, message, code="host_not_allowed")

    def site_refusal(self, scope: Scope) -> ApiError | None:
        """Return the refusal of a browser's request from another site's page or link; else None."""
        headers = Headers(scope=scope)
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
            f"Sec-Fetch-Site is {' and '.join(sites)[:MAX_SHOWN]!r}: a page of another site asks, or a link there; "
            "type this server's address into the browser; a page that fetches needs its origin in --allowed-origins"
        )
        return ApiError(403, message, code="cross_site")

    def _is_own_host(self, host: str, local: str) -> bool:
        """Return True for a Host that means this machine. `local`: the address that the client connected to."""
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = _normal(found[1].strip("[]"))
        address = _address(name)
        if address is None:
            return name in self._names
        return address.is_loopback or name in self._names or address == _address(local.partition("%")[0])


class TrustedHostMiddleware:
    """A middleware inside the shell and CORS, before preflights and keys."""

    def __init__(
        self, app: ASGIApp, endpoints: Endpoints, config: Config, keys: KeyRing, note: Callable[[str], None]
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._trusted = TrustedHosts(config)
        self._keys = keys
        self._note = note  # counts a refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        if scope["type"] != "http" or isinstance(scope.get(KEY), KeyInfo):  # a call from inside has no Host
            await self._app(scope, receive, send)
            return
        refusal = None
        if not self._keys.keys:
            refusal = self._trusted.host_refusal(scope) or self._trusted.site_refusal(scope)
        elif self._trusted.has_listed:
            refusal = self._trusted.host_refusal(scope)
        if refusal is not None and self._is_probe(scope):
            scope[UNTRUSTED] = True
            refusal = None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            self._note(refusal.code)
            await refusal.response()(scope, receive, send)

    def _is_probe(self, scope: Scope) -> bool:
        return scope["path"] != "/login" and self._endpoints.open_access(scope) is not None


def _is_same_origin(origin: str, headers: Headers, scope: Scope) -> bool:
    """Return True for this server's own origin: the Host, which was checked. A proxy may terminate TLS."""
    scheme, _, host = origin.partition("://")
    schemes = ("https",) if scope["scheme"] == "https" else ("http", "https")
    return scheme in schemes and host.lower() == headers.get("host", "").lower()


def _normal(name: str) -> str:
    """Return a name or address in its normal form, for comparisons."""
    plain = name.lower().removesuffix(".")
    address = _address(plain)
    return plain if address is None else str(address)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
