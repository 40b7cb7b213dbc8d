"""Counts and times of every committed step: the input of the memory floor and the step split.

Owns: the counts of the steps since they were last taken, and their sums by the number of rows. Does not: measure
times (the loop does).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from octavo.bench.floor import StepFloor
from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.engine.loop import EngineLoop
from octavo.observe.history import count_prefill
from octavo.observe.series import PARTS, StepTimes

DEVICE_PARTS = ("forward", "sample")  # the host's are the others: schedule, prepare, emit, and the time between parts
_NOT_TIMED = (0.0,) * len(PARTS)


class StepCounts:
    """One entry per step: rows, query tokens, KV positions read, whether it only decodes, seconds of its parts."""

    __slots__ = ("is_decode", "num_kv_read", "num_query_tokens", "num_rows", "seconds")

    def __init__(self) -> None:
        self.num_rows = array("q")
        self.num_query_tokens = array("q")
        self.num_kv_read = array("q")
        self.is_decode = array("b")
        self.seconds: list[tuple[float, ...]] = []

    def __len__(self) -> int:
        return len(self.num_query_tokens)

    def floor_s(self, floor: StepFloor) -> float:
        """Return the sum of all steps' floors, in seconds."""
        return sum(map(floor.seconds, self.num_query_tokens, self.num_kv_read))

    def by_rows(self, floor: StepFloor | None = None) -> list[dict[str, Any]]:
        """Return means over the timed steps that only decode, by rows: 1, 2, up to 4, up to 8, and so on."""
        groups: dict[int, list[int]] = {}
        for index, rows in enumerate(self.num_rows):
            if self.is_decode[index] and self.seconds[index] is not _NOT_TIMED:
                groups.setdefault(1 << (rows - 1).bit_length(), []).append(index)
        return [{"rows_up_to": rows, **self._summary(groups[rows], floor)} for rows in sorted(groups)]

    def at_rows(self, rows: int, floor: StepFloor | None = None) -> dict[str, Any]:
        """Return means over the timed steps that only decode, with exactly `rows` rows; empty if there was none."""
        steps = [
            index
            for index, count in enumerate(self.num_rows)
            if count == rows and self.is_decode[index] and self.seconds[index] is not _NOT_TIMED
        ]
        return self._summary(steps, floor) if steps else {}

    def _summary(self, steps: Sequence[int], floor: StepFloor | None) -> dict[str, Any]:
        totals = dict(zip(PARTS, map(sum, zip(*(self.seconds[step] for step in steps), strict=True)), strict=True))
        whole_s = totals["step"]
        host_s = max(0.0, whole_s - sum(totals[part] for part in DEVICE_PARTS))
        summary: dict[str, Any] = {
            "steps": len(steps),
            "step_ms": round(whole_s / len(steps) * 1e3, 4),
            "host_ms": round(host_s / len(steps) * 1e3, 4),
            "host_share": round(host_s / whole_s, 4) if whole_s else 0.0,
        }
        if floor is not None:
            floor_s = sum(floor.seconds(self.num_query_tokens[step], self.num_kv_read[step]) for step in steps)
            summary["floor_ms"] = round(floor_s / len(steps) * 1e3, 4)
            summary["floor_fraction"] = round(floor_s / whole_s, 4) if whole_s else 0.0
        return summary


class StepRecorder:
    """An EventSink that counts what each successful step with rows computes and reads.

    A sink is called just before a step's times are recorded, so they are fetched at the next step.
    """

    def __init__(self) -> None:
        self.counts = StepCounts()
        self._times: StepTimes | None = None
        self._find: Callable[[], tuple[float, ...]] | None = None  # fetches the times of the last step

    def watch(self, loop: EngineLoop) -> None:
        """Watch a loop's steps, with their times. Call before it starts."""
        self._times = loop.step_times
        loop.watch(self)

    def admitted(self, request: Request) -> None:
        """Do nothing: there is no step to count."""

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Do nothing: there is no step to count."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Record one step; one without rows costs no pass over the weights."""
        self._settle()
        if plan.num_rows and isinstance(outcome, StepResult):
            counts = self.counts
            counts.num_rows.append(plan.num_rows)
            counts.num_query_tokens.append(plan.num_query_tokens)
            counts.num_kv_read.append(plan.num_kv_read)
            counts.is_decode.append(plan.num_query_tokens == plan.num_rows or not count_prefill(plan)[0])
            self._find = self._finder()

    def take(self) -> StepCounts:
        """Return the steps recorded since the last call. Call while the engine is idle."""
        self._settle()
        counts, self.counts = self.counts, StepCounts()
        return counts

    def _finder(self) -> Callable[[], tuple[float, ...]]:
        times = self._times
        if times is None:
            return lambda: _NOT_TIMED
        number = times.num_steps
        return lambda: times.get(number) or _NOT_TIMED

    def _settle(self) -> None:
        if self._find is not None:
            self.counts.seconds.append(self._find())
            self._find = None
