"""Cruise: how long a run of decode steps takes in which nobody comes, ends or waits for a block.

Owns: a step's price (Pace), and the times of turns looked ahead. Does not: change a scheduler (core.forward does).
"""

from __future__ import annotations

from bisect import bisect_left

from octavo.core.plan import StepPlan
from octavo.simulator.cost_model import CostModel, StepShape, shape_of


class Pace:
    """Prices plans. Those of decode rows only are priced by their sums, where the model can."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self.decode_s = getattr(costs, "decode_s", None)
        self._host: dict[int, float] = {}

    def of(self, plan: StepPlan) -> tuple[float, float]:
        """Seconds on the device and on the host. A plan without rows and copies takes the device no time."""
        num_rows = len(plan.slots)
        has_copies = plan.copies or plan.swap_outs or plan.host_loads
        if not num_rows and not has_copies:
            return 0.0, self._costs.host_s(shape_of(plan))
        if plan.is_fast_path and self.decode_s is not None and not has_copies:
            return self.decode_s(num_rows, plan.num_kv_read, max(plan.starts) + 1), self.host_s(num_rows)
        shape = shape_of(plan)
        return self._costs.step_s(shape), self._costs.host_s(shape)

    def host_s(self, num_rows: int) -> float:
        """Seconds on the host for a plan of so many decode rows."""
        known = self._host.get(num_rows)
        if known is None:
            known = self._host[num_rows] = self._costs.host_s(StepShape([1] * num_rows, [], num_rows))
        return known


class Cruise:
    """Turns looked ahead: when each begins, when it commits, and what it takes. The last begin is the next turn's."""

    __slots__ = ("begins", "commits", "steps_s")

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.commits: list[float] = []
        self.steps_s: list[float] = []

    @property
    def num_turns(self) -> int:
        """Turns looked ahead."""
        return len(self.commits)

    def num_turns_before(self, at: float) -> int:
        """Turns that begin before `at`."""
        return bisect_left(self.begins, at, hi=len(self.commits))

    def num_commits_before(self, at: float) -> int:
        """Commits before `at`."""
        return bisect_left(self.commits, at)
