"""EngineQueue: the server's counts of waiting and running sequences, and the wait that a new request would have.

Owns: the counts, by key and by priority; the engine's last forecast, requesting a new one when it is old, and the
changes since. Does not: order anything (the scheduler does), forecast (observe.forecast does, in the engine) or
refuse a request (admission does).
Waiting sequences are those without a token, less those for which the engine has a slot and KV room now. So a bound of N
means N in addition to those that run, and nothing waits for an idle engine, however many requests are submitted.
The engine simulates its queue. Between two answers the same forecaster's WaitModel adds the effect of the requests
queued or started since. Until the engine has answered, waits are unknown.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from octavo.errors import OctavoError
from octavo.observe.forecast import WaitModel

MIN_AGE_S = 5.0  # before a new answer is requested: making one takes the step loop 9 to 40 ms, under 1 % of this
UNKNOWN_AGE_S = 0.1  # the same while there is no model: an answer without one costs nothing
MAX_AGE_S = 15.0  # of an answer; then only the model is used
ANSWER_S = 5.0
_UNKNOWN_SLOTS = 256


class DecayedMean:
    """A weighted mean in which a value's weight halves for each `half_life` of weight added after it."""

    __slots__ = ("_half_life", "_sum", "_weight", "value")

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._sum = 0.0
        self._weight = 0.0
        self.value: float | None = None  # None before the first `add`

    def add(self, total: float, weight: float) -> None:
        """Add `weight` items with the sum `total`."""
        kept = 0.5 ** (weight / self._half_life)
        self._sum = self._sum * kept + total
        self._weight = self._weight * kept + weight
        self.value = self._sum / self._weight


@dataclass(slots=True)
class QueuedWork:
    """Queued sequences, their prompt tokens, and their expected output tokens."""

    num_sequences: float = 0
    prompt_tokens: float = 0
    output_tokens: float = 0

    def add(self, other: QueuedWork, times: float = 1) -> None:
        """Add another's counts `times` times."""
        self.num_sequences += times * other.num_sequences
        self.prompt_tokens += times * other.prompt_tokens
        self.output_tokens += times * other.output_tokens

    def scaled(self, share: float) -> QueuedWork:
        """Return the counts multiplied by `share`."""
        return QueuedWork(self.num_sequences * share, self.prompt_tokens * share, self.output_tokens * share)


Queue = tuple[QueuedWork, int] | None  # queued work and running sequences; None: a request could start at once


@dataclass(frozen=True, slots=True)
class _Answer:
    """The engine's answer, and the server's queue at that moment."""

    wait_s: float
    queue: tuple[QueuedWork, int]
    at: float


class QueueForecast:
    """The engine's last forecast. `ask` calls the engine's verb `forecast` ("model": the model only); None: no call."""

    def __init__(
        self, ask: Callable[[str], Awaitable[object]] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.model: WaitModel | None = None
        self._ask = ask
        self._now = now
        self._answer: _Answer | None = None
        self._asked_at = -inf
        self._asking: asyncio.Task[None] | None = None

    def update(self, answer: Mapping[str, Any], queue: Queue) -> None:
        """Store an answer of the engine, with the server's current queue.

        The wait is used only if both see a full engine: just admitted requests are counted here first.
        """
        self._set_model(answer)
        wait_s = answer["new_request_s"]
        self._answer = _Answer(wait_s, queue, self._now()) if wait_s and queue is not None else None

    def refresh(self, queue: Callable[[], Queue]) -> None:
        """Request a forecast from the engine in the background, unless its last answer is recent."""
        if self._ask is None or (self._asking is not None and not self._asking.done()):
            return
        now = self._now()
        if now - self._asked_at >= (UNKNOWN_AGE_S if self.model is None else MIN_AGE_S):
            self._asked_at = now
            is_current = self._answer is not None and now - self._answer.at < MIN_AGE_S
            is_model_only = is_current or queue() is None
            self._asking = asyncio.create_task(self._ask_engine(self._ask, queue, is_model_only))

    async def _ask_engine(
        self, ask: Callable[[str], Awaitable[object]], queue: Callable[[], Queue], is_model_only: bool
    ) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await ask("model" if is_model_only else "")
        except (OctavoError, TimeoutError):
            self._answer = None
            return
        if isinstance(answer, Mapping) and is_model_only:
            self._set_model(answer)
        elif isinstance(answer, Mapping):
            self.update(answer, queue())

    def _set_model(self, answer: Mapping[str, Any]) -> None:
        if "model" in answer:
            self.model = None if answer["model"] is None else WaitModel(**answer["model"])

    def wait_s(self, ahead: QueuedWork, num_running: int) -> float | None:
        """Return the seconds until a request queued after `ahead` starts at a full engine; None if unknown."""
        answer = self._answer
        if answer is not None and self._now() - answer.at <= MAX_AGE_S:
            return max(0.0, answer.wait_s + self._model_s(ahead, num_running) - self._model_s(*answer.queue))
        return None if self.model is None else self._model_s(ahead, num_running)

    def _model_s(self, ahead: QueuedWork, num_running: int) -> float:
        if self.model is None:
            return 0.0
        return self.model.expected_wait_s(ahead.prompt_tokens, ahead.output_tokens, num_running)

    def prefill_s(self, num_tokens: int) -> float | None:
        """Return the seconds that `num_tokens` prompt tokens add to steps; None if unknown."""
        return None if self.model is None else self.model.steps_s(0, num_tokens)

    def answer_s(self, num_running: int) -> float | None:
        """Return the seconds that an answer takes while `num_running` sequences run; None if unknown."""
        if self.model is None:
            return None
        steps = self.model.answer_tokens
        return self.model.steps_s(steps, steps * max(1, num_running))

    def output_tokens(self, max_tokens: int | None) -> float:
        """Return the expected tokens that a sequence generates; 0 if unknown."""
        mean = 0.0 if self.model is None else self.model.answer_tokens
        return mean if max_tokens is None else min(mean, max_tokens)


class EngineQueue:
    """Counts of sequences and tokens; `num_slots` sequences and `num_kv_tokens` tokens fit the engine (0 = unknown)."""

    def __init__(self, num_slots: int = 0, num_kv_tokens: int = 0, forecast: QueueForecast | None = None) -> None:
        self.forecast = QueueForecast() if forecast is None else forecast
        self.num_slots = num_slots or _UNKNOWN_SLOTS
        self.num_kv_tokens = num_kv_tokens
        self.num_requests = 0  # HTTP requests with a ticket
        self.num_pending = 0  # sequences without a token
        self.num_running = 0  # sequences with a token
        self.num_tokens_held = 0  # by those
        self.new_share = 1.0  # of prompt tokens that need KV room of their own, from the last prompts
        self._new_tokens = DecayedMean(16_384)  # the share of prompt tokens not in the prefix cache
        self.pending = QueuedWork()  # of all prompts without a token
        self.by_key: Counter[str] = Counter()  # sequences without a token
        self.tokens_by_key: Counter[str] = Counter()
        self._by_priority: dict[int, QueuedWork] = {}

    def prompt_done(self, num_tokens: int, num_cached: int) -> None:
        """Count an ended prompt of `num_tokens` tokens, `num_cached` of them from the prefix cache."""
        if num_tokens > 0:
            self._new_tokens.add(num_tokens - num_cached, num_tokens)
            self.new_share = self._new_tokens.value or 0.0
        self.forecast.refresh(self.state)

    def state(self) -> Queue:
        """Return the queued work and the running sequences; None if a new request could start at once."""
        return None if self.num_free > self.num_pending else (self.ahead_of(None), self.num_busy)

    def wait_s(self, priority: int | None = None) -> float | None:
        """Return the seconds that a new request of this priority, or (None) after all others, would wait.

        0 if it could start at once; None if unknown.
        """
        if self.num_free > self.num_pending:
            return 0.0
        self.forecast.refresh(self.state)
        return self.forecast.wait_s(self.ahead_of(priority), self.num_busy)

    @property
    def num_free(self) -> int:
        """Sequences that could start at once."""
        free = max(0, self.num_slots - self.num_running)
        if self.num_kv_tokens and self.num_pending:
            room = max(0, self.num_kv_tokens - self.num_tokens_held)
            each = max(1.0, self.pending.prompt_tokens * self.new_share / self.num_pending)
            free = min(free, int(room / each))
        return free

    @property
    def num_busy(self) -> int:
        """Sequences that the engine works on, including those that compute their prompt."""
        return self.num_running + min(self.num_free, self.num_pending)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot or for KV room."""
        return max(0, self.num_pending - self.num_free)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of all sequences without a token."""
        return round(self.pending.prompt_tokens)

    def ahead_of(self, priority: int | None) -> QueuedWork:
        """Return the queued work that precedes a new request of this priority (None: all, in order of arrival)."""
        if priority is None:
            chosen = self.pending
        else:
            chosen = QueuedWork()
            for level, work in self._by_priority.items():
                if level <= priority:
                    chosen.add(work)
        share = max(0.0, 1 - self.num_free / chosen.num_sequences) if chosen.num_sequences else 0.0
        return chosen.scaled(share)

    def add(self, key: str, priority: int, work: QueuedWork, num_prompts: int) -> None:
        """Add `num_prompts` prompts to the queue, each of this work; a negative number removes them."""
        if not num_prompts:
            return
        num_sequences = round(num_prompts * work.num_sequences)
        self.num_pending += num_sequences
        self.pending.add(work, num_prompts)
        level = self._by_priority.setdefault(priority, QueuedWork())
        level.add(work, num_prompts)
        if level.num_sequences < 0.5:
            del self._by_priority[priority]
        self.by_key[key] += num_sequences
        self.tokens_by_key[key] += round(num_prompts * work.prompt_tokens)
        if self.by_key[key] <= 0:
            del self.by_key[key], self.tokens_by_key[key]
        if not self.num_pending:
            self.pending = QueuedWork()  # drop rounding errors of the sums
