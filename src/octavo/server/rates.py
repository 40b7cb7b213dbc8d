"""Token buckets: the limits of one key per minute, and the wait until it may use more.

Owns: the buckets of a key, its count of open requests, its use so far.
Does not: read a clock (`now` is an argument, seconds on one monotonic clock), or decide for more than one key.
Invariant: a bucket never holds more than a minute's worth and refills at its rate, so that a wait is exact unless other
requests use the bucket meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from octavo.errors import RateLimitError
from octavo.server.keys import KeyInfo

_DECIMALS = 9  # rounding of times: rounding errors must not become a wait


class Bucket:
    """A token bucket of a minute's worth that refills evenly. It may be overdrawn by use that is known only later."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """Return the amount in the bucket; below 0 if overdrawn."""
        if now > self._at:
            self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until it holds `amount`, or is full if `amount` is more than it can hold; 0 = now."""
        short = min(amount, self.per_minute) - self.level(now)
        return round(max(0.0, short * 60 / self.per_minute), _DECIMALS)

    def take(self, amount: float, now: float) -> None:
        """Take an amount; the level may fall below 0."""
        self._level = self.level(now) - amount

    def resize(self, per_minute: int, now: float) -> None:
        """Change the limit; keep the amount used."""
        used = self.per_minute - self.level(now)
        self.per_minute = per_minute
        self._level = min(float(per_minute), per_minute - used)


class Meter:
    """The use of one key. `num_tokens` and `num_requests` count since the start."""

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
        """Set new limits of the same key; keep the amounts used."""
        self.info = info
        self.requests = _resized(self.requests, info.requests_per_minute, now)
        self.tokens = _resized(self.tokens, info.tokens_per_minute, now)

    def check_tokens(self, now: float, num_tokens: float) -> None:
        """Raise RateLimitError if the key's bucket has fewer than `num_tokens` tokens."""
        if self.tokens is not None and (wait_s := self.tokens.wait_s(num_tokens, now)):
            raise self._refusal(f"it may use {self.tokens.per_minute} tokens a minute", wait_s)

    def begin(self, now: float) -> None:
        """Count a request. Raises RateLimitError if a limit is used up."""
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now)):
            raise self._refusal(f"it may make {self.requests.per_minute} requests a minute", wait_s)
        self.check_tokens(now, 1)
        if self.requests is not None:
            self.requests.take(1, now)
        self.num_requests += 1

    def use_tokens(self, num_tokens: int, now: float) -> None:
        """Count tokens, of a prompt or generated."""
        self.num_tokens += num_tokens
        if self.tokens is not None:
            self.tokens.take(num_tokens, now)

    def headers(self, now: float) -> Iterator[tuple[bytes, bytes]]:
        """Yield OpenAI's x-ratelimit headers, for the limits that are set."""
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
