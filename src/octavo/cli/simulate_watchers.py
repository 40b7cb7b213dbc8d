"""What looks at the first replica of a simulation: the dashboard's frames, and a file for Perfetto.

Owns: making the sinks for that replica alone, and writing what they saw. Does not: draw (dashboard, trace.perfetto).
"""

from __future__ import annotations

from octavo.core.scheduler import Scheduler
from octavo.dashboard.page import write_page
from octavo.errors import ConfigError
from octavo.observe.frames.encode import Frame, Source
from octavo.observe.frames.sink import FrameSink
from octavo.observe.frames.spool import Spool
from octavo.observe.perfetto import PerfettoSink, TraceFile
from octavo.observe.sink import EventSink, Several


class Watchers:
    """Sinks for the first scheduler that is made; the others get one that looks at nothing."""

    def __init__(self, model: str, page: str | None, perfetto: str | None) -> None:
        self._model = model
        self._page, self._perfetto = page, perfetto
        self._frames = Spool()
        self._num_cut = 0
        self._frame_sink: FrameSink | None = None
        self._trace: tuple[TraceFile, PerfettoSink] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anybody looks, which makes every step be planned by itself."""
        return self._page is not None or self._perfetto is not None

    def make_sink(self, scheduler: Scheduler) -> EventSink:
        """The sink of one more scheduler."""
        sinks: list[EventSink] = []
        if self._page is not None and self._frame_sink is None:
            self._frame_sink = FrameSink(scheduler, self._keep, Source("simulation", self._model))
            sinks.append(self._frame_sink)
        if self._perfetto is not None and self._trace is None:
            try:
                file = TraceFile(self._perfetto, {"model": self._model, "source": "simulation"})
            except OSError as error:
                raise _unwritable(self._perfetto, error) from None
            self._trace = file, PerfettoSink(scheduler, file.write)
            sinks.append(self._trace[1])
        return Several(sinks)

    def write(self) -> list[str]:
        """Write what was seen, once the simulation is over; returns what of it was left out."""
        told: list[str] = []
        if self._frame_sink is not None and self._page is not None:
            self._frame_sink.end()
            try:
                write_page(self._frames, self._page)
            except OSError as error:
                raise _unwritable(self._page, error) from None
        if self._trace is not None:
            file, sink = self._trace
            sink.end()
            file.close()
            if sink.num_undrawn:
                told.append(f"{self._perfetto}: {sink.num_undrawn:,} requests more have no track of their own")
        if self._num_cut:
            told.append(f"{self._page}: {self._num_cut:,} steps more were left out")
        return told

    def _keep(self, frame: Frame) -> None:
        self._num_cut = frame.get("cut", 0)  # the last frame says it
        self._frames.write(frame)


def _unwritable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error.strerror}); give a path in a folder that exists")
