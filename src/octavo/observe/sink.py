"""EventSink: what the step loop, a replay and a simulation report their events to.

Owns: the protocols. Does not: guard a step against a sink that fails (guards).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.observe.step_times import StepTimes


class EventSink(Protocol):
    """Called in the thread that steps, in order; must be quick, and copy what it needs and does not own."""

    def admitted(self, request: Request) -> None:
        """A request was admitted."""
        ...

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Decisions were made, by plans and commits alike; each is reported exactly once."""
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
    """What observers need of the step loop (octavo.engine.loop.EngineLoop)."""

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
