"""Time for the step loop: a clock that tells `now` and knows how to wait.

Owns: Clock, the real clock and a clock that tests turn by hand.
Does not: know wall time; every time in the engine is seconds on one monotonic clock.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a monotonic clock, and a wait that ends at a time or at a notification."""

    def now(self) -> float:
        """Seconds; never goes back."""
        ...

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        """Wait on `condition` (held by the caller) until notified or until the time; None = no time."""
        ...


class MonotonicClock:
    """The machine's monotonic clock; on Linux and macOS it is the same in every process."""

    def now(self) -> float:
        """Seconds since some fixed point of this machine."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        """Wait on `condition` until notified or until the time."""
        condition.wait(None if until is None else max(0.0, until - time.monotonic()))


class ManualClock:
    """A clock that stands still until someone calls advance(): for tests and simulations."""

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
