"""A plan on its way through an executor, as the loop holds it."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.plan import StepPlan
from octavo.executors.protocol import Ticket


@dataclass(slots=True)
class Flight:
    """A plan, its ticket or why it could not be submitted, seconds spent on scheduling, and when that began."""

    plan: StepPlan
    ticket: Ticket
    error: Exception | None
    schedule_s: float
    begun: float
