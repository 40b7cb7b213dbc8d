"""What every step computed and read, noted as it is committed: the input of the memory floor.

Owns: the counts of the steps since they were last taken. Does not: measure times (the loop does).
"""

from __future__ import annotations

from array import array

from octavo.bench.floor import StepFloor
from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request


class StepCounts:
    """Query tokens and KV positions read, one entry per step."""

    __slots__ = ("num_kv_read", "num_query_tokens")

    def __init__(self) -> None:
        self.num_query_tokens = array("q")
        self.num_kv_read = array("q")

    def __len__(self) -> int:
        return len(self.num_query_tokens)

    def floor_s(self, floor: StepFloor) -> float:
        """The sum of all steps' floors, in seconds."""
        return sum(map(floor.seconds, self.num_query_tokens, self.num_kv_read))


class StepRecorder:
    """An EventSink that counts what each successful step with rows computes and reads."""

    def __init__(self) -> None:
        self.counts = StepCounts()

    def admitted(self, request: Request) -> None:
        """Nothing to note."""

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Nothing to note."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Note one step; one without rows costs no pass over the weights."""
        if plan.num_rows and isinstance(outcome, StepResult):
            self.counts.num_query_tokens.append(plan.num_query_tokens)
            self.counts.num_kv_read.append(plan.num_kv_read)

    def take(self) -> StepCounts:
        """Hand over the steps noted since the last time."""
        counts, self.counts = self.counts, StepCounts()
        return counts
