"""Recorded steps made up by a simulation: the real scheduler's plans with the durations of a known cost model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from octavo.core.limits import Limits
from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.observe.recording.columns import StepColumns
from octavo.observe.recording.reader import RecordedStep
from octavo.simulator.arrival import Arrival
from octavo.simulator.cost_model import CostModel
from octavo.simulator.costs.fitted import Fit, add_step, fit_columns
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup

IDLE_S = 0.003  # a plan later than so is not the one that an engine makes at once
LIMITS = Limits(16, (400,), 4096, 1000, 256, 16)


class Steps:
    """A sink that keeps what a recording would say of each step."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []

    def admitted(self, request: Request) -> None:
        """Nothing."""

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Nothing."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Keep it."""
        before = self.steps[-1].collected if self.steps else None
        self.steps.append(RecordedStep(0, plan, outcome, plan.now, events.time, events.time, before))


def workload(number: int = 60, gap: float = 0.2) -> list[Arrival]:
    """Prompts of 5 to 600 tokens, outputs of 5 to 60, one each `gap` seconds, the same each time."""
    return [Arrival(at * gap, 5 + at * 97 % 600, 5 + at * 31 % 55) for at in range(number)]


def steps_of(costs: CostModel, arrivals: Iterable[Arrival], depth: int = 1) -> list[RecordedStep]:
    """The steps of a simulation."""
    sink = Steps()
    simulate(arrivals, Setup(LIMITS, costs, depth=depth, make_sink=lambda scheduler: sink))
    steps = sink.steps
    for place, step in enumerate(steps):
        later = (other.plan.now for other in steps[place + 1 :] if other.plan.now > step.collected)
        following = next(later, None)
        if following is not None and following - step.collected < IDLE_S:
            steps[place] = replace(step, next_plan=following)
    return steps


def columns_of(recorded: Iterable[RecordedStep]) -> StepColumns:
    """What read_columns would read of a recording of these steps."""
    columns = StepColumns()
    for step in recorded:
        add_step(columns, step)
    return columns


def fit_steps(recorded: Iterable[RecordedStep], source: str = "steps", has_warm_up: bool = False) -> Fit:
    """The fit of these steps."""
    return fit_columns(columns_of(recorded), source, has_warm_up)
