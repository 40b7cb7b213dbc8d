"""A Clock that tests turn by hand."""

from __future__ import annotations

import threading

from octavo.engine.loop import Clock


class ManualClock(Clock):
    """A clock that stands still until advance() is called."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()
        self._waiting: list[threading.Condition] = []

    def now(self) -> float:
        """The time as last set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time on and wake every waiter, so that it looks at the clock again."""
        with self._lock:
            self._now += seconds
            waiting = list(self._waiting)
        for condition in waiting:
            with condition:
                condition.notify_all()

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        """Wait on `condition` until notified; advance() notifies.

        Registering precedes the look at the time, and advance() needs `condition` to notify, so a turn
        of the clock is either seen here or wakes the wait.
        """
        with self._lock:
            self._waiting.append(condition)
        try:
            if until is None or until > self._now:
                condition.wait()
        finally:
            with self._lock:
                self._waiting.remove(condition)
