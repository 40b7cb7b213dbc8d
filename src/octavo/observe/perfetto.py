"""Write a scheduler's activity in the Trace Event Format of Chrome, which ui.perfetto.dev and chrome://tracing open.

Owns: the file, the clip, and the tracks: steps with their parts, counters, and one track for each request (queued,
prefill, decode, preempted, swapped out, finished). Does not: fold events (history), or store more than the open
requests and one step, because ended slices are written at once.
Invariants: slices of a track never overlap except by nesting, and are written in order; consecutive decode steps of a
request are one slice; times are whole nanoseconds, in microseconds since the first; requests without a track are
counted. Format: "Trace Event Format", Google, 2016 (X, C, i, s, f and M events).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import IO, Any

from octavo.core.plan import Event, EventKind
from octavo.observe.history import History, OpenSlots, RequestHistory, StepRecord

TraceEvent = dict[str, Any]
MAX_TRACKS = 4096  # requests drawn
ENGINE, STEPS = 1, 1  # process and thread of the steps
REQUESTS = 2  # process of the requests; each later start of an engine has the next two numbers
PREEMPTED, SWAPPED = "preempted", "swapped out"
PARTS = ("schedule", "prepare", "forward", "sample", "emit")
_COUNTERS = ("running", "waiting", "KV blocks held", "KV blocks cached", "tokens in a step")


class TraceFile:
    """A file of trace events, compressed if its name ends in .gz. Close it."""

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


def _open(path: str | Path) -> IO[str]:
    if str(path).endswith(".gz"):
        return gzip.open(path, "wt", encoding="utf-8", compresslevel=5)
    return Path(path).open("w", encoding="utf-8")


class TraceClip:
    """Filter of the events between two times, in seconds of the trace, of at most `max_tracks` requests."""

    def __init__(
        self,
        write: Callable[[TraceEvent], object],
        begin_s: float = -inf,
        end_s: float = inf,
        max_tracks: int = MAX_TRACKS,
    ) -> None:
        self.num_undrawn = 0
        self._write = write
        self._begin, self._end = begin_s * 1e6, end_s * 1e6
        self._max_tracks = max_tracks
        self._names: dict[tuple[int, int], TraceEvent] = {}  # of tracks without an event yet
        self._drawn: set[tuple[int, int]] = set()
        self._num_requests = 0  # of these

    def write(self, event: TraceEvent) -> None:
        """Write an event if it is inside the times."""
        if event["name"] == "thread_name":
            self._names[event["pid"], event["tid"]] = event
        elif event["ph"] == "M":
            self._write(event)
        else:
            is_inside = event["ts"] + event.get("dur", 0.0) >= self._begin and event["ts"] <= self._end
            if is_inside and ("tid" not in event or self._is_drawn((event["pid"], event["tid"]))):
                self._write(event)

    def _is_drawn(self, track: tuple[int, int]) -> bool:
        """Return True if a track is drawn; this is decided at its first event inside the times."""
        name = self._names.pop(track, None)
        if name is not None:
            is_request = track[0] % 2 == REQUESTS % 2
            if is_request and self._num_requests >= self._max_tracks:
                self.num_undrawn += 1
            else:
                self._num_requests += is_request
                self._drawn.add(track)
                self._write(name)
        return track in self._drawn


class _Track:
    """One request's track and its current slice, from `begin` to `end` if that is known; times in nanoseconds.

    A slice lasts at least to `pinned`, the end of an arrow.
    """

    __slots__ = ("_write", "args", "begin", "end", "kind", "last_end", "num_steps", "pid", "pinned", "tid")

    def __init__(self, write: Callable[[TraceEvent], object], pid: int, tid: int, begin: int) -> None:
        self._write = write
        self.pid, self.tid = pid, tid
        self.last_end = begin  # of the last slice written
        self.start("queued", begin)

    def start(self, kind: str, begin: int, **args: Any) -> None:
        """Begin a slice."""
        self.kind, self.begin, self.args = kind, max(begin, self.last_end), args
        self.end, self.num_steps, self.pinned = self.begin, 0, 0

    def close(self, now: int) -> None:
        """Write the slice, up to its last step, or up to now if it has none."""
        end = self.end if self.num_steps else max(now, self.begin, self.pinned)
        if self.kind and (end > self.begin or self.kind != "queued"):
            if self.num_steps > 1:
                self.args["steps"] = self.num_steps
            self.event("X", self.kind, self.begin, dur=(end - self.begin) / 1000, args=self.args)
            self.last_end = end
        self.kind, self.num_steps, self.args = "", 0, {}

    def instant(self, name: str, at: int, **args: Any) -> None:
        """Write an instant."""
        self.event("i", name, max(at, self.last_end), s="t", args=args)

    def event(self, phase: str, name: str, at: int, **more: Any) -> None:
        """Write an event."""
        self._write({"ph": phase, "name": name, "pid": self.pid, "tid": self.tid, "ts": at / 1000, **more})


class _RequestTracks:
    """Tracks of requests in order of arrival."""

    def __init__(self, write: Callable[[TraceEvent], object], pid: int) -> None:
        self._write = write
        self._pid = pid
        self._num_tracks = 0
        self._tracks: dict[str, _Track] = {}
        self._slots = OpenSlots()
        self._num_arrows = 0
        self._arrows: list[tuple[str, str]] = []  # (preempted by, preempted), drawn with the preempting step
        self._last_end = -1  # of the last step

    def add(self, request: RequestHistory, arrival: int) -> None:
        """Begin the track of a request that arrived."""
        self._num_tracks += 1
        track = self._tracks[request.request_id] = _Track(self._write, self._pid, self._num_tracks, arrival)
        track.args = {"prompt": request.num_prompt_tokens}
        if request.tenant:
            track.args["tenant"] = request.tenant
        name = {"name": request.request_id}
        self._write({"ph": "M", "name": "thread_name", "pid": self._pid, "tid": self._num_tracks, "args": name})

    def decided(self, decisions: Iterable[Event], ns: Callable[[float], int]) -> None:
        """Draw decisions: call this with a step's decisions before its rows, and with its commit's after them."""
        for event in decisions:
            track = self._tracks.get(event.request_id)
            if track is None:
                continue
            at, kind = ns(event.time), event.kind
            reason = None if event.reason is None else event.reason.name.lower()
            if kind == EventKind.DEFERRED and reason is not None:
                track.instant(f"waits: {reason}", at, needed=event.needed, available=event.available)
            elif kind in (EventKind.ADMITTED, EventKind.RESUMED):
                track.args["cached"] = event.cached_tokens
                track.close(at)
                track.start("", at)
            elif kind == EventKind.PREEMPTED:
                track.close(at)
                track.start(PREEMPTED, at, tokens=event.num_tokens)
                if reason is not None:
                    track.args["reason"] = reason
                if event.by is not None:
                    track.args["by"] = event.by
                    self._arrows.append((event.by, event.request_id))
            elif kind == EventKind.SWAPPED:  # reported beside its preemption
                track.kind = SWAPPED
                track.args["tokens"] = event.num_tokens
            elif kind == EventKind.FINISHED:
                track.close(at)
                how = "error" if event.finish_reason is None else event.finish_reason.name.lower()
                message = {} if event.message is None else {"message": event.message}
                track.instant(f"finished: {how}", at, tokens=event.num_tokens, cached=event.cached_tokens, **message)
                del self._tracks[event.request_id]

    def stepped(self, record: StepRecord, begin: int, end: int) -> None:
        """Draw a step's rows."""
        self._slots.apply(record)
        assert record.slots is not None
        rows: dict[str, tuple[str, int]] = {}  # kind and tokens of each request
        drafts = record.num_drafts or (0,) * len(record.slots)
        for slot, count, drafted in zip(record.slots, record.counts, drafts, strict=True):
            name = self._slots.slots[slot].request_id
            kind, tokens = rows.get(name, ("decode", 0))
            rows[name] = "prefill" if count > 1 and not drafted else kind, tokens + count
        for name, (kind, tokens) in rows.items():
            track = self._tracks.get(name)
            if track is None:
                continue
            if track.kind != kind or track.end != self._last_end or kind == "prefill":
                track.close(begin)
                track.start(kind, begin)
            track.end = max(end, track.begin)
            track.num_steps += 1
            track.args["tokens"] = track.args.get("tokens", 0) + tokens
        for by, victim in self._arrows:
            self._draw_arrow(self._tracks.get(by), self._tracks.get(victim), begin + 1, end)
        self._arrows.clear()
        self._last_end = end

    def end(self, now: int) -> None:
        """Write the slices of requests without an end."""
        for track in self._tracks.values():
            track.args["open"] = True
            track.close(now)
        self._tracks.clear()

    def _draw_arrow(self, source: _Track | None, target: _Track | None, at: int, end: int) -> None:
        """Draw an arrow from a row to the wait of the request that it preempted, just after both slices begin."""
        if source is None or target is None or end - at < 2:
            return
        if source.begin <= at and source.num_steps and target.kind in (PREEMPTED, SWAPPED):
            tip = max(at, target.begin) + 1
            target.pinned = tip + 1
            self._num_arrows += 1
            source.event("s", "preempted by", at, cat="preemption", id=self._num_arrows)
            target.event("f", "preempted by", tip, bp="e", cat="preemption", id=self._num_arrows)


class PerfettoWriter:
    """Reads a history and passes trace events to `write`. Call `end` after the last step.

    `segment_index` counts the starts of an engine in one trace, from 0; `origin` is the engine's time at zero of
    the trace, by default the first time.
    """

    def __init__(
        self,
        history: History,
        write: Callable[[TraceEvent], object],
        *,
        segment_index: int = 0,
        origin: float | None = None,
    ) -> None:
        self._history = history
        self._write = write
        self._origin = origin
        self._held: StepRecord | None = None  # until its emit time is known
        self._end_ns = 0  # of the last step's slice
        self._counts: dict[str, int] = {}
        self._engine = ENGINE + 2 * segment_index
        self._requests = _RequestTracks(write, self._engine + 1)
        self._has_ended = False
        suffix = f" (segment {segment_index + 1})" if segment_index else ""
        for process, what in ((self._engine, "engine"), (self._engine + 1, "requests")):
            write({"ph": "M", "name": "process_name", "pid": process, "args": {"name": what + suffix}})
        write({"ph": "M", "name": "thread_name", "pid": self._engine, "tid": STEPS, "args": {"name": "steps"}})

    def read(self, record: StepRecord) -> None:
        """Hold a record of the history, and write the one before it."""
        self._write_held()
        self._held = record
        if self._origin is None:
            self._origin = record.arrivals[0].arrival if record.arrivals else record.begin

    def end(self) -> None:
        """Write the held step and the open slices. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._history.flush(self._history.last_time)
            self._write_held()
            self._requests.end(max(self._end_ns, self._ns(self._history.last_time)))

    def _ns(self, time: float) -> int:
        return max(0, round((time - (self._origin or 0.0)) * 1e9))

    def _write_held(self) -> None:
        """Write the held step: its slice, its parts, the counters, its rows."""
        record, self._held = self._held, None
        if record is None:
            return
        for request in record.arrivals:
            self._requests.add(request, self._ns(request.arrival))
        if record.slots is None:
            self._requests.decided(record.decisions, self._ns)
            return
        begin = max(self._ns(record.begin), self._end_ns)
        computed = max(begin, self._ns(record.end))
        times = self._history.times
        known = times.get(record.timing) if times is not None and record.timing >= 0 else None
        lengths = [round(seconds * 1e9) for seconds in (known or (0.0, *record.computed, 0.0))[:5]]
        planning = min(lengths[0], max(0, computed - begin - sum(lengths[1:4])))  # the rest is the commit
        self._end_ns = computed + lengths[0] - planning + lengths[4]
        self._slice(f"step {record.step}", begin, self._end_ns, {"args": _step_args(record)})
        self._parts(begin, computed, planning, lengths)
        self._count(record, begin)
        self._requests.decided([event for event in record.decisions if event.step <= record.step], self._ns)
        self._requests.stepped(record, begin, computed)
        self._requests.decided([event for event in record.decisions if event.step > record.step], self._ns)

    def _parts(self, begin: int, computed: int, planning: int, lengths: list[int]) -> None:
        """Write the parts: planning, the executor's up to the time of its result, the commit, the delivery.

        A part that would begin before the end of the one before is cut: plans in flight overlap.
        """
        planned, committed = begin + planning, computed + lengths[0] - planning
        sample = max(planned, computed - lengths[3])
        forward = max(planned, sample - lengths[2])
        prepare = max(planned, forward - lengths[1])
        edges = (begin, planned), (prepare, forward), (forward, sample), (sample, computed)
        for name, (first, last) in zip(PARTS, edges, strict=False):
            self._slice(name, first, last)
        self._slice("schedule", computed, committed)
        self._slice("emit", committed, committed + lengths[4])

    def _slice(self, name: str, begin: int, end: int, more: TraceEvent | None = None) -> None:
        if end > begin or more is not None:
            times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
            self._write({"ph": "X", "name": name, "pid": self._engine, "tid": STEPS, **times, **(more or {})})

    def _count(self, record: StepRecord, at: int) -> None:
        gauges = record.gauges
        blocks = sum(gauges.blocks_used), sum(gauges.blocks_cached)
        counts = dict(zip(_COUNTERS, (gauges.num_running, gauges.num_waiting, *blocks, record.num_tokens), strict=True))
        for name, count in counts.items():
            if count != self._counts.get(name):
                self._write({"ph": "C", "name": name, "pid": self._engine, "ts": at / 1000, "args": {"value": count}})
        self._counts = counts


def _step_args(record: StepRecord) -> dict[str, Any]:
    swapped_out, loaded, copied = record.moved
    rare = {
        "drafted": sum(record.num_drafts),
        "new sequences": len(record.taken),
        "failed": record.failure,
        "swapped out": swapped_out,
        "loaded": loaded,
        "copied": copied,
    }
    return {
        "rows": len(record.slots or ()),
        "tokens": record.num_tokens,
        "given": record.num_outputs,
        "running": record.gauges.num_running,
        "waiting": record.gauges.num_waiting,
        "blocks held": sum(record.gauges.blocks_used),
        **{name: value for name, value in rare.items() if value},
    }
