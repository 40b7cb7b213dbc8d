"""Watchdog: finds out from the heartbeat whether an engine stalls.

Owns: the times without a new beat. Does not: read the page, kill an engine, or read a clock.
Invariants: an engine is reported as stalled only if its deadline has passed, or if it left a call unanswered for
ANSWER_S without a new beat. Time in which this process did not look does not count: after a late look the engine gets
the full time again.
"""

from __future__ import annotations

from octavo.engine.heartbeat import Beat

LATE_S = 0.5  # two looks further apart than this mean that this process, or the machine, was stopped
CONFIRM_S = 0.3  # an overdue beat must stay the newest for this long
ANSWER_S = 5.0  # how long an idle engine may leave a call unanswered


class Watchdog:
    """Finds out whether one engine stalls. Times are seconds on the monotonic clock."""

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._number = -1  # number of the last beat seen
        self._moved_at = now
        self._overdue_since: float | None = None

    def look(self, now: float, beat: Beat | None, oldest_call_at: float | None) -> str | None:
        """Return a description of the stall, or None. `oldest_call_at` is when the oldest unanswered call was sent."""
        late = now - self._looked_at
        self._looked_at = now
        number = 0 if beat is None else beat.number
        if number != self._number or late > LATE_S:
            self._number, self._moved_at, self._overdue_since = number, now, None
            return None
        if beat is not None and beat.deadline is not None:
            return self._judge_deadline(now, beat, beat.deadline)
        since = self._moved_at if oldest_call_at is None else max(oldest_call_at, self._moved_at)
        if oldest_call_at is not None and now - since > ANSWER_S:
            return f"a call has been without an answer for {now - oldest_call_at:.1f} s"
        return None

    def _judge_deadline(self, now: float, beat: Beat, deadline: float) -> str | None:
        if now <= deadline:
            return None
        if self._overdue_since is None:
            self._overdue_since = now
        if now - self._overdue_since < CONFIRM_S:
            return None
        return (
            f"{beat.phase.name.lower()} {beat.step}: nothing has moved for {now - self._moved_at:.1f} s, the limit was "
            f"{now - deadline:.1f} s ago"
        )
