"""What a scheduler tells about its calls, and what it can be given instead of making it: for recording and replay.

Owns: the two protocols, and the makers of block keys and drafts that use them. Does not: record, or compare.
A scheduler without a tap and without a source has none of this on its path.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol

from octavo.core.drafts import Drafter
from octavo.core.kv.keys import KeyMaker
from octavo.core.limits import Limits
from octavo.core.plan import Events, StepFailure, StepPlan, StepResult
from octavo.core.request import FinishError, FinishReason, Request, Sequence


class CallTap(Protocol):
    """Is told of every call of a verb, after it, with its arguments and outcome; of none that raised.

    Plans, outcomes and requests are never written to afterwards.
    """

    def keyed(self, order: int, choice: int, first: int, keys: tuple[bytes, ...]) -> None:
        """A sequence got block keys, from index `first` on, during the call that is told next.

        `order` counts admissions from 0. The keys of a prompt are made during its admission.
        """
        ...

    def admitted(self, request: Request, now: float) -> None:
        """Scheduler.admit took a request."""
        ...

    def planned(self, plan: StepPlan, now: float, only: frozenset[str] | None) -> None:
        """Scheduler.plan made a plan, possibly an empty one."""
        ...

    def committed(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events, now: float) -> None:
        """Scheduler.commit took an outcome."""
        ...

    def cancelled(
        self, request_ids: tuple[str, ...], now: float, reason: FinishReason, error: FinishError | None
    ) -> None:
        """Scheduler.cancel ended requests."""
        ...

    def choice_ended(self, request_id: str, choice: int, now: float, reason: FinishReason) -> None:
        """Scheduler.end_choice was called."""
        ...

    def controlled(self, verb: str, num_tokens: int | None = None) -> None:
        """pause, resume, drain, reset_prefix_cache or limit_step was called."""
        ...


class InputSource(Protocol):
    """Supplies what a scheduler cannot compute for requests known by length: block keys and drafts."""

    has_drafts: bool  # whether drafts come from here, too

    def keys(self, order: int, choice: int, first: int) -> Iterable[bytes]:
        """Return the block keys of a sequence from index `first` on; none where it has none yet."""
        ...

    def can_draft(self, request: Request) -> bool:
        """Return whether drafts are proposed for a request."""
        ...

    def drafts(self, request_id: str, slot: int, most: int) -> array[int]:
        """Return the drafts of the sequence in a slot for the plan in the making, at most so many."""
        ...


class TappedKeys(KeyMaker):
    """Makes keys, and tells a tap which."""

    __slots__ = ("_tap",)

    def __init__(self, limits: Limits, tap: CallTap) -> None:
        super().__init__(limits.block_size, limits.prefix_caching)
        self._tap = tap

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Make keys, and tell the tap."""
        first = len(sequence.keys)
        super().extend(sequence, num_blocks)
        if len(sequence.keys) > first:
            self._tap.keyed(sequence.request.order, sequence.choice, first, tuple(sequence.keys[first:]))


class GivenKeys(KeyMaker):
    """Takes keys from a source."""

    __slots__ = ("_source",)

    def __init__(self, limits: Limits, source: InputSource) -> None:
        super().__init__(limits.block_size, limits.prefix_caching)
        self._source = source

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Give a sequence the keys that the source has."""
        sequence.keys.extend(self._source.keys(sequence.request.order, sequence.choice, len(sequence.keys)))


class GivenDrafts(Drafter):
    """Takes drafts from a source."""

    __slots__ = ("_source",)

    def __init__(self, source: InputSource) -> None:
        self._source = source

    def knows(self, request: Request) -> bool:
        """As the source."""
        return self._source.can_draft(request)

    def propose(self, sequence: Sequence, count: int) -> array[int]:
        """The source's drafts."""
        return self._source.drafts(sequence.request.name, sequence.slot, count)
