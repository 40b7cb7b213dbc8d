"""The steps of a recording with their times, for cost models.

Owns: RecordedStep. Does not: replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.core.plan import StepFailure, StepPlan, StepResult
from octavo.observe.recording.calls import Commit, Plan
from octavo.observe.recording.reader import Recording


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step: `plan` with its columns (not its sequences' ids), `outcome` with its timings.

    Seconds on the engine's clock: the plan was begun at `plan.now`, done at `planned`; the result was collected at
    `collected` and committed at `committed`. `free_from` is when the step before it was collected (None for the first
    of a life). `next_plan` is when the plan after its commit was begun, delivery and commands between them; None for
    the last.
    """

    life: int
    plan: StepPlan
    outcome: StepResult | StepFailure
    planned: float
    collected: float
    committed: float
    free_from: float | None = None
    next_plan: float | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it gave nothing."""
        return isinstance(self.outcome, StepFailure)


def steps(recording: Recording) -> Iterator[RecordedStep]:
    """The steps of all segments that were committed, in order; plans voided by a failure before them are left out."""
    for life, segment in enumerate(recording.segments):
        flight: deque[Plan] = deque()
        free_from: float | None = None
        last: tuple[Plan, Commit, float | None] | None = None
        for call in segment.calls():
            if isinstance(call, Plan):
                if last is not None:
                    yield _step(life, *last, call.now)
                    last = None
                if call.digest:
                    flight.append(call)
            elif isinstance(call, Commit) and flight:
                if last is not None:
                    yield _step(life, *last, None)
                last = flight.popleft(), call, free_from
                free_from = call.now
                if isinstance(call.outcome, StepFailure):
                    flight.clear()
        if last is not None:
            yield _step(life, *last, None)


def _step(life: int, plan: Plan, commit: Commit, free_from: float | None, next_plan: float | None) -> RecordedStep:
    return RecordedStep(
        life, plan.plan, commit.outcome, plan.planned, commit.now, commit.committed, free_from, next_plan
    )
