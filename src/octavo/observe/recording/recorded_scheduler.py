"""A scheduler whose calls are recorded: each verb does what it does, then hands over what it was given and gave.

Owns: the tap. Does not: decide otherwise, encode or write (recorder does).
Invariants: a call that is refused is not recorded, for it changes nothing; nothing that was handed over changes later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.core.admission import Admission
from octavo.core.kv.keys import KeyMaker
from octavo.core.limits import Limits
from octavo.core.plan import Events, StepFailure, StepPlan, StepResult
from octavo.core.request import FinishReason, Request, Sequence
from octavo.core.scheduler import Scheduler
from octavo.observe.recording.calls import Cancel, Control, EndChoice
from octavo.observe.recording.items import Admitted, Committed, Item, Keys, Planned

Put = Callable[[Item], None]


class KeptKeys(KeyMaker):
    """Makes keys, and keeps them until the call is handed over."""

    __slots__ = ("made",)

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits.block_size, limits.prefix_caching)
        self.made: list[tuple[int, int, int, tuple[bytes, ...]]] = []

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Make keys, and keep which they were."""
        first = len(sequence.keys)
        super().extend(sequence, num_blocks)
        if len(sequence.keys) > first:
            self.made.append((sequence.request.order, sequence.choice, first, tuple(sequence.keys[first:])))

    def take(self) -> Keys:
        """What was made since the last call."""
        if not self.made:
            return ()
        made, self.made = tuple(self.made), []
        return made


class RecordedScheduler(Scheduler):
    """A scheduler that tells `put` of every call. `clock` is the engine's."""

    __slots__ = ("_clock", "_keys", "_put")

    def __init__(self, limits: Limits, put: Put, clock: Callable[[], float]) -> None:
        super().__init__(limits)
        self._put = put
        self._clock = clock
        self._keys = self.state.cache.key_maker = KeptKeys(limits)

    def admit(self, request: Request, now: float) -> Admission:
        """As Scheduler.admit. The prompt's keys are made at once, so that they stand with the request."""
        admission = super().admit(request, now)
        self.state.cache.extend_keys(self.state.requests[request.request_id].sequences[0])
        self._put(Admitted(now, request, self._keys.take()))
        return admission

    def plan(self, now: float, only: frozenset[str] | None = None) -> StepPlan:
        """As Scheduler.plan."""
        plan = super().plan(now, only)
        rows = self.state.flight[-1].rows if not plan.is_empty else ()
        self._put(Planned(now, self._clock(), plan, rows, only, self._keys.take()))
        return plan

    def commit(self, plan: StepPlan, outcome: StepResult | StepFailure, now: float) -> Events:
        """As Scheduler.commit."""
        rows = self.state.flight[0].rows if self.state.flight else ()
        events = super().commit(plan, outcome, now)
        self._put(Committed(now, self._clock(), plan, outcome, rows, self._keys.take()))
        return events

    def cancel(
        self,
        request_ids: Iterable[str],
        now: float,
        reason: FinishReason = FinishReason.CANCELLED,
        message: str | None = None,
    ) -> int:
        """As Scheduler.cancel."""
        names = tuple(request_ids)
        count = super().cancel(names, now, reason, message)
        self._put(Cancel(now, names, reason, message))
        return count

    def end_choice(
        self,
        request_id: str,
        choice: int,
        now: float,
        reason: FinishReason = FinishReason.STOP,
        message: str | None = None,
    ) -> bool:
        """As Scheduler.end_choice."""
        has_ended = super().end_choice(request_id, choice, now, reason, message)
        self._put(EndChoice(now, request_id, choice, reason, message))
        return has_ended

    def reset_prefix_cache(self) -> bool:
        """As Scheduler.reset_prefix_cache."""
        was_reset = super().reset_prefix_cache()
        self._put(Control("reset_prefix_cache"))
        return was_reset

    def pause(self) -> None:
        """As Scheduler.pause."""
        super().pause()
        self._put(Control("pause"))

    def resume(self) -> None:
        """As Scheduler.resume."""
        super().resume()
        self._put(Control("resume"))

    def drain(self) -> None:
        """As Scheduler.drain."""
        super().drain()
        self._put(Control("drain"))

    def limit_step(self, num_tokens: int | None) -> None:
        """As Scheduler.limit_step."""
        super().limit_step(num_tokens)
        self._put(Control("limit_step", num_tokens))
