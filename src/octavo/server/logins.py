"""Logins: sessions of browsers, which cannot send a key in a header with every page.

Owns: sessions (a random id in a cookie represents a key), their bounds and ends, the check of a cookie's request, and
the number of wrong keys of each address.
Does not: hold a key (only its digest, which the ring looks up each time), or outlive the process.
Invariants: a session of a removed key is invalid; a cookie is ignored in a request that another site's page may have
made; every table is bounded.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from octavo.server.keys import KeyInfo, KeyRing
from octavo.server.shares import keeps_most

MAX_SESSIONS = 1024  # of all keys: beyond it the key with most of them loses the one unused for longest
MAX_SESSIONS_PER_KEY = 64
MAX_IDLE_S = 12 * 3600.0
MAX_SESSION_S = 7 * 24 * 3600.0
MAX_WRONG_KEYS = 10  # of one address within WRONG_KEYS_S that are answered 401
WRONG_KEYS_S = 60.0
MAX_WRONG_KEY_ADDRESSES = 4096
COOKIE = "octavo-session"
_MAX_COOKIES = 8  # with our name that are checked: servers on other ports of this host have cookies too
_SAFE = ("GET", "HEAD")


@dataclass(slots=True)
class _Session:
    key_digest: bytes
    began: float
    used: float


class WrongKeys:
    """Wrong keys by address, of /login and of headers. `now` is a monotonic clock.

    Only wrong keys are delayed: a valid one is never refused, since a proxy's clients share its address.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._times: OrderedDict[str, deque[float]] = OrderedDict()  # by network, least recent first

    def note(self, address: str) -> float:
        """Count one; return the seconds that the address must wait, 0 for its first MAX_WRONG_KEYS in a minute."""
        network, now = _network(address), self._now()
        times = self._times.pop(network, None) or deque(maxlen=MAX_WRONG_KEYS)
        wait_s = times[0] + WRONG_KEYS_S - now if len(times) == MAX_WRONG_KEYS else 0.0
        times.append(now)
        self._times[network] = times
        if len(self._times) > MAX_WRONG_KEY_ADDRESSES:
            self._times.popitem(last=False)
        return max(0.0, wait_s)


class Logins:
    """Sessions of one server, and its wrong keys. `now` is a monotonic clock."""

    def __init__(self, keys: KeyRing, now: Callable[[], float] = time.monotonic) -> None:
        self.wrong_keys = WrongKeys(now)
        self._keys = keys
        self._now = now
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()  # by the SHA-256 of the id; longest unused first

    @property
    def num_sessions(self) -> int:
        """The number of sessions, including expired ones that were not looked up since."""
        return len(self._sessions)

    def log_in(self, key: bytes) -> str | None:
        """Start a session and return its id; None for an invalid key."""
        holder = self._keys.find(key)
        if holder is None:
            return None
        if self._count()[holder.digest] >= MAX_SESSIONS_PER_KEY:
            self._end_oldest(holder.digest)
        session_id, now = secrets.token_urlsafe(32), self._now()
        self._sessions[_name(session_id)] = _Session(holder.digest, now, now)
        if len(self._sessions) > MAX_SESSIONS:
            self._end_oldest(keeps_most(self._count()))
        return session_id

    def _count(self) -> Counter[bytes]:
        return Counter(session.key_digest for session in self._sessions.values())

    def _end_oldest(self, digest: bytes) -> None:
        del self._sessions[next(name for name, session in self._sessions.items() if session.key_digest == digest)]

    def log_out(self, session_id: str) -> None:
        """End a session. Unknown ones are ignored."""
        self._sessions.pop(_name(session_id), None)

    def find(self, session_id: str) -> KeyInfo | None:
        """Return the KeyInfo of a session's key; None if the session has expired or the key was removed."""
        name, now = _name(session_id), self._now()
        session = self._sessions.get(name)
        if session is None:
            return None
        holder = self._keys.holder_of(session.key_digest)
        if holder is None or now - session.used > MAX_IDLE_S or now - session.began > MAX_SESSION_S:
            del self._sessions[name]
            return None
        session.used = now
        self._sessions.move_to_end(name)
        return holder

    def holder(self, scope: Scope) -> tuple[KeyInfo, str] | None:
        """Return the key and the session id of a request's cookie; None without a valid one."""
        headers = Headers(scope=scope)
        cookies = session_cookies(headers)
        if not cookies or not is_own_page(headers, scope["method"]):
            return None
        for session_id in cookies:
            found = self.find(session_id)
            if found is not None:
                return found, session_id
        return None


def session_cookies(headers: Headers) -> list[str]:
    """Return the ids in a request's cookies that may be sessions of this server."""
    pairs = (pair.strip().partition("=") for value in headers.getlist("cookie") for pair in value.split(";"))
    return [value for name, _, value in pairs if name.removeprefix("__Host-").startswith(COOKIE)][:_MAX_COOKIES]


def is_own_page(headers: Headers, method: str) -> bool:
    """Return True if the request comes from a page of this server, or from an address that a user typed.

    Browsers send Sec-Fetch-Site (Fetch Metadata) over https and to this machine; else Origin, with all requests but
    GET. A cookie with SameSite=Strict is not sent with other sites' requests in the first place.
    """
    site = headers.getlist("sec-fetch-site")
    if site:
        return site == ["same-origin"] or (site == ["none"] and method in _SAFE)
    origins = headers.getlist("origin")
    if not origins:
        return method in _SAFE
    return len(origins) == 1 and urlsplit(origins[0]).netloc == headers.get("host", "")


def cookie_name(headers: Headers, is_secure: bool) -> str:
    """Return the cookie's name, which has the port: browsers share cookies among a host's ports."""
    port = headers.get("host", "").rpartition(":")[2]
    name = f"{COOKIE}-{port}" if port.isdecimal() and len(port) <= 5 else COOKIE
    return f"__Host-{name}" if is_secure else name


def _name(session_id: str) -> bytes:
    return hashlib.sha256(session_id.encode("utf-8", "surrogatepass")).digest()


def _network(address: str) -> str:
    """Return the network by which a client is counted: its IPv4 address, or the /64 of its IPv6 address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else str(found)
