"""EngineClient: how a front end talks to an engine, in this process or over a Unix socket.

Owns: the protocol and the output record. Does not: hold text, import torch, or know HTTP.
Invariants: every choice of an accepted request gets exactly one output with a finish_reason, and nothing after it;
the request's last output, and only that, is_final.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from octavo.core.plan import TokenLogprobs
from octavo.core.request import FinishError, FinishReason, Request

Verb = Literal[
    "statistics", "pause", "resume", "drain", "cancel_all", "reset_prefix_cache", "explain", "reset_statistics",
    "export_statistics", "frames", "forecast",
]  # fmt: skip


@dataclass(slots=True)  # not frozen: one is made per token, and a frozen one costs four times as much
class TokenOutput:
    """New ids of one choice since the last output: a snapshot, never an alias of live lists.

    `position` is the index of the first new id among the choice's outputs. `finish_reason` is set on the choice's last
    output, with `error` if something went wrong. `is_final` marks the last output of the whole request. That one has
    queue_s (seconds from arrival to the first admission), cached_tokens (tokens of the prompt found in the cache at the
    first admission) and preempted (when it was preempted in the engine that ended it: from and to, in seconds since its
    arrival). `logprobs` is None or aligned with `token_ids`.
    `first_at` is when the front end received the request's first id, on the monotonic clock.
    `prompt_logprobs` is sent once, before or with the first id: (first position, entries). `pooled`, in the last
    output of a request that wants it, is the state after the prompt: float32, scaled to length 1.
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
        """The text of the error, None without one."""
        return None if self.error is None else self.error.message


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine accepted the request with this max_tokens; `capped` if it was reduced to what fits."""

    request_id: str
    max_tokens: int
    capped: bool


class EngineClient(Protocol):
    """The interface of an engine's client. Safe to call from any task of one event loop."""

    async def submit(self, request: Request) -> Accepted:
        """Submit a request. Raises AdmissionError, DuplicateRequestError, EngineDeadError."""
        ...

    def outputs(
        self, request_id: str, final_only: bool = False, max_ids: int = sys.maxsize
    ) -> AsyncIterator[TokenOutput]:
        """Yield the outputs of an accepted request, to the final one; one reader per request.

        A slow reader gets the ids of several steps in one output, or in several of at most `max_ids` ids. With
        `final_only` the reader is woken only at the end.
        """
        ...

    def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> int:
        """End requests in any state, or only one choice of them; return how many were open."""
        ...

    async def statistics(self) -> Mapping[str, object]:
        """Return engine counters and gauges as plain JSON values."""
        ...

    async def control(self, verb: Verb, argument: str = "") -> object:
        """Return the statistics; pause, resume, drain, cancel every request (-> how many), reset the prefix cache
        (-> bool), explain a request or, without one, all (-> see observe.explainer), reset the statistics (-> bool),
        export them (-> tables by name, see metrics.export), return frames after a cursor (see docs/statistics.md)."""
        ...

    async def close(self) -> None:
        """Stop: every open request is answered first. Idempotent."""
        ...
