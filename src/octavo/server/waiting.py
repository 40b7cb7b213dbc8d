"""WaitingRoom: what waits for the engine and what runs on it, as far as the server sees it.

Owns: the counts, by key and by priority, and each request's Seat in them. Does not: order anything (the scheduler
does), refuse anybody (admission does), or read a clock.
What waits: sequences without a token, less those for which the engine has a slot and KV room now. So a bound of N
means N beside those that run, and an idle engine has nobody waiting however many come at once.
Invariant: whatever a seat took is given back exactly once, at its request's end at the latest.
"""

from __future__ import annotations

from collections import Counter

from octavo.server.queue_forecast import QueuedWork

_UNKNOWN_SLOTS = 256


class DecayedMean:
    """A weighted mean in which a value counts half once `half_life` of weight has been added after it."""

    __slots__ = ("_half_life", "_sum", "_weight")

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._sum = 0.0
        self._weight = 0.0

    def add(self, total: float, weight: float) -> None:
        """Count `weight` things that measured `total` together."""
        kept = 0.5 ** (weight / self._half_life)
        self._sum = self._sum * kept + total
        self._weight = self._weight * kept + weight

    @property
    def value(self) -> float | None:
        """The mean; None before the first value."""
        return self._sum / self._weight if self._weight else None


class Seat:
    """What one HTTP request takes: `num_prompts` prompts of `width` sequences each."""

    __slots__ = ("_held", "_is_open", "_room", "key", "num_prompts", "num_started", "num_waiting", "priority", "width",
                 "work")  # fmt: skip

    def __init__(self, room: WaitingRoom, key: str, priority: int, num_prompts: int, width: int) -> None:
        self.key = key
        self.priority = priority
        self.num_prompts = num_prompts
        self.width = width
        self.num_waiting = num_prompts  # prompts without a token
        self.num_started = 0  # prompts with one, and without their end
        self._room = room
        self.work = QueuedWork(width)  # of one prompt, on average
        self._held = 0  # tokens in the KV pool, as far as known
        self._is_open = True

    def expect(self, prompt_tokens: float, output_tokens: float) -> None:
        """Say how many tokens all its prompts have, and each of its sequences will likely generate."""
        self._room.move(self, -self.num_waiting)
        each = max(1, self.num_prompts)
        self.work = QueuedWork(self.width, prompt_tokens / each, self.width * output_tokens)
        self._room.move(self, self.num_waiting)

    def start(self) -> None:
        """One of its prompts has its first token."""
        if self.num_waiting:
            self._room.move(self, -1)
            self.num_waiting -= 1
            self.num_started += 1
            self._room.num_running += self.width
            self.grow(round(self.work.prompt_tokens * self._room.new_share))

    def grow(self, num_tokens: int) -> None:
        """Its sequences hold so many tokens more."""
        if self._is_open:
            self._held += num_tokens
            self._room.num_tokens_held += num_tokens

    def end(self) -> None:
        """One of its prompts has ended."""
        if self.num_started:
            gone = self._held // self.num_started
            self.num_started -= 1
            self._room.num_running -= self.width
            self.grow(-gone)
        elif self.num_waiting:
            self._room.move(self, -1)
            self.num_waiting -= 1

    def leave(self) -> None:
        """Give back all that is left of it. Idempotent."""
        if self._is_open:
            self._room.move(self, -self.num_waiting)
            self._room.num_running -= self.num_started * self.width
            self.grow(-self._held)
            self._is_open = False
            self._room.num_requests -= 1
            self.num_waiting = self.num_started = 0


class WaitingRoom:
    """Counts sequences and tokens; `num_slots` sequences and `num_kv_tokens` tokens fit the engine (0 = unknown)."""

    def __init__(self, num_slots: int = 0, num_kv_tokens: int = 0) -> None:
        self.num_slots = num_slots or _UNKNOWN_SLOTS
        self.num_kv_tokens = num_kv_tokens
        self.num_requests = 0  # HTTP requests with a seat
        self.num_pending = 0  # sequences without a token
        self.num_running = 0  # sequences with a token
        self.num_tokens_held = 0  # by those
        self._new_share = DecayedMean(16_384)  # of prompt tokens, those that were not in the prefix cache
        self.pending = QueuedWork()  # of all prompts without a token
        self.by_key: Counter[str] = Counter()  # sequences without a token
        self.tokens_by_key: Counter[str] = Counter()
        self._by_priority: dict[int, QueuedWork] = {}

    def enter(self, key: str, priority: int, num_prompts: int, width: int) -> Seat:
        """Take a seat; the caller says what to expect of it next."""
        seat = Seat(self, key, priority, num_prompts, width)
        self.num_requests += 1
        self.move(seat, num_prompts)
        return seat

    @property
    def new_share(self) -> float:
        """The share of prompt tokens that take KV room of their own, from the last prompts."""
        share = self._new_share.value
        return 1.0 if share is None else share

    def prompt_done(self, num_tokens: int, num_cached: int) -> None:
        """Count a prompt of so many tokens, some of them from the prefix cache."""
        if num_tokens > 0:
            self._new_share.add(num_tokens - num_cached, num_tokens)

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
        """Sequences that the engine works on, prompts of those without a token among them."""
        return self.num_running + min(self.num_free, self.num_pending)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot or for KV room."""
        return max(0, self.num_pending - self.num_free)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of all that has no token yet."""
        return round(self.pending.prompt_tokens)

    def ahead_of(self, priority: int | None) -> QueuedWork:
        """What waits and goes before a new request of this priority (None: before any, in order of arrival)."""
        if priority is None:
            chosen = self.pending
        else:
            chosen = QueuedWork()
            for level, work in self._by_priority.items():
                if level <= priority:
                    chosen.add(work)
        share = max(0.0, 1 - self.num_free / chosen.num_sequences) if chosen.num_sequences else 0.0
        return chosen.scaled(share)

    def move(self, seat: Seat, num_prompts: int) -> None:
        """Add so many prompts of a seat to what waits; a negative number takes them out."""
        if not num_prompts:
            return
        work = seat.work
        self.num_pending += num_prompts * seat.width
        self.pending.add(work, num_prompts)
        level = self._by_priority.setdefault(seat.priority, QueuedWork())
        level.add(work, num_prompts)
        if level.num_sequences < 0.5:
            del self._by_priority[seat.priority]
        self.by_key[seat.key] += num_prompts * seat.width
        self.tokens_by_key[seat.key] += round(num_prompts * work.prompt_tokens)
        if self.by_key[seat.key] <= 0:
            del self.by_key[seat.key], self.tokens_by_key[seat.key]
        if not self.num_pending:
            self.pending = QueuedWork()  # no remainder of sums is left behind
