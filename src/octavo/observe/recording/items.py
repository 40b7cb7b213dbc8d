"""What crosses from the engine's thread to the writer's: calls as they were made, nothing copied or computed.

Owns: the items. Does not: encode them.
Everything in them is never written to again by contract (plans, results, requests, a flight's rows), or was copied.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

from octavo.core.plan import StepFailure, StepPlan, StepResult
from octavo.core.request import Request, Sequence
from octavo.observe.recording.calls import Cancel, Control, EndChoice, Ended

Keys = tuple[tuple[int, int, int, tuple[bytes, ...]], ...]  # order, choice, first index, keys


class Admitted(NamedTuple):
    """A request was taken."""

    now: float
    request: Request
    keys: Keys


class Planned(NamedTuple):
    """A plan was made, with the sequences of its rows."""

    now: float
    planned: float
    plan: StepPlan
    rows: Rows[Sequence]
    only: frozenset[str] | None
    keys: Keys


class Committed(NamedTuple):
    """A step was committed, with the sequences of its rows."""

    now: float
    committed: float
    plan: StepPlan
    outcome: StepResult | StepFailure
    rows: Rows[Sequence]
    keys: Keys


Item = Admitted | Planned | Committed | Cancel | EndChoice | Control | Ended
