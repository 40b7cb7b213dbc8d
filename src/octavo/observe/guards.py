"""Guards: nothing that observes an engine can end it.

Owns: the fan-out to sinks and the wrappers of readers, sections and verbs. A sink or reader that raises is switched
off with one line in the log; a question that raises is answered with what went wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.errors import EngineError
from octavo.observe.sink import EventSink

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Instruments:
    """Fans out to sinks; one that raises is dropped."""

    def __init__(self, sinks: Iterable[EventSink] = ()) -> None:
        self._sinks = list(sinks)

    def add(self, sink: EventSink) -> None:
        """Report to a sink from now on."""
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

    def _each(self, report: Callable[[EventSink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                report(sink)
            except Exception:  # the instrument shell
                _LOG.exception("%s failed and is switched off", type(sink).__name__)
                self._sinks.remove(sink)


def guarded_reader(name: str, read: Callable[[T], object]) -> Callable[[T], None]:
    """Return a reader that is switched off when it raises."""
    is_on = True

    def guarded(record: T) -> None:
        nonlocal is_on
        if is_on:
            try:
                read(record)
            except Exception:  # the instrument shell
                _LOG.exception("%s failed and is switched off", name)
                is_on = False

    return guarded


def guarded_verb(name: str, act: Callable[[str], object]) -> Callable[[str], object]:
    """Return a verb that answers what `act` returns, or an EngineError with what went wrong."""

    def guarded(argument: str) -> object:
        try:
            return act(argument)
        except Exception as error:  # the instrument shell
            _LOG.exception("%s failed", name)
            return EngineError(f"{name} failed: {type(error).__name__}: {error}")

    return guarded


def guarded_section(read: Callable[[], object]) -> Callable[[], object]:
    """Return a section of the statistics that is {"error": ...} where it cannot be read."""

    def guarded() -> object:
        try:
            return read()
        except Exception as error:  # the instrument shell
            _LOG.exception("statistics cannot be read")
            return {"error": f"statistics cannot be read: {type(error).__name__}: {error}"}

    return guarded
