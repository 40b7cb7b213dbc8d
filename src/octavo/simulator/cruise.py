"""Cruise: how long a run of decode steps takes in which nobody comes, ends or waits for a block.

Owns: a step's price (Pace), and the times of turns looked ahead. Does not: change a scheduler (core.forward does).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from octavo.core.forward import Stretch
from octavo.core.plan import StepPlan
from octavo.simulator.cost_model import CostModel, StepShape, shape_of

MORE_TURNS = 8  # looked ahead at once
ALONE = (0.0, 0.0)  # nothing is in flight between turns
DecodeS = Callable[[int, int, int], float]


class Pace:
    """Prices plans. Those of decode rows only are priced by their sums, where the model can."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self.decode_s: DecodeS | None = getattr(costs, "decode_s", None)
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
    """Turns looked ahead over a stretch: when each begins and commits; for the plan it makes, its time and end.

    `begins` has one entry more: when the turn behind them begins. `host_s` passes behind each commit of these plans.
    With a plan in flight, `flying` = (its end, its host time), each turn commits the plan of the one before.
    """

    __slots__ = ("_decode_s", "_flying", "_until", "begins", "commits", "ends", "host_s", "steps_s", "stretch")

    def __init__(self, stretch: Stretch, pace: Pace, begin: float, until: float, flying: tuple[float, float]) -> None:
        assert pace.decode_s is not None
        self.stretch = stretch
        self.host_s = pace.host_s(len(stretch.rows))
        self.begins = [begin]
        self.commits: list[float] = []
        self.ends: list[float] = []
        self.steps_s: list[float] = []
        self._decode_s = pace.decode_s
        self._until = until
        self._flying = flying if flying is not ALONE else None
        if flying is ALONE:
            self.commits = self.ends
        self.more()

    def more(self) -> None:
        """Look further ahead, MORE_TURNS at once, as far as they begin before `until`."""
        done = len(self.steps_s)
        count = min(self.stretch.max_steps - done, MORE_TURNS)
        if self._flying is None:
            self._more_alone(done, count)
        else:
            self._more_ahead(done, count, *self._flying)

    def _more_alone(self, done: int, count: int) -> None:
        """Each plan is committed before the next is made."""
        stretch, host_s, at, decode_s, until = self.stretch, self.host_s, self.begins[-1], self._decode_s, self._until
        num_rows = len(stretch.rows)
        kv_sum, kv_max = stretch.kv_sum + done * num_rows, stretch.kv_max + done
        add_step, add_end, add_begin = self.steps_s.append, self.ends.append, self.begins.append
        for _ in range(count):
            if at >= until:
                break
            step_s = decode_s(num_rows, kv_sum, kv_max)
            end = at + step_s
            at = end + host_s
            add_step(step_s)
            add_end(end)
            add_begin(at)
            kv_sum += num_rows
            kv_max += 1

    def _more_ahead(self, done: int, count: int, end: float, host_s: float) -> None:
        """Each turn commits the plan before its own, which ends at `end`."""
        stretch, at = self.stretch, self.begins[-1]
        num_rows = len(stretch.rows)
        kv_sum, kv_max = stretch.kv_sum + done * num_rows, stretch.kv_max + done
        for _ in range(count):
            if at >= self._until:
                break
            step_s = self._decode_s(num_rows, kv_sum, kv_max)
            commit = max(at, end)
            end = max(at, end) + step_s
            self.steps_s.append(step_s)
            self.ends.append(end)
            self.commits.append(commit)
            at = commit + host_s
            host_s = self.host_s
            self.begins.append(at)
            kv_sum += num_rows
            kv_max += 1
        self._flying = (end, host_s)

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing further to look at."""
        return len(self.steps_s) == self.stretch.max_steps or self.begins[-1] >= self._until

    @property
    def has_end(self) -> bool:
        """Whether somebody ends in the last commit."""
        return self.stretch.has_end and len(self.steps_s) == self.stretch.max_steps

    @property
    def next_at(self) -> float:
        """When it has to be looked at again: somebody ends, or the next turn begins."""
        return self.commits[-1] if self.has_end else self.begins[-1]

    @property
    def num_turns(self) -> int:
        """Turns looked ahead."""
        return len(self.steps_s)

    def num_turns_before(self, at: float) -> int:
        """Turns that begin before `at`."""
        return bisect_left(self.begins, at, hi=len(self.steps_s))

    def num_commits_before(self, at: float) -> int:
        """Commits before `at`."""
        return bisect_left(self.commits, at)
