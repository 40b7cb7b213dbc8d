"""The heartbeat: a page of shared memory that the step loop writes, and that can be read when the loop is dead.

Owns: the page's layout, writing and reading the page, and the time limits of steps.
Does not: decide whether a loop stalls (Watchdog does), or kill.
Invariants: a reader gets the newest beat or batch exactly as it was written or, if the writer was killed while writing,
the previous one. Beats and batches are written alternately to two slots each, with a checksum; the newest valid slot
counts. The ids of a batch are written before its step begins.
Cost: 3 to 6 us for a step with an unchanged batch, 20 to 200 us for a changed one (1 to 256 rows; two busy cores).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from tempfile import TemporaryFile
from time import monotonic
from zlib import crc32

import msgspec

from octavo.core.plan import StepPlan

MIN_STEP_S = 5.0  # every step may take at least this long
COMMANDS_S = 5.0  # time for commands, such as admitting requests or exporting statistics
MARGIN = 10.0  # a step may take this many times its predicted seconds
ENCODE_S = 0.1  # time for each token of media that a step encodes
LONG_CONTEXT = 4096  # tokens of context from which attention may dominate a step; below, MARGIN covers it

_BEAT = struct.Struct("<QQIQQdQ")  # number, epoch, phase, step, steps committed, deadline, number of the batch
_BATCH = struct.Struct("<QI")  # number, bytes of ids
_CRC = struct.Struct("<I")
_BEAT_BYTES = _BEAT.size + _CRC.size
_BEAT_SLOT = 64
_BATCHES_AT = 2 * _BEAT_SLOT
_BATCH_SLOT = 1 << 17
_MAX_IDS_BYTES = _BATCH_SLOT - _BATCH.size - _CRC.size
PAGE_BYTES = _BATCHES_AT + 2 * _BATCH_SLOT
_MEMORY = "/dev/shm"


class Phase(IntEnum):
    """The loop's current activity."""

    IDLE = 0
    COMMANDS = 1
    STEP = 2


_IDLE, _COMMANDS, _STEP = map(int, Phase)  # plain ints are packed four times as fast


@dataclass(frozen=True, slots=True)
class Beat:
    """One beat. `deadline` is the time by which the next beat is due, on the monotonic clock; None while idle."""

    number: int
    epoch: int
    phase: Phase
    step: int
    num_committed: int
    deadline: float | None
    batch: int

    @property
    def where(self) -> str:
        """What the loop does, for messages."""
        return f"step {self.step}" if self.phase is Phase.STEP else f"{self.phase.name.lower()} after step {self.step}"


def memory_folder() -> str | None:
    """Return a folder whose files are in memory; None if there is none, or it cannot be written to."""
    return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None


@contextmanager
def page_file() -> Iterator[int]:
    """Yield the descriptor of a nameless file for a page.

    The file is in memory if possible: with a file on a disk, the loop would wait while the page is written back.
    """
    with TemporaryFile(dir=memory_folder()) as file:
        os.ftruncate(file.fileno(), PAGE_BYTES)
        yield file.fileno()


class HeartbeatPage:
    """The shared page, mapped from an open file. One process writes; any number may read."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, PAGE_BYTES)

    def write_beat(self, number: int, rest: tuple[int, int, int, int, float, int]) -> None:
        """Write beat `number`: epoch, phase, step, committed, deadline, batch."""
        body = _BEAT.pack(number, *rest)
        at = (number & 1) * _BEAT_SLOT
        self._map[at : at + _BEAT_BYTES] = body + _CRC.pack(crc32(body))

    def write_batch(self, number: int, ids: Iterable[str]) -> None:
        """Write the request ids of batch `number`; ids that do not fit are left out."""
        packed, names = msgspec.msgpack.encode(tuple(ids)), tuple(ids)
        while len(packed) > _MAX_IDS_BYTES:
            names = names[: len(names) // 2]
            packed = msgspec.msgpack.encode(names)
        body = _BATCH.pack(number, len(packed)) + packed
        at = _BATCHES_AT + (number & 1) * _BATCH_SLOT
        self._map[at : at + len(body) + _CRC.size] = body + _CRC.pack(crc32(body))

    def beat(self) -> Beat | None:
        """Return the newest valid beat; None before the first beat."""
        beats = [found for at in (0, _BEAT_SLOT) if (found := self._read_beat(at)) is not None]
        return max(beats, key=lambda found: found.number, default=None)

    def batch(self, number: int) -> tuple[str, ...] | None:
        """Return the request ids of a batch; None if the batch is no longer on the page, or is damaged."""
        at = _BATCHES_AT + (number & 1) * _BATCH_SLOT
        found, size = _BATCH.unpack(self._map[at : at + _BATCH.size])
        if found != number or size > _MAX_IDS_BYTES:
            return None
        end = at + _BATCH.size + size
        body = self._map[at:end]
        if _CRC.unpack(self._map[end : end + _CRC.size])[0] != crc32(body):
            return None
        try:
            return msgspec.msgpack.decode(body[_BATCH.size :], type=tuple[str, ...])
        except msgspec.MsgspecError:
            return None

    def close(self) -> None:
        """Unmap the page. Idempotent."""
        self._map.close()

    def _read_beat(self, at: int) -> Beat | None:
        body = self._map[at : at + _BEAT.size]
        (crc,) = _CRC.unpack(self._map[at + _BEAT.size : at + _BEAT.size + _CRC.size])
        number, epoch, phase, step, num_committed, deadline, batch = _BEAT.unpack(body)
        if number == 0 or crc != crc32(body) or phase > max(Phase):
            return None
        return Beat(number, epoch, Phase(phase), step, num_committed, deadline or None, batch)


@dataclass(slots=True)
class _StepAverage:
    """Recent averages over steps of one size: tokens, seconds, and context weight (see _weight)."""

    tokens: float
    seconds: float
    weight: float


class StepLimits:
    """Time limits of steps, from the times of earlier steps. Steps are grouped by size: powers of two of their tokens.

    A size without steps is predicted from the other sizes: a step takes no longer than a larger step, and no longer
    than a smaller step times the ratio of their tokens. For long contexts the prediction grows with the context.
    """

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        self._averages: dict[int, _StepAverage] = {}
        for num_tokens, seconds in (measured or {}).items():
            self.note(num_tokens, seconds)

    def limit(self, num_tokens: int, context: int = 0) -> float:
        """Return the seconds that a step of `num_tokens` may take; `context` is its longest row's context."""
        average, weight = self._averages.get(num_tokens.bit_length() or 1), _weight(context)
        if average is not None and num_tokens <= average.tokens and weight <= average.weight:
            seconds = average.seconds
        else:
            averages = self._averages.values() if average is None else (average,)
            seconds = min((_predict(one, num_tokens, weight) for one in averages), default=0.0)
        return max(MIN_STEP_S, MARGIN * seconds)

    def note(self, num_tokens: int, seconds: float, context: int = 0) -> None:
        """Record a step's time. A slower step counts at once, a faster one gradually."""
        num_tokens, weight = max(num_tokens, 1), _weight(context)  # a step without rows has no tokens
        average = self._averages.get(num_tokens.bit_length())
        if average is None or seconds > average.seconds:
            self._averages[num_tokens.bit_length()] = _StepAverage(num_tokens, seconds, weight)
            return
        average.tokens += 0.05 * (num_tokens - average.tokens)
        average.seconds += 0.05 * (seconds - average.seconds)
        average.weight += 0.05 * (weight - average.weight)


def _predict(average: _StepAverage, num_tokens: int, weight: float) -> float:
    return average.seconds * max(1.0, num_tokens / average.tokens) * max(1.0, weight / average.weight)


def _weight(context: int) -> float:
    return context / LONG_CONTEXT if context > LONG_CONTEXT else 1.0


class HeartbeatWriter:
    """Writer of the page; all methods belong to the loop's thread."""

    def __init__(self, page: HeartbeatPage, epoch: int, now: Callable[[], float] = monotonic) -> None:
        self._page = page
        self._epoch = epoch
        self._now = now
        self._limits = StepLimits()
        self._number = 0
        self._step = 0
        self._num_committed = 0
        self._batch = 0
        # Tokens, longest context, limit, time of begin, requests with rows.
        self._flight: deque[tuple[int, int, float, float, tuple[str, ...]]] = deque()
        self._allowed = 0.0  # seconds that all plans in flight may take
        self._last_end = 0.0
        self._slots: object = None  # slots of the plan whose batch is on the page; None: write the next batch anew
        self._names: tuple[str, ...] = ()  # request ids of that plan
        self._owners: dict[int, str] = {}

    def warmed_up(self, seconds: Mapping[int, float]) -> None:
        """Set the times of warm-up steps, by number of tokens."""
        self._limits = StepLimits(seconds)

    def step_begins(self, plan: StepPlan) -> None:
        """Write a beat: a plan is about to be submitted."""
        if plan.new_sequences or plan.slots != self._slots:
            self._write_batch(plan)
        num_tokens, now = plan.num_query_tokens, self._now()
        context = max(plan.starts) if plan.num_kv_read > LONG_CONTEXT else 0
        limit = self._limits.limit(num_tokens, context)
        if plan.encode_jobs:  # a tower's speed is unknown, and its time is no measure of other steps
            limit += ENCODE_S * sum(job.num_tokens for job in plan.encode_jobs)
            num_tokens = -1
        self._flight.append((num_tokens, context, limit, now, self._names))
        self._allowed += limit
        self._step = plan.step
        self._beat(_STEP, now + self._allowed)

    def step_ended(self, is_committed: bool) -> None:
        """Write a beat: the oldest plan in flight was committed, or it failed and all in flight were discarded."""
        now = self._now()
        if is_committed:
            num_tokens, context, limit, began, _ = self._flight.popleft()
            last_end = self._last_end
            if num_tokens >= 0:
                self._limits.note(num_tokens, now - (began if began > last_end else last_end), context)
            self._allowed -= limit
            self._num_committed += 1
        else:
            self._flight.clear()
        if not self._flight:
            self._allowed = 0.0
        self._last_end = now
        self._beat(_STEP, now + self._allowed + MIN_STEP_S)

    def commands_begin(self) -> None:
        """Write a beat: commands are about to run."""
        self._beat(_COMMANDS, self._now() + self._allowed + COMMANDS_S)

    def idle(self) -> None:
        """Write a beat: the loop has nothing to do."""
        self._beat(_IDLE, 0.0)

    def _write_batch(self, plan: StepPlan) -> None:
        """Write the ids of all requests with a row in this plan or in one still in flight."""
        for new in plan.new_sequences:
            self._owners[new.slot] = new.request_id
        self._names = tuple(dict.fromkeys([self._owners[slot] for slot in plan.slots]))
        names = dict.fromkeys(self._names)
        for *_, earlier in self._flight:
            names |= dict.fromkeys(earlier)
        self._batch += 1
        self._page.write_batch(self._batch, names)
        self._slots = plan.slots if len(names) == len(self._names) else None

    def _beat(self, phase: int, deadline: float) -> None:
        self._number = number = self._number + 1
        self._page.write_beat(number, (self._epoch, phase, self._step, self._num_committed, deadline, self._batch))
