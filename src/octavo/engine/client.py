"""EngineClient: how a front end talks to an engine, in this process or over a Unix socket.

Owns: the protocol, the output record, and the events that end requests. Does not: hold text, or know HTTP.
Invariants: every choice of an accepted request gets exactly one output with a finish_reason, and no output after that.
Only the request's last output has is_final set.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from octavo.core.plan import Event, EventKind, TokenLogprobs
from octavo.core.request import FinishError, FinishReason, Request
from octavo.media.item import MediaItem

ENDS = frozenset({EventKind.FINISHED, EventKind.CHOICE_FINISHED})
Verb = Literal[
    "statistics", "pause", "resume", "drain", "cancel_all", "reset_prefix_cache", "explain", "reset_statistics",
    "export_statistics", "frames", "forecast", "load_adapter", "unload_adapter",
]  # fmt: skip


@dataclass(slots=True)  # not frozen: one object is made per token, and a frozen object costs four times as much
class TokenOutput:
    """New ids of one choice since the last output: a snapshot, never an alias of live lists.

    `position` is the index of the first new id among the choice's outputs. `finish_reason` is set on the choice's last
    output, with `error` if the choice failed. `logprobs` is None or aligned with `token_ids`. `first_at` is when the
    front end received the request's first id, on the monotonic clock.
    `is_final` marks the last output of the whole request. Only the final output has `queue_s` (seconds from arrival to
    the first admission), `cached_tokens` (prompt tokens found in the cache at the first admission), `preempted` (begin
    and end of each preemption by the last engine, in seconds since arrival), and `pooled` if the request wants it: the
    state after the prompt, float32, scaled to length 1.
    `prompt_logprobs` is sent once, before or with the first id: (first position, entries).
    """

    request_id: str
    choice: int
    position: int
    token_ids: array[int]
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    prompt_logprobs: tuple[int, tuple[TokenLogprobs, ...]] | None = None
    pooled: bytes | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    error: FinishError | None = None
    queue_s: float = 0.0
    first_at: float | None = None
    is_final: bool = False
    preempted: tuple[tuple[float, float], ...] = ()

    @property
    def message(self) -> str | None:
        """The text of the error, or None."""
        return None if self.error is None else self.error.message


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine accepted the request with this max_tokens. `capped`: the request set none, so it is what fits."""

    request_id: str
    max_tokens: int
    capped: bool


def finished(
    request_id: str,
    reason: FinishReason,
    error: FinishError | None = None,
    *,
    choice: int | None = None,
    stop_token_id: int | None = None,
    time: float = 0.0,
) -> Event:
    """Return an event that ends a request, or one of its choices, without a scheduler."""
    kind = EventKind.FINISHED if choice is None else EventKind.CHOICE_FINISHED
    return Event(
        kind, request_id, time, 0, finish_reason=reason, stop_token_id=stop_token_id, error=error, choice=choice or 0
    )


class EngineClient(Protocol):
    """The interface of an engine's client. Safe to call from any task of one event loop."""

    async def submit(self, request: Request, media: tuple[MediaItem, ...] = ()) -> Accepted:
        """Submit a request with its media. Raises AdmissionError, DuplicateRequestError, EngineDeadError."""

    def outputs(
        self, request_id: str, final_only: bool = False, max_ids: int = sys.maxsize
    ) -> AsyncIterator[TokenOutput]:
        """Yield the outputs of an accepted request, up to the final one; a request has one reader.

        A slow reader gets the ids of several steps in one output. An output has at most `max_ids` ids. With
        `final_only` the reader is woken only at the end.
        """

    def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> int:
        """End waiting or running requests, or only one choice of each; return how many requests were open."""

    async def statistics(self) -> Mapping[str, object]:
        """Return engine counters and gauges as plain JSON values."""

    async def control(self, verb: Verb, argument: str = "") -> object:
        """Run a verb and return its result.

        statistics returns counters and gauges; cancel_all the number of requests; explain (of the request named by
        `argument`, or of all) what observe.explainer documents; export_statistics tables by name (metrics.export);
        forecast the wait of a new request; frames the frames after the cursor `argument` (docs/statistics.md). All
        other verbs return a bool. The arguments of load_adapter and unload_adapter are those of engine.adapters.
        """

    async def close(self) -> None:
        """Stop: every open request is answered first. Idempotent."""
