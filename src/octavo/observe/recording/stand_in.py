"""What stands for ids in a scheduler that replays without them: recorded block keys, recorded drafts.

Owns: ReplayKeys, ReplayDrafter. Does not: drive the scheduler (replaying).
Invariant: keys are asked for in the order in which the live scheduler made them, for the same sequences; where one is
left over, the replay has gone another way, and DivergenceError is raised.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from octavo.core.kv.keys import KeyMaker
from octavo.core.limits import Limits
from octavo.core.plan import StepPlan
from octavo.core.request import Request, Sequence
from octavo.core.speculation import Drafter
from octavo.observe.recording.calls import KeyRun


class DivergenceError(Exception):
    """The replay asks for what the live scheduler did not ask for."""


class ReplayKeys(KeyMaker):
    """Gives the keys of the call that is being replayed."""

    __slots__ = ("_due",)

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits.block_size, limits.prefix_caching)
        self._due: deque[KeyRun] = deque()

    def begin(self, runs: Iterable[KeyRun]) -> None:
        """Take in the keys that the next call will ask for."""
        self._due.extend(runs)

    def end(self) -> None:
        """The call is over: all its keys must have been asked for. Raises DivergenceError."""
        if self._due:
            run = self._due[0]
            raise DivergenceError(f"keys from block {run.first} on of request number {run.order} were not asked for")

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Give a sequence what the live one got: nothing, where that had no keys for so many blocks."""
        asked = sequence.request.order, sequence.choice, len(sequence.keys)
        if self._due and (self._due[0].order, self._due[0].choice, self._due[0].first) == asked:
            sequence.keys.extend(self._due.popleft().keys)


class ReplayDrafter(Drafter):
    """Proposes what the live drafter proposed, by stand-ins."""

    __slots__ = ("_drafts", "is_blind")

    def __init__(self) -> None:
        self._drafts: dict[int, array[int]] = {}
        self.is_blind = False  # whether the request that comes next had no ids in the live engine either

    def begin(self, plan: StepPlan) -> None:
        """Take in the drafts of the plan that comes next."""
        self._drafts = {}
        at = 0
        for slot, count in zip(plan.slots, plan.num_drafts, strict=False):
            if count:
                self._drafts[slot] = plan.draft_token_ids[at : at + count]
            at += count

    def knows(self, request: Request) -> bool:
        """As the live one."""
        return not self.is_blind

    def propose(self, sequence: Sequence, count: int) -> array[int]:
        """The recorded drafts. Raises DivergenceError where there is no room for them."""
        drafts = self._drafts.get(sequence.slot, array("i"))
        if len(drafts) > max(0, count):
            raise DivergenceError(f"{sequence.request.name} had {len(drafts)} drafts, and has room for {count}")
        return drafts
