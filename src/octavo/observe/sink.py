"""EventSink: the interface to which the step loop, a replay and a simulation report; and guards for live observers.

Owns: the protocols, and the guards, which ensure that no observer ends an engine. A sink or reader that raises is
switched off with one entry in the log; a verb that raises is answered with the error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, ParamSpec, Protocol, TypeVar

from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.observe.series import StepTimes

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")


class EventSink(Protocol):
    """A receiver of events, called in the engine's thread, in order; must be quick, and copy data that it keeps."""

    def admitted(self, request: Request) -> None:
        """Handle an admitted request."""
        ...

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Handle decisions of plans and commits, each reported exactly once."""
        ...

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Handle a committed plan."""
        ...


class LoopClock(Protocol):
    """The clock of a loop."""

    def now(self) -> float:
        """Return seconds, monotonic."""
        ...


class WatchedLoop(Protocol):
    """The observers' interface of the step loop (octavo.engine.loop.EngineLoop)."""

    step_times: StepTimes
    sections: dict[str, Callable[[], object]]
    verbs: dict[str, Callable[[str], object]]

    @property
    def clock(self) -> LoopClock:
        """The clock."""
        ...

    def watch(self, sink: EventSink) -> None:
        """Report to the sink from now on."""
        ...


class FanOutSink:
    """A sink which reports to each of its sinks; one that raises is dropped."""

    def __init__(self) -> None:
        self._sinks: list[EventSink] = []

    def add(self, sink: EventSink) -> None:
        """Report to a sink from now on."""
        self._sinks.append(sink)

    def report(self, verb: Literal["admitted", "decided", "stepped"], *facts: object) -> None:
        """Call this method of each sink."""
        for sink in tuple(self._sinks):
            try:
                getattr(sink, verb)(*facts)
            except Exception:  # the instrument shell
                _LOG.exception("%s failed and is switched off", type(sink).__name__)
                self._sinks.remove(sink)


def guarded_reader(name: str, read: Callable[[T], object]) -> Callable[[T], None]:
    """Return a reader that is switched off once it raises."""
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


def guarded(name: str, act: Callable[P, object], answer: Callable[[str], object]) -> Callable[P, object]:
    """Return a function that returns the result of `act` or, if that raises, `answer` of the error's text."""

    def run(*args: P.args, **kwargs: P.kwargs) -> object:
        try:
            return act(*args, **kwargs)
        except Exception as error:  # the instrument shell
            _LOG.exception("%s failed", name)
            return answer(f"{name} failed: {type(error).__name__}: {error}")

    return run
