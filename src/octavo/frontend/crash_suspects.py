"""CrashSuspects: finds the request that kills engines.

A request that was in the batch at a crash is resumed; after a second crash without a token it is resumed alone; after a
third it is failed.

Owns: the crash counts, and which requests may be sent to the engine now. Does not: know engines, requests or time.
Invariants: a committed token sets a request's count back to 0; while the one that runs alone has neither a token nor an
end, no other is sent; the others are sent after the suspects, oldest first.
"""

from __future__ import annotations

from collections.abc import Iterable

ALONE = 2  # crashes without a token, after which a request runs alone
MAX_CRASHES = 3


class CrashSuspects:
    """Counts crashes per request, and holds requests that may not be sent yet."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._suspects: dict[str, None] = {}  # still to run alone, oldest first
        self._rest: dict[str, None] = {}  # held meanwhile, oldest first
        self._alone: str | None = None

    @property
    def is_holding(self) -> bool:
        """Whether requests are held until one that runs alone is cleared or failed."""
        return self._alone is not None or bool(self._suspects or self._rest)

    @property
    def alone(self) -> str | None:
        """The request that runs alone."""
        return self._alone

    def count(self, request_id: str) -> int:
        """Return the crashes with this request in the batch since its last token."""
        return self._counts.get(request_id, 0)

    def crashed(self, request_ids: Iterable[str]) -> list[str]:
        """Count an engine's death with these in its batch, none with a token of it; return those to fail."""
        failed = []
        for name in dict.fromkeys(request_ids):
            self._counts[name] = self._counts.get(name, 0) + 1
            if self._counts[name] >= MAX_CRASHES:
                failed.append(name)
        return failed

    def begin_epoch(self, open_ids: Iterable[str]) -> None:
        """Hold all open requests, oldest first, for a new engine."""
        names = list(open_ids)
        self._alone = None
        self._suspects = {name: None for name in names if self.count(name) >= ALONE}
        self._rest = {name: None for name in names if name not in self._suspects}
        self._counts = {name: self._counts[name] for name in names if name in self._counts}

    def release(self) -> list[str]:
        """Return the requests to send now; ask again after clear()."""
        if self._alone is not None:
            return []
        if self._suspects:
            self._alone = next(iter(self._suspects))
            del self._suspects[self._alone]
            return [self._alone]
        released, self._rest = list(self._rest), {}
        return released

    def hold(self, request_id: str) -> bool:
        """Hold a new request with the rest; False where none is held, so that it is sent at once."""
        if self.is_holding:
            self._rest[request_id] = None
        return self.is_holding

    def is_held(self, request_id: str) -> bool:
        """Return True if a request was not sent yet."""
        return request_id in self._rest or request_id in self._suspects

    def clear(self, request_id: str) -> None:
        """A request got a token, or its end."""
        self._counts.pop(request_id, None)
        self._suspects.pop(request_id, None)
        self._rest.pop(request_id, None)
        if self._alone == request_id:
            self._alone = None
