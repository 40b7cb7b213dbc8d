"""The login sessions of browsers, and wrong keys.

Owns: sessions (a random id in a cookie represents a key), their bounds and ends; which requests may use a cookie; the
answers to wrong keys and their count per address.
Does not: check a request (AuthMiddleware does), or store a key (a session stores its digest, which the ring looks up
each time).
Invariants: the session of a removed key is invalid. A cookie is ignored in a request that
another site's page may have sent. Every table is bounded. Sessions and counts end with the process.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from octavo.dashboard.page import HEADERS, login_page
from octavo.server.http.errors import ApiError
from octavo.server.http.keys import KeyInfo, KeyRing
from octavo.server.http.limits import largest_user

# In a request's scope:
KEY = "octavo.key"  # the KeyInfo of the request
SESSION = "octavo.session"  # the id of the session that authenticated the request, if any
PAGES = {"/": "", "/dashboard": "dashboard", "/docs": "docs"}  # pages that show a browser the login form
MAX_SESSIONS = 1024  # of all keys; above this, the key with most sessions loses its longest unused one
MAX_SESSIONS_PER_KEY = 64
MAX_IDLE_S = 12 * 3600.0
MAX_SESSION_S = 7 * 24 * 3600.0
MAX_WRONG_KEYS = 10  # of one address within WRONG_KEYS_S; further ones get 429 instead of 401
WRONG_KEYS_S = 60.0
MAX_WRONG_KEY_ADDRESSES = 4096
COOKIE = "octavo-session"
_MAX_COOKIES = 8  # only this many cookies with our name are checked: other ports of this host share them
_SAFE = ("GET", "HEAD")


@dataclass(slots=True)
class _Session:
    key_digest: bytes
    began: float
    used: float


class WrongKeys:
    """Counts of wrong keys by address, in /login and in headers. `now` is a monotonic clock.

    Only wrong keys are refused with 429. A valid key never is, since all clients of a proxy share one address.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._times: OrderedDict[str, deque[float]] = OrderedDict()  # by network, least recently used first

    def note(self, address: str) -> float:
        """Count a wrong key; return the address's wait in seconds: 0 for the first MAX_WRONG_KEYS in a minute."""
        network, now = _network(address), self._now()
        times = self._times.pop(network, None) or deque(maxlen=MAX_WRONG_KEYS)
        wait_s = times[0] + WRONG_KEYS_S - now if len(times) == MAX_WRONG_KEYS else 0.0
        times.append(now)
        self._times[network] = times
        if len(self._times) > MAX_WRONG_KEY_ADDRESSES:
            self._times.popitem(last=False)
        return max(0.0, wait_s)


class Logins:
    """The login sessions of one server, and its WrongKeys. `now` is a monotonic clock."""

    def __init__(self, keys: KeyRing, now: Callable[[], float] = time.monotonic) -> None:
        self.wrong_keys = WrongKeys(now)
        self._keys = keys
        self._now = now
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()  # by the SHA-256 of the id, longest unused first

    def log_in(self, key: bytes) -> str | None:
        """Start a session and return its id; None if the key is invalid."""
        info = self._keys.find(key)
        if info is None:
            return None
        if self._count()[info.digest] >= MAX_SESSIONS_PER_KEY:
            self._end_oldest(info.digest)
        session_id, now = secrets.token_urlsafe(32), self._now()
        self._sessions[_name(session_id)] = _Session(info.digest, now, now)
        if len(self._sessions) > MAX_SESSIONS:
            self._end_oldest(largest_user(self._count()))
        return session_id

    def _count(self) -> Counter[bytes]:
        return Counter(session.key_digest for session in self._sessions.values())

    def _end_oldest(self, digest: bytes) -> None:
        del self._sessions[next(name for name, session in self._sessions.items() if session.key_digest == digest)]

    def log_out(self, session_id: str) -> None:
        """End a session. An unknown id is ignored."""
        self._sessions.pop(_name(session_id), None)

    def find(self, session_id: str) -> KeyInfo | None:
        """Return the KeyInfo of a session's key; None if the session is unknown or expired, or its key was removed."""
        name, now = _name(session_id), self._now()
        session = self._sessions.get(name)
        if session is None:
            return None
        info = self._keys.find_by_digest(session.key_digest)
        if info is None or now - session.used > MAX_IDLE_S or now - session.began > MAX_SESSION_S:
            del self._sessions[name]
            return None
        session.used = now
        self._sessions.move_to_end(name)
        return info

    def identify(self, scope: Scope) -> tuple[KeyInfo, str] | None:
        """Return the key and the session id of a request's cookie; None without a valid session."""
        headers = Headers(scope=scope)
        cookies = session_cookies(headers)
        if not cookies or not is_own_page(headers, scope["method"]):
            return None
        for session_id in cookies:
            info = self.find(session_id)
            if info is not None:
                return info, session_id
        return None


def tenant_of(request: Request) -> str:
    """Return the tenant of a request's key."""
    holder: KeyInfo = request.scope[KEY]
    return holder.tenant


def session_cookies(headers: Headers) -> list[str]:
    """Return the cookie values that may be session ids of this server."""
    pairs = (pair.strip().partition("=") for value in headers.getlist("cookie") for pair in value.split(";"))
    return [value for name, _, value in pairs if name.removeprefix("__Host-").startswith(COOKIE)][:_MAX_COOKIES]


def is_own_page(headers: Headers, method: str) -> bool:
    """Return True if the request comes from a page of this server, or from an address that a user typed.

    Browsers send Sec-Fetch-Site (Fetch Metadata) over https and to this machine. Otherwise they send Origin, but not
    with GET. In addition, browsers do not send a SameSite=Strict cookie with other sites' requests.
    """
    site = headers.getlist("sec-fetch-site")
    if site:
        return site == ["same-origin"] or (site == ["none"] and method in _SAFE)
    origins = headers.getlist("origin")
    if not origins:
        return method in _SAFE
    return len(origins) == 1 and urlsplit(origins[0]).netloc == headers.get("host", "")


def cookie_name(headers: Headers, is_secure: bool) -> str:
    """Return the cookie's name. It contains the port, because browsers share cookies among a host's ports."""
    port = headers.get("host", "").rpartition(":")[2]
    name = f"{COOKIE}-{port}" if port.isdecimal() and len(port) <= 5 else COOKIE
    return f"__Host-{name}" if is_secure else name


def _name(session_id: str) -> bytes:
    return hashlib.sha256(session_id.encode("utf-8", "surrogatepass")).digest()


def _network(address: str) -> str:
    """Return the network that stands for a client: its IPv4 address, or the /64 of its IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    return str(ipaddress.ip_network((parsed, 64), strict=False)) if parsed.version == 6 else str(parsed)


def source_of(scope: Scope) -> str:
    """Return the address for counting wrong keys: the connection's address, never one from a header."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def wants_html(accept: str) -> bool:
    """Return True if the client is a browser that shows a page. API clients do not name text/html in Accept."""
    return "text/html" in accept.lower()


def login_form(status: int, message: str, next_page: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the page that asks for a key and opens `next_page` after the login."""
    page, policy = login_page(message, next_page)
    sent = {**HEADERS, "content-security-policy": policy, "cache-control": "no-store", **(headers or {})}
    return Response(page, status, sent, media_type="text/html")


def wrong_key_error(message: str, wait_s: float) -> ApiError:
    """Return a 401, or a 429 if the address must wait: `wait_s` is from WrongKeys."""
    if wait_s <= 0:
        return ApiError(401, message, code="invalid_api_key")
    text = f"{message}; there were too many wrong keys from this address, so try again later"
    return ApiError(429, text, code="too_many_wrong_keys", retry_after_s=math.ceil(wait_s), is_final=True)
