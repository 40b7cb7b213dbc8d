"""Sessions: text in and out over an EngineClient.

Owns: checks that need the model's vocabulary, seeds, deadlines, deltas of text, stopping at stop strings.
Does not: know HTTP, batch, or retry.
Invariants: a session's last delta, and only that, has a finish_reason; every request sent has a seed.
"""

from __future__ import annotations

import random
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.core.plan import TokenLogprobs
from octavo.core.request import FinishReason, Request, SamplingParams, Want
from octavo.engine.client import Accepted, EngineClient, TokenOutput
from octavo.engine.transcript import Transcript
from octavo.errors import EngineDeadError, InvalidRequestError

if TYPE_CHECKING:
    from octavo.text.text_model import TextModel

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used: tokens, and seconds from its submission."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float
    ttft_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text and ids of one choice. `finish_reason`, stop_reason, usage and message come with the last only.

    Text lags behind the ids while a character or a possible stop string is incomplete. `logprobs` is None or
    aligned with token_ids. `message` says what went wrong, for reasons other than STOP and LENGTH.
    """

    choice: int
    text: str
    token_ids: array[int]
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    message: str | None = None


class Session:
    """One accepted request. Iterate once; cancel at any time, from any task."""

    def __init__(self, client: EngineClient, request: Request, accepted: Accepted, transcript: Transcript) -> None:
        self.request_id = request.request_id
        self.params = request.params
        self.accepted = accepted
        self.prompt_logprobs: tuple[int, tuple[TokenLogprobs, ...]] | None = None
        self._client = client
        self._request = request
        self._transcript = transcript
        self._outputs = client.outputs(request.request_id)
        self._is_stopped = False
        self._has_ended = False

    @property
    def prompt_token_ids(self) -> array[int]:
        """The prompt as the engine has it."""
        assert self._request.prompt_token_ids is not None
        return self._request.prompt_token_ids

    @property
    def has_ended(self) -> bool:
        """Whether the last delta was given."""
        return self._has_ended

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self

    async def __anext__(self) -> TextDelta:
        if self._has_ended:
            raise StopAsyncIteration
        async for output in self._outputs:
            delta = self._delta(output)
            if self._transcript.stop_string is not None and not self._is_stopped:
                self._is_stopped = True
                if output.finish_reason is None:
                    await self._client.cancel((self.request_id,), FinishReason.STOP)
            if delta is not None:
                return delta
        self._has_ended = True
        raise EngineDeadError(f"the outputs of request {self.request_id} ended without a finish reason")

    async def collect(self) -> list[TextDelta]:
        """All deltas. Without stop strings this wakes up once, at the end."""
        if not self.params.stop:
            self._outputs = self._client.outputs(self.request_id, final_only=True)
        return [delta async for delta in self]

    async def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End the request in whatever state; iterating still gives its last delta. Idempotent."""
        if not self._has_ended:
            await self._client.cancel((self.request_id,), reason)

    def _delta(self, output: TokenOutput) -> TextDelta | None:
        """The delta of an output; None when there is nothing to tell."""
        now = time.monotonic()
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        text, count = self._transcript.push(output.token_ids, output.finish_reason)
        logprobs = None if output.logprobs is None else output.logprobs[:count]
        delta = TextDelta(output.choice, text, output.token_ids[:count], logprobs)
        if output.finish_reason is not None:
            self._has_ended = True
            return self._last(delta, output, now)
        return delta if delta.token_ids else None

    def _last(self, delta: TextDelta, output: TokenOutput, now: float) -> TextDelta:
        transcript, arrival = self._transcript, self._request.arrival
        is_stopped = transcript.stop_string is not None
        return replace(
            delta,
            finish_reason=FinishReason.STOP if is_stopped else output.finish_reason,
            stop_reason=transcript.stop_string if is_stopped else transcript.stop_token_id,
            usage=Usage(
                prompt_tokens=self._request.num_prompt_tokens,
                completion_tokens=transcript.num_tokens,
                cached_tokens=output.cached_tokens,
                queue_s=output.queue_s,
                ttft_s=(output.first_at if output.first_at is not None else now) - arrival,
                e2e_s=now - arrival,
            ),
            message=None if is_stopped else output.message,
        )


class Sessions:
    """Opens sessions on one engine and one model. `seed` feeds the seeds of requests that have none."""

    def __init__(
        self, client: EngineClient, text: TextModel, seed: int = 0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.client = client
        self.text = text
        self._seeds = random.Random(seed)
        self._eos_token_ids = tuple(dict.fromkeys((*text.spec.eos_token_ids, *text.tokenizer.eos_token_ids)))
        self._now = now

    def prompt_ids(self, prompt: Prompt) -> Sequence[int]:
        """Ids of a prompt given as text (with special tokens) or as ids."""
        return self.text.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: bytes = b"",
        timeout_s: float | None = None,
    ) -> Session:
        """Check and send a request. Raises InvalidRequestError before the engine sees it, AdmissionError after."""
        ids = self._check(prompt_ids, params, timeout_s)
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        arrival = self._now()
        request = Request(
            request_id if request_id is not None else secrets.token_hex(12),
            ids,
            params,
            arrival,
            eos_token_ids=self._eos_token_ids,
            wants=Want.SAMPLE if params.prompt_logprobs is None else Want.SAMPLE | Want.SCORE,
            priority=priority,
            cache_salt=cache_salt,
            deadline=None if timeout_s is None else arrival + timeout_s,
        )
        accepted = await self.client.submit(request)
        transcript = Transcript(self.text.tokenizer, params, request.eos_token_ids)
        return Session(self.client, request, accepted, transcript)

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams, timeout_s: float | None) -> array[int]:
        if not prompt_ids:
            raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias])
        if timeout_s is not None and not 0 < timeout_s < float("inf"):
            raise InvalidRequestError(f"timeout is {timeout_s!r}; give seconds above 0", "timeout")
        return self._check_ids("prompt", prompt_ids)

    def _check_ids(self, param: str, ids: Sequence[int]) -> array[int]:
        largest = self.text.spec.vocab_size - 1
        try:
            packed = array("i", ids)
        except (TypeError, OverflowError):
            packed = None
        if packed is None or (packed and not 0 <= min(packed) <= max(packed) <= largest):
            wrong = next(i for i in ids if not isinstance(i, int) or not 0 <= i <= largest)
            raise InvalidRequestError(
                f"{param} holds {wrong!r}; this model's token ids are whole numbers from 0 to {largest}", param
            )
        return packed
