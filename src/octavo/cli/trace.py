"""`octavo trace DIR`: converts a recording to a trace for ui.perfetto.dev, and to a page that plays the recording.

Owns: writing both files in one replay, on one clock (`octavo replay` can write them too).
Does not: know the formats (observe.perfetto, observe.frames and dashboard do).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path

from octavo.cli.flags import UsageError, check_output
from octavo.cli.terminal import say
from octavo.config.setting import Number
from octavo.core.plan import StepResult
from octavo.core.scheduler import Scheduler
from octavo.dashboard.page import write_page
from octavo.errors import ConfigError
from octavo.observe.frames import MAX_WRITTEN, FrameSource, FrameSpool, FrameWriter, Window
from octavo.observe.history import History
from octavo.observe.perfetto import MAX_TRACKS, PerfettoWriter, TraceClip, TraceFile
from octavo.observe.recording import Header, RecordedStep, Recording, ReplayReport, open_recording, replay
from octavo.observe.series import StepTimes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("recording", metavar="DIR", help="what octavo serve --record or octavo record wrote")
    parser.add_argument(
        "--perfetto", metavar="FILE", help="write Chrome's trace format; compressed if FILE ends in .gz"
    )
    parser.add_argument("--page", metavar="FILE", help="write the dashboard as one HTML file that plays the recording")
    parser.add_argument(
        "--begin", type=float, default=0.0, metavar="S", help="leave out what is before this second [0]"
    )
    parser.add_argument(
        "--end", type=float, default=float("inf"), metavar="S", help="leave out what is after this second [all]"
    )
    for flag, default, text in (
        ("--max-requests", MAX_TRACKS, "requests with a track"),
        ("--max-steps", MAX_WRITTEN, "steps in a page"),
    ):
        parser.add_argument(flag, type=Number(int, 1), default=default, metavar="N", help=f"{text} [{default:,}]")


def run(args: argparse.Namespace) -> int:
    """Write the files; return 1 if the replay's decisions differ from the recorded ones."""
    if args.perfetto is None and args.page is None:
        raise UsageError("there is nothing to write; give --perfetto FILE, --page FILE or both")
    if not 0 <= args.begin < args.end:
        raise UsageError(
            f"--begin is {args.begin:g} and --end {args.end:g}; give seconds from 0, with --end after --begin"
        )
    check_output("--perfetto", args.perfetto)
    check_output("--page", args.page)
    options = ViewOptions(args.page, args.perfetto, args.begin, args.end, args.max_steps, args.max_requests)
    views = write_views(open_recording(args.recording), options)
    print_views(views, options)
    return 0 if views.report.is_equal else 1


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """The files to write (a path, or None), the range of the recording in seconds, and size limits."""

    page: str | None = None
    perfetto: str | None = None
    begin_s: float = 0.0
    end_s: float = float("inf")
    max_steps: int = MAX_WRITTEN
    max_tracks: int = MAX_TRACKS


@dataclass(slots=True)
class WrittenViews:
    """The numbers of written frames and trace events, and of omitted steps and requests."""

    report: ReplayReport = field(default_factory=ReplayReport)
    num_frames: int = 0
    num_cut_steps: int = 0
    num_trace_events: int = 0
    num_undrawn_requests: int = 0


def print_views(views: WrittenViews, options: ViewOptions) -> None:
    """Print the written files, and the numbers of omitted steps and requests."""
    difference = views.report.difference
    if difference is not None:
        say(f"step {difference.step} differs from the recorded one; the views end before it", *difference.lines)
    if options.perfetto is not None:
        line = f"{options.perfetto}: {views.num_trace_events:,} events; open it at https://ui.perfetto.dev"
        if views.num_undrawn_requests:
            line += (
                f". {views.num_undrawn_requests:,} requests have no track: raise --max-requests, or give --begin, --end"
            )
        print(line)
    if options.page is not None:
        line = f"{options.page}: {views.num_frames:,} frames"
        if views.num_cut_steps:
            line += f". {views.num_cut_steps:,} steps are left out: raise --max-steps, or give --begin, --end"
        print(line)


def write_views(recording: Recording, options: ViewOptions) -> WrittenViews:
    """Replay a recording and write the requested files. They end at the first decision that differs.

    Raises RecordingError, and ConfigError for a file that cannot be written.
    """
    views = WrittenViews()
    spool = FrameSpool() if options.page is not None else None
    file = None
    try:
        if options.perfetto is not None:
            file = TraceFile(options.perfetto, {"source": "recording"})
        writers = _SegmentWriters(options, spool, file)
        views.report = replay(recording, writers.start_segment, writers.add_times)
        writers.finish(views)
        if file is not None:
            file.about["requests not drawn"] = views.num_undrawn_requests
            file.close()
            views.num_trace_events = file.num_written
        if spool is not None and options.page is not None:
            views.num_frames = len(spool)
            write_page(spool, Path(options.page))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written ({error.strerror}); give a path in a folder") from None
    finally:
        if file is not None:
            file.close()
    return views


class _SegmentWriters:
    """The writers of a recording's segments. Segments are replayed one after another."""

    def __init__(self, options: ViewOptions, spool: FrameSpool | None, file: TraceFile | None) -> None:
        self.step_times = StepTimes(4)
        self._options = options
        self._spool = spool
        self._clip = None
        if file is not None:
            self._clip = TraceClip(file.write, options.begin_s, options.end_s, options.max_tracks)
        self._first: Header | None = None
        self._segment = -1
        self._frames: FrameWriter | None = None
        self._num_written = self._num_cut = 0
        self._trace: PerfettoWriter | None = None

    def start_segment(self, scheduler: Scheduler, header: Header) -> History:
        """Return the next segment's history, from which the segment's writers read."""
        self._first = self._first or header
        self._segment += 1
        self._finish_segment()
        origin = header.clock - (header.began - self._first.began)  # the first segment's start on this clock
        history = History(scheduler, self.step_times)
        if self._spool is not None:
            began = header.began - header.clock if header.began else None
            source = FrameSource("recording", header.model, began, f"life-{self._segment + 1}", header.device)
            window = Window(origin + self._options.begin_s, origin + self._options.end_s, self._options.max_steps)
            window = replace(window, max_steps=max(0, window.max_steps - self._num_written))
            self._frames = FrameWriter(history, self._spool.write, source, window)
            history.add_reader(self._frames.read)
        if self._clip is not None:
            self._trace = PerfettoWriter(history, self._clip.write, segment_index=self._segment, origin=origin)
            history.add_reader(self._trace.read)
        return history

    def add_times(self, step: RecordedStep) -> None:
        """Add the seconds of a step that has a result."""
        if isinstance(step.outcome, StepResult):
            self.step_times.add(step.seconds(step.outcome))

    def _finish_segment(self) -> None:
        if self._frames is not None:
            self._frames.finish()
            self._num_written += self._frames.num_written
            self._num_cut += self._frames.num_cut
        if self._trace is not None:
            self._trace.end()

    def finish(self, views: WrittenViews) -> None:
        """Finish the last segment, and store the numbers of omitted steps and requests."""
        if self._trace is not None:
            self._trace.end()
        if self._frames is not None:
            self._frames.end(self._num_cut)
            views.num_cut_steps = self._num_cut + self._frames.num_cut
        if self._clip is not None:
            views.num_undrawn_requests = self._clip.num_undrawn
