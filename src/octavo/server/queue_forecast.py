"""QueueForecast: how long a new request would wait, as the engine's forecaster says.

Owns: the engine's last answer, asking for a new one where it is old, and what has changed since.
Does not: forecast (observe.forecast does, in the engine), know who waits (waiting does), or decide anything.
The engine simulates its queue. Between two answers the same forecaster's WaitModel gives the difference that the
requests make which were queued or started since. Until the engine has answered, nothing is known.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from octavo.errors import OctavoError
from octavo.observe.forecast import WaitModel

MIN_AGE_S = 5.0  # an answer is used for so long: making one takes the step loop 9 to 40 ms, under 1 % of it
UNKNOWN_AGE_S = 0.1  # an answer that says nothing, which costs nothing
MAX_AGE_S = 15.0  # of an answer; then only the model is used
ANSWER_S = 5.0


@dataclass(slots=True)
class QueuedWork:
    """What waits: sequences, the tokens of their prompts, the tokens that they will probably generate."""

    num_sequences: float = 0
    prompt_tokens: float = 0
    output_tokens: float = 0

    def add(self, other: QueuedWork, times: float = 1) -> None:
        """Add another's, so many times."""
        self.num_sequences += times * other.num_sequences
        self.prompt_tokens += times * other.prompt_tokens
        self.output_tokens += times * other.output_tokens

    def scaled(self, share: float) -> QueuedWork:
        """Return a share of it."""
        return QueuedWork(self.num_sequences * share, self.prompt_tokens * share, self.output_tokens * share)


Queue = tuple[QueuedWork, int] | None  # what waits, and how many sequences run; None: a request could start at once


@dataclass(frozen=True, slots=True)
class _Answer:
    """The engine's answer, and the queue as it was here at that moment."""

    wait_s: float
    queue: tuple[QueuedWork, int]
    at: float


class QueueForecast:
    """`ask` puts the engine's verb `forecast` (its argument: "model" for the model alone); None: it is never asked."""

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
        """Note an answer of the engine, with the queue as it is here now.

        The wait counts only where both see a full engine: just admitted requests are counted here first.
        """
        self._set_model(answer)
        wait_s = answer["new_request_s"]
        self._answer = _Answer(wait_s, queue, self._now()) if wait_s and queue is not None else None

    def refresh(self, queue: Callable[[], Queue]) -> None:
        """Ask the engine in the background, unless its last answer is fresh."""
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
        """Return the seconds until a request starts that is queued after `ahead`, at a full engine; None: unknown."""
        answer = self._answer
        if answer is not None and self._now() - answer.at <= MAX_AGE_S:
            return max(0.0, answer.wait_s + self._model_s(ahead, num_running) - self._model_s(*answer.queue))
        return None if self.model is None else self._model_s(ahead, num_running)

    def _model_s(self, ahead: QueuedWork, num_running: int) -> float:
        if self.model is None:
            return 0.0
        return self.model.expected_wait_s(ahead.prompt_tokens, ahead.output_tokens, num_running)

    def prefill_s(self, num_tokens: int) -> float | None:
        """Return the seconds that steps take longer by so many prompt tokens; None: unknown."""
        return None if self.model is None else self.model.steps_s(0, num_tokens)

    def answer_s(self, num_running: int) -> float | None:
        """Return the seconds that an answer takes beside so many sequences; None: unknown."""
        if self.model is None:
            return None
        steps = self.model.answer_tokens
        return self.model.steps_s(steps, steps * max(1, num_running))

    def output_tokens(self, max_tokens: int | None) -> float:
        """Return about how many tokens a sequence will generate; 0 while nothing is known."""
        mean = 0.0 if self.model is None else self.model.answer_tokens
        return mean if max_tokens is None else min(mean, max_tokens)
