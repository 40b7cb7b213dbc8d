"""The Outbox: which requests of an engine are open, and which events are sent to its client.

Owns: the guarantee of one end for each open request. Does not: know sockets, asyncio or text; it runs in the engine's
thread. An admission, preemption or resumption is sent with the next commit or end, and so costs no message of its own.
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
    """Return an event that ends a request, or one of its choices, without a scheduler."""
    kind = EventKind.FINISHED if choice is None else EventKind.CHOICE_FINISHED
    return Event(
        kind, request_id, time, 0, finish_reason=reason, stop_token_id=stop_token_id, error=error, choice=choice or 0
    )


class Outbox:
    """Tracks the open requests, and selects the events to send to the client."""

    def __init__(self) -> None:
        self._open: dict[str, None] = {}
        self._held: list[Event] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open_ids(self) -> tuple[str, ...]:
        """Ids of the open requests, oldest first."""
        return tuple(self._open)

    def open(self, request_id: str) -> None:
        """Add an admitted request, which will get one end."""
        self._open[request_id] = None

    def committed(self, events: Events) -> Events:
        """Return the events of a commit to send. The columns are shared, not copied."""
        if not events.decisions and not self._held:
            return events
        self._take(events.decisions)
        return replace(events, decisions=self._release())

    def decided(self, decisions: tuple[Event, ...]) -> Events | None:
        """Return events with the decisions made outside a commit; None if all of them can wait."""
        if not self._take(decisions):
            return None
        return Events(decisions[-1].step, decisions[-1].time, decisions=self._release())

    def end_all(self, now: float, reason: FinishReason, error: FinishError) -> Events:
        """Return events that end every open request, without the scheduler."""
        ends = tuple(finished(request_id, reason, error, time=now) for request_id in self._open)
        self._open.clear()
        return Events(0, now, decisions=self._release() + ends)

    def _take(self, decisions: Iterable[Event]) -> bool:
        """Hold the decisions that will be sent; return True if one of them is an end."""
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
