"""Whoever watches a scheduler at work: a live engine's, a replayed recording's, a simulation's.

Owns: the protocol. Does not: keep a failing watcher from disturbing a step (engine.instruments does).
"""

from __future__ import annotations

from typing import Protocol

from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request


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
