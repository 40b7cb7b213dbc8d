"""Random runs of a scheduler that is recorded, in memory: what comes out is read back and replayed.

Owns: RecordedRun, its driver, and a recording made of its segments. Does not: check anything itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from octavo.core.scheduler import Scheduler
from octavo.core.tap import Call
from octavo.observe.recording.format import CallEncoder, EndMarker, Header, RecordedCall, StateRecord
from octavo.observe.recording.reader import pack_header, pack_records, preamble
from tests.core.harness import Run
from tests.core.random_driver import Driver
from tests.fake_model import FakeExecutor


class ListTap:
    """A call tap that keeps what a recorder would."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.items: list[RecordedCall] = []
        self._clock = clock

    def called(self, call: Call) -> None:
        self.items.append(RecordedCall(call, self._clock()))


class RecordedRun(Run):
    """A run whose scheduler hands its calls to `lives`, one list for each engine that lived."""

    lives: list[list[RecordedCall]]

    def make_engine(self) -> tuple[Scheduler, FakeExecutor]:
        _, executor = super().make_engine()
        if not hasattr(self, "lives"):
            self.lives = []
        tap = ListTap(lambda: self.now)
        self.lives.append(tap.items)
        return Scheduler(self.limits, tap), executor

    def write_from_states(self, folder: Path, has_text: bool = False) -> list[Path]:
        """Write a folder for each state that was saved: the rest of its engine's life, beginning with the state."""
        header = Header("tiny", self.limits, self.depth, has_text=has_text, has_state=True)
        paths = []
        for number, items in enumerate(self.lives):
            for index, item in enumerate(items):
                if isinstance(item.call, StateRecord):
                    paths.append(folder / f"{number}-{index}.octrec")
                    write_segment(paths[-1], replace(header, start=item.call.now), items, first=index)
        return paths

    def write(self, folder: Path, has_text: bool = False) -> Path:
        """Write what was recorded, a segment for each life."""
        for number, items in enumerate(self.lives, start=1):
            write_segment(
                folder / f"{number:04d}.octrec", Header("tiny", self.limits, self.depth, has_text=has_text), items
            )
        return folder


def write_segment(path: Path, header: Header, items: list[RecordedCall], per_frame: int = 50, first: int = 0) -> None:
    """Write a segment as a recorder does, from the item `first` on."""
    encoder = CallEncoder(header.has_text)
    records = [encoder.encode(item) for item in (*items, RecordedCall(EndMarker(0.0, "the engine was stopped")))]
    records = records[first:]
    frames = [pack_records(records[at : at + per_frame]) for at in range(0, len(records), per_frame)]
    path.write_bytes(preamble() + pack_header(header) + b"".join(frames))


class RecordedDriver(Driver):
    """The random driver over a recorded run."""

    run_type = RecordedRun


class SavingRun(RecordedRun):
    """A recorded run whose scheduler's state is saved now and then, after any call."""

    def make_engine(self) -> tuple[Scheduler, FakeExecutor]:
        scheduler, executor = super().make_engine()
        lots, items, tap = random.Random(len(self.lives)), self.lives[-1], scheduler._tap
        assert isinstance(tap, ListTap)
        called = tap.called

        def call_and_save(call: Call) -> None:
            called(call)
            if lots.random() < 0.02:
                items.append(RecordedCall(StateRecord(self.now, scheduler.save())))

        tap.called = call_and_save  # type: ignore[method-assign]
        return scheduler, executor


class SavingDriver(RecordedDriver):
    """The random driver over a run that saves states."""

    run_type = SavingRun
