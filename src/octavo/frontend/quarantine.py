"""Quarantine: finds the request that kills engines. Who was in the batch at a crash comes back, then comes back alone,
then does not come back.

Owns: the crash counts, and who may go to the new engine now. Does not: know engines, ledgers or time.
Invariants: a committed token sets a request's count back to 0; while one on trial has neither a token nor an end,
nobody who has not been sent yet is sent; whoever is not convicted is sent, oldest first, behind those on trial.
"""

from __future__ import annotations

from collections.abc import Iterable

ALONE = 2  # crashes without a token, after which a request comes back alone
CONVICTED = 3


class Quarantine:
    """Counts crashes per request, and holds back those that are not to be sent yet."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._suspects: dict[str, None] = {}  # still to be tried, oldest first
        self._rest: dict[str, None] = {}  # held meanwhile, oldest first
        self._on_trial: str | None = None

    @property
    def is_holding(self) -> bool:
        """Whether anybody waits for the end of a trial."""
        return self._on_trial is not None or bool(self._suspects or self._rest)

    @property
    def on_trial(self) -> str | None:
        """Who runs alone."""
        return self._on_trial

    def count(self, request_id: str) -> int:
        """Crashes with this request in the batch since its last token."""
        return self._counts.get(request_id, 0)

    def crashed(self, stuck: Iterable[str]) -> list[str]:
        """An engine died with these in its batch that had no token since the crash before; return the convicted."""
        convicted = []
        for name in dict.fromkeys(stuck):
            self._counts[name] = self._counts.get(name, 0) + 1
            if self._counts[name] >= CONVICTED:
                convicted.append(name)
        return convicted

    def line_up(self, open_ids: Iterable[str]) -> None:
        """A new engine is there for these, oldest first; whoever was held before is among them."""
        names = list(open_ids)
        self._on_trial = None
        self._suspects = {name: None for name in names if self.count(name) >= ALONE}
        self._rest = {name: None for name in names if name not in self._suspects}
        self._counts = {name: self._counts[name] for name in names if name in self._counts}

    def release(self) -> list[str]:
        """Who goes to the engine now; ask again after settled()."""
        if self._on_trial is not None:
            return []
        if self._suspects:
            self._on_trial = next(iter(self._suspects))
            del self._suspects[self._on_trial]
            return [self._on_trial]
        released, self._rest = list(self._rest), {}
        return released

    def may_go(self, request_id: str) -> bool:
        """Whether a new request goes at once; else it is held with the rest."""
        if not self.is_holding:
            return True
        self._rest[request_id] = None
        return False

    def is_held(self, request_id: str) -> bool:
        """Whether it was not sent yet."""
        return request_id in self._rest or request_id in self._suspects

    def settled(self, request_id: str) -> None:
        """A request got a token, or its end."""
        self._counts.pop(request_id, None)
        self._suspects.pop(request_id, None)
        self._rest.pop(request_id, None)
        if self._on_trial == request_id:
            self._on_trial = None
