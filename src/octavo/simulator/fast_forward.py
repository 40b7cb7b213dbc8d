"""Fast forward: the times of decode steps during which nothing arrives, ends or waits for a block.

Owns: a step's price, and a DecodeRun: the predicted times of turns, and when to predict further.
Does not: change a scheduler (core.repeat applies such steps together), or update totals (replica).
"""

from __future__ import annotations

from bisect import bisect_left

from octavo.core.plan import StepPlan
from octavo.core.repeat import Repeat
from octavo.simulator.cost_model import CostModel, DecodeSeconds, StepShape, shape_of

MORE_TURNS = 8  # predicted at once


class StepPrices:
    """Prices plans. Plans of decode rows only are priced from sums, if the cost model can."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self.decode_s: DecodeSeconds | None = costs.decode_s
        self._host: dict[int, float] = {}

    def of(self, plan: StepPlan) -> tuple[float, float]:
        """Return seconds on the device and on the host. A plan without rows and copies takes the device no time."""
        num_rows = len(plan.slots)
        has_copies = plan.copies or plan.swap_outs or plan.host_loads
        if not num_rows and not has_copies:
            return 0.0, self._costs.host_s(shape_of(plan))
        if plan.is_fast_path and self.decode_s is not None and not has_copies:
            return self.decode_s(num_rows, plan.num_kv_read, max(plan.starts) + 1), self.host_s(num_rows)
        shape = shape_of(plan)
        return self._costs.step_s(shape), self._costs.host_s(shape)

    def host_s(self, num_rows: int) -> float:
        """Return seconds on the host for a plan of `num_rows` decode rows."""
        known = self._host.get(num_rows)
        if known is None:
            known = self._host[num_rows] = self._costs.host_s(StepShape([1] * num_rows, [], num_rows))
        return known


class DecodeRun:
    """Predicted turns of repeating steps: when each begins and commits, and the time and end of the plan it makes.

    `begins` has one entry more: when the next turn begins. `host_s` passes after each commit of these plans. `flying`
    is the plan in flight before the first turn, if any: its end and its host time. Each turn then commits the plan of
    the turn before.
    """

    __slots__ = ("_decode_s", "_flying", "_until", "begins", "commits", "ends", "host_s", "steps", "steps_s")

    def __init__(
        self, steps: Repeat, prices: StepPrices, begin: float, until: float, flying: tuple[float, float] | None
    ) -> None:
        assert prices.decode_s is not None
        self.steps = steps
        self.host_s = prices.host_s(steps.num_rows)
        self.begins = [begin]
        self.ends: list[float] = []
        self.steps_s: list[float] = []
        self.commits: list[float] = self.ends if flying is None else []
        self._decode_s = prices.decode_s
        self._until = until
        self._flying = flying
        self.more()

    def more(self) -> None:
        """Predict up to MORE_TURNS more turns, as long as they begin before `until`."""
        done = len(self.steps_s)
        count = min(self.steps.max_steps - done, MORE_TURNS)
        if self._flying is None:
            self._more_alone(done, count)
        else:
            self._more_ahead(done, count, *self._flying)

    def _more_alone(self, done: int, count: int) -> None:
        """Predict turns with one plan in flight: each plan is committed before the next is made."""
        host_s, at, decode_s, until = self.host_s, self.begins[-1], self._decode_s, self._until
        num_rows = self.steps.num_rows
        kv_sum, kv_max = self.steps.kv_sum + done * num_rows, self.steps.kv_max + done
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
        """Predict turns with two plans in flight: each turn commits the plan before its own, which ends at `end`."""
        at, num_rows = self.begins[-1], self.steps.num_rows
        kv_sum, kv_max = self.steps.kv_sum + done * num_rows, self.steps.kv_max + done
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
        """True if no further turn can be predicted."""
        return len(self.steps_s) == self.steps.max_steps or self.begins[-1] >= self._until

    @property
    def has_end(self) -> bool:
        """True if requests end in the last commit."""
        return bool(self.steps.ending) and len(self.steps_s) == self.steps.max_steps

    @property
    def next_at(self) -> float:
        """Return when the replica has to act: requests end, or the next turn begins."""
        return self.commits[-1] if self.has_end else self.begins[-1]

    @property
    def num_turns(self) -> int:
        """Return the number of predicted turns."""
        return len(self.steps_s)

    def num_turns_before(self, at: float) -> int:
        """Return the number of turns that begin before `at`."""
        return bisect_left(self.begins, at, hi=len(self.steps_s))

    def num_commits_before(self, at: float) -> int:
        """Return the number of commits before `at`."""
        return bisect_left(self.commits, at)
