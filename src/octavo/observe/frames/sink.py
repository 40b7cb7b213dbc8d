"""FrameSink: the frames of a recording or a simulation, each written as it is made.

Owns: when the queue and the pool are looked at, by the clock of what is watched; the bound, and the window of time.
Does not: keep frames. Invariant: what is before the window is followed, so that the head tells who has which slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.observe.frames.encode import Frame, Source, head_frame, step_frame
from octavo.observe.frames.records import PartTimes, Places, Record, Recorder
from octavo.observe.frames.snapshots import PoolFrames, queue_frame

LOOK_S = 0.25  # between two looks at the queue and the pool
MAX_STEPS = 20_000  # written; some 10 MB of a page


@dataclass(frozen=True, slots=True)
class Window:
    """What of a stream is written: from one time up to, but not, another (the engine's seconds), and how many steps."""

    begin: float = float("-inf")
    end: float = float("inf")
    max_steps: int = MAX_STEPS
    look_s: float = LOOK_S


class FrameSink:
    """An EventSink that gives each frame to `write`. Call `end` when all is told."""

    def __init__(
        self,
        scheduler: Scheduler,
        write: Callable[[Frame], object],
        source: Source,
        *,
        window: Window | None = None,
        times: PartTimes | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._write = write
        self._source = source
        self._window = window or Window()
        self._times = times
        self._recorder = Recorder(scheduler, times)
        self._places = Places()
        self._blocks: PoolFrames | None = None
        self._held: Record | None = None  # its emit is known only when it has been told to all
        self._looks: tuple[Frame, ...] = ()  # made behind the step that is held
        self._previous: Record | None = None
        self._next_look = float("-inf")
        self.num_written = 0
        self.num_cut = 0
        self._has_head = False
        self._has_ended = False

    def admitted(self, request: Request) -> None:
        """A request was taken."""
        self._recorder.admitted(request)

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Decisions, each exactly once."""
        self._recorder.decided(decisions)

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """A plan was committed."""
        self._flush()
        self._held = self._recorder.step(plan, outcome, events)
        if self._is_shown(self._held) and events.time >= self._next_look:
            self._look(events.time)

    def finish(self) -> None:
        """Write what is left, but no end: another engine's frames follow. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._flush()
            if self._recorder.has_news:
                self._put(self._recorder.note(self._recorder.last_time))
            self._head()

    def end(self, num_cut: int = 0) -> None:
        """Write what is left, and the end, with how many steps of engines before this were cut. Idempotent."""
        if self._has_ended:
            return
        self.finish()
        frame: Frame = {"k": "end", "t": round(self._recorder.last_time, 6)}
        if self.num_cut + num_cut:
            frame["cut"] = self.num_cut + num_cut
        self._write(frame)

    def _flush(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._put(held)
        looks, self._looks = self._looks, ()
        for frame in looks:
            self._write(frame)

    def _is_shown(self, record: Record) -> bool:
        window = self._window
        return window.begin <= record.time < window.end and self.num_written < window.max_steps

    def _put(self, record: Record) -> None:
        if self._is_shown(record):
            self._head(record.time)
            self._write(step_frame(record, self._previous, self._times))
            self._previous = record
            self.num_written += 1
        else:
            self.num_cut += record.slots is not None and record.time >= self._window.begin
        self._places.apply(record)

    def _head(self, now: float | None = None) -> None:
        if not self._has_head:
            self._has_head = True
            at = self._recorder.last_time if now is None else now
            self._write(head_frame(self._source, self._scheduler.limits, self._places, at))

    def _look(self, now: float) -> None:
        self._next_look = now + self._window.look_s
        if self._blocks is None:
            self._blocks = PoolFrames(self._scheduler)
        self._looks = queue_frame(self._scheduler, self._recorder.waiting, now), self._blocks.frame(now)
