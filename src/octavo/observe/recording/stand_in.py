"""What a scheduler that replays without ids is given instead: recorded block keys, recorded drafts.

Owns: RecordedInputs. Does not: drive the scheduler (replaying).
Invariant: keys are asked for in the order in which the live scheduler made them, for the same sequences; where one is
left over, the replay has gone another way, and DivergenceError is raised.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from octavo.core.plan import StepPlan
from octavo.core.request import Request
from octavo.observe.recording.calls import KeyRun


class DivergenceError(Exception):
    """The replay asks for what the live scheduler did not ask for."""


class RecordedInputs:
    """An InputSource: the keys of the call that is being replayed, and without text the drafts of its plan."""

    def __init__(self, has_text: bool) -> None:
        self.has_drafts = not has_text
        self.is_blind = False  # whether the request that comes next had no ids in the live engine either
        self._due: deque[KeyRun] = deque()
        self._drafts: dict[int, array[int]] = {}

    def begin(self, runs: Iterable[KeyRun], plan: StepPlan | None = None) -> None:
        """Take in the keys that the next call will ask for, and the drafts of the plan that it makes."""
        self._due.extend(runs)
        if plan is None:
            return
        self._drafts = {}
        at = 0
        for slot, count in zip(plan.slots, plan.num_drafts, strict=False):
            if count:
                self._drafts[slot] = plan.draft_token_ids[at : at + count]
            at += count

    def end(self) -> None:
        """The call is over: all its keys must have been asked for. Raises DivergenceError."""
        if self._due:
            run = self._due[0]
            raise DivergenceError(f"keys from block {run.first} on of request number {run.order} were not asked for")

    def keys(self, order: int, choice: int, first: int) -> Iterable[bytes]:
        """What the live sequence got: nothing, where that had no keys for so many blocks."""
        if self._due and (self._due[0].order, self._due[0].choice, self._due[0].first) == (order, choice, first):
            return self._due.popleft().keys
        return ()

    def can_draft(self, request: Request) -> bool:
        """As the live one."""
        return not self.is_blind

    def drafts(self, request_id: str, slot: int, most: int) -> array[int]:
        """The recorded drafts. Raises DivergenceError where there is no room for them."""
        drafts = self._drafts.get(slot, array("i"))
        if len(drafts) > max(0, most):
            raise DivergenceError(f"{request_id} had {len(drafts)} drafts, and has room for {most}")
        return drafts
