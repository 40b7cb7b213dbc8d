"""Whoever watches a scheduler at work: a live engine's, a replayed recording's, a simulation's.

Owns: the protocol, and telling several. Does not: keep one that fails from disturbing a step (engine.instruments does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.observe.step_times import StepTimes


class EventSink(Protocol):
    """Told in the thread that steps, in order; must be quick and keep what it needs by copying."""

    def admitted(self, request: Request) -> None:
        """A request was taken."""
        ...

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Decisions, each exactly once, from plans and commits alike."""
        ...

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """A plan was committed."""
        ...


class LoopClock(Protocol):
    """The clock of a loop."""

    def now(self) -> float:
        """Seconds, monotonic."""
        ...


class WatchedLoop(Protocol):
    """What those who watch need of the step loop (octavo.engine.loop.EngineLoop)."""

    step_times: StepTimes
    sections: dict[str, Callable[[], object]]
    verbs: dict[str, Callable[[str], object]]

    @property
    def clock(self) -> LoopClock:
        """Its clock."""
        ...

    def watch(self, sink: EventSink) -> None:
        """Call the sink from now on."""
        ...


class Several:
    """Tells each of several sinks. One that fails ends what drives it: a replay or a simulation, not an engine."""

    def __init__(self, sinks: Sequence[EventSink]) -> None:
        self._sinks = sinks

    def admitted(self, request: Request) -> None:
        """A request was taken."""
        for sink in self._sinks:
            sink.admitted(request)

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Decisions, each exactly once."""
        for sink in self._sinks:
            sink.decided(decisions)

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """A plan was committed."""
        for sink in self._sinks:
            sink.stepped(plan, outcome, events)
