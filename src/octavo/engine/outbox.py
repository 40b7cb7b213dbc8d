"""The Outbox: which requests of an engine are open, and which events its client gets.

Owns: the promise of one end for each open request. Does not: know sockets, asyncio or text; it runs in the engine's
thread. Admissions, preemptions and resumptions wait for the next commit or end, so that they cost no message.
Invariant: every request opened here gets exactly one FINISHED event, and no token after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from octavo.core.plan import Event, EventKind, Events
from octavo.core.request import FinishError, FinishReason

ENDS = frozenset({EventKind.FINISHED, EventKind.CHOICE_FINISHED})
_SENT = ENDS | {EventKind.ADMITTED, EventKind.PREEMPTED, EventKind.RESUMED}


def finished(
    request_id: str,
    reason: FinishReason,
    error: FinishError | None = None,
    *,
    choice: int | None = None,
    stop_token_id: int | None = None,
    time: float = 0.0,
) -> Event:
    """Return the end of a request, or of one choice of it, that no scheduler decided."""
    kind = EventKind.FINISHED if choice is None else EventKind.CHOICE_FINISHED
    return Event(
        kind, request_id, time, 0, finish_reason=reason, stop_token_id=stop_token_id, error=error, choice=choice or 0
    )


class Outbox:
    """Follows the open requests through events, and leaves out what a client has no use for."""

    def __init__(self) -> None:
        self._open: dict[str, None] = {}
        self._held: list[Event] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open_ids(self) -> tuple[str, ...]:
        """Ids without an end yet, oldest first."""
        return tuple(self._open)

    def open(self, request_id: str) -> None:
        """A request was admitted: it will get one end."""
        self._open[request_id] = None

    def committed(self, events: Events) -> Events:
        """Return what to send of a commit. Its columns are shared, not copied."""
        if not events.decisions and not self._held:
            return events
        self._take(events.decisions)
        return replace(events, decisions=self._release())

    def decided(self, decisions: tuple[Event, ...]) -> Events | None:
        """Return what to send of decisions taken outside a commit; None where all of it can wait."""
        if not self._take(decisions):
            return None
        return Events(decisions[-1].step, decisions[-1].time, decisions=self._release())

    def end_all(self, now: float, reason: FinishReason, error: FinishError) -> Events:
        """End every open request here, whatever the scheduler knows."""
        ends = tuple(finished(request_id, reason, error, time=now) for request_id in self._open)
        self._open.clear()
        return Events(0, now, decisions=self._release() + ends)

    def _take(self, decisions: Iterable[Event]) -> bool:
        """Keep what is to be sent; return True if there is an end among it."""
        has_end = False
        for event in decisions:
            if event.kind not in _SENT or event.request_id not in self._open:
                continue
            self._held.append(event)
            has_end |= event.kind in ENDS
            if event.kind == EventKind.FINISHED:
                del self._open[event.request_id]
        return has_end

    def _release(self) -> tuple[Event, ...]:
        held, self._held = tuple(self._held), []
        return held
