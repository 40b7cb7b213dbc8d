"""Frames: plain JSON values of steps, queue and pool (docs/statistics.md is the schema), and their streams.

Owns: every kind of frame; how much of the queue and the pool a frame shows, so that a look at them takes at most a
millisecond, however large they are. FrameRing stores a live engine's last steps; FrameWriter writes the frames of a
replay or a simulation. Does not: fold events (history).
Invariants: a record in the ring becomes a frame only when a reader polls. Memory is bounded by the number of steps and
of the objects that they reference. An answer is bounded by steps, rows and time. Steps before a window are applied to
the state in its head frame.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.core.limits import Limits
from octavo.core.plan import Event, EventKind
from octavo.core.scheduler import Scheduler
from octavo.core.snapshots import Gauges, PoolSample, RequestView
from octavo.observe.explainer import reason_name
from octavo.observe.history import History, OpenSlots, RequestHistory, StepRecord, WaitCounts
from octavo.observe.series import StepTimes

MAX_STEPS = 1024  # kept in a ring
MAX_WEIGHT = 65_536  # arrivals, decisions and new sequences kept in a ring
MAX_POLL = 200  # steps in an answer
MAX_POLL_ROWS = 16_384  # rows in an answer, before the last step of it
MAX_POLL_S = 0.001  # time of the engine's thread for an answer; a frame that has begun is finished
MIN_STEPS_S = 0.0005  # time for the steps of an answer, even after a long look
LOOK_S = 0.125  # between two looks in a live engine, alternately at the queue and at the pool
WRITTEN_LOOK_S = 0.25  # between two looks at both queue and pool, by the clock of the written steps
MAX_WRITTEN = 20_000  # steps; about 10 MB in a page
VERSION = 1
Frame = dict[str, Any]
MAX_TOP = 50  # waiting requests shown
MAX_CELLS = 4096  # cells of all groups together
MAX_READ = 4096  # table entries read in one look
NO_OWNER = 0xFFFF  # the owner of a block whose table was not read yet
_FREE, _HELD_ONCE, _SHARED, _CACHED = range(4)  # values of a cell
# Tables from a count of references, and from "has a key", to these values. They are applied to all cells at once,
# because one Python loop over 4,096 cells takes a tenth of a millisecond.
_HELD = bytes([_FREE, _HELD_ONCE]) + bytes([_SHARED]) * 254
_UNHELD = bytes([_CACHED]) + bytes(255)
_KEYED = bytes([0, _CACHED]) + bytes(254)
_SHOWN_LIMITS = (
    "block_size", "num_blocks", "host_blocks", "max_batch_tokens", "max_sequences", "max_model_len", "policy",
)  # fmt: skip
_KINDS = {kind: kind.name.lower() for kind in EventKind}


@dataclass(frozen=True, slots=True)
class FrameSource:
    """The source of a stream. `kind` is live, recording or simulation; `began` is the clock's zero in Unix seconds.

    `stream_id` distinguishes the streams of successive engines; `device` is the model's device.
    """

    kind: str
    model: str = ""
    began: float | None = None
    stream_id: str = ""
    device: str = ""


def head_frame(source: FrameSource, limits: Limits, before: OpenSlots, now: float) -> Frame:
    """Return a stream's first frame, which has the state before the next frame."""
    shown = {name: getattr(limits, name) for name in _SHOWN_LIMITS}
    return {
        "k": "head",
        "v": VERSION,
        "model": source.model,
        "source": source.kind,
        "began": source.began,
        "life": source.stream_id,
        "device": source.device,
        "t": round(now, 6),
        "limits": {name: list(value) if isinstance(value, tuple) else value for name, value in shown.items()},
        "slots": [list(taken) for taken in before.slots.values()],
        "open": [_arrival(request) for request in before.open.values()],
        "totals": _totals(before.gauges),
    }


def step_frame(record: StepRecord, previous: StepRecord | None, times: StepTimes | None) -> Frame:
    """Return a step's frame. `previous` is the record before it in the same stream; None after a head frame.

    A record without a step becomes a frame of the kind "note".
    """
    gauges, totals = record.gauges, _totals(record.gauges)
    news = _given(**{"in": [_arrival(request) for request in record.arrivals]}, ev=decisions(record.decisions))
    if record.slots is None:
        return {"k": "note", "t": round(record.begin, 6), **news, "totals": totals}
    num_prefills, num_forks, num_prompt = record.prefill
    num_accepted, idle = 0, record.idle_s
    if previous is not None:
        num_accepted = gauges.num_accepted_tokens - previous.gauges.num_accepted_tokens
        before = _part_seconds(previous, times)
        if idle and before is not None:
            idle = max(0.0, idle - before[4])
    parts = _part_seconds(record, times) or (None, *record.computed, None)
    frame: Frame = {
        "k": "step",
        "n": record.step,
        "t": round(record.begin, 6),
        "s": round(record.end - record.begin, 6),
        "idle": round(idle, 6),
        "parts": [each and round(each, 6) for each in parts[:5]],
        "tok": [
            num_prompt,
            len(record.slots) - num_prefills - num_forks,
            sum(record.num_drafts),
            num_accepted,
            record.num_outputs,
        ],
        "run": gauges.num_running,
        "wait": gauges.num_waiting,
        "used": list(gauges.blocks_used),
        "cached": list(gauges.blocks_cached),
        **news,
        **_given(
            drafts=list(record.num_drafts),
            totals=totals if previous is None or totals != _totals(previous.gauges) else None,
            freed=list(record.freed),
            new=[list(taken) for taken in record.taken],
            moved=list(record.moved) if any(record.moved) else None,
            swapped=gauges.num_swapped,
            host=sum(gauges.host_blocks_used),
            fail=record.failure,
        ),
    }
    if previous is None or not _continues(record, previous):
        frame["rows"] = _rows(record)
    return frame


def _given(**fields: object) -> Frame:
    """Return the fields that are not empty."""
    return {name: value for name, value in fields.items() if value}


def queue_frame(scheduler: Scheduler, waits: WaitCounts, now: float) -> Frame:
    """Return the queue: the number of waiting requests by reason, and the first of them."""
    total, reasons = scheduler.num_waiting, dict(waits.by_reason())
    rest = total - sum(reasons.values())  # requests without a reason of their own: those before them wait
    if rest > 0:
        reasons["behind"] = reasons.get("behind", 0) + rest
    top = [_waiting(entry, now) for entry in scheduler.first_waiting(MAX_TOP)]
    return {"k": "queue", "t": round(now, 6), "total": total, "reasons": reasons, "top": top}


def _waiting(one: RequestView, now: float) -> list[object]:
    waited = round(max(0.0, now - one.arrival), 3)
    return [one.name, one.tenant, reason_name(one.reason), one.needed, one.available, waited, one.num_known]


class PoolFrames:
    """Frames of one scheduler's KV pools.

    Each look reads the owners of about MAX_READ blocks and stores them. So the owners of a large pool are complete only
    after several looks; until then a block may show its previous owner.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owners = [array("H", [NO_OWNER]) * num_blocks for num_blocks in scheduler.limits.num_blocks]
        self._next_slot = 0

    def frame(self, now: float) -> Frame:
        """Return the pools as they are now."""
        self._find_owners()
        samples = self._scheduler.sample_pools(MAX_CELLS)
        groups = [_group(sample, owners) for sample, owners in zip(samples, self._owners, strict=True)]
        frame: Frame = {"k": "blocks", "t": round(now, 6), "groups": groups}
        num_host = sum(self._scheduler.limits.host_blocks)
        if num_host:
            frame["host"] = [sum(self._scheduler.gauges().host_blocks_used), num_host]
        return frame

    def _find_owners(self) -> None:
        num_read = 0
        for sequence in self._scheduler.read_tables(self._next_slot, MAX_READ):
            self._next_slot = sequence.slot + 1
            for owners, table in zip(self._owners, sequence.tables, strict=True):
                num_read += len(table)
                for block in table:
                    owners[block] = sequence.slot
        if num_read < MAX_READ:
            self._next_slot = 0


def _group(sample: PoolSample, owners: array[int]) -> Frame:
    shown = owners[:: sample.stride]
    if sys.byteorder == "big":
        shown.byteswap()
    cached = int.from_bytes(sample.references.translate(_UNHELD)) & int.from_bytes(sample.has_key.translate(_KEYED))
    cells = (int.from_bytes(sample.references.translate(_HELD)) | cached).to_bytes(len(sample.references))
    return {
        "n": sample.num_blocks,
        "per": sample.stride,
        "cells": b64encode(cells).decode(),
        "owner": b64encode(shown.tobytes()).decode(),
    }


def _totals(gauges: Gauges | None) -> dict[str, int]:
    if gauges is None:
        return dict.fromkeys(("finished", "preempted", "looked_up", "found"), 0)
    return {
        "finished": gauges.num_finished,
        "preempted": gauges.num_preemptions,
        "looked_up": gauges.queried_tokens,
        "found": gauges.hit_tokens,
    }


def _arrival(request: RequestHistory) -> list[object]:
    return [
        request.request_id,
        round(request.arrival, 6),
        request.tenant,
        request.num_prompt_tokens,
        request.priority,
        request.max_tokens,
    ]


def _rows(record: StepRecord) -> list[int]:
    """Return slot, first position and tokens of each row, flat."""
    assert record.slots is not None
    flat = array("i", bytes(12 * len(record.slots)))
    flat[0::3], flat[1::3], flat[2::3] = record.slots, record.starts, record.counts
    return flat.tolist()


def _continues(record: StepRecord, previous: StepRecord) -> bool:
    """Return True if the rows have the slots of the previous step's rows, and each begins where the previous one ended.

    A row of the same sequence can otherwise only begin earlier (it is repeated, or drafts were wrong), so comparing the
    sums of the starts suffices.
    """
    if record.taken or record.slots != previous.slots or record.counts != previous.counts:
        return False
    return sum(record.starts) == sum(previous.starts) + sum(previous.counts)


def _part_seconds(record: StepRecord, times: StepTimes | None) -> Sequence[float] | None:
    return times.get(record.timing) if times is not None and record.timing >= 0 else None


def decisions(events: Sequence[Event]) -> list[list[object]]:
    """Return decisions with their numbers. Chunks are left out: the rows show them."""
    return [
        [_KINDS[event.kind], event.request_id, _fields(event)] for event in events if event.kind != EventKind.CHUNKED
    ]


def _fields(event: Event) -> dict[str, object]:
    room = {"needed": event.needed, "available": event.available} if event.needed or event.available else {}
    return {
        "t": round(event.time, 6),
        **room,
        **_given(
            n=event.num_tokens,
            reason=reason_name(event.reason),
            by=event.by,
            cached=event.cached_tokens,
            finish=None if event.finish_reason is None else event.finish_reason.name.lower(),
            message=event.message,
            choice=event.choice,
        ),
    }


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
        """Add a record of the history, or the frames of a look."""
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
        started_at = self._now()
        self._look(started_at)
        stream_id, _, digits = cursor.rpartition(":")
        last, lost = self._first + len(self._ring), 0
        limits, frames = self._scheduler.limits, list[Frame]()
        if cursor == "now":
            number, slots = last, self._tail.copy()
            for record in self._records():
                slots.apply(record)
            frames.append(head_frame(self._source, limits, slots, started_at))
        else:
            is_known = (
                bool(cursor) and stream_id == self._source.stream_id and digits.isdecimal() and int(digits) <= last
            )
            number = int(digits) if is_known else self._first
            lost = max(0, self._first - number)
            number += lost
            if lost or not is_known:
                first = next(self._records(), None)
                frames.append(head_frame(self._source, limits, self._tail, first.begin if first else started_at))
        number = self._collect(frames, number, started_at + MAX_POLL_S)
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
        """If a look is due, add events without a step, and a frame of the queue or the pool; both after a long time."""
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
    """Return how many objects an entry references, without its rows."""
    if not isinstance(entry, StepRecord):
        return len(entry)
    return len(entry.taken) + len(entry.arrivals) + len(entry.decisions)


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a stream to write: steps that begin in [begin, end) on the engine's clock, at most `max_steps`.

    `look_s` is the time between two looks at the queue and the pool.
    """

    begin: float = float("-inf")
    end: float = float("inf")
    max_steps: int = MAX_WRITTEN
    look_s: float = WRITTEN_LOOK_S


class FrameWriter:
    """Reads a history and passes each frame to `write`. Call `end` after the last step."""

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
        """Write the remaining frames without an end frame, because another engine's frames follow. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._history.flush(self._history.last_time)
            self._write_held()
            self._write_head(self._history.last_time)

    def end(self, num_cut: int = 0) -> None:
        """Write the remaining frames and the end frame; `num_cut` is the cut steps of earlier engines. Idempotent."""
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
    """Stores frames as packed JSON, in a tenth of the memory of objects; read them in order once all are written."""

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._encoder = msgspec.json.Encoder()

    def __len__(self) -> int:
        return len(self._packed)

    def write(self, frame: Frame) -> None:
        """Store a frame."""
        self._packed.append(self._encoder.encode(frame))

    def __iter__(self) -> Iterator[Frame]:
        """Yield all frames, in order."""
        decoder = msgspec.json.Decoder(Frame)
        return map(decoder.decode, self._packed)
