"""EventSinks: whoever watches the loop (traces, metrics, dashboards), behind one guard.

Owns: the fan-out. Does not: let a failing watcher disturb a step: it is switched off,
with one line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.observe.sink import EventSink

_LOG = logging.getLogger(__name__)


class Instruments:
    """Fans out to sinks; one that raises is dropped."""

    def __init__(self, sinks: Iterable[EventSink] = ()) -> None:
        self._sinks = list(sinks)

    def add(self, sink: EventSink) -> None:
        """Watch from now on."""
        self._sinks.append(sink)

    def admitted(self, request: Request) -> None:
        """Fan out."""
        if self._sinks:
            self._each(lambda sink: sink.admitted(request))

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Fan out; nothing when there are none."""
        if self._sinks and decisions:
            self._each(lambda sink: sink.decided(decisions))

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Fan out."""
        if self._sinks:
            self._each(lambda sink: sink.stepped(plan, outcome, events))

    def _each(self, tell: Callable[[EventSink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                tell(sink)
            except Exception:  # the instrument shell
                _LOG.exception("%s failed and is switched off", type(sink).__name__)
                self._sinks.remove(sink)
