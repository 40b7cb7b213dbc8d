"""For recording and replay: a scheduler's calls as records, and inputs that replace its own computations.

Owns: the types of calls; the protocols CallTap and InputSource; the key makers and the drafter that use them.
Does not: record, or compare. A scheduler without a tap and without a source runs no code of this module in a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

from octavo.core.drafts import Drafter
from octavo.core.kv.prefix import KeyMaker
from octavo.core.limits import Limits
from octavo.core.plan import StepFailure, StepPlan, StepResult
from octavo.core.request import FinishError, FinishReason, Request
from octavo.core.request_state import Sequence

# --- calls: plans, results and requests in them are never written to afterwards, so they may cross to another thread --


class KeyRun(NamedTuple):
    """Block keys that a sequence got during a call, from block `first` on; `order` is its request's arrival number."""

    order: int
    choice: int
    first: int
    keys: tuple[bytes, ...]


class AdmitCall(NamedTuple):
    """Scheduler.admit queued a request."""

    now: float
    request: Request
    keys: tuple[KeyRun, ...] = ()


class PlanCall(NamedTuple):
    """Scheduler.plan made a plan, possibly an empty one."""

    now: float
    plan: StepPlan
    only: frozenset[str] | None = None
    keys: tuple[KeyRun, ...] = ()


class CommitCall(NamedTuple):
    """Scheduler.commit committed the outcome of step `step`."""

    now: float
    step: int
    outcome: StepResult | StepFailure
    keys: tuple[KeyRun, ...] = ()


class CancelCall(NamedTuple):
    """Scheduler.cancel ended requests."""

    now: float
    request_ids: tuple[str, ...]
    reason: FinishReason
    error: FinishError | None = None


class EndChoiceCall(NamedTuple):
    """Scheduler.end_choice was called."""

    now: float
    request_id: str
    choice: int
    reason: FinishReason


class ControlCall(NamedTuple):
    """A control of the scheduler was called: pause, resume, drain, reset_prefix_cache, or limit_step (`num_tokens`)."""

    verb: str
    num_tokens: int | None = None


class KVCall(NamedTuple):
    """A verb for KV that crosses engines was called: expect_kv (`num_tokens`), receive_kv, keep_kv or release_kv."""

    verb: str
    request_id: str
    num_tokens: int = 0


Call = AdmitCall | PlanCall | CommitCall | CancelCall | EndChoiceCall | ControlCall | KVCall


class CallTap(Protocol):
    """Receives each call of a scheduler's method after the method has returned, but no call that raised."""

    def called(self, call: Call) -> None:
        """Handle a call."""


class FanOutTap:
    """Gives each call to several taps, in order."""

    def __init__(self, taps: Many[CallTap]) -> None:
        self._taps = tuple(taps)

    def called(self, call: Call) -> None:
        """Give a call to each tap."""
        for tap in self._taps:
            tap.called(call)


class InputSource(Protocol):
    """Supplies the block keys and drafts that a scheduler cannot compute for requests without token ids."""

    has_drafts: bool  # the source also supplies drafts

    def keys(self, order: int, choice: int, first: int) -> Iterable[bytes]:
        """Return the block keys that the sequence has now, from block `first` on."""

    def can_draft(self, request: Request) -> bool:
        """Return True if the source may have drafts for a request."""

    def drafts(self, request_id: str, slot: int, most: int) -> array[int]:
        """Return up to `most` drafts for the sequence in a slot, for the plan being made."""


class NotedKeys(KeyMaker):
    """Makes keys, and records the keys that were made during the current call."""

    __slots__ = ("_runs",)

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits.block_size, limits.prefix_caching)
        self._runs: list[KeyRun] = []

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Make keys, and record them."""
        first = len(sequence.keys)
        super().extend(sequence, num_blocks)
        if len(sequence.keys) > first:
            self._runs.append(KeyRun(sequence.request.order, sequence.choice, first, tuple(sequence.keys[first:])))

    def take(self) -> tuple[KeyRun, ...]:
        """Return the keys made since the last call."""
        runs, self._runs = tuple(self._runs), []
        return runs


class GivenKeys(KeyMaker):
    """Takes keys from an InputSource instead of computing them."""

    __slots__ = ("_source",)

    def __init__(self, limits: Limits, source: InputSource) -> None:
        super().__init__(limits.block_size, limits.prefix_caching)
        self._source = source

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Append the source's next keys to the sequence's keys."""
        sequence.keys.extend(self._source.keys(sequence.request.order, sequence.choice, len(sequence.keys)))


class GivenDrafts(Drafter):
    """Takes drafts from an InputSource instead of proposing them."""

    __slots__ = ("_given",)

    def __init__(self, source: InputSource) -> None:
        super().__init__()
        self._given = source

    def knows(self, request: Request) -> bool:
        """Return True if the source may have drafts for the request."""
        return self._given.can_draft(request)

    def propose(self, rows: list[tuple[Sequence, int]], num_rows: int) -> list[array[int]]:
        """Return the source's drafts."""
        return [self._given.drafts(sequence.request.name, sequence.slot, count) for sequence, count in rows]
