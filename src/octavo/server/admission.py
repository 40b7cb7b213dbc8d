"""Admission: accept a request now, or refuse it and say when it can be sent again.

Owns: the numbers of waiting and running sequences by key and priority, the engine's last forecast and the changes
since; the order of the checks, the load levels, each key's share of the queue, the keys' meters, refusal messages.
Does not: order requests (the scheduler does), forecast (observe.forecast does), read bodies or know HTTP.
Checks of a request: `check_arrival` before its body is read; `admit` before tokenization; `check_tokens` after it.
Invariants: a refusal reserves nothing and costs only counting; every ticket is released. A sequence waits if it has no
token and the engine has no slot or KV room for it; a bound of N allows N waiting sequences besides the running ones.
Until the engine's first forecast, wait times are unknown.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import Any

from octavo.config import AdmissionConfig
from octavo.errors import BusyError, LoadShedError, OctavoError, QueueFullError, RateLimitError, WaitTooLongError
from octavo.observe.forecast import WaitModel
from octavo.server.http.keys import ANONYMOUS, KeyInfo
from octavo.server.http.limits import Meter

MIN_AGE_S = 5.0  # minimum time between two forecasts: one takes the step loop 9 to 40 ms, under 1 % of 5 s
UNKNOWN_AGE_S = 0.1  # the minimum while the engine has no WaitModel: a forecast without a model costs nothing
MAX_AGE_S = 15.0  # older answers are ignored; waits are computed by the model alone
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
        """Add the counts of `other`, multiplied by `times`."""
        self.num_sequences += times * other.num_sequences
        self.prompt_tokens += times * other.prompt_tokens
        self.output_tokens += times * other.output_tokens

    def scaled(self, share: float) -> QueuedWork:
        """Return the counts multiplied by `share`."""
        return QueuedWork(self.num_sequences * share, self.prompt_tokens * share, self.output_tokens * share)


Queue = tuple[QueuedWork, int] | None  # queued work and running sequences; None: a request could start at once


@dataclass(frozen=True, slots=True)
class _Answer:
    """The engine's forecast, and the server's queue when the forecast arrived."""

    wait_s: float
    queue: tuple[QueuedWork, int]
    at: float


class QueueForecast:
    """The engine's last forecast. `ask` requests a new forecast, or with "model" the WaitModel only."""

    def __init__(self, ask: Callable[[str], Awaitable[object]] | None = None) -> None:
        self.model: WaitModel | None = None
        self._ask = ask
        self._now = time.monotonic
        self._answer: _Answer | None = None
        self._asked_at = -inf
        self._asking: asyncio.Task[None] | None = None

    def update(self, answer: Mapping[str, Any], queue: Queue) -> None:
        """Store a forecast of the engine, with the server's current queue.

        Its wait is used only if engine and server both see a full engine: the server counts admitted requests first.
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
        """Return the seconds until a request behind `ahead` starts at a full engine; None if unknown."""
        answer = self._answer
        if answer is not None and self._now() - answer.at <= MAX_AGE_S:
            return max(0.0, answer.wait_s + self._model_s(ahead, num_running) - self._model_s(*answer.queue))
        return None if self.model is None else self._model_s(ahead, num_running)

    def _model_s(self, ahead: QueuedWork, num_running: int) -> float:
        if self.model is None:
            return 0.0
        return self.model.expected_wait_s(ahead.prompt_tokens, ahead.output_tokens, num_running)

    def prefill_s(self, num_tokens: int) -> float | None:
        """Return the seconds that computing `num_tokens` prompt tokens adds to the engine's steps; None if unknown."""
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
    """Counts of sequences and tokens. The engine has room for `num_slots` and `num_kv_tokens` (0: unknown)."""

    def __init__(self, num_slots: int = 0, num_kv_tokens: int = 0, forecast: QueueForecast | None = None) -> None:
        self.forecast = QueueForecast() if forecast is None else forecast
        self.num_slots = num_slots or _UNKNOWN_SLOTS
        self.num_kv_tokens = num_kv_tokens
        self.num_requests = 0  # HTTP requests with a ticket
        self.num_pending = 0  # sequences without a token
        self.num_running = 0  # sequences with a token
        self.num_tokens_held = 0  # of the running sequences, in the KV pool
        self.new_share = 1.0  # the share of prompt tokens that the prefix cache lacks, from the last prompts
        self.new_tokens = DecayedMean(16_384)  # the mean behind new_share; its half-life is 16,384 prompt tokens
        self.pending = QueuedWork()  # the work of all sequences without a token
        self.by_key: Counter[str] = Counter()  # sequences without a token
        self.tokens_by_key: Counter[str] = Counter()
        self._by_priority: dict[int, QueuedWork] = {}

    def state(self) -> Queue:
        """Return the queued work and the number of running sequences; None if a new request could start at once."""
        return None if self.num_free > self.num_pending else (self.ahead_of(None), self.num_busy)

    def wait_s(self, priority: int | None = None) -> float | None:
        """Return the seconds that a new request of this priority would wait; None for `priority`: behind all requests.

        Return 0 if the request could start at once, and None if the wait is unknown.
        """
        if self.num_free > self.num_pending:
            return 0.0
        self.forecast.refresh(self.state)
        return self.forecast.wait_s(self.ahead_of(priority), self.num_busy)

    @property
    def num_free(self) -> int:
        """The number of sequences that could start at once."""
        free = max(0, self.num_slots - self.num_running)
        if self.num_kv_tokens and self.num_pending:
            room = max(0, self.num_kv_tokens - self.num_tokens_held)
            each = max(1.0, self.pending.prompt_tokens * self.new_share / self.num_pending)
            free = min(free, int(room / each))
        return free

    @property
    def num_busy(self) -> int:
        """The number of sequences that the engine works on, including those whose prompt is being computed."""
        return self.num_running + min(self.num_free, self.num_pending)

    @property
    def num_waiting(self) -> int:
        """The number of sequences that wait for a slot or for KV room."""
        return max(0, self.num_pending - self.num_free)

    @property
    def num_waiting_tokens(self) -> int:
        """The prompt tokens of all sequences without a token."""
        return round(self.pending.prompt_tokens)

    def ahead_of(self, priority: int | None) -> QueuedWork:
        """Return the queued work ahead of a new request of this priority; None for `priority`: all queued work."""
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
        """Add `num_prompts` prompts to the queue, each with this work. A negative number removes prompts."""
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
            self.pending = QueuedWork()  # drop the sums' rounding errors


MAX_RETRY_S = 60.0
DEFAULT_PRIORITY = 0  # smaller is more urgent
_RESERVED = 8  # with several keys, an eighth of the queue is reserved for keys without waiting sequences
_BOUNDS = (0.5, 0.75, 1.0)  # shares of the queue at which the load levels begin
_FIRST_TOKENS_PER_CHARACTER = 0.3
MAX_METERS = 4096  # at this number of meters, those without open requests are dropped


class Load(IntEnum):
    """How full the queue is, by sequences or by tokens: the larger share counts."""

    NORMAL = 0
    BUSY = 1  # at least half full
    CROWDED = 2  # at least three quarters full
    FULL = 3


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """The size and limits of a checked body, before tokenization.

    `width` is the number of sequences per prompt. `num_ids` counts the prompt tokens that the client sent as ids.
    `max_wait_s` is the longest wait in the queue: the shorter of the queue timeout and the timeout.
    """

    key: KeyInfo = ANONYMOUS
    priority: int = DEFAULT_PRIORITY
    num_prompts: int = 1
    width: int = 1
    max_tokens: int | None = None
    num_characters: int = 0
    num_ids: int = 0
    max_wait_s: float | None = None


class AdmissionTicket:
    """What one admitted request holds: its counts in the queue, and one of its key's open requests."""

    def __init__(
        self, queue: EngineQueue, request: AdmissionRequest, meter: Meter | None, now: Callable[[], float]
    ) -> None:
        self.request = request
        self.num_waiting = request.num_prompts  # prompts without a token
        self.num_started = 0  # prompts that have a token and have not ended
        self.work = QueuedWork(request.width)  # of one prompt, as the mean of all prompts
        self._place = (request.key.name, request.priority)
        self._queue = queue
        self.meter = meter
        self._now = now
        self._held = 0  # tokens in the KV pool, approximately
        self._is_open = True
        queue.num_requests += 1
        self._queue.add(*self._place, self.work, request.num_prompts)
        if meter is not None:
            meter.num_open += 1

    def expect(self, prompt_tokens: float, output_tokens: float) -> None:
        """Set the total tokens of the request's prompts, and the expected output tokens of each sequence."""
        self._queue.add(*self._place, self.work, -self.num_waiting)
        width = self.request.width
        self.work = QueuedWork(width, prompt_tokens / max(1, self.request.num_prompts), width * output_tokens)
        self._queue.add(*self._place, self.work, self.num_waiting)

    def generated(self, num_tokens: int, is_first: bool = False) -> None:
        """Count generated tokens. `is_first`: they include a prompt's first token, so that prompt stops waiting."""
        queue, num_held = self._queue, num_tokens
        if is_first and self.num_waiting:
            self._queue.add(*self._place, self.work, -1)
            self.num_waiting -= 1
            self.num_started += 1
            queue.num_running += self.request.width
            num_held += round(self.work.prompt_tokens * queue.new_share)
        if self._is_open:
            self._held += num_held
            queue.num_tokens_held += num_held
        if self.meter is not None:
            self.meter.use_tokens(num_tokens, self._now())

    def ended(self, num_prompt_tokens: int, num_cached: int) -> None:
        """Count one finished prompt: its tokens, and the tokens that came from the prefix cache."""
        queue = self._queue
        if self.num_started:
            num_held = self._held // self.num_started
            self.num_started -= 1
            queue.num_running -= self.request.width
            self._held -= num_held
            queue.num_tokens_held -= num_held
        elif self.num_waiting:
            self._queue.add(*self._place, self.work, -1)
            self.num_waiting -= 1
        if num_prompt_tokens > 0:
            queue.new_tokens.add(num_prompt_tokens - num_cached, num_prompt_tokens)
            queue.new_share = queue.new_tokens.value or 0.0
        queue.forecast.refresh(queue.state)

    def leave(self) -> None:
        """Release all counts that the ticket still holds. Idempotent."""
        if not self._is_open:
            return
        self._queue.add(*self._place, self.work, -self.num_waiting)
        self._queue.num_running -= self.num_started * self.request.width
        self._queue.num_tokens_held -= self._held
        self._is_open = False
        self._queue.num_requests -= 1
        self.num_waiting = self.num_started = 0
        if self.meter is not None:
            self.meter.num_open -= 1
            self.meter = None


class AdmissionControl:
    """The checks that accept or refuse requests. `is_by_priority`: the scheduler runs urgent requests first."""

    def __init__(
        self,
        config: AdmissionConfig,
        queue: EngineQueue,
        *,
        is_by_priority: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.queue = queue
        self._tokens_per_character = DecayedMean(65_536)
        self.now = now
        self._is_by_priority = is_by_priority
        self.meters: dict[str, Meter] = {}  # by the key's name

    def meter(self, key: KeyInfo) -> Meter | None:
        """Return the key's meter, created on first use; None for a request without a key."""
        if not key.name:
            return None
        meter = self.meters.get(key.name)
        if meter is None:
            if len(self.meters) >= MAX_METERS:
                for unused in [name for name, each in self.meters.items() if not each.num_open]:
                    del self.meters[unused]  # in place: several models share the meters
            meter = self.meters[key.name] = Meter(key, self.now())
        return meter

    @property
    def load(self) -> Load:
        """The current load level."""
        return Load(bisect_right(_BOUNDS, self._share(self.queue.num_waiting, self.queue.num_waiting_tokens)))

    def check_arrival(self, key: KeyInfo, *, needs_place: bool = True) -> None:
        """Count a request before its body is read. Raises BusyError if the queue is full or the key is at a limit.

        `needs_place`: the request takes room in the queue. A retry may not: its answer may exist already.
        """
        meter = self.meter(key)
        if meter is not None and meter.info is not key:  # the keys were reloaded
            meter.update(key, self.now())
        if needs_place and self.queue.num_pending:
            self._check_full(key, 1)
        if meter is not None:
            if needs_place:
                self._check_concurrent(meter)
            meter.begin(self.now())

    def charge(self, key: KeyInfo, num_tokens: int) -> None:
        """Charge a key for tokens that were only counted, tokenized or detokenized for it."""
        meter = self.meter(key)
        if meter is not None:
            meter.use_tokens(num_tokens, self.now())

    def admit(self, request: AdmissionRequest) -> AdmissionTicket:
        """Return a ticket for a request whose body was checked. Raises BusyError."""
        meter = self.meter(request.key)
        num_tokens = request.num_ids + self.tokens_of(request.num_characters)
        if self.queue.num_pending:  # else nothing waits
            num_sequences = request.num_prompts * request.width
            self._check_full(request.key, num_sequences)
            self._check_load(request)
            self._check_share(request.key, num_sequences, num_tokens)
        if request.max_wait_s is not None or self.config.max_queue_time_s is not None:
            self._check_wait(request)
        if meter is not None:
            self._check_concurrent(meter)
        if self.queue.num_pending:
            self._check_tokens(request.key, num_tokens)
        if meter is not None:
            meter.check_tokens(self.now(), num_tokens)
        ticket = AdmissionTicket(self.queue, request, meter, self.now)
        ticket.expect(num_tokens, self.queue.forecast.output_tokens(request.max_tokens))
        self.queue.forecast.refresh(self.queue.state)
        return ticket

    def readmit(self, request: AdmissionRequest) -> AdmissionTicket:
        """Return a ticket for a request that an earlier server process admitted."""
        return AdmissionTicket(self.queue, request, self.meter(request.key), self.now)

    def check_tokens(self, ticket: AdmissionTicket, num_tokens: int) -> None:
        """Check the number of tokens in all prompts, and charge the key for them. Raises BusyError."""
        request = ticket.request
        if request.num_characters > 0:
            self._tokens_per_character.add(num_tokens - request.num_ids, request.num_characters)
        if self.queue.num_pending > ticket.num_waiting * request.width:  # other requests wait too
            ticket.expect(0, 0)
            self._check_tokens(request.key, num_tokens)
        if ticket.meter is not None:
            ticket.meter.check_tokens(self.now(), num_tokens)
            ticket.meter.use_tokens(num_tokens, self.now())
        ticket.expect(num_tokens, self.queue.forecast.output_tokens(request.max_tokens))

    def tokens_of(self, num_characters: int) -> int:
        """Return the estimated number of tokens in a text."""
        mean = self._tokens_per_character.value
        return round(num_characters * (_FIRST_TOKENS_PER_CHARACTER if mean is None else mean))

    def _check_tokens(self, key: KeyInfo, num_tokens: int) -> None:
        """Refuse a request whose tokens exceed the room that other requests leave in the queue. Raises BusyError."""
        others, bound = self.queue.num_waiting_tokens, self.config.max_waiting_tokens
        if others and others + num_tokens > bound:
            wait_s = self._seconds_until_computed(others + num_tokens - bound)
            wait_text = "how long is not known yet" if wait_s is None else f"there will be room in about {wait_s:.1f} s"
            text = f"requests with {others} prompt tokens wait for their first token, {bound} may, and this one has"
            message = f"the queue is full: {text} {num_tokens}; {wait_text}"
            raise self._counted(key, QueueFullError(message, retry_after_s=wait_s))

    def snapshot(self) -> dict[str, object]:
        """Return the current counts and waits, for metrics."""
        keys = {
            name: {"requests": m.num_requests, "tokens": m.num_tokens, "refused": m.num_refused, "open": m.num_open}
            for name, m in self.meters.items()
        }
        return {
            "waiting": self.queue.num_waiting,
            "max_waiting": self.config.max_waiting,
            "waiting_tokens": self.queue.num_waiting_tokens,
            "max_waiting_tokens": self.config.max_waiting_tokens,
            "running": self.queue.num_running,
            "load": int(self.load),
            "wait_s": self.wait_s(),
            "keys": keys,
        }

    def wait_s(self, priority: int = DEFAULT_PRIORITY) -> float | None:
        """Return the seconds that a new request would wait: 0 if it could start at once, None if unknown."""
        return self.queue.wait_s(priority if self._is_by_priority else None)

    def _share(self, num_sequences: float, num_tokens: float) -> float:
        return max(num_sequences / self.config.max_waiting, num_tokens / self.config.max_waiting_tokens)

    def _check_full(self, key: KeyInfo, num_sequences: int) -> None:
        waiting, bound = self.queue.num_waiting, self.config.max_waiting
        kept = ""
        if len(self.meters) > 1 and key.name in self.queue.by_key:
            # Otherwise the key that fills the queue would take each slot that becomes free before another key asks.
            bound -= bound // _RESERVED
            kept = f" ({self.config.max_waiting - bound} more places are for keys of which nothing waits)"
        if waiting and waiting + num_sequences > bound:
            request_text = "" if num_sequences == 1 else f", and this request has {num_sequences}"
            message = (
                f"the queue is full: {waiting} sequences wait, {bound} may{kept}{request_text}; {self._wait_text()}"
            )
            wait_s = self._seconds_until_started(waiting + num_sequences - bound)
            raise self._counted(key, QueueFullError(message, retry_after_s=wait_s))

    def _check_load(self, request: AdmissionRequest) -> None:
        if request.priority <= DEFAULT_PRIORITY:
            return
        load = self.load
        if load < Load.BUSY:
            return
        if load >= Load.CROWDED or request.width > 1:
            kind = "requests" if load >= Load.CROWDED else "requests of several choices"
            text = f"the queue is {load.name.lower()} and {kind} of priority {request.priority} are refused"
            counts = f"{self.queue.num_waiting} sequences wait, {self.config.max_waiting} may"
            message = f"{text}: {counts}; {self._wait_text()}"
            wait_s = self._seconds_until_started(self.queue.num_waiting - self.config.max_waiting / 2)
            raise self._counted(request.key, LoadShedError(message, retry_after_s=wait_s))

    def _check_share(self, key: KeyInfo, num_sequences: int, num_tokens: int) -> None:
        """Refuse a request that exceeds its key's share, if several keys wait and the queue is at least half full."""
        queue = self.queue
        mine = queue.by_key.get(key.name, 0)
        if not mine or len(queue.by_key) == 1 or self.load < Load.BUSY:
            return
        known = (self.meters.get(name) for name in queue.by_key)
        weights = [1.0 if meter is None else meter.info.weight for meter in known]
        share = key.weight / sum(weights)
        if self._share(mine + num_sequences, queue.tokens_by_key[key.name] + num_tokens) > share:
            message = (
                f"key {key.name!r} has its share of the queue: {mine} of its sequences wait, {share:.0%} of the "
                f"{self.config.max_waiting} places are its own while {len(weights)} keys wait; {self._wait_text()}"
            )
            raise self._counted(key, QueueFullError(message, retry_after_s=self._seconds_until_started(num_sequences)))

    def _check_wait(self, request: AdmissionRequest) -> None:
        limits = [limit for limit in (request.max_wait_s, self.config.max_queue_time_s) if limit is not None]
        if (wait_s := self.wait_s(request.priority)) is not None and wait_s > min(limits):
            message = (
                f"this request would wait about {wait_s:.1f} s, and may wait {min(limits):g} s: "
                f"{self.queue.num_waiting} sequences wait, {self.config.max_waiting} may"
            )
            retry_s = min(MAX_RETRY_S, wait_s - min(limits))
            raise self._counted(request.key, WaitTooLongError(message, retry_after_s=retry_s))

    def _check_concurrent(self, meter: Meter) -> None:
        bound = meter.info.max_concurrent
        if bound is not None and meter.num_open >= bound:
            wait_s = min(
                MAX_RETRY_S, (self.queue.forecast.answer_s(self.queue.num_busy) or 0.0) / max(1, meter.num_open)
            )
            message = (
                f"key {meter.info.name!r} is at its limit: {meter.num_open} of its requests are open, {bound} may be"
            )
            raise self._counted(meter.info, RateLimitError(message, retry_after_s=wait_s))

    def _counted(self, key: KeyInfo, error: BusyError) -> BusyError:
        """Count a refusal for the key; return the error."""
        meter = self.meter(key)
        if meter is not None:
            meter.num_refused += 1
        return error

    def _seconds_until_started(self, num_sequences: float) -> float | None:
        """Return the seconds until `num_sequences` more sequences have started; None if unknown.

        All waiting sequences and a new one start within `wait_s()` seconds; the result is that time in proportion.
        """
        wait_s = self.wait_s()
        if wait_s is None:
            return None
        return min(MAX_RETRY_S, wait_s * max(0.0, num_sequences) / (self.queue.num_waiting + 1))

    def _seconds_until_computed(self, num_tokens: int) -> float | None:
        """Return the seconds until prompts of `num_tokens` tokens have slots and are computed; None if unknown."""
        prefill_s = self.queue.forecast.prefill_s(num_tokens)
        if prefill_s is None or not self.queue.num_waiting:
            return None if prefill_s is None else min(MAX_RETRY_S, prefill_s)
        each = max(1.0, self.queue.num_waiting_tokens / max(1, self.queue.num_pending))
        return max(min(MAX_RETRY_S, prefill_s), self._seconds_until_started(num_tokens / each) or 0.0)

    def _wait_text(self) -> str:
        wait_s = self.wait_s()
        return "how long is not known yet" if wait_s is None else f"a new request would wait about {wait_s:.1f} s"
