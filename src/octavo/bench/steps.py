"""What every step computed and read, noted as it is committed: the input of the memory floor.

Owns: the counts of the steps since the last clear(). Does not: measure times (the loop does).
"""

from __future__ import annotations

from array import array

from octavo.bench.floor import StepFloor
from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request


class StepRecorder:
    """An EventSink that keeps the query tokens and KV positions read of each successful step."""

    def __init__(self) -> None:
        self.num_query_tokens = array("q")
        self.num_kv_read = array("q")
        self.num_failed = 0

    def admitted(self, request: Request) -> None:
        """Nothing to note."""

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Nothing to note."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Note one step; a plan without rows costs no pass over the weights and is left out."""
        if isinstance(outcome, StepFailure):
            self.num_failed += 1
        elif plan.num_rows:
            self.num_query_tokens.append(plan.num_query_tokens)
            self.num_kv_read.append(plan.num_kv_read)

    def clear(self) -> None:
        """Forget all steps."""
        self.num_query_tokens = array("q")
        self.num_kv_read = array("q")
        self.num_failed = 0

    def floor_s(self, floor: StepFloor) -> float:
        """The sum of all steps' floors, in seconds."""
        return sum(map(floor.seconds, self.num_query_tokens, self.num_kv_read))
