"""The heartbeat: a page of shared memory that the step loop writes, and that is read also when the loop is dead.

Owns: the page's layout, writing and reading it, how long a step may take. Does not: judge or kill (see watchdog).
Invariants: a reader gets a beat or a batch exactly as it was written, or the one before it, also when the writer was
killed in the middle: each is written alternately to two places, with a checksum, and the newest that is whole counts.
A batch is written before the step that runs it begins.
Cost: 3 to 6 us for a step whose batch stays as it is, 20 to 200 us where it changed (1 to 256 rows; two busy cores).
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

MIN_STEP_S = 5.0  # what any step may take
COMMANDS_S = 5.0  # taking in requests, or an export of statistics
MARGIN = 10.0  # how many times the predicted seconds a step may take
LONG_CONTEXT = 4096  # tokens from which attention over them may be most of a step; below, the margin has room for it

_BEAT = struct.Struct("<QIIQQdQ")  # number, epoch, phase, step, steps committed, deadline, number of the batch
_BATCH = struct.Struct("<QI")  # number, bytes of ids
_CRC = struct.Struct("<I")
_BEAT_BYTES = _BEAT.size + _CRC.size
_BEAT_PLACE = 64
_BATCHES_AT = 2 * _BEAT_PLACE
_BATCH_PLACE = 1 << 17
_MOST_IDS_BYTES = _BATCH_PLACE - _BATCH.size - _CRC.size
PAGE_BYTES = _BATCHES_AT + 2 * _BATCH_PLACE
_MEMORY = "/dev/shm"


class Phase(IntEnum):
    """What the loop does."""

    IDLE = 0
    COMMANDS = 1
    STEP = 2


_IDLE, _COMMANDS, _STEP = map(int, Phase)  # plain ones are packed four times as fast


@dataclass(frozen=True, slots=True)
class Beat:
    """One beat. `deadline` is when the next must have come, on the monotonic clock; None while idle."""

    number: int
    epoch: int
    phase: Phase
    step: int
    num_committed: int
    deadline: float | None
    batch: int


@contextmanager
def page_file() -> Iterator[int]:
    """Yield the descriptor of a file for a page. It has no name, and is in memory if it can be: a page on a disk makes
    the loop wait while it is written back.
    """
    with TemporaryFile(dir=_MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None) as file:
        os.ftruncate(file.fileno(), PAGE_BYTES)
        yield file.fileno()


class HeartbeatPage:
    """The shared page, mapped from an open file. One process writes, any number read."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, PAGE_BYTES)

    def write_beat(self, number: int, rest: tuple[int, int, int, int, float, int]) -> None:
        """Write beat `number`: epoch, phase, step, committed, deadline, batch."""
        body = _BEAT.pack(number, *rest)
        at = (number & 1) * _BEAT_PLACE
        self._map[at : at + _BEAT_BYTES] = body + _CRC.pack(crc32(body))

    def write_batch(self, number: int, ids: Iterable[str]) -> None:
        """Write the ids of batch `number`; those that do not fit are left out."""
        packed, names = msgspec.msgpack.encode(tuple(ids)), tuple(ids)
        while len(packed) > _MOST_IDS_BYTES:
            names = names[: len(names) // 2]
            packed = msgspec.msgpack.encode(names)
        body = _BATCH.pack(number, len(packed)) + packed
        at = _BATCHES_AT + (number & 1) * _BATCH_PLACE
        self._map[at : at + len(body) + _CRC.size] = body + _CRC.pack(crc32(body))

    def beat(self) -> Beat | None:
        """The newest whole beat; None before the first."""
        beats = [found for at in (0, _BEAT_PLACE) if (found := self._read_beat(at)) is not None]
        return max(beats, key=lambda found: found.number, default=None)

    def batch(self, number: int) -> tuple[str, ...] | None:
        """The ids of a batch; None when it is not there whole."""
        at = _BATCHES_AT + (number & 1) * _BATCH_PLACE
        found, size = _BATCH.unpack(self._map[at : at + _BATCH.size])
        if found != number or size > _MOST_IDS_BYTES:
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
        """Unmap it. Idempotent."""
        self._map.close()

    def _read_beat(self, at: int) -> Beat | None:
        body = self._map[at : at + _BEAT.size]
        (crc,) = _CRC.unpack(self._map[at + _BEAT.size : at + _BEAT.size + _CRC.size])
        number, epoch, phase, step, num_committed, deadline, batch = _BEAT.unpack(body)
        if number == 0 or crc != crc32(body) or phase > max(Phase):
            return None
        return Beat(number, epoch, Phase(phase), step, num_committed, deadline or None, batch)


@dataclass(slots=True)
class _Kind:
    """What steps of one size took of late: tokens, seconds, and the weight of their contexts."""

    tokens: float
    seconds: float
    weight: float


class StepLimits:
    """How long a step may take, from what others took: sizes are powers of two of its tokens.

    A size not seen yet is predicted from those that were: no step takes longer than a larger one, nor than a smaller
    one times the ratio of their tokens. Where a row's context is long, the prediction grows with it.
    """

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        self._kinds: dict[int, _Kind] = {}
        for num_tokens, seconds in (measured or {}).items():
            self.note(num_tokens, seconds)

    def limit(self, num_tokens: int, context: int = 0) -> float:
        """Return the seconds that a step of so many tokens may take; `context` is the longest of its rows'."""
        kind, weight = self._kinds.get(num_tokens.bit_length() or 1), _weight(context)
        if kind is not None and num_tokens <= kind.tokens and weight <= kind.weight:
            seconds = kind.seconds
        else:
            kinds = self._kinds.values() if kind is None else (kind,)
            seconds = min((_predict(one, num_tokens, weight) for one in kinds), default=0.0)
        return max(MIN_STEP_S, MARGIN * seconds)

    def note(self, num_tokens: int, seconds: float, context: int = 0) -> None:
        """Note what a step took. A slower one counts at once, a faster one little by little."""
        num_tokens, weight = max(num_tokens, 1), _weight(context)  # a step of effects alone has none
        kind = self._kinds.get(num_tokens.bit_length())
        if kind is None or seconds > kind.seconds:
            self._kinds[num_tokens.bit_length()] = _Kind(num_tokens, seconds, weight)
            return
        kind.tokens += 0.05 * (num_tokens - kind.tokens)
        kind.seconds += 0.05 * (seconds - kind.seconds)
        kind.weight += 0.05 * (weight - kind.weight)


def _predict(kind: _Kind, num_tokens: int, weight: float) -> float:
    return kind.seconds * max(1.0, num_tokens / kind.tokens) * max(1.0, weight / kind.weight)


def _weight(context: int) -> float:
    return context / LONG_CONTEXT if context > LONG_CONTEXT else 1.0


class HeartbeatWriter:
    """Writes the page as the loop runs; all methods belong to the loop's thread."""

    def __init__(self, page: HeartbeatPage, epoch: int, now: Callable[[], float] = monotonic) -> None:
        self._page = page
        self._epoch = epoch
        self._now = now
        self._limits = StepLimits()
        self._number = 0
        self._step = 0
        self._num_committed = 0
        self._batch = 0
        # Tokens, longest context, limit, begun, whose rows.
        self._flight: deque[tuple[int, int, float, float, tuple[str, ...]]] = deque()
        self._allowed = 0.0  # seconds that all of it may take
        self._last_end = 0.0
        self._slots: object = None  # of the plan whose batch is on the page; None: write it anew
        self._names: tuple[str, ...] = ()  # that plan's requests
        self._owners: dict[int, str] = {}

    def warmed_up(self, seconds: Mapping[int, float]) -> None:
        """Note what steps of so many tokens took before there were requests."""
        self._limits = StepLimits(seconds)

    def step_begins(self, plan: StepPlan) -> None:
        """A plan is about to be submitted."""
        if plan.new_sequences or plan.slots != self._slots:
            self._write_batch(plan)
        num_tokens, now = plan.num_query_tokens, self._now()
        context = max(plan.starts) if plan.num_kv_read > LONG_CONTEXT else 0
        limit = self._limits.limit(num_tokens, context)
        self._flight.append((num_tokens, context, limit, now, self._names))
        self._allowed += limit
        self._step = plan.step
        self._beat(_STEP, now + self._allowed)

    def step_ended(self, is_committed: bool) -> None:
        """The oldest plan in flight was committed, or it failed, and with it all that were in flight."""
        now = self._now()
        if is_committed:
            num_tokens, context, limit, begun, _ = self._flight.popleft()
            last_end = self._last_end
            self._limits.note(num_tokens, now - (begun if begun > last_end else last_end), context)
            self._allowed -= limit
            self._num_committed += 1
        else:
            self._flight.clear()
        if not self._flight:
            self._allowed = 0.0
        self._last_end = now
        self._beat(_STEP, now + self._allowed + MIN_STEP_S)

    def commands_begin(self) -> None:
        """Commands are about to be carried out."""
        self._beat(_COMMANDS, self._now() + self._allowed + COMMANDS_S)

    def idle(self) -> None:
        """There is nothing to do."""
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
