"""Streams of frames: FrameRing keeps a live engine's last steps, FrameWriter writes those of a replay or a simulation.

Owns: the ring and its cursors, the window of steps to write, when the queue and the pool are looked at.
Does not: fold events (history), or make frames (encode).
Invariants: no frame is made of a record in the ring before a reader polls; memory is bounded by steps and by the
objects that they reference, an answer by steps, rows and time. Steps before a window are applied to its head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from octavo.observe.frames.encode import Frame, FrameSource, PoolFrames, head_frame, queue_frame, step_frame
from octavo.observe.history import History, OpenSlots, StepRecord

MAX_STEPS = 1024  # kept in a ring
MAX_WEIGHT = 65_536  # arrivals, decisions and new sequences kept in a ring
MAX_POLL = 200  # steps in an answer
MAX_POLL_ROWS = 16_384  # rows in an answer, before the last step of it
MAX_POLL_S = 0.001  # of the engine's thread for an answer, by its clock; a frame that is begun is finished
MIN_STEPS_S = 0.0005  # of it for the steps of an answer, even after a long look
LOOK_S = 0.125  # between two looks in a live engine, at the queue and the pool in turn
WRITTEN_LOOK_S = 0.25  # between two looks at both, by the clock of the written steps
MAX_WRITTEN = 20_000  # steps; about 10 MB in a page


class FrameRing:
    """The last records of a live engine; `poll` returns their frames. All methods belong to the engine's thread.

    `now` is the engine's clock.
    """

    def __init__(self, history: History, source: FrameSource, now: Callable[[], float]) -> None:
        self._history = history
        self._scheduler = history.scheduler
        self._source = source
        self._now = now
        self._pools = PoolFrames(history.scheduler)
        self._ring: deque[StepRecord | tuple[Frame, ...]] = deque()  # looks are kept as frames
        self._first = 0  # number of the ring's first entry
        self._weight = 0
        self._tail = OpenSlots()  # before the ring's first entry
        self._looked_at: float | None = None
        self._is_pools_turn = False

    def add(self, entry: StepRecord | tuple[Frame, ...]) -> None:
        """Keep a record of the history, or the frames of a look."""
        ring = self._ring
        ring.append(entry)
        self._weight += _weight(entry)
        while len(ring) > MAX_STEPS or self._weight > MAX_WEIGHT:
            old = ring.popleft()
            self._first += 1
            self._weight -= _weight(old)
            if isinstance(old, StepRecord):
                self._tail.apply(old)

    def poll(self, cursor: str) -> dict[str, object]:
        """Return the frames after a cursor (docs/statistics.md); an unknown cursor is treated as ""."""
        begun = self._now()
        self._look(begun)
        stream_id, _, digits = cursor.rpartition(":")
        last, lost = self._first + len(self._ring), 0
        limits, frames = self._scheduler.limits, list[Frame]()
        if cursor == "now":
            number, slots = last, self._tail.copy()
            for record in self._records():
                slots.apply(record)
            frames.append(head_frame(self._source, limits, slots, begun))
        else:
            is_known = (
                bool(cursor) and stream_id == self._source.stream_id and digits.isdecimal() and int(digits) <= last
            )
            number = int(digits) if is_known else self._first
            lost = max(0, self._first - number)
            number += lost
            if lost or not is_known:
                first = next(self._records(), None)
                frames.append(head_frame(self._source, limits, self._tail, first.begin if first else begun))
        number = self._collect(frames, number, begun + MAX_POLL_S)
        return {
            "cursor": f"{self._source.stream_id}:{number}",
            "frames": frames,
            "lost": lost,
            "more": number < last,
        }

    def _collect(self, frames: list[Frame], number: int, until: float) -> int:
        """Add the frames from a number on, up to the bounds of one answer; return the number after them."""
        until = max(until, self._now() + MIN_STEPS_S)
        index, num_steps, num_rows = number - self._first, 0, 0
        previous = None if frames else next(self._records(reversed(range(index))), None)
        while index < len(self._ring) and num_steps < MAX_POLL and num_rows < MAX_POLL_ROWS:
            if num_steps and self._now() > until:
                break
            entry = self._ring[index]
            index += 1
            if not isinstance(entry, StepRecord):
                frames.extend(entry)
                continue
            frame = step_frame(entry, previous, self._history.times)
            frames.append(frame)
            num_steps += 1
            num_rows += len(frame.get("rows", ())) // 3 + _weight(entry)
            previous = entry
        return self._first + index

    def _records(self, indices: Iterable[int] | None = None) -> Iterator[StepRecord]:
        """Yield the ring's records, or those at these indices."""
        for entry in self._ring if indices is None else map(self._ring.__getitem__, indices):
            if isinstance(entry, StepRecord):
                yield entry

    def _look(self, now: float) -> None:
        """Add events without a step, and a frame of the queue or the pool if due; both after a long time."""
        if self._looked_at is not None and now < self._looked_at + LOOK_S:
            return
        self._history.flush(now)
        is_rare = self._looked_at is None or now >= self._looked_at + 4 * LOOK_S
        self._looked_at = now
        looks = list[Frame]()
        self._is_pools_turn = not self._is_pools_turn
        if is_rare or not self._is_pools_turn:
            looks.append(queue_frame(self._scheduler, self._history.waits, now))
        if is_rare or self._is_pools_turn:
            looks.append(self._pools.frame(now))
        self.add(tuple(looks))


def _weight(entry: StepRecord | tuple[Frame, ...]) -> int:
    """Return how many objects an entry references beside its rows."""
    if not isinstance(entry, StepRecord):
        return len(entry)
    return len(entry.taken) + len(entry.arrivals) + len(entry.decisions)


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a stream to write: times in [begin, end), in the engine's seconds, and the maximum of steps.

    `look_s` is the time between two looks at the queue and the pool.
    """

    begin: float = float("-inf")
    end: float = float("inf")
    max_steps: int = MAX_WRITTEN
    look_s: float = WRITTEN_LOOK_S


class FrameWriter:
    """Reader of a history which passes each frame to `write`. Call `end` after the last step."""

    def __init__(
        self, history: History, write: Callable[[Frame], object], source: FrameSource, window: Window | None = None
    ) -> None:
        self._history = history
        self._scheduler = history.scheduler
        self._write = write
        self._source = source
        self._window = window or Window()
        self._before = OpenSlots()
        self._pools = PoolFrames(history.scheduler)
        self._held: StepRecord | None = None  # its emit time is known only when all readers have read it
        self._looks: tuple[Frame, ...] = ()  # made after the held step
        self._previous: StepRecord | None = None
        self._next_look = float("-inf")
        self.num_written = 0
        self.num_cut = 0
        self._has_head = False
        self._has_ended = False

    def read(self, record: StepRecord) -> None:
        """Hold a record of the history, and write the one before it."""
        self._write_held()
        self._held = record
        if record.slots is not None and self._is_shown(record) and record.end >= self._next_look:
            self._look(record.end)

    def finish(self) -> None:
        """Write the remaining frames without an end frame: another engine's frames follow. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._history.flush(self._history.last_time)
            self._write_held()
            self._write_head(self._history.last_time)

    def end(self, num_cut: int = 0) -> None:
        """Write the remaining frames and the end; `num_cut`: steps of earlier engines that were cut. Idempotent."""
        if self._has_ended:
            return
        self.finish()
        frame: Frame = {"k": "end", "t": round(self._history.last_time, 6)}
        if self.num_cut + num_cut:
            frame["cut"] = self.num_cut + num_cut
        self._write(frame)

    def _is_shown(self, record: StepRecord) -> bool:
        window = self._window
        return window.begin <= record.begin < window.end and self.num_written < window.max_steps

    def _write_held(self) -> None:
        record, self._held = self._held, None
        if record is None:
            return
        if self._is_shown(record):
            self._write_head(record.begin)
            self._write(step_frame(record, self._previous, self._history.times))
            self._previous = record
            self.num_written += 1
        else:
            self.num_cut += record.slots is not None and record.begin >= self._window.begin
        self._before.apply(record)
        looks, self._looks = self._looks, ()
        for frame in looks:
            self._write(frame)

    def _write_head(self, now: float) -> None:
        if not self._has_head:
            self._has_head = True
            self._write(head_frame(self._source, self._scheduler.limits, self._before, now))

    def _look(self, now: float) -> None:
        self._next_look = now + self._window.look_s
        self._looks = queue_frame(self._scheduler, self._history.waits, now), self._pools.frame(now)


class FrameSpool:
    """Frames kept as packed JSON, in a tenth of their memory as objects, to be read in order once all are written."""

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._encoder = msgspec.json.Encoder()

    def __len__(self) -> int:
        return len(self._packed)

    def write(self, frame: Frame) -> None:
        """Keep a frame."""
        self._packed.append(self._encoder.encode(frame))

    def __iter__(self) -> Iterator[Frame]:
        """Yield all frames, in order."""
        decoder = msgspec.json.Decoder(Frame)
        return map(decoder.decode, self._packed)
