"""Observers of the first replica of a simulation: the dashboard's frames, and a file for Perfetto.

Owns: the history of that replica alone, its readers and their files. Does not: draw (dashboard, observe.perfetto).
"""

from __future__ import annotations

from octavo.core.scheduler import Scheduler
from octavo.dashboard.page import write_page
from octavo.errors import ConfigError
from octavo.observe.frames import Frame, FrameSource, FrameSpool, FrameWriter
from octavo.observe.history import History
from octavo.observe.perfetto import PerfettoWriter, TraceClip, TraceFile


class Watchers:
    """The observers of the first scheduler that is made."""

    def __init__(self, model: str, page: str | None, perfetto: str | None) -> None:
        self._model = model
        self._page, self._perfetto = page, perfetto
        self._frames = FrameSpool()
        self._num_cut = 0
        self._frame_writer: FrameWriter | None = None
        self._trace: tuple[TraceFile, TraceClip, PerfettoWriter] | None = None

    @property
    def is_wanted(self) -> bool:
        """True if a page or a trace is to be written, which makes the simulator plan every step by itself."""
        return self._page is not None or self._perfetto is not None

    def make_sink(self, scheduler: Scheduler) -> History | None:
        """Return the history of the first scheduler, with its readers; None for the others."""
        if self._frame_writer is not None or self._trace is not None:
            return None
        history = History(scheduler)
        if self._page is not None:
            self._frame_writer = FrameWriter(history, self._keep, FrameSource("simulation", self._model))
            history.add_reader(self._frame_writer.read)
        if self._perfetto is not None:
            try:
                file = TraceFile(self._perfetto, {"model": self._model, "source": "simulation"})
            except OSError as error:
                raise _unwritable(self._perfetto, error) from None
            clip = TraceClip(file.write)
            writer = PerfettoWriter(history, clip.write)
            self._trace = file, clip, writer
            history.add_reader(writer.read)
        return history

    def write(self) -> list[str]:
        """Write the files after the simulation; return remarks on what was left out."""
        told: list[str] = []
        if self._frame_writer is not None and self._page is not None:
            self._frame_writer.end()
            try:
                write_page(self._frames, self._page)
            except OSError as error:
                raise _unwritable(self._page, error) from None
        if self._trace is not None:
            file, clip, writer = self._trace
            writer.end()
            file.close()
            if clip.num_undrawn:
                told.append(f"{self._perfetto}: {clip.num_undrawn:,} requests more have no track of their own")
        if self._num_cut:
            told.append(f"{self._page}: {self._num_cut:,} steps more were left out")
        return told

    def _keep(self, frame: Frame) -> None:
        self._num_cut = frame.get("cut", 0)  # the last frame has the total
        self._frames.write(frame)


def _unwritable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error.strerror}); give a path in a folder that exists")
