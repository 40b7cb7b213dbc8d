"""The flight recorder: bounded in time and bytes, beginning with a state, readable at any time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from octavo.core.limits import Limits
from octavo.core.scheduler import Scheduler
from octavo.observe.recording import Recording, arrivals, flight, open_recording, replay
from octavo.observe.recording.flight import FlightRecorder, read_flight, write_recording
from octavo.observe.recording.format import Header
from tests.core.harness import Run, limits, prompt
from tests.core.random_config import Hostile
from tests.fake_model import FakeExecutor


class FlightFiles:
    """Files as a parent of engines holds them."""

    def __init__(self) -> None:
        self.files = [TemporaryFile(buffering=0) for _ in range(3)]  # noqa: SIM115
        self.descriptors = [file.fileno() for file in self.files]

    def read(self, reason: str, last_s: float | None = None) -> tuple[bytes, float] | None:
        return read_flight(self.descriptors, reason, last_s)


@pytest.fixture
def files() -> Iterator[FlightFiles]:
    made = FlightFiles()
    yield made
    for file in made.files:
        file.close()


class FlownRun(Run):
    """A run whose scheduler has a flight recorder, on the machine's clock."""

    def __init__(self, sizes: Limits, files: FlightFiles, keep_s: float = 60.0, max_bytes: int = 1 << 20) -> None:
        self.recorder = FlightRecorder(Header("tiny", sizes, 2), time.monotonic, keep_s, max_bytes)
        self.recorder.attach(files.descriptors)
        super().__init__(sizes, depth=2)
        self.now = time.monotonic()

    def make_engine(self) -> tuple[Scheduler, FakeExecutor]:
        _, executor = super().make_engine()
        scheduler = Scheduler(self.limits, self.recorder)
        self.recorder.save = scheduler.save
        return scheduler, executor

    def serve(self, seconds: float, per_step_s: float = 0.002) -> None:
        """Serve requests for some seconds."""
        end, number = time.monotonic() + seconds, 0
        while (now := time.monotonic()) < end:
            self.now = now
            if len(self.scheduler.open_work().running) + self.scheduler.num_waiting < 5:
                number += 1
                self.admit(prompt(9, number), 12, n=1 + number % 2, arrival=now)
            self.step()
            time.sleep(per_step_s)


def taken(files: FlightFiles, folder: Path, last_s: float | None = None) -> Recording:
    """Read the files as a recording."""
    time.sleep(0.25)
    found = files.read("read by a test", last_s)
    assert found is not None
    write_recording(folder, found[0])
    return open_recording(folder)


def test_it_keeps_the_time_that_was_asked_for_in_the_last_three_segments(files: FlightFiles, tmp_path: Path) -> None:
    run = FlownRun(limits(), files, keep_s=0.8)
    run.serve(2.6)
    recording = taken(files, tmp_path / "all")
    report = replay(recording)
    assert report.is_equal and report.num_equal == report.num_plans > 20 and report.num_open
    assert report.seconds > 0.7 and recording.header.has_state
    assert recording.header.number == int(str(run.recorder.status()["segments"])) - 2 > 1
    part = taken(files, tmp_path / "part", 0.1)
    assert replay(part).is_equal and part.header.number > recording.header.number
    assert any(one.is_resumed for one in arrivals(recording))
    status = run.recorder.status()
    assert status["is_recording"] and status["ended"] == "" and float(str(status["save_s"])) > 0
    run.recorder.close()
    assert run.recorder.status()["is_recording"] is False and files.read("after the end") is not None


def test_its_bytes_are_bounded_and_a_full_file_is_followed_by_the_next(files: FlightFiles, tmp_path: Path) -> None:
    run = FlownRun(limits(), files, keep_s=3600.0, max_bytes=120_000)
    end = time.monotonic() + 60
    while int(str(run.recorder.status()["segments"])) < 4 and time.monotonic() < end:
        run.serve(0.3)
        assert run.recorder.status()["bytes"] <= 120_000  # type: ignore[operator]
    recording = taken(files, tmp_path)
    assert recording.header.number > 1 and recording.header.has_state
    report = replay(recording)
    assert report.is_equal and report.num_equal > 20
    run.recorder.close()


def test_from_the_engines_first_request_it_needs_no_state(files: FlightFiles, tmp_path: Path) -> None:
    run = FlownRun(limits(), files)
    assert files.read("too early") is None
    run.serve(0.3)
    recording = taken(files, tmp_path)
    report = replay(recording)
    assert not recording.header.has_state and report.is_equal and not report.num_open and report.num_requests > 4
    run.recorder.close()


def test_calls_that_are_lost_are_never_replayed_as_if_they_were_not(
    files: FlightFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is full before a state was saved: what follows is kept from the next state on."""
    monkeypatch.setattr(flight, "FULL", 0.999)  # so that there is no room for the calls until the next state
    run = FlownRun(limits(), files, keep_s=3600.0, max_bytes=60_000)
    end = time.monotonic() + 60
    while int(str(run.recorder.status()["segments"])) < 4 and time.monotonic() < end:
        run.serve(0.4, 0.0005)
    recording = taken(files, tmp_path)
    assert replay(recording).is_equal and recording.header.number > 2
    run.recorder.close()


def test_a_policy_that_cannot_be_saved_is_recorded_until_the_first_file_is_full(
    files: FlightFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = FlownRun(limits(policy=Hostile.name), files, keep_s=3600.0, max_bytes=24_000)
    end = time.monotonic() + 60
    while (status := run.recorder.status())["is_recording"] and time.monotonic() < end:
        run.serve(0.4, 0.0005)
    assert not status["is_recording"] and "give it the methods save and restore" in str(status["ended"])
    assert "the flight recorder ends when it is full" in caplog.text
    assert files.read("what there is") is not None
    run.recorder.close()


def test_a_state_that_no_file_can_hold_ends_it_with_the_remedy(files: FlightFiles) -> None:
    sizes = limits(num_blocks=4000)
    run = FlownRun(sizes, files, keep_s=0.1, max_bytes=6_000)
    end = time.monotonic() + 60
    while run.recorder.status()["is_recording"] and time.monotonic() < end:
        run.serve(0.4)
    assert "raise --flight-recorder-bytes" in str(run.recorder.status()["ended"])
    run.recorder.close()


def test_without_files_it_does_nothing() -> None:
    sizes = limits()
    recorder = FlightRecorder(Header("tiny", sizes, 1), time.monotonic, 60.0, 1 << 20)
    scheduler = Scheduler(sizes, recorder)
    recorder.save = scheduler.save
    assert not recorder.status()["is_recording"]
    recorder.close()


def test_a_header_says_where_a_recording_begins(files: FlightFiles, tmp_path: Path) -> None:
    begun = time.monotonic()
    run = FlownRun(limits(), files, keep_s=0.4)
    run.serve(1.0)
    header = taken(files, tmp_path).header
    assert header.has_state and begun < header.start < time.monotonic()
    assert replace(header, start=0.0, number=0, has_state=False, limits=run.limits) == replace(
        Header("tiny", run.limits, 2), began=header.began, clock=header.clock
    )
    run.recorder.close()
