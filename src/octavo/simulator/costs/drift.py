"""Drift: detect that an engine's steps no longer take the time that a fit predicts.

Owns: the comparison and the alarm. Does not: fit, or report (the reader of the state does).
The alarm is a two-sided cumulative sum (Page, "Continuous inspection schemes", Biometrika 41, 1954) of log(measured /
predicted) over blocks of steps, in units of the spread that these blocks had when the fit was made.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log

from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.observe.recording.reader import RecordedStep
from octavo.simulator.cost_model import StepShape, shape_of
from octavo.simulator.costs.fitted import Fit, Fitted

BLOCK = 32  # steps that are compared together
SLACK = 1.0  # spreads by which a block may be off without being counted
BOUND = 8.0  # spreads beyond the slack, summed, that raise the alarm
LEAST_SPREAD = 0.03
MEMORY = 0.2  # weight of the last block in the ratio shown


class Drift:
    """Compares steps with a fit. `ratio` is recent measured over predicted time; 1.0 before the first block.

    `is_drifting` is True from the alarm until the sum is back at 0. `num_alarms` counts the alarms.
    """

    def __init__(self, fit: Fit) -> None:
        self._costs = Fitted(fit)
        self._spread = max(fit.spread, LEAST_SPREAD)
        self.ratio = 1.0
        self.is_drifting = False
        self.num_alarms = 0
        self.num_steps = 0
        self._slower = self._faster = 0.0
        self._measured = self._predicted = 0.0

    def add(self, shape: StepShape, seconds: float) -> None:
        """Add a step and its measured seconds."""
        self._measured += seconds
        self._predicted += self._costs.step_s(shape)
        self.num_steps += 1
        if self.num_steps % BLOCK == 0:
            self._judge(self._measured / max(self._predicted, 1e-12))
            self._measured = self._predicted = 0.0

    def _judge(self, ratio: float) -> None:
        self.ratio = ratio if self.num_steps == BLOCK else self.ratio + MEMORY * (ratio - self.ratio)
        off = log(max(ratio, 1e-12)) / self._spread
        self._slower = min(2 * BOUND, max(0.0, self._slower + off - SLACK))
        self._faster = min(2 * BOUND, max(0.0, self._faster - off - SLACK))
        worst = max(self._slower, self._faster)
        if worst > BOUND and not self.is_drifting:
            self.is_drifting = True
            self.num_alarms += 1
        elif worst == 0.0:
            self.is_drifting = False

    def summary(self) -> dict[str, object]:
        """Return the state as plain JSON values."""
        return {
            "steps": self.num_steps,
            "ratio": self.ratio,
            "is_drifting": self.is_drifting,
            "alarms": self.num_alarms,
            "spread": self._spread,
        }

    def __str__(self) -> str:
        """Return the state as a sentence."""
        if self.num_steps < BLOCK:
            return f"{self.num_steps} steps: too few to compare with the fit"
        state = "they drift from the fit" if self.is_drifting else "no drift"
        return f"steps take {self.ratio:.2f} times what the fit says ({self.num_steps} compared): {state}"


class DriftSink:
    """An EventSink that compares a live engine's steps with a fit. Costs about 20 microseconds a step."""

    def __init__(self, fit: Fit) -> None:
        self.drift = Drift(fit)
        self._free_from = 0.0

    def admitted(self, request: Request) -> None:
        """Do nothing: there is no step to compare."""

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Do nothing: there is no step to compare."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Compare a step, timed from its plan or from the end of the step before it, whichever is later."""
        begun = max(plan.now, self._free_from)
        self._free_from = events.time
        if plan.slots and isinstance(outcome, StepResult) and events.time > begun:
            self.drift.add(shape_of(plan), events.time - begun)


def drift_of(steps: Iterable[RecordedStep], fit: Fit) -> Drift:
    """Compare a recording's steps with a fit of another recording."""
    drift = Drift(fit)
    for step in steps:
        begun = step.plan.now if step.free_from is None else max(step.plan.now, step.free_from)
        if step.plan.slots and not step.has_failed and step.collected > begun:
            drift.add(shape_of(step.plan), step.collected - begun)
    return drift
