"""A track for each request in a trace: queued, prefill, decode, preempted, swapped out, and how it ended.

Owns: what each open request was last seen doing; arrows from whoever made another go. Does not: know the file, or steps
(perfetto). Consecutive steps of one kind are one slice, for else a trace would be as long as the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from octavo.core.plan import Event, EventKind
from octavo.core.request import Request
from octavo.observe.frames.records import Record

TraceEvent = dict[str, Any]
REQUESTS = 2  # their process, of the first life
PREEMPTED, SWAPPED = "preempted", "swapped out"


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


class RequestTracks:
    """Tracks of requests, in the order of their coming; at most so many."""

    def __init__(self, write: Callable[[TraceEvent], object], max_tracks: int, process: int = REQUESTS) -> None:
        self.num_undrawn = 0
        self._write = write
        self._max = max_tracks
        self._process = process
        self._num_tracks = 0
        self._tracks: dict[str, _Track] = {}
        self._slots: dict[int, str] = {}
        self._num_arrows = 0
        self._arrows: list[tuple[str, str]] = []  # (who made it go, who went), told with the step that did it
        self._last_end = -1  # of the last step

    def admitted(self, request: Request, arrival: int) -> None:
        """A request came."""
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
        """Follow decisions: those of a step before its rows, those that its commit made behind them."""
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
            elif kind == EventKind.SWAPPED:  # told beside its preemption
                track.kind = SWAPPED
                track.args["tokens"] = event.num_tokens
            elif kind == EventKind.FINISHED:
                self._finish(event, at)

    def stepped(self, record: Record, begin: int, end: int) -> None:
        """A step's rows."""
        for slot in record.freed:
            self._slots.pop(slot, None)
        for slot, name, _, _ in record.taken:
            self._slots[slot] = name
        assert record.slots is not None
        tokens: dict[str, int] = {}
        prefills: dict[str, None] = {}
        drafts = record.drafts or (0,) * len(record.slots)
        for slot, count, drafted in zip(record.slots, record.counts, drafts, strict=True):
            name = self._slots.get(slot, "")
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
        """From the row that took the room to the wait that it made; just behind the slices' beginnings: in them."""
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
