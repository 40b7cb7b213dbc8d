"""Limits: the bounds of one HTTP request, a tenant's share of a common bound, and a key's rates.

Owns: HttpLimits; Shares; a key's token buckets, its open requests and its use so far.
Does not: read a clock (`now` is an argument: seconds on one monotonic clock), count what a store holds, or refuse
requests for any reason but the key's own rates.
Shares: half of a bound is divided evenly among the tenants with keys, and reserved for each of them; all tenants share
the other half. Entries that can be dropped (answers, responses, sessions, explanations) need no refusal: the tenant
with most, including the new entry, loses its oldest. A tenant within an even share never loses one to another tenant.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from octavo.errors import RateLimitError
from octavo.server.http.keys import KeyInfo, KeyRing


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Bounds of one JSON body. `max_parts` counts strings, objects and lists, `max_values` numbers and constants."""

    max_depth: int = 64
    max_parts: int = 65_536
    max_values: int = 1 << 20


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one request, of one connection, and of all connections.

    If keys are set, a body without a valid key must arrive within `unauthenticated_body_timeout_s`; at most
    `max_unauthenticated_bodies` such bodies may be unfinished.
    More than `max_header_bytes` of headers get a 431; a head over `max_head_bytes` cuts the connection. The application
    answers a slow body after `body_timeout_s`. If it does not read a body, the connection is cut `body_grace_s` later.
    `max_upload_bytes` bounds a file (--max-upload-bytes with --batch-dir, else 0). After `upload_grace_s`, an upload
    must average `min_upload_bytes_per_s`.
    A client that does not read its stream is cut after `stall_timeout_s`, or when `max_unread_bytes` are unread.
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
    unauthenticated_body_timeout_s: float = 2.0
    max_unauthenticated_bodies: int = 16
    stall_timeout_s: float = 30.0
    max_unread_bytes: int = 128 * 1024
    keep_alive_s: float = 10.0


K = TypeVar("K")


def largest_user(used: Mapping[K, int], among: Collection[K] | None = None) -> K:
    """Return the tenant (or key) with the largest use, of all or of those in `among`."""
    return max(used if among is None else among, key=lambda each: used.get(each, 0))


class Shares:
    """The division of bounds among the tenants of one key ring."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def free(self, tenant: str, used: Mapping[str, int], bound: int) -> int:
        """Return how much more of `bound` a tenant may use. `used` is each tenant's current use.

        Without keys, or with keys of one tenant only, nothing is reserved.
        """
        others = self._keys.tenants - {tenant}
        own = bound // (2 * (len(others) + 1))
        kept_free = sum(max(0, own - used.get(other, 0)) for other in others)
        # The last term counts if others exceed their share, such as batch answers or tenants of removed keys.
        return max(0, bound - sum(used.values()) - kept_free, own - used.get(tenant, 0))


_DECIMALS = 9  # times are rounded, so that rounding errors do not become waits


class Bucket:
    """A token bucket that holds one minute's amount and refills evenly. Use that is counted late may overdraw it."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """Return the amount in the bucket; negative if overdrawn."""
        if now > self._at:
            self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket holds `amount`, or is full if `amount` exceeds its size; 0 means now."""
        short = min(amount, self.per_minute) - self.level(now)
        return round(max(0.0, short * 60 / self.per_minute), _DECIMALS)

    def take(self, amount: float, now: float) -> None:
        """Take an amount. The level may fall below 0."""
        self._level = self.level(now) - amount

    def resize(self, per_minute: int, now: float) -> None:
        """Change the bucket's size. The amount used stays the same."""
        used = self.per_minute - self.level(now)
        self.per_minute = per_minute
        self._level = min(float(per_minute), per_minute - used)


class Meter:
    """The use of one key. `num_tokens` and `num_requests` count since the server's start."""

    __slots__ = ("info", "num_open", "num_refused", "num_requests", "num_tokens", "requests", "tokens")

    def __init__(self, info: KeyInfo, now: float) -> None:
        self.info = info
        self.requests = None if info.requests_per_minute is None else Bucket(info.requests_per_minute, now)
        self.tokens = None if info.tokens_per_minute is None else Bucket(info.tokens_per_minute, now)
        self.num_open = 0
        self.num_requests = 0
        self.num_tokens = 0
        self.num_refused = 0

    def update(self, info: KeyInfo, now: float) -> None:
        """Set the key's new limits. The amounts used stay the same."""
        self.info = info
        self.requests = _resized(self.requests, info.requests_per_minute, now)
        self.tokens = _resized(self.tokens, info.tokens_per_minute, now)

    def check_tokens(self, now: float, num_tokens: float) -> None:
        """Raise RateLimitError if the key's bucket holds fewer than `num_tokens` tokens."""
        if self.tokens is not None and (wait_s := self.tokens.wait_s(num_tokens, now)):
            raise self._refusal(f"it may use {self.tokens.per_minute} tokens a minute", wait_s)

    def begin(self, now: float) -> None:
        """Count a request. Raises RateLimitError if a rate of the key is used up."""
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now)):
            raise self._refusal(f"it may make {self.requests.per_minute} requests a minute", wait_s)
        self.check_tokens(now, 1)
        if self.requests is not None:
            self.requests.take(1, now)
        self.num_requests += 1

    def use_tokens(self, num_tokens: int, now: float) -> None:
        """Count prompt tokens or generated tokens."""
        self.num_tokens += num_tokens
        if self.tokens is not None:
            self.tokens.take(num_tokens, now)

    def headers(self, now: float) -> Iterator[tuple[bytes, bytes]]:
        """Yield OpenAI's x-ratelimit headers for the rates that the key has."""
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                level = bucket.level(now)
                full_in_s = (bucket.per_minute - level) * 60 / bucket.per_minute
                yield f"x-ratelimit-limit-{name}".encode(), str(bucket.per_minute).encode()
                yield f"x-ratelimit-remaining-{name}".encode(), str(max(0, math.floor(level))).encode()
                yield f"x-ratelimit-reset-{name}".encode(), f"{full_in_s:.3f}s".encode()

    def _refusal(self, reason: str, wait_s: float) -> RateLimitError:
        self.num_refused += 1
        message = f"key {self.info.name!r} is at its limit: {reason}; try again in {wait_s:.3g} s"
        return RateLimitError(message, retry_after_s=wait_s)


def _resized(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket
