"""A scheduler's work in the Trace Event Format of Chrome, which ui.perfetto.dev and chrome://tracing open.

Owns: the tracks (steps with their parts, counters, one for each request) and the file. Does not: keep more than open
requests and a step: what is over is written.
Invariants: slices of a track never overlap but by nesting, and are written in order; times are whole nanoseconds, in
microseconds since the first; what is not drawn for want of tracks is counted.
Format: "Trace Event Format", Google, 2016 (X, C, i, s, f and M events).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.observe.frames.records import PartTimes, Record, Recorder
from octavo.observe.request_tracks import REQUESTS, RequestTracks, TraceEvent

MAX_TRACKS = 4096  # requests drawn
ENGINE, STEPS = 1, 1  # process and thread of the steps
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
        """Write the end, with what is to be said about the trace. Idempotent."""
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
class Place:
    """Where a trace stands among those of other lives: which it is, and the engine's time that is zero for all.

    Without an origin, the first time told is zero.
    """

    life: int = 0
    origin: float | None = None


class Clip:
    """Passes on the events between two times, in seconds of the trace, of at most so many requests."""

    def __init__(self, write: Callable[[TraceEvent], object], begin_s: float, end_s: float, max_tracks: int) -> None:
        self.num_undrawn = 0
        self._write = write
        self._begin, self._end = begin_s * 1e6, end_s * 1e6
        self._max = max_tracks
        self._names: dict[tuple[int, int], TraceEvent | None] = {}  # None: written, or one too many
        self._left_out: dict[tuple[int, int], None] = {}
        self._num_tracks = 0

    def write(self, event: TraceEvent) -> None:
        """Write it, if it is to be seen."""
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


class PerfettoSink:
    """An EventSink that gives trace events to `write`. Call `end` when all is told."""

    def __init__(
        self,
        scheduler: Scheduler,
        write: Callable[[TraceEvent], object],
        *,
        times: PartTimes | None = None,
        max_tracks: int = MAX_TRACKS,
        place: Place | None = None,
    ) -> None:
        self._write = write
        self._times = times
        self._recorder = Recorder(scheduler, times)
        self._place = place or Place()
        self._origin = self._place.origin
        self._held: Record | None = None  # until its emit is known
        self._end_ns = 0  # of the last step's slice
        self._counts: tuple[int, ...] = ()
        life = f" (life {self._place.life + 1})" if self._place.life else ""
        engine = self._engine = ENGINE + 2 * self._place.life
        self._requests = RequestTracks(write, max_tracks, engine + 1)
        self._has_ended = False
        for process, name in ((engine, f"engine{life}"), (engine + 1, f"requests{life}")):
            write({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        write({"ph": "M", "name": "thread_name", "pid": engine, "tid": STEPS, "args": {"name": "steps"}})

    @property
    def num_undrawn(self) -> int:
        """Requests without a track."""
        return self._requests.num_undrawn

    def admitted(self, request: Request) -> None:
        """A request was taken."""
        self._start(request.arrival)
        self._requests.admitted(request, self._ns(request.arrival))

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Decisions, each exactly once."""
        if decisions:
            self._start(decisions[0].time)
            self._recorder.decided(decisions)

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """A plan was committed."""
        self._start(plan.now)
        self._flush()
        self._held = self._recorder.step(plan, outcome, events)

    def end(self) -> None:
        """Write what is still open. Idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        self._flush()
        self._requests.decided(self._recorder.note(self._recorder.last_time).decisions, self._ns)
        self._requests.end(max(self._end_ns, self._ns(self._recorder.last_time)))

    def _start(self, time: float) -> None:
        if self._origin is None:
            self._origin = time

    def _ns(self, time: float) -> int:
        return max(0, round((time - (self._origin or 0.0)) * 1e9))

    def _flush(self) -> None:
        """Write the step that is held: its slice, its parts, the counters, its rows."""
        record, self._held = self._held, None
        if record is None:
            return
        begin, computed = max(self._ns(record.time), self._end_ns), self._ns(record.end)
        computed = max(begin, computed)
        known = self._times.get(record.timing) if self._times is not None and record.timing >= 0 else None
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
        """Planning first; what the executor did ends when its result came; behind that the commit and the delivery.

        A part that would begin before the one in front of it has ended is cut: plans in flight overlap.
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

    def _count(self, record: Record, at: int) -> None:
        counts = (*record.gauges[:2], sum(record.used), sum(record.cached), record.num_tokens)
        before = self._counts or (None,) * len(counts)
        for name, count, old in zip(_COUNTERS, counts, before, strict=True):
            if count != old:
                self._write({"ph": "C", "name": name, "pid": self._engine, "ts": at / 1000, "args": {"value": count}})
        self._counts = counts


def _step_args(record: Record) -> dict[str, Any]:
    args: dict[str, Any] = {
        "rows": len(record.slots or ()),
        "tokens": record.num_tokens,
        "given": record.given,
        "running": record.gauges[0],
        "waiting": record.gauges[1],
        "blocks held": sum(record.used),
    }
    more = {"drafted": sum(record.drafts), "new sequences": len(record.taken), "failed": record.failure}
    moved = dict(zip(("swapped out", "loaded", "copied"), record.moved, strict=True))
    args.update((name, value) for name, value in (more | moved).items() if value)
    return args
