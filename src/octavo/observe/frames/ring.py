"""The frames of a live engine: its last steps in a ring, and frames of them for whoever asks.

Owns: the ring, cursors, and when the queue and the pool are looked at: when somebody asks, each at most four times a
second.
Does not: answer anybody by itself, or make anything while nobody asks but one light record a step.
Invariants: memory is bounded by steps and by what they hold on to; an answer by steps, rows and time. All methods
belong to the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.observe.frames.encode import Frame, Source, head_frame, step_frame
from octavo.observe.frames.records import PartTimes, Places, Record, Recorder
from octavo.observe.frames.snapshots import PoolFrames, queue_frame

MAX_STEPS = 1024  # kept
MAX_WEIGHT = 65_536  # arrivals, decisions and new sequences kept
MAX_POLL = 200  # steps in an answer
MAX_POLL_ROWS = 16_384  # rows in an answer, before the last step of it
MAX_POLL_S = 0.001  # of the engine's thread for an answer, by its clock; what is under way is done
MIN_STEPS_S = 0.0005  # of it for the steps of an answer, whatever a look took
LOOK_S = 0.125  # between two looks, at the queue and the pool in turn


class FrameRing:
    """An EventSink that keeps the last steps; `poll` gives frames. `now` is the engine's clock."""

    def __init__(
        self, scheduler: Scheduler, source: Source, now: Callable[[], float], times: PartTimes | None = None
    ) -> None:
        self._scheduler = scheduler
        self._source = source
        self._now = now
        self._times = times
        self._recorder = Recorder(scheduler, times)
        self._blocks: PoolFrames | None = None  # made when somebody looks
        self._ring: deque[Record | tuple[Frame, ...]] = deque()  # looks are kept as the frames that they are
        self._first = 0  # number of the ring's first entry
        self._weight = 0
        self._tail = Places()  # before the ring's first entry
        self._looked_at: float | None = None
        self._is_pools_turn = False

    # --- what the loop tells

    def admitted(self, request: Request) -> None:
        """A request was taken."""
        self._recorder.admitted(request)

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Decisions, each exactly once."""
        self._recorder.decided(decisions)

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """A plan was committed."""
        self._add(self._recorder.step(plan, outcome, events))

    # --- what people ask

    def poll(self, cursor: str) -> dict[str, object]:
        """Frames behind a cursor, as docs/frames.md has it; a cursor that is not known is as ""."""
        begun = self._now()
        self._look(begun)
        life, _, spelled = cursor.rpartition(":")
        number, last, lost = 0, self._first + len(self._ring), 0
        is_known = bool(cursor) and life == self._source.life and spelled.isdecimal() and int(spelled) <= last
        frames: list[Frame] = []
        if cursor == "now":
            number = last
            frames.append(head_frame(self._source, self._scheduler.limits, self._front(), begun))
        else:
            number = int(spelled) if is_known else self._first
            if number < self._first:
                lost = self._first - number
                number = self._first
            if lost or not is_known:
                frames.append(head_frame(self._source, self._scheduler.limits, self._tail, self._tail_time()))
        number = self._collect(frames, number, begun + MAX_POLL_S)
        return {
            "cursor": f"{self._source.life}:{number}",
            "frames": frames,
            "lost": lost,
            "more": number < last,
        }

    def _collect(self, frames: list[Frame], number: int, until: float) -> int:
        """Add the frames from a number on, as far as one answer goes; gives the number behind them."""
        until = max(until, self._now() + MIN_STEPS_S)
        index, num_steps, num_rows = number - self._first, 0, 0
        previous = None if frames else self._record_before(index)
        while index < len(self._ring) and num_steps < MAX_POLL and num_rows < MAX_POLL_ROWS:
            if num_steps and self._now() > until:
                break
            entry = self._ring[index]
            index += 1
            if not isinstance(entry, Record):
                frames.extend(entry)
                continue
            frame = step_frame(entry, previous, self._times)
            frames.append(frame)
            num_steps += 1
            num_rows += len(frame.get("rows", ())) // 3 + _weight(entry)
            previous = entry
        return self._first + index

    def _record_before(self, index: int) -> Record | None:
        for place in range(min(index, len(self._ring)) - 1, -1, -1):
            entry = self._ring[place]
            if isinstance(entry, Record):
                return entry
        return None

    def _tail_time(self) -> float:
        for entry in self._ring:
            if isinstance(entry, Record):
                return entry.time
        return self._now()

    def _look(self, now: float) -> None:
        """Enter news without a step, and look at the queue or the pool if that is due; at both if it was long ago."""
        if self._looked_at is not None and now < self._looked_at + LOOK_S:
            return
        if self._recorder.has_news:
            self._add(self._recorder.note(now))
        is_rare = self._looked_at is None or now >= self._looked_at + 4 * LOOK_S
        self._looked_at = now
        looks = list[Frame]()
        self._is_pools_turn = not self._is_pools_turn
        if is_rare or not self._is_pools_turn:
            looks.append(queue_frame(self._scheduler, self._recorder.waiting, now))
        if is_rare or self._is_pools_turn:
            if self._blocks is None:
                self._blocks = PoolFrames(self._scheduler)
            looks.append(self._blocks.frame(now))
        self._add(tuple(looks))

    def _front(self) -> Places:
        """Who has which slot behind the ring's last entry."""
        places = self._tail.copy()
        for entry in self._ring:
            if isinstance(entry, Record):
                places.apply(entry)
        return places

    def _add(self, entry: Record | tuple[Frame, ...]) -> None:
        ring = self._ring
        ring.append(entry)
        self._weight += _weight(entry)
        while len(ring) > MAX_STEPS or self._weight > MAX_WEIGHT:
            old = ring.popleft()
            self._first += 1
            self._weight -= _weight(old)
            if isinstance(old, Record):
                self._tail.apply(old)


def _weight(entry: Record | tuple[Frame, ...]) -> int:
    """How many things it holds on to beside its rows. A step's is known with three looks."""
    if not isinstance(entry, Record):
        return len(entry)
    return len(entry.taken) + len(entry.arrivals) + len(entry.decisions)
