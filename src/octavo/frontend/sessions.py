"""Sessions: text in and out over an EngineClient.

Owns: checks that need the model's vocabulary or the engine's size; seeds, deadlines and block keys of requests; text
deltas; ending choices at stop strings; selecting the best choices of best_of.
Does not: know HTTP, batch, or retry.
Invariants: only a choice's last delta has a finish_reason, and only the request's last delta has the usage. Every
request sent has a seed.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self, TypedDict, Unpack

from octavo.core.kv.prefix import prompt_keys
from octavo.core.plan import TokenLogprobs
from octavo.core.request import FinishReason, Request, SamplingParams, Span, Want
from octavo.engine.client import Accepted, EngineClient, TokenOutput
from octavo.errors import AdmissionError, EngineDeadError, InvalidRequestError
from octavo.executors.protocol import Capacity
from octavo.frontend.open_request import num_choices
from octavo.frontend.open_requests import OutputReader
from octavo.frontend.outputs import Scores, TextDelta, Usage, best_choices
from octavo.media.item import MediaItem
from octavo.text.detokenizer import Detokenizer, StopStrings

if TYPE_CHECKING:
    from octavo.text.text_model import TextModel
    from octavo.text.tokenizer import Tokenizer

__all__ = ["Prompt", "RequestOptions", "Scores", "Session", "Sessions", "TextDelta", "Usage", "check_stream"]

Prompt = str | Sequence[int]
_ID_BYTES = 4
_ENTRY_BYTES = 240  # memory of one token's TokenLogprobs
_TOP_BYTES = 72  # memory of each alternative in it
MAX_SLICE = 256  # tokens given to a reader at once, to bound the size of a message
OFF_LOOP_TOKENS = 16_384  # beyond this, hashing a prompt's blocks takes over a millisecond


class RequestOptions(TypedDict, total=False):
    """Serving options of a request.

    `timeout_s` and `queue_timeout_s` (until the first admission) count from the submission. The objectives, for the
    deadline policy, are seconds to the first token and seconds for each later token. The fair policy shares the engine
    among values of `tenant`. `session` names the conversation, for a fleet's router. `wants` is what the engine
    computes; by default it follows from the parameters. `spans` are the places of images in the prompt, and `media` has
    each of these images once.
    """

    priority: int
    tenant: str
    cache_salt: bytes
    session: str
    timeout_s: float | None
    queue_timeout_s: float | None
    ttft_objective: float | None
    tpot_objective: float | None
    wants: Want
    spans: tuple[Span, ...]
    media: tuple[MediaItem, ...]


def slice_tokens(num_logprobs: int | None) -> int:
    """Return the maximum of tokens given to a reader at once, with `num_logprobs` alternatives each."""
    return MAX_SLICE if num_logprobs is None else max(1, MAX_SLICE // (1 + num_logprobs))


def token_bytes(num_logprobs: int | None) -> int:
    """Return roughly the bytes of memory of a token with `num_logprobs` alternatives."""
    return _ID_BYTES if num_logprobs is None else _ID_BYTES + _ENTRY_BYTES + _TOP_BYTES * num_logprobs


def check_stream(params: SamplingParams) -> None:
    """Raise InvalidRequestError if the best choices are known only at the end and so cannot be streamed."""
    if not params.beam_width and params.num_sequences > params.n:
        raise InvalidRequestError(
            f"best_of is {params.best_of} and n is {params.n}: which choices are the best is known at the end only, so "
            "they cannot be streamed; leave best_of out, or do not stream",
            "best_of",
        )


class Transcript:
    """The growing text of one choice. `stop_string` is set once a stop string matched; later ids are ignored."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, eos_token_ids: Iterable[int]) -> None:
        eos = () if params.ignore_eos else tuple(eos_token_ids)
        self._end_ids = frozenset((*eos, *params.stop_token_ids))
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, params.shown_special_ids)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self.num_tokens = 0
        self.stop_string: str | None = None
        self.stop_token_id: int | None = None
        self.logprob_sum: float | None = None if params.num_logprobs is None else 0.0  # None: not known

    def push(
        self, ids: array[int], finish: FinishReason | None, logprobs: Sequence[TokenLogprobs | None] | None = None
    ) -> tuple[str, int]:
        """Add the next ids; return their text and how many of the ids count.

        `finish` is the engine's reason if these are the last ids; a stop string in them still takes precedence.
        """
        if self.stop_string is not None:
            return "", 0
        shown = ids
        if finish is FinishReason.STOP and ids and ids[-1] in self._end_ids:
            shown = ids[:-1]
        if self._stops is None:
            text, num_counted = self._detokenizer.push(shown), len(shown)
        else:
            text, num_counted = self._until_stop(shown, self._stops)
        if self.stop_string is None:
            num_counted = len(ids)
            if len(shown) < len(ids) and ids[-1] in self._stop_token_ids:
                self.stop_token_id = ids[-1]
            if finish is not None:
                rest = self._detokenizer.flush()
                if self._stops is not None:
                    rest, self.stop_string = self._stops.push(rest)
                    rest += "" if self.stop_string is not None else self._stops.flush()
                text += rest
        self.num_tokens += num_counted
        if self.logprob_sum is not None:
            known = [entry.logprob for entry in (logprobs or ())[:num_counted] if entry is not None]
            self.logprob_sum = self.logprob_sum + sum(known) if len(known) == num_counted else None
        return text, num_counted

    def _until_stop(self, ids: array[int], stops: StopStrings) -> tuple[str, int]:
        texts: list[str] = []
        for count, token_id in enumerate(ids, 1):
            text = self._detokenizer.push((token_id,))
            if self.num_tokens + count > self._min_tokens:
                text, self.stop_string = stops.push(text)
            texts.append(text)
            if self.stop_string is not None:
                return "".join(texts), count
        return "".join(texts), len(ids)


class OutputClient(Protocol):
    """The part of an EngineClient that a session uses once its request is accepted."""

    def outputs(
        self, request_id: str, final_only: bool = False, max_ids: int = sys.maxsize
    ) -> AsyncIterator[TokenOutput]:
        """See EngineClient."""

    def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> int:
        """See EngineClient."""


class Session:
    """One accepted request. Iterate once; cancel at any time, from any task.

    Deltas of choices are interleaved. With best_of > n, whole choices are yielded at the end, numbered best first.
    """

    def __init__(
        self,
        client: OutputClient,
        request: Request,
        accepted: Accepted,
        tokenizer: Tokenizer,
        max_slice: int = sys.maxsize,
    ) -> None:
        """Open the outputs of an accepted request; `max_slice` bounds the tokens of a delta."""
        params = request.params
        self.request_id = request.request_id
        self.params = params
        self.accepted = accepted
        self.prompt_logprobs: Scores | None = None
        self.is_cancelled = False  # a cancellation ended the request
        self._client = client
        self._request = request
        self._choices = [Transcript(tokenizer, params, request.eos_token_ids) for _ in range(num_choices(params))]
        self._outputs = client.outputs(request.request_id, max_ids=min(max_slice, slice_tokens(params.num_logprobs)))
        self._is_ranked = len(self._choices) > params.n
        self._held: list[TextDelta] = []  # deltas held until the best choices are known
        self._ready: deque[TextDelta] = deque()
        self._has_ended = False

    @property
    def prompt_token_ids(self) -> array[int]:
        """The ids of the prompt as sent to the engine."""
        assert self._request.prompt_token_ids is not None
        return self._request.prompt_token_ids

    @property
    def num_unread(self) -> int:
        """The number of tokens received and not yet read; 0 if the client does not know it."""
        return self._outputs.num_unread if isinstance(self._outputs, OutputReader) else 0

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self

    async def __anext__(self) -> TextDelta:
        if self._ready and self._ready[0].prompt_logprobs is not None:
            await asyncio.sleep(0)  # many such deltas may be ready, and other tasks need this event loop
        while not self._ready:
            if self._has_ended:
                raise StopAsyncIteration
            output = await anext(self._outputs, None)
            if output is None:
                self._has_ended = True
                raise EngineDeadError(f"the outputs of request {self.request_id} ended without a finish reason")
            if output.prompt_logprobs is not None:
                self._give_scores(output.prompt_logprobs)
            delta = self._take(output)
            self._has_ended = output.is_final
            if delta is not None:
                (self._held if self._is_ranked else self._ready).append(delta)
            if self._is_ranked and output.is_final:
                self._ready.extend(best_choices(self._held, self.params.n))
        return self._ready.popleft()

    async def collect(self) -> list[TextDelta]:
        """Return all deltas. Without stop strings this task wakes up only once, at the end."""
        self._outputs = self._client.outputs(self.request_id, final_only=not self.params.stop)
        return [delta async for delta in self]

    # Not a generator with contextlib's decorator: at the interpreter's end asyncio closes all generators at the same
    # time, both the one that cancels and the stream around it, and closing the stream would fail.
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cancel()

    async def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End the request; iterating still yields its last delta. Idempotent."""
        if not self._has_ended:
            self._client.cancel((self.request_id,), reason)

    def _give_scores(self, scores: Scores) -> None:
        """Make deltas of the prompt's log-probabilities, small enough to be encoded quickly."""
        self.prompt_logprobs = scores
        first, entries = scores
        size = slice_tokens(self.params.prompt_logprobs)
        for start in range(0, len(entries), size):
            piece = (first + start, entries[start : start + size])
            self._ready.append(TextDelta(0, "", array("i"), prompt_logprobs=piece))

    def _take(self, output: TokenOutput) -> TextDelta | None:
        """Return the delta of an output, or None if the delta is empty; end the choice at a stop string.

        The last delta of a choice has its end, and the last one of the request has the usage.
        """
        now = time.monotonic()
        transcript = self._choices[output.choice]
        was_cut = transcript.stop_string is not None
        text, count = transcript.push(output.token_ids, output.finish_reason, output.logprobs)
        if transcript.stop_string is not None and not was_cut and output.finish_reason is None:
            self._client.cancel((self.request_id,), FinishReason.STOP, output.choice)
        logprobs = None if output.logprobs is None or self.params.logprobs is None else output.logprobs[:count]
        delta = TextDelta(output.choice, text, output.token_ids[:count], logprobs)
        reason, error = output.finish_reason, output.error
        if reason is None:
            return delta if delta.token_ids else None
        if transcript.stop_string is not None:
            reason, error = FinishReason.STOP, None
        elif reason is FinishReason.STOP and self.params.max_tokens == 0:
            reason = FinishReason.LENGTH
        self.is_cancelled |= reason is FinishReason.CANCELLED
        usage = None
        if output.is_final:
            arrival = self._request.arrival
            usage = Usage(
                prompt_tokens=self._request.num_prompt_tokens,
                completion_tokens=sum(choice.num_tokens for choice in self._choices),
                cached_tokens=output.cached_tokens,
                queue_s=output.queue_s,
                ttft_s=(output.first_at if output.first_at is not None else now) - arrival,
                e2e_s=now - arrival,
                preempted=output.preempted,
            )
        return replace(
            delta,
            finish_reason=reason,
            stop_reason=transcript.stop_token_id if transcript.stop_string is None else transcript.stop_string,
            usage=usage,
            error=error,
            cumulative_logprob=transcript.logprob_sum,
            pooled=output.pooled,
        )


class Sessions:
    """Creates sessions on one engine and one model. `seed` seeds the draws for requests without a seed.

    If the engine's `capacity` is given, requests with too many sequences are refused here, and the keys of prompt
    blocks are computed here, outside the step loop.
    """

    def __init__(
        self,
        client: EngineClient,
        text: TextModel,
        seed: int = 0,
        *,
        capacity: Capacity | None = None,
    ) -> None:
        self.client = client
        self.text = text
        self.capacity = capacity
        self.max_slice = sys.maxsize  # most tokens of a delta
        self.adapter_id = 0
        self._seeds = random.Random(seed)
        self._eos_token_ids = tuple(dict.fromkeys((*text.spec.eos_token_ids, *text.tokenizer.eos_token_ids)))

    @property
    def max_model_len(self) -> int:
        """The maximum number of tokens of a prompt and its answer together."""
        return self.text.spec.max_model_len if self.capacity is None else self.capacity.max_model_len

    def token_by_token(self) -> Sessions:
        """Return a copy whose deltas have at most one token; the copy shares the seeds and all else."""
        copied = copy(self)
        copied.max_slice = 1
        return copied

    def with_adapter(self, adapter_id: int) -> Sessions:
        """Return a copy whose requests use an adapter; the copy shares the seeds and all else."""
        copied = copy(self)
        copied.adapter_id = adapter_id
        return copied

    def prompt_ids(self, prompt: Prompt) -> Sequence[int]:
        """Return the ids of a prompt given as text (with special tokens) or as ids."""
        return self.text.encode_input(prompt) if isinstance(prompt, str) else prompt

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Session:
        """Check and send a request. Raises InvalidRequestError before the engine sees it, AdmissionError after."""
        if options.get("wants") != Want.POOL:
            self.text.check_generates()
        num_kept = params.num_kept(self.max_model_len)
        if options.get("spans") and num_kept is not None:
            message = "truncate_prompt_tokens cannot be used with images; leave it out"
            raise InvalidRequestError(message, "truncate_prompt_tokens")
        ids = self._check(prompt_ids if num_kept is None else prompt_ids[-num_kept:], params)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        params = replace(params, seed=seed, truncate_prompt_tokens=None)
        request = self._request(request_id, ids, params, options)
        if self.capacity is not None:
            make_keys = partial(prompt_keys, request, self.capacity.block_size)
            is_long = request.num_prompt_tokens > OFF_LOOP_TOKENS
            keys = await asyncio.to_thread(make_keys) if is_long else make_keys()
            request = replace(request, block_keys=keys)
        accepted = await self.client.submit(request, options.get("media", ()))
        return Session(self.client, request, accepted, self.text.tokenizer, self.max_slice)

    def _request(
        self, request_id: str | None, ids: array[int], params: SamplingParams, options: RequestOptions
    ) -> Request:
        unknown = options.keys() - RequestOptions.__optional_keys__
        if unknown:
            raise TypeError(
                f"submit() knows no {sorted(unknown)[0]}; it takes {', '.join(RequestOptions.__annotations__)}"
            )
        for name in ("timeout_s", "queue_timeout_s", "ttft_objective", "tpot_objective"):
            value = options.get(name)
            if value is not None and not (isinstance(value, (int, float)) and 0 < value < float("inf")):
                shown = name.removesuffix("_s")
                raise InvalidRequestError(f"{shown} is {value!r}; give seconds above 0", shown)
        arrival, timeout_s = time.monotonic(), options.get("timeout_s")
        wants = Want.SAMPLE if params.prompt_logprobs is None else Want.SAMPLE | Want.SCORE
        wants = options.get("wants", Want.SCORE if params.max_tokens == 0 else wants)
        return Request(
            request_id if request_id is not None else secrets.token_hex(12),
            ids,
            params,
            arrival,
            eos_token_ids=self._eos_token_ids,
            wants=wants,
            priority=options.get("priority", 0),
            tenant=options.get("tenant", ""),
            cache_salt=options.get("cache_salt", b""),
            adapter_id=self.adapter_id,
            session=options.get("session", ""),
            spans=options.get("spans", ()),
            deadline=None if timeout_s is None else arrival + timeout_s,
            queue_timeout=options.get("queue_timeout_s"),
            ttft_objective=options.get("ttft_objective"),
            tpot_objective=options.get("tpot_objective"),
        )

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> array[int]:
        if not prompt_ids:
            raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
        count = params.num_sequences
        if self.capacity is not None and count > self.capacity.num_slots:
            name = "beam_width" if params.beam_width else "best_of" if params.best_of else "n"
            raise AdmissionError(
                f"{name} is {count}, this engine runs {self.capacity.num_slots} sequences; lower it or raise "
                "--max-num-seqs",
                name,
            )
        largest = self.text.spec.vocab_size - 1
        try:
            packed = array("i", prompt_ids)
        except (TypeError, OverflowError):
            packed = None
        if packed is None or not 0 <= min(packed) <= max(packed) <= largest:
            wrong = next(i for i in prompt_ids if not isinstance(i, int) or not 0 <= i <= largest)
            raise InvalidRequestError(
                f"prompt holds {wrong!r}; this model's token ids are whole numbers from 0 to {largest}", "prompt"
            )
        return packed
