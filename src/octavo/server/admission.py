"""Admission: accept a request now, or refuse it and say when it can be sent again.

Owns: the order of the checks, the load levels, shares of the queue, the meters of keys, the messages of refusals.
Does not: count or forecast (engine_queue and rates do), read bodies, or know HTTP.
A request is checked three times: `glance` before its body is read, by counts alone; `enter` once the body is checked
and before anything is tokenized; `settle` when the prompts' tokens are counted.
Invariants: a refusal reserves nothing and costs only counting; every ticket is released.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from octavo.config import AdmissionConfig
from octavo.errors import BusyError, LoadShedError, QueueFullError, RateLimitError, WaitTooLongError
from octavo.server.engine_queue import DecayedMean, EngineQueue, QueuedWork
from octavo.server.http.keys import ANONYMOUS, KeyInfo
from octavo.server.http.limits import Meter

MAX_RETRY_S = 60.0
DEFAULT_PRIORITY = 0  # smaller is more urgent
_RESERVED = 8  # with several keys, one place in 8 is reserved for keys without waiting requests
_BOUNDS = (0.5, 0.75, 1.0)  # shares of the queue at which the load levels begin
_FIRST_TOKENS_PER_CHARACTER = 0.3
MAX_METERS = 4096  # at this number, the meters without open requests are dropped


class Load(IntEnum):
    """How full the queue is, in sequences or tokens, whichever is fuller."""

    NORMAL = 0
    BUSY = 1  # half
    CROWDED = 2  # three quarters
    FULL = 3


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """The size and limits of a checked body, before anything is tokenized; `num_ids` counts the token ids given.

    `max_wait_s` is the longest that it may wait: its queue timeout or its timeout.
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
    """An admitted request's share of the queue, and its place among its key's open requests."""

    __slots__ = (
        "_held",
        "_is_open",
        "_now",
        "_place",
        "_queue",
        "meter",
        "num_started",
        "num_waiting",
        "request",
        "work",
    )

    def __init__(
        self, queue: EngineQueue, request: AdmissionRequest, meter: Meter | None, now: Callable[[], float]
    ) -> None:
        self.request = request
        self.num_waiting = request.num_prompts  # prompts without a token
        self.num_started = 0  # prompts that have a token and have not ended
        self.work = QueuedWork(request.width)  # of one prompt, on average
        self._place = (request.key.name, request.priority)
        self._queue = queue
        self.meter = meter
        self._now = now
        self._held = 0  # tokens in the KV pool, as far as known
        self._is_open = True
        queue.num_requests += 1
        self._queue.add(*self._place, self.work, request.num_prompts)
        if meter is not None:
            meter.num_open += 1

    def expect(self, prompt_tokens: float, output_tokens: float) -> None:
        """Set the tokens of all its prompts, and the output tokens expected of each of its sequences."""
        self._queue.add(*self._place, self.work, -self.num_waiting)
        width = self.request.width
        self.work = QueuedWork(width, prompt_tokens / max(1, self.request.num_prompts), width * output_tokens)
        self._queue.add(*self._place, self.work, self.num_waiting)

    def generated(self, num_tokens: int, is_first: bool = False) -> None:
        """Charge tokens that were generated; `is_first`: a prompt's first."""
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
        """Remove one of its prompts, which finished, and record its prompt tokens and cached tokens."""
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
        queue.prompt_done(num_prompt_tokens, num_cached)

    def leave(self) -> None:
        """Release what the ticket still holds. Idempotent."""
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
    """The checks that accept or refuse requests. `is_by_priority`: the scheduler runs more urgent requests first."""

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
        self._meters: dict[str, Meter] = {}

    def meter(self, key: KeyInfo) -> Meter | None:
        """Return the key's meter, a new one if needed; None if there are no keys."""
        if not key.name:
            return None
        meter = self._meters.get(key.name)
        if meter is None:
            if len(self._meters) >= MAX_METERS:
                self._meters = {name: each for name, each in self._meters.items() if each.num_open}
            meter = self._meters[key.name] = Meter(key, self.now())
        return meter

    def _current_meter(self, key: KeyInfo) -> Meter | None:
        meter = self.meter(key)
        if meter is not None and meter.info is not key:  # the keys were reloaded
            meter.update(key, self.now())
        return meter

    @property
    def meters(self) -> Mapping[str, Meter]:
        """The meters, by the name of the key."""
        return self._meters

    @property
    def load(self) -> Load:
        """How full the queue is."""
        return Load(bisect_right(_BOUNDS, self._share(self.queue.num_waiting, self.queue.num_waiting_tokens)))

    def glance(self, key: KeyInfo, *, may_be_known: bool = False) -> None:
        """Count a request before its body is read, or refuse it at a full queue or its key's limit (BusyError).

        `may_be_known`: it may ask for an answer that exists already, which needs no place in the queue.
        """
        meter = self._current_meter(key)
        if not may_be_known and self.queue.num_pending:
            self._check_full(key, 1)
        if meter is not None:
            if not may_be_known:
                self._check_concurrent(meter)
            meter.begin(self.now())

    def count(self, key: KeyInfo) -> None:
        """Count a request that needs no place in the queue, or refuse it at its key's limit (BusyError)."""
        meter = self._current_meter(key)
        if meter is not None:
            meter.begin(self.now())

    def charge(self, key: KeyInfo, num_tokens: int) -> None:
        """Charge a key for tokens that were counted or decoded for it, and not generated."""
        meter = self.meter(key)
        if meter is not None:
            meter.use_tokens(num_tokens, self.now())

    def enter(self, request: AdmissionRequest) -> AdmissionTicket:
        """Return a ticket for a checked body. Raises BusyError."""
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
        """Return a ticket for a request that was admitted by a former server."""
        return AdmissionTicket(self.queue, request, self.meter(request.key), self.now)

    def settle(self, ticket: AdmissionTicket, num_tokens: int) -> None:
        """Check the counted tokens of all prompts, and charge them. Raises BusyError."""
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
        """Refuse a request with more tokens than other requests leave of the queue. Raises BusyError."""
        others, most = self.queue.num_waiting_tokens, self.config.max_waiting_tokens
        if others and others + num_tokens > most:
            wait_s = self._tokens_room_s(others + num_tokens - most)
            told = "how long is not known yet" if wait_s is None else f"there will be room in about {wait_s:.1f} s"
            text = f"requests with {others} prompt tokens wait for their first token, {most} may, and this one has"
            message = f"the queue is full: {text} {num_tokens}; {told}"
            raise self._counted(key, QueueFullError(message, retry_after_s=wait_s))

    def snapshot(self) -> dict[str, object]:
        """Return the current figures, for metrics."""
        keys = {
            name: {"requests": m.num_requests, "tokens": m.num_tokens, "refused": m.num_refused, "open": m.num_open}
            for name, m in self._meters.items()
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

    def forecast_came(self, answer: Mapping[str, object]) -> None:
        """Store the engine's current forecast."""
        self.queue.forecast.update(answer, self.queue.state())

    def _share(self, num_sequences: float, num_tokens: float) -> float:
        return max(num_sequences / self.config.max_waiting, num_tokens / self.config.max_waiting_tokens)

    def _check_full(self, key: KeyInfo, num_sequences: int) -> None:
        waiting, most = self.queue.num_waiting, self.config.max_waiting
        kept = ""
        if len(self._meters) > 1 and key.name in self.queue.by_key:
            # Otherwise the key that fills the queue takes each free place before another key asks for it.
            most -= most // _RESERVED
            kept = f" ({self.config.max_waiting - most} more places are for keys of which nothing waits)"
        if waiting and waiting + num_sequences > most:
            asked = "" if num_sequences == 1 else f", and this request has {num_sequences}"
            message = f"the queue is full: {waiting} sequences wait, {most} may{kept}{asked}; {self._told()}"
            wait_s = self._room_s(waiting + num_sequences - most)
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
            message = f"{text}: {self.queue.num_waiting} sequences wait, {self.config.max_waiting} may; {self._told()}"
            wait_s = self._room_s(self.queue.num_waiting - self.config.max_waiting / 2)
            raise self._counted(request.key, LoadShedError(message, retry_after_s=wait_s))

    def _check_share(self, key: KeyInfo, num_sequences: int, num_tokens: int) -> None:
        """Refuse a request that takes its key over its share while several keys wait in a queue at least half full."""
        queue = self.queue
        mine = queue.by_key.get(key.name, 0)
        if not mine or len(queue.by_key) == 1 or self.load < Load.BUSY:
            return
        known = (self._meters.get(name) for name in queue.by_key)
        weights = [1.0 if meter is None else meter.info.weight for meter in known]
        share = key.weight / sum(weights)
        if self._share(mine + num_sequences, queue.tokens_by_key[key.name] + num_tokens) > share:
            message = (
                f"key {key.name!r} has its share of the queue: {mine} of its sequences wait, {share:.0%} of the "
                f"{self.config.max_waiting} places are its own while {len(weights)} keys wait; {self._told()}"
            )
            raise self._counted(key, QueueFullError(message, retry_after_s=self._room_s(num_sequences)))

    def _check_wait(self, request: AdmissionRequest) -> None:
        limits = [limit for limit in (request.max_wait_s, self.config.max_queue_time_s) if limit is not None]
        wait_s = self.wait_s(request.priority)
        if wait_s is not None and wait_s > min(limits):
            message = (
                f"this request would wait about {wait_s:.1f} s, and may wait {min(limits):g} s: "
                f"{self.queue.num_waiting} sequences wait, {self.config.max_waiting} may"
            )
            retry_s = min(MAX_RETRY_S, wait_s - min(limits))
            raise self._counted(request.key, WaitTooLongError(message, retry_after_s=retry_s))

    def _check_concurrent(self, meter: Meter) -> None:
        most = meter.info.max_concurrent
        if most is not None and meter.num_open >= most:
            wait_s = min(
                MAX_RETRY_S, (self.queue.forecast.answer_s(self.queue.num_busy) or 0.0) / max(1, meter.num_open)
            )
            message = (
                f"key {meter.info.name!r} is at its limit: {meter.num_open} of its requests are open, {most} may be"
            )
            raise self._counted(meter.info, RateLimitError(message, retry_after_s=wait_s))

    def _counted(self, key: KeyInfo, error: BusyError) -> BusyError:
        """Count a refusal for the key, and return the error."""
        meter = self.meter(key)
        if meter is not None:
            meter.num_refused += 1
        return error

    def _room_s(self, num_sequences: float) -> float | None:
        """Return the seconds until `num_sequences` have started; None if unknown.

        In `wait_s` seconds, all waiting sequences and one more start.
        """
        wait_s = self.wait_s()
        if wait_s is None:
            return None
        return min(MAX_RETRY_S, wait_s * max(0.0, num_sequences) / (self.queue.num_waiting + 1))

    def _tokens_room_s(self, num_tokens: int) -> float | None:
        """Return the seconds until prompts of `num_tokens` tokens have slots and are computed."""
        prefill_s = self.queue.forecast.prefill_s(num_tokens)
        if prefill_s is None or not self.queue.num_waiting:
            return None if prefill_s is None else min(MAX_RETRY_S, prefill_s)
        each = max(1.0, self.queue.num_waiting_tokens / max(1, self.queue.num_pending))
        return max(min(MAX_RETRY_S, prefill_s), self._room_s(num_tokens / each) or 0.0)

    def _told(self) -> str:
        wait_s = self.wait_s()
        return "how long is not known yet" if wait_s is None else f"a new request would wait about {wait_s:.1f} s"
