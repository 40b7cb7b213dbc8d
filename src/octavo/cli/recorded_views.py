"""Views of a recording: the dashboard's page with its frames, and a trace for Perfetto, made in one replay.

Owns: the sinks of each segment, one clock for all of them, the files. Does not: read arguments (trace, replay).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from octavo.core.scheduler import Scheduler
from octavo.dashboard.page import write_page
from octavo.errors import ConfigError
from octavo.observe.frames.encode import FrameSource
from octavo.observe.frames.streams import MAX_WRITTEN, FrameSpool, FrameWriter, Window
from octavo.observe.history import History
from octavo.observe.perfetto import MAX_TRACKS, PerfettoWriter, TraceClip, TraceFile
from octavo.observe.recording import Header, Recording, ReplayReport, replay
from octavo.observe.series import StepTimes


@dataclass(frozen=True, slots=True)
class Wanted:
    """The views to write: paths of files, None for none; a range of seconds of the recording; size bounds."""

    page: str | None = None
    perfetto: str | None = None
    begin_s: float = 0.0
    end_s: float = float("inf")
    max_steps: int = MAX_WRITTEN
    max_tracks: int = MAX_TRACKS


@dataclass(slots=True)
class Views:
    """The numbers of frames and trace events written, and of steps and requests left out."""

    report: ReplayReport = field(default_factory=ReplayReport)
    num_frames: int = 0
    num_cut_steps: int = 0
    num_trace_events: int = 0
    num_undrawn_requests: int = 0


def write_views(recording: Recording, wanted: Wanted) -> Views:
    """Replay a recording into the requested files, which end at the first difference.

    Raises RecordingError, and ConfigError for a file that cannot be written.
    """
    views = Views()
    spool = FrameSpool() if wanted.page is not None else None
    file = None
    try:
        if wanted.perfetto is not None:
            file = TraceFile(wanted.perfetto, {"source": "recording"})
        watching = _Watching(wanted, spool, file)
        views.report = replay(recording, watching.make_sink, watching.times.add)
        watching.end(views)
        if file is not None:
            file.about["requests not drawn"] = views.num_undrawn_requests
            file.close()
            views.num_trace_events = file.num_written
        if spool is not None and wanted.page is not None:
            views.num_frames = len(spool)
            write_page(spool, Path(wanted.page))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written ({error.strerror}); give a path in a folder") from None
    finally:
        if file is not None:
            file.close()
    return views


class _Watching:
    """The sinks of all segments, made one after the other."""

    def __init__(self, wanted: Wanted, spool: FrameSpool | None, file: TraceFile | None) -> None:
        self.times = StepTimes(4)
        self._wanted = wanted
        self._spool = spool
        self._clip = None
        if file is not None:
            self._clip = TraceClip(file.write, wanted.begin_s, wanted.end_s, wanted.max_tracks)
        self._first: Header | None = None
        self._life = -1
        self._frames: FrameWriter | None = None
        self._num_written = self._num_cut = 0
        self._trace: PerfettoWriter | None = None

    def make_sink(self, scheduler: Scheduler, header: Header) -> History:
        """Return the history of the next segment, with its readers."""
        self._first = self._first or header
        self._life += 1
        self._next()
        origin = header.clock - (header.began - self._first.began)  # the first segment's beginning on this clock
        history = History(scheduler, self.times)
        if self._spool is not None:
            began = header.began - header.clock if header.began else None
            source = FrameSource("recording", header.model, began, f"life-{self._life + 1}", header.device)
            window = Window(origin + self._wanted.begin_s, origin + self._wanted.end_s, self._wanted.max_steps)
            window = replace(window, max_steps=max(0, window.max_steps - self._num_written))
            self._frames = FrameWriter(history, self._spool.write, source, window)
            history.add_reader(self._frames.read)
        if self._clip is not None:
            self._trace = PerfettoWriter(history, self._clip.write, life=self._life, origin=origin)
            history.add_reader(self._trace.read)
        return history

    def end(self, views: Views) -> None:
        """Finish the last segment's readers, and count what was left out."""
        if self._trace is not None:
            self._trace.end()
        if self._frames is not None:
            self._frames.end(self._num_cut)
            views.num_cut_steps = self._num_cut + self._frames.num_cut
        if self._clip is not None:
            views.num_undrawn_requests = self._clip.num_undrawn

    def _next(self) -> None:
        if self._frames is not None:
            self._frames.finish()
            self._num_written += self._frames.num_written
            self._num_cut += self._frames.num_cut
        if self._trace is not None:
            self._trace.end()
