"""Time for the step loop: a clock that gives `now` and can wait.

Owns: Clock and the real clock. Does not: know wall time; every time in the engine is seconds on one monotonic clock.
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
