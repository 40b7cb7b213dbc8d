"""What crosses from the engine's thread to the writer's: calls as they were made, nothing copied or computed.

Owns: the items. Does not: encode them.
Everything in them is never written to again by contract (plans, results, requests), or was copied.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.core.plan import StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.observe.recording.calls import Cancel, Control, EndChoice, Ended

Keys = tuple[tuple[int, int, int, tuple[bytes, ...]], ...]  # order, choice, first index, keys


class Admitted(NamedTuple):
    """A request was taken."""

    now: float
    request: Request
    keys: Keys


class Planned(NamedTuple):
    """A plan was made."""

    now: float
    planned: float
    plan: StepPlan
    only: frozenset[str] | None
    keys: Keys


class Committed(NamedTuple):
    """A step was committed."""

    now: float
    committed: float
    plan: StepPlan
    outcome: StepResult | StepFailure
    keys: Keys


Item = Admitted | Planned | Committed | Cancel | EndChoice | Control | Ended
