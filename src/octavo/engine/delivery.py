"""Delivery: what one step gives to the front end, as columns, and the Outbox that makes it.

Owns: the open requests as the engine's side sees them, and the promise of one end for each.
Does not: know sockets, asyncio or text; it runs in the engine's thread.
Invariant: every request opened here gets exactly one End, and no token after it. A choice that ends before its
request has a ChoiceEnd; the request's End is that of all its other choices.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.core.plan import Event, EventKind, Events, TokenLogprobs
from octavo.core.request import FinishError, FinishReason, Request

MAX_PREEMPTIONS_TOLD = 32  # of one request, with their times; all are counted
Score = tuple[str, int, tuple[TokenLogprobs, ...]]  # request id, first position, entries
Pooled = tuple[str, bytes]  # request id, float32


def _ints() -> array[int]:
    return array("i")


@dataclass(frozen=True, slots=True)
class Start:
    """The first admission of a request by an engine: seconds since its arrival, prompt tokens found in the cache."""

    request_id: str
    queue_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The end of one choice of a request that goes on."""

    request_id: str
    choice: int
    finish_reason: FinishReason
    stop_token_id: int | None = None
    error: FinishError | None = None

    @property
    def message(self) -> str | None:
        """The text of its error."""
        return None if self.error is None else self.error.message


@dataclass(frozen=True, slots=True)
class End:
    """The end of one request, and of its choices that have not ended. `queue_s` is arrival to first admission.

    `preempted` are the times that it was out of the batch: (from, to) in seconds since its arrival, the first ones.
    """

    request_id: str
    finish_reason: FinishReason
    stop_token_id: int | None = None
    cached_tokens: int = 0
    num_preemptions: int = 0
    queue_s: float = 0.0
    error: FinishError | None = None
    preempted: tuple[tuple[float, float], ...] = ()

    @property
    def message(self) -> str | None:
        """The text of its error."""
        return None if self.error is None else self.error.message


@dataclass(slots=True)
class Delivery:
    """One step's tokens (columns, one entry per token), prompt scores, pooled states, and ends, which come last.

    `starts` are admissions of this step and of those before it that had nothing else to tell.

    Nobody writes to it once sent.
    """

    request_ids: list[str] = field(default_factory=list)
    choices: array[int] = field(default_factory=_ints)
    positions: array[int] = field(default_factory=_ints)
    token_ids: array[int] = field(default_factory=_ints)
    logprobs: list[TokenLogprobs | None] | None = None
    scores: tuple[Score, ...] = ()
    choice_ends: tuple[ChoiceEnd, ...] = ()
    ends: tuple[End, ...] = ()
    starts: tuple[Start, ...] = ()
    pooled: tuple[Pooled, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing to send."""
        return not (self.request_ids or self.ends or self.choice_ends or self.scores or self.starts or self.pooled)


class _Open:
    """An open request: when it arrived, how long it queued, how often and when it was preempted."""

    __slots__ = ("arrival", "num_preemptions", "out_since", "preempted", "queue_s")

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.queue_s: float | None = None
        self.num_preemptions = 0
        self.out_since: float | None = None
        self.preempted: tuple[tuple[float, float], ...] = ()

    def leave(self, time: float, is_preempted: bool) -> None:
        """It is out of the batch, preempted or put back after a failed row or step."""
        self.num_preemptions += is_preempted
        self.out_since = time

    def come_back(self, time: float) -> None:
        """It is in the batch again, or over."""
        if self.out_since is not None and len(self.preempted) < MAX_PREEMPTIONS_TOLD:
            self.preempted += ((self.out_since - self.arrival, time - self.arrival),)
        self.out_since = None


class Outbox:
    """Turns events into deliveries and keeps track of who still waits for an end."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._starts: list[Start] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open_ids(self) -> tuple[str, ...]:
        """Ids without an end yet, oldest first."""
        return tuple(self._open)

    def open(self, request: Request) -> None:
        """A request was admitted: it will get one End."""
        self._open[request.request_id] = _Open(request.arrival)

    def decided(self, decisions: Iterable[Event]) -> Delivery:
        """A delivery of decisions alone. Admissions go with the next commit, or with an end."""
        choice_ends, ends = self._ends(decisions)
        starts = self._take_starts() if ends else ()
        return Delivery(choice_ends=choice_ends, ends=ends, starts=starts)

    def committed(self, events: Events) -> Delivery:
        """A delivery of a commit; takes over the columns without copying them."""
        choice_ends, ends = self._ends(events.decisions) if events.decisions else ((), ())
        return Delivery(
            request_ids=events.request_ids,
            choices=events.choices,
            positions=events.positions,
            token_ids=events.token_ids,
            logprobs=events.logprobs,
            scores=events.scores,
            choice_ends=choice_ends,
            ends=ends,
            starts=self._take_starts() if self._starts else (),
            pooled=events.pooled,
        )

    def end_all(self, reason: FinishReason, error: FinishError) -> Delivery:
        """End every open request here, whatever the scheduler knows."""
        ends = [self._end(request_id, reason, error) for request_id in self._open]
        self._open.clear()
        return Delivery(ends=tuple(ends), starts=self._take_starts())

    def _take_starts(self) -> tuple[Start, ...]:
        starts, self._starts = tuple(self._starts), []
        return starts

    def _end(self, request_id: str, reason: FinishReason, error: FinishError) -> End:
        entry = self._open[request_id]
        return End(request_id, reason, num_preemptions=entry.num_preemptions, queue_s=entry.queue_s or 0.0, error=error)

    def _ends(self, decisions: Iterable[Event]) -> tuple[tuple[ChoiceEnd, ...], tuple[End, ...]]:
        """Follow the decisions; return the ends among them."""
        choice_ends: list[ChoiceEnd] = []
        ends: list[End] = []
        for event in decisions:
            entry = self._open.get(event.request_id)
            if entry is None:
                continue
            reason = FinishReason.ERROR if event.finish_reason is None else event.finish_reason
            if event.kind == EventKind.ADMITTED and entry.queue_s is None:
                entry.queue_s = max(0.0, event.time - entry.arrival)
                self._starts.append(Start(event.request_id, entry.queue_s, event.cached_tokens))
            elif event.kind == EventKind.PREEMPTED:
                entry.leave(event.time, is_preempted=event.by is not None)
            elif event.kind == EventKind.RESUMED:
                entry.come_back(event.time)
            elif event.kind == EventKind.CHOICE_FINISHED:
                choice_ends.append(ChoiceEnd(event.request_id, event.choice, reason, event.stop_token_id, event.error))
            elif event.kind == EventKind.FINISHED:
                del self._open[event.request_id]
                entry.come_back(event.time)
                ends.append(
                    End(
                        event.request_id,
                        reason,
                        event.stop_token_id,
                        event.cached_tokens,
                        entry.num_preemptions,
                        entry.queue_s or 0.0,
                        event.error,
                        entry.preempted,
                    )
                )
        return tuple(choice_ends), tuple(ends)
