"""The steps of a recording with their times, for cost models.

Owns: RecordedStep. Does not: replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.core.plan import StepFailure, StepPlan, StepResult
from octavo.trace.recording.reader import Recording


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step: `plan` with its columns (not its sequences' ids), `outcome` with its timings.

    Seconds on the engine's clock: the plan was begun at `plan.now`, done at `planned`; the result was collected at
    `collected` and committed at `committed`. `free_from` is when the last step before it was collected (None for the
    first of a life): with a depth of 1, the device is idle from then until `planned`.
    """

    life: int
    plan: StepPlan
    outcome: StepResult | StepFailure
    planned: float
    collected: float
    committed: float
    free_from: float | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it gave nothing."""
        return isinstance(self.outcome, StepFailure)


def steps(recording: Recording) -> Iterator[RecordedStep]:
    """The steps of all segments that were committed, in order."""
    raise NotImplementedError
