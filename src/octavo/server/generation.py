"""Generation: the open sessions of one HTTP request, from submission to the last delta.

Owns: submitting all prompts or none, merging their deltas, cancelling what is open, the request's metrics.
Does not: shape answers. Invariant: after `close` no session of it is open in the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from octavo.core.request import FinishError, FinishReason, SamplingParams
from octavo.errors import ErrorKind, OctavoError, error_of
from octavo.frontend.outputs import token_bytes
from octavo.frontend.sessions import RequestOptions
from octavo.observe.metrics.requests import Finished, RequestMetrics
from octavo.observe.request_trace import RequestTrace, Timed
from octavo.server.admission import AdmissionTicket
from octavo.server.encoding import REASONS, Choice
from octavo.server.faults import ApiError, cancelled_error, from_exception

if TYPE_CHECKING:
    from octavo.frontend.outputs import Usage
    from octavo.frontend.sessions import Session, Sessions, TextDelta

Merged = asyncio.Queue["tuple[int, TextDelta] | asyncio.Task[None]"]
GIVEN_UP = (FinishReason.CANCELLED, FinishReason.TIMEOUT)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What one HTTP request asks of the engine. `arrival` is when it reached the server, on the monotonic clock.

    `request_id` is the engine's: no two requests have the same, whatever their clients call them.
    """

    request_id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    arrival: float
    options: RequestOptions = field(default_factory=RequestOptions)
    trace: RequestTrace | None = None

    @property
    def session_ids(self) -> list[str]:
        """The engine's name for each prompt."""
        if len(self.prompts) == 1:
            return [self.request_id]
        return [f"{self.request_id}-{index}" for index in range(len(self.prompts))]


class Generation:
    """Sessions of one request, one per prompt; the choices of the first prompt come first.

    `closing` gives back whatever was taken for it, the ticket too.
    """

    def __init__(
        self,
        asked: GenerationRequest,
        sessions: list[Session],
        metrics: RequestMetrics,
        ticket: AdmissionTicket,
        closing: ExitStack,
    ) -> None:
        self.asked = asked
        self._sessions = sessions
        self._metrics = metrics
        self._ticket = ticket
        self._closing = closing
        self.num_choices = len(sessions) * asked.params.n
        self._last_at = [0.0] * self.num_choices
        self._num_tokens = [0] * self.num_choices
        self._open = set(range(len(sessions)))
        self._silent = set(self._open)  # without a token yet
        self._token_bytes = token_bytes(asked.params.num_logprobs)

    @property
    def name(self) -> str:
        """The engine's name of it, for the log."""
        return self.asked.request_id

    @property
    def unread_bytes(self) -> int:
        """Roughly what is held for a reader that does not read: ids, and log-probabilities where asked for."""
        return self._token_bytes * sum(session.num_unread for session in self._sessions)

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield (index, delta) until every choice has its finish reason. Raises ApiError for a failed one."""
        source = self._merged() if len(self._sessions) > 1 else self._only()
        async with aclosing(source):
            async for session, delta in source:
                index = session * self.asked.params.n + delta.choice
                if delta.finish_reason not in (None, *REASONS) and delta.text:  # what came before the failure is told
                    before = replace(delta, finish_reason=None, stop_reason=None, usage=None, error=None)
                    self._note(session, index, before)
                    yield index, before
                    delta = replace(delta, text="", token_ids=delta.token_ids[:0], logprobs=None)
                self._note(session, index, delta)
                yield index, delta
        if self._open:
            raise ApiError(500, "the engine ended an answer without a reason", code="engine_error")

    async def _only(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        async for delta in self._sessions[0]:
            yield 0, delta

    async def _merged(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        queue: Merged = asyncio.Queue()
        room = asyncio.Semaphore(len(self._sessions))  # beyond it whoever reads is slow, and the ledger waits for it
        tasks = [asyncio.create_task(_forward(i, session, queue, room)) for i, session in enumerate(self._sessions)]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        num_open = len(tasks)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, asyncio.Task):
                    item.result()
                    num_open -= 1
                else:
                    room.release()
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _note(self, session: int, index: int, delta: TextDelta) -> None:
        now = time.monotonic()
        if delta.token_ids:
            num_tokens = len(delta.token_ids)
            if session in self._silent:
                self._silent.discard(session)
                self._metrics.first_tokens(now - self.asked.arrival, num_tokens, len(self.asked.prompts[session]))
                self._ticket.seat.start()
            elif self._last_at[index]:
                self._metrics.next_tokens(now - self._last_at[index], num_tokens)
            else:
                self._metrics.other_tokens(num_tokens)
            self._ticket.generated(num_tokens)
            self._num_tokens[index] += num_tokens
            self._last_at[index] = now
        if delta.finish_reason is not None:
            self._note_end(session, delta.finish_reason, delta, now)

    def _note_end(self, session: int, reason: FinishReason, delta: TextDelta, now: float) -> None:
        """Count the end of a choice, and with it that of its prompt. Raises ApiError where it failed."""
        usage, trace = delta.usage, self.asked.trace
        if usage is not None:
            self._open.discard(session)
            if trace is not None:
                trace.timed(_timed(usage, now), REASONS.get(reason, reason.name.lower()))
        if reason not in REASONS:
            if trace is not None:
                trace.error = reason.name.lower()
            if usage is not None:
                self._metrics.ended_early("abort" if reason in GIVEN_UP else "error")
            raise failure_of(reason, delta.error)
        if usage is not None:
            if session in self._silent:  # it was to have no tokens: the answer is what the prompt gives
                self._silent.discard(session)
                self._metrics.prompt_only(usage.prompt_tokens)
            end = Finished(
                REASONS[reason],
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cached_tokens,
                usage.queue_s,
                usage.ttft_s,
                e2e_s=now - self.asked.arrival,
                max_tokens=self.asked.params.max_tokens,
                num_choices=self.asked.params.num_sequences,
                longest=max(self._num_tokens[session * self.asked.params.n :][: self.asked.params.n]),
            )
            self._metrics.finished(end)
            self._ticket.ended(end)

    async def collect(self) -> list[Choice]:
        """Wait for every choice to end."""
        choices = [Choice() for _ in range(self.num_choices)]
        async with aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                choices[index].deltas.append(delta)
        return choices

    async def close(self) -> None:
        """Cancel in the engine what has not ended, and give back what was taken. Idempotent."""
        if self._open and self.asked.trace is not None:
            self.asked.trace.error = self.asked.trace.error or "cancelled"
        self._closing.close()
        while self._open:
            self._metrics.ended_early("abort")
            await self._sessions[self._open.pop()].cancel()


def _timed(usage: Usage, now: float) -> Timed:
    return Timed(
        arrival=now - usage.e2e_s,
        queue_s=usage.queue_s,
        ttft_s=usage.ttft_s,
        ended=now,
        preempted=usage.preempted,
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def failure_of(reason: FinishReason, error: FinishError | None) -> ApiError:
    """Return what went wrong with a request that ended for this reason, with the engine's error."""
    kind = ErrorKind.ENGINE if error is None else error.kind
    if reason is FinishReason.TIMEOUT and kind is ErrorKind.QUEUE_TIMEOUT:
        return ApiError(408, "the request did not start within its queue timeout", code="queue_timeout")
    if reason is FinishReason.TIMEOUT:
        return ApiError(408, "the request did not finish within its timeout", code="timeout")
    if reason is FinishReason.CANCELLED and kind is not ErrorKind.ENGINE_DEAD:
        return cancelled_error()
    return from_exception(error_of(kind, "the engine failed" if error is None else error.message))


async def _forward(index: int, session: Session, queue: Merged, room: asyncio.Semaphore) -> None:
    async for delta in session:
        await room.acquire()
        queue.put_nowait((index, delta))


async def open_sessions(sessions: Sessions, asked: GenerationRequest) -> list[Session]:
    """Submit every prompt, or none: when one is refused the others are cancelled.

    They go together, in order: an engine that answers between steps would otherwise take them in one by one.
    """
    if len(asked.prompts) == 1:
        return [await sessions.submit(asked.prompts[0], asked.params, request_id=asked.request_id, **asked.options)]
    pairs = zip(asked.session_ids, asked.prompts, strict=True)
    opening = [
        asyncio.ensure_future(sessions.submit(prompt, asked.params, request_id=request_id, **asked.options))
        for request_id, prompt in pairs
    ]
    try:
        return list(await asyncio.gather(*opening))
    except (OctavoError, asyncio.CancelledError):
        for each in opening:
            each.cancel()
        for opened in await asyncio.gather(*opening, return_exceptions=True):
            if not isinstance(opened, BaseException):
                await opened.cancel()
        raise
