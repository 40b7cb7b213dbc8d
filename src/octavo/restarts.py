"""Decide whether and when to restart a process that ended.

Owns: the count of useless processes, and the wait before the next start. Does not: start processes, wait, read a clock
or draw random numbers: `now` (seconds, monotonic) and `draw` (0 to 1) are arguments.
Invariant: a process that was useful costs nothing. The budget is spent once more than `max_useless` useless processes
have ended within `within_s` seconds.
"""

from __future__ import annotations

import signal
from collections import deque


class RestartBudget:
    """Counts useless processes. The wait is at most `first_s` after the first, and doubles up to `longest_s`."""

    def __init__(
        self, max_useless: int = 5, within_s: float = 60.0, *, first_s: float = 0.2, longest_s: float = 10.0
    ) -> None:
        self.max_useless = max_useless
        self.within_s = within_s
        self._first_s = first_s
        self._longest_s = longest_s
        self._useless: deque[float] = deque()

    def ended(self, now: float, draw: float, *, was_useful: bool) -> float | None:
        """Record the end of a process; return the seconds to wait before the next, None if the budget is spent.

        The wait is drawn from the upper half of its range, so that processes that ended together do not restart
        together.
        """
        if was_useful:
            return 0.0
        self._useless.append(now)
        count = self.num_useless(now)
        if count > self.max_useless:
            return None
        longest = min(self._first_s * 2.0 ** (count - 1), self._longest_s)
        return longest * (0.5 + 0.5 * draw)

    def num_useless(self, now: float) -> int:
        """Return the number of useless processes that ended within the last `within_s` seconds."""
        while self._useless and self._useless[0] <= now - self.within_s:
            self._useless.popleft()
        return len(self._useless)


def describe_status(status: int) -> str:
    """Return an exit status in words; a negative one is a signal's."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
