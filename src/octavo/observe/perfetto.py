"""A scheduler's work in the Trace Event Format of Chrome, which ui.perfetto.dev and chrome://tracing open.

Owns: the file, and the tracks: steps with their parts, counters, and one track for each request (queued, prefill,
decode, preempted, swapped out, and how it ended). Does not: fold events (history), or keep more than open requests and
a step: what is over is written.
Invariants: slices of a track never overlap but by nesting, and are written in order; consecutive steps of one kind of a
request are one slice; times are whole nanoseconds, in microseconds since the first; requests without a track are
counted. Format: "Trace Event Format", Google, 2016 (X, C, i, s, f and M events).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from octavo.core.plan import Event, EventKind
from octavo.observe.history import History, OpenSlots, RequestHistory, StepRecord

TraceEvent = dict[str, Any]
MAX_TRACKS = 4096  # requests drawn
ENGINE, STEPS = 1, 1  # process and thread of the steps
REQUESTS = 2  # process of the requests, in the first life
PREEMPTED, SWAPPED = "preempted", "swapped out"
PARTS = ("schedule", "prepare", "forward", "sample", "emit")
_COUNTERS = ("running", "waiting", "KV blocks held", "KV blocks cached", "tokens in a step")


class TraceFile:
    """A file of trace events, compressed when its name ends in .gz. Use as a context, or close it."""

    def __init__(self, path: str | Path, about: dict[str, object] | None = None) -> None:
        self.num_written = 0
        self.about: dict[str, object] = dict(about or {})
        self._file = _open(path)
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[\n')

    def write(self, event: TraceEvent) -> None:
        """Add one event."""
        self._file.write((",\n" if self.num_written else "") + json.dumps(event, separators=(",", ":")))
        self.num_written += 1

    def close(self) -> None:
        """Write the end, with `about`. Idempotent."""
        if not self._file.closed:
            self._file.write(f'\n],"otherData":{json.dumps(self.about)}}}\n')
            self._file.close()

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(path: str | Path) -> IO[str]:
    if str(path).endswith(".gz"):
        return gzip.open(path, "wt", encoding="utf-8", compresslevel=5)
    return Path(path).open("w", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class LifeOrigin:
    """One engine's part of a trace: which life it is, and the engine's time that is zero for all lives.

    Without an origin, the first time of the trace is zero.
    """

    number: int = 0
    origin: float | None = None


class TraceClip:
    """Writes the events between two times, in seconds of the trace, of at most `max_tracks` requests."""

    def __init__(self, write: Callable[[TraceEvent], object], begin_s: float, end_s: float, max_tracks: int) -> None:
        self.num_undrawn = 0
        self._write = write
        self._begin, self._end = begin_s * 1e6, end_s * 1e6
        self._max = max_tracks
        self._names: dict[tuple[int, int], TraceEvent | None] = {}  # None: written, or one too many
        self._left_out: dict[tuple[int, int], None] = {}
        self._num_tracks = 0

    def write(self, event: TraceEvent) -> None:
        """Write an event, if it is inside."""
        track = event["pid"], event.get("tid", -1)
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                self._names[track] = event
            else:
                self._write(event)
        elif event["ts"] + event.get("dur", 0.0) >= self._begin and event["ts"] <= self._end:
            self._write_on(track, event)

    def _write_on(self, track: tuple[int, int], event: TraceEvent) -> None:
        name = self._names.get(track)
        if name is not None:
            self._names[track] = None
            is_request = event["pid"] % 2 == REQUESTS % 2  # the other processes are engines
            if is_request and self._num_tracks >= self._max:
                self._left_out[track] = None
                self.num_undrawn += 1
            else:
                self._num_tracks += is_request
                self._write(name)
        if track not in self._left_out:
            self._write(event)


class _Track:
    """One request: what it does since `begin`, up to `end` where that is known; times in nanoseconds.

    What it does lasts to `pinned` at least, where an arrow ends.
    """

    __slots__ = ("args", "begin", "end", "kind", "last_end", "pinned", "steps", "thread")

    def __init__(self, thread: int, begin: int) -> None:
        self.thread = thread
        self.last_end = begin  # of the last slice written
        self.start("queued", begin)

    def start(self, kind: str, begin: int) -> None:
        self.kind, self.begin = kind, max(begin, self.last_end)
        self.end, self.steps, self.pinned = self.begin, 0, 0
        self.args: dict[str, Any] = {}


class _RequestTracks:
    """Tracks of requests in order of arrival, at most `max_tracks`."""

    def __init__(self, write: Callable[[TraceEvent], object], max_tracks: int, process: int) -> None:
        self.num_undrawn = 0
        self._write = write
        self._max = max_tracks
        self._process = process
        self._num_tracks = 0
        self._tracks: dict[str, _Track] = {}
        self._slots = OpenSlots()
        self._num_arrows = 0
        self._arrows: list[tuple[str, str]] = []  # (preempted by, preempted), drawn with the step that did it
        self._last_end = -1  # of the last step

    def add(self, request: RequestHistory, arrival: int) -> None:
        """Begin the track of a request that arrived."""
        if self._num_tracks >= self._max:
            self.num_undrawn += 1
            return
        self._num_tracks += 1
        track = self._tracks[request.request_id] = _Track(self._num_tracks, arrival)
        track.args = {"prompt": request.num_prompt_tokens}
        if request.tenant:
            track.args["tenant"] = request.tenant
        name = {"name": request.request_id}
        self._write({"ph": "M", "name": "thread_name", "pid": self._process, "tid": track.thread, "args": name})

    def decided(self, decisions: Iterable[Event], ns: Callable[[float], int]) -> None:
        """Draw decisions: those of a step before its rows, those that its commit made after them."""
        for event in decisions:
            track = self._tracks.get(event.request_id)
            if track is None:
                continue
            at, kind = ns(event.time), event.kind
            if kind == EventKind.DEFERRED and event.reason is not None:
                args = {"needed": event.needed, "available": event.available}
                self._instant(track, f"waits: {event.reason.name.lower()}", at, args)
            elif kind in (EventKind.ADMITTED, EventKind.RESUMED):
                track.args["cached"] = event.cached_tokens
                self._close(track, at)
                track.start("", at)
            elif kind == EventKind.PREEMPTED:
                self._close(track, at)
                track.start(PREEMPTED, at)
                track.args = {"tokens": event.num_tokens}
                if event.reason is not None:
                    track.args["reason"] = event.reason.name.lower()
                if event.by is not None:
                    track.args["by"] = event.by
                    self._arrows.append((event.by, event.request_id))
            elif kind == EventKind.SWAPPED:  # reported beside its preemption
                track.kind = SWAPPED
                track.args["tokens"] = event.num_tokens
            elif kind == EventKind.FINISHED:
                self._finish(event, at)

    def stepped(self, record: StepRecord, begin: int, end: int) -> None:
        """Draw a step's rows."""
        self._slots.apply(record)
        assert record.slots is not None
        tokens: dict[str, int] = {}
        prefills: dict[str, None] = {}
        drafts = record.num_drafts or (0,) * len(record.slots)
        for slot, count, drafted in zip(record.slots, record.counts, drafts, strict=True):
            name = self._slots.slots[slot].request_id
            tokens[name] = tokens.get(name, 0) + count
            if count > 1 and not drafted:
                prefills[name] = None
        for name, count in tokens.items():
            track = self._tracks.get(name)
            if track is not None:
                self._row(track, "prefill" if name in prefills else "decode", count, (begin, end))
        self._draw_arrows(begin, end)
        self._last_end = end

    def end(self, now: int) -> None:
        """Write what requests without an end were doing."""
        for track in self._tracks.values():
            track.args["open"] = True
            self._close(track, now)
        self._tracks.clear()

    def _row(self, track: _Track, kind: str, count: int, span: tuple[int, int]) -> None:
        begin, end = span
        if track.kind != kind or track.end != self._last_end or kind == "prefill":
            self._close(track, begin)
            track.start(kind, begin)
        track.end = max(end, track.begin)
        track.steps += 1
        track.args["tokens"] = track.args.get("tokens", 0) + count

    def _close(self, track: _Track, now: int) -> None:
        """Write what the request was doing, up to its last step, or up to now where it was waiting."""
        end = track.end if track.steps else max(now, track.begin, track.pinned)
        if track.kind and (end > track.begin or track.kind != "queued"):
            if track.steps > 1:
                track.args["steps"] = track.steps
            event = {"ph": "X", "name": track.kind, "pid": self._process, "tid": track.thread, "ts": track.begin / 1000}
            self._write({**event, "dur": (end - track.begin) / 1000, "args": track.args})
            track.last_end = end
        track.kind, track.steps, track.args = "", 0, {}

    def _finish(self, event: Event, now: int) -> None:
        track = self._tracks.pop(event.request_id)
        self._close(track, now)
        reason = event.finish_reason.name.lower() if event.finish_reason is not None else "error"
        args: dict[str, Any] = {"tokens": event.num_tokens, "cached": event.cached_tokens}
        if event.message is not None:
            args["message"] = event.message
        self._instant(track, f"finished: {reason}", now, args)

    def _instant(self, track: _Track, name: str, at: int, args: dict[str, Any]) -> None:
        at = max(at, track.last_end)
        event = {"ph": "i", "s": "t", "name": name, "pid": self._process, "tid": track.thread, "ts": at / 1000}
        self._write({**event, "args": args})

    def _draw_arrows(self, begin: int, end: int) -> None:
        """From the row that took the room to the wait that it made, just after the beginnings of both slices."""
        for by, victim in self._arrows:
            source, target = self._tracks.get(by), self._tracks.get(victim)
            if source is None or target is None or end - begin < 3:
                continue
            at = begin + 1
            if source.begin > at or not source.steps or target.kind not in (PREEMPTED, SWAPPED):
                continue
            tip = max(at, target.begin) + 1
            target.pinned = tip + 1
            self._num_arrows += 1
            arrow = {"name": "preempted by", "cat": "preemption", "id": self._num_arrows, "pid": self._process}
            self._write({"ph": "s", **arrow, "tid": source.thread, "ts": at / 1000})
            self._write({"ph": "f", "bp": "e", **arrow, "tid": target.thread, "ts": tip / 1000})
        self._arrows.clear()


class PerfettoWriter:
    """Reads a history and gives trace events to `write`. Call `end` after the last step."""

    def __init__(
        self,
        history: History,
        write: Callable[[TraceEvent], object],
        *,
        max_tracks: int = MAX_TRACKS,
        life: LifeOrigin | None = None,
    ) -> None:
        life = life or LifeOrigin()
        self._history = history
        self._write = write
        self._origin = life.origin
        self._held: StepRecord | None = None  # until its emit is known
        self._end_ns = 0  # of the last step's slice
        self._counts: tuple[int, ...] = ()
        name = f" (life {life.number + 1})" if life.number else ""
        engine = self._engine = ENGINE + 2 * life.number
        self._requests = _RequestTracks(write, max_tracks, engine + 1)
        self._has_ended = False
        for process, what in ((engine, "engine"), (engine + 1, "requests")):
            write({"ph": "M", "name": "process_name", "pid": process, "args": {"name": what + name}})
        write({"ph": "M", "name": "thread_name", "pid": engine, "tid": STEPS, "args": {"name": "steps"}})

    @property
    def num_undrawn(self) -> int:
        """Requests without a track."""
        return self._requests.num_undrawn

    def read(self, record: StepRecord) -> None:
        """Take in a record of the history, and write the one before it."""
        self._write_held()
        self._held = record
        if self._origin is None:
            self._origin = record.arrivals[0].arrival if record.arrivals else record.begin

    def end(self) -> None:
        """Write what is still open. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._history.flush(self._history.last_time)
            self._write_held()
            self._requests.end(max(self._end_ns, self._ns(self._history.last_time)))

    def _ns(self, time: float) -> int:
        return max(0, round((time - (self._origin or 0.0)) * 1e9))

    def _write_held(self) -> None:
        """Write the step that is held: its slice, its parts, the counters, its rows."""
        record, self._held = self._held, None
        if record is None:
            return
        for request in record.arrivals:
            self._requests.add(request, self._ns(request.arrival))
        if record.slots is None:
            self._requests.decided(record.decisions, self._ns)
            return
        begin, computed = max(self._ns(record.begin), self._end_ns), self._ns(record.end)
        computed = max(begin, computed)
        times = self._history.times
        known = times.get(record.timing) if times is not None and record.timing >= 0 else None
        parts = tuple(known[:5]) if known is not None else (0.0, *record.computed, 0.0)
        lengths = [round(seconds * 1e9) for seconds in parts]
        planning = min(lengths[0], max(0, computed - begin - sum(lengths[1:4])))  # the rest is the commit
        self._end_ns = computed + lengths[0] - planning + lengths[4]
        self._slice(f"step {record.step}", begin, self._end_ns, _step_args(record))
        self._parts(begin, computed, planning, lengths)
        self._count(record, begin)
        self._requests.decided([event for event in record.decisions if event.step <= record.step], self._ns)
        self._requests.stepped(record, begin, computed)
        self._requests.decided([event for event in record.decisions if event.step > record.step], self._ns)

    def _parts(self, begin: int, computed: int, planning: int, lengths: list[int]) -> None:
        """Planning first; what the executor did ends when its result came; after that the commit and the delivery.

        A part that would begin before the end of the one before is cut: plans in flight overlap.
        """
        at = begin + planning
        self._part(0, begin, at)
        ends = [computed]
        for length in (lengths[3], lengths[2], lengths[1]):  # sample, forward, prepare
            ends.append(max(at, ends[-1] - length))
        for part, (first, last) in enumerate(zip(ends[:0:-1], ends[-2::-1], strict=True), 1):
            self._part(part, first, last)
        committed = computed + lengths[0] - planning
        self._part(0, computed, committed)
        self._part(4, committed, committed + lengths[4])

    def _part(self, part: int, begin: int, end: int) -> None:
        if end > begin:
            self._slice(PARTS[part], begin, end, None)

    def _slice(self, name: str, begin: int, end: int, args: dict[str, Any] | None) -> None:
        event: TraceEvent = {"ph": "X", "name": name, "pid": self._engine, "tid": STEPS}
        event["ts"], event["dur"] = begin / 1000, (end - begin) / 1000
        self._write(event if args is None else {**event, "args": args})

    def _count(self, record: StepRecord, at: int) -> None:
        gauges = record.gauges
        blocks = sum(gauges.blocks_used), sum(gauges.blocks_cached)
        counts = (gauges.num_running, gauges.num_waiting, *blocks, record.num_tokens)
        before = self._counts or (None,) * len(counts)
        for name, count, old in zip(_COUNTERS, counts, before, strict=True):
            if count != old:
                self._write({"ph": "C", "name": name, "pid": self._engine, "ts": at / 1000, "args": {"value": count}})
        self._counts = counts


def _step_args(record: StepRecord) -> dict[str, Any]:
    args: dict[str, Any] = {
        "rows": len(record.slots or ()),
        "tokens": record.num_tokens,
        "given": record.num_outputs,
        "running": record.gauges.num_running,
        "waiting": record.gauges.num_waiting,
        "blocks held": sum(record.gauges.blocks_used),
    }
    more = {"drafted": sum(record.num_drafts), "new sequences": len(record.taken), "failed": record.failure}
    moved = dict(zip(("swapped out", "loaded", "copied"), record.moved, strict=True))
    args.update((name, value) for name, value in (more | moved).items() if value)
    return args
