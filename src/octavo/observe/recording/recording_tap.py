"""The call tap of a scheduler that is recorded: it hands over what each call was given and gave.

Owns: the items' making. Does not: encode or write (recorder does).
Invariant: nothing that was handed over changes later.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.plan import Events, StepFailure, StepPlan, StepResult
from octavo.core.request import FinishError, FinishReason, Request
from octavo.observe.recording.calls import Cancel, Control, EndChoice
from octavo.observe.recording.items import Admitted, Committed, Item, Keys, Planned

Put = Callable[[Item], None]


class RecordingTap:
    """Tells `put` of every call. `clock` is the engine's."""

    def __init__(self, put: Put, clock: Callable[[], float]) -> None:
        self._put = put
        self._clock = clock
        self._keys: list[tuple[int, int, int, tuple[bytes, ...]]] = []

    def keyed(self, order: int, choice: int, first: int, keys: tuple[bytes, ...]) -> None:
        """Keep the keys until their call is handed over."""
        self._keys.append((order, choice, first, keys))

    def _take_keys(self) -> Keys:
        if not self._keys:
            return ()
        keys, self._keys = tuple(self._keys), []
        return keys

    def admitted(self, request: Request, now: float) -> None:
        """A request was taken."""
        self._put(Admitted(now, request, self._take_keys()))

    def planned(self, plan: StepPlan, now: float, only: frozenset[str] | None) -> None:
        """A plan was made."""
        self._put(Planned(now, self._clock(), plan, only, self._take_keys()))

    def committed(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events, now: float) -> None:
        """A step was committed."""
        self._put(Committed(now, self._clock(), plan, outcome, self._take_keys()))

    def cancelled(
        self, request_ids: tuple[str, ...], now: float, reason: FinishReason, error: FinishError | None
    ) -> None:
        """Requests were ended."""
        self._put(Cancel(now, request_ids, reason, None if error is None else error.message))

    def choice_ended(self, request_id: str, choice: int, now: float, reason: FinishReason) -> None:
        """A choice was ended."""
        self._put(EndChoice(now, request_id, choice, reason))

    def controlled(self, verb: str, num_tokens: int | None = None) -> None:
        """A control was called."""
        self._put(Control(verb, num_tokens))
