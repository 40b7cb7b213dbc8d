"""A recording's durations as a cost model, by which a simulation reproduces the recorded times.

Times lie on a grid of 2 ** -20 s, so that sums of differences give the times themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from octavo.core.tap import AdmitCall, PlanCall
from octavo.observe.recording import RecordedStep, Recording, arrivals, steps
from octavo.simulator.arrival import Arrival
from octavo.simulator.cost_model import CostModel, StepShape
from octavo.simulator.costs.fitted import begin_of
from octavo.simulator.recorded import uses_device
from octavo.simulator.workloads.traces import recorded_arrival

GRID = 2.0**20  # points in a second


class RecordedCosts(CostModel):
    """A CostModel of the recorded times, in the order of the recording. It can be used for one simulation."""

    name = "as recorded"

    def __init__(self, recorded: Iterable[RecordedStep], origin: float) -> None:
        self._device: deque[float] = deque()
        self._host: deque[float] = deque()
        for step in recorded:
            plan = step.plan
            begun = snap(begin_of(step), origin)
            end = snap(step.collected, origin)
            after = end if step.next_plan is None else snap(step.next_plan, origin)
            if uses_device(plan):
                self._device.append(end - begun)
                self._host.append(after - end)
            else:
                self._host.append(after - begun)

    def step_s(self, shape: StepShape) -> float:
        """Return seconds on the device of the next step. Fails after the last."""
        del shape
        return self._next(self._device)

    def host_s(self, shape: StepShape) -> float:
        """Return seconds of the host after it."""
        del shape
        return self._next(self._host)

    @staticmethod
    def _next(times: deque[float]) -> float:
        assert times, "the simulation makes more steps than were recorded"
        return times.popleft()


def snap(time: float, origin: float) -> float:
    """Return seconds since `origin`, rounded to the grid."""
    return round((time - origin) * GRID) / GRID


def as_recorded(recording: Recording) -> tuple[list[Arrival], RecordedCosts, float]:
    """Return arrivals and durations that reproduce the recorded times, and their origin on the engine's clock.

    The simulation must have the recorded limits and depth. A request arrives when the first plan that knows it begins.
    Only a recording of one life without failed steps, and of requests that ended by their lengths, is reproduced
    exactly.
    """
    segment = recording.segments[0]
    turns: list[float] = []
    waiting = 0
    for recorded in segment.calls():
        call = recorded.call
        if isinstance(call, AdmitCall):
            waiting += 1
        elif isinstance(call, PlanCall) and waiting:
            turns += [call.now] * waiting
            waiting = 0
    origin = turns[0] if turns else segment.header.clock
    taken = sorted(arrivals(recording), key=lambda one: one.taken)
    found = [
        recorded_arrival(one, one.output_tokens, snap(turn, origin)) for turn, one in zip(turns, taken, strict=False)
    ]
    return found, RecordedCosts(steps(recording), origin), origin
