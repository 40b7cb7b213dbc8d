"""What a parent does with an engine's flight recorder: saves it, within bounds, and finds missed objectives."""

from __future__ import annotations

import time
from array import array
from pathlib import Path

import pytest
from tests.core.harness import limits

from octavo.config import FlightConfig
from octavo.core.plan import Event, EventKind
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.frontend.flight_recordings import MAX_SAVED, FlightRecordings, find_miss, remove_oldest
from octavo.observe.recording import open_recording, replay
from octavo.observe.recording.flight import FlightRecorder
from octavo.observe.recording.format import Header


def flown(folder: Path) -> FlightRecordings:
    """The recordings of an engine that has planned a request."""
    kept = FlightRecordings(FlightConfig(flight_recordings=str(folder)))
    recorder = FlightRecorder(Header("tiny", limits(), 1), time.monotonic, 60.0, 1 << 20)
    recorder.attach(kept.descriptors)
    scheduler = Scheduler(limits(), recorder)
    recorder.save = scheduler.save
    scheduler.admit(Request("r", array("i", range(5))), time.monotonic())
    scheduler.plan(time.monotonic())
    recorder.close()
    return kept


def saved(folder: Path, count: int) -> list[Path]:
    end = time.monotonic() + 60
    while len(found := sorted(folder.glob("*/*.octrec"))) < count and time.monotonic() < end:
        time.sleep(0.02)
    return found


def test_a_crash_is_saved_even_if_the_files_are_closed_at_once(tmp_path: Path) -> None:
    kept = flown(tmp_path / "kept")
    kept.crashed("killed by SIGKILL, step 7")
    kept.close()
    (path,) = saved(tmp_path / "kept", 1)
    assert path.parent.name.endswith("-crash") and path.parent.stat().st_mode & 0o777 == 0o700
    report = replay(open_recording(path))
    assert report.is_equal and report.num_plans == 1
    assert report.ends == ["the engine ended (killed by SIGKILL, step 7)"]
    kept.close()
    with pytest.raises(ValueError, match="closed"):
        kept.read("too late")


def test_misses_are_saved_at_most_once_in_a_minute(tmp_path: Path) -> None:
    kept = flown(tmp_path)
    for number in range(5):
        kept.missed(f"request {number} missed its objective")
    (path,) = saved(tmp_path, 1)
    time.sleep(0.2)
    assert len(saved(tmp_path, 1)) == 1 and path.parent.name.endswith("-miss")
    kept.close()


def test_the_newest_are_kept_and_foreign_files_stay(tmp_path: Path) -> None:
    names = [f"202611{day:02d}-120000-000-{kind}" for day in range(1, 8) for kind in ("crash", "miss")]
    for name in (*names, "mine", "20261101-120000-000-other"):
        (tmp_path / name).mkdir()
    (tmp_path / "20261101-120000-000-crash" / "0001.octrec").write_bytes(b"x")
    (tmp_path / "20000101-120000-000-crash").symlink_to(tmp_path / "mine")
    remove_oldest(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*names[-MAX_SAVED:], "mine", "20261101-120000-000-other", "20000101-120000-000-crash"}


def test_a_folder_that_cannot_be_written_to_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    kept = flown(tmp_path / "file" / "kept")
    kept.crashed("it fell")
    end = time.monotonic() + 60
    while "no recording can be saved" not in caplog.text and time.monotonic() < end:
        time.sleep(0.02)
    assert "no recording can be saved" in caplog.text
    kept.close()


def test_without_a_flight_recorder_there_are_no_files() -> None:
    assert FlightRecordings.of(FlightConfig(flight_recorder=0.0)) is None


@pytest.mark.parametrize(
    ("objectives", "first_at", "num_tokens", "miss"),
    [
        ({}, 14.0, 5, None),
        ({"ttft_objective": 4.0}, 14.0, 5, None),
        ({"ttft_objective": 3.9}, 14.0, 5, "missed its ttft objective: 4.000 s, not 3.9 s"),
        ({"ttft_objective": 5.0}, None, 0, "missed its ttft objective: 10.000 s, not 5 s"),
        ({"ttft_objective": 20.0}, None, 0, None),
        ({"tpot_objective": 1.5}, 14.0, 5, None),
        ({"tpot_objective": 1.4}, 14.0, 5, "missed its tpot objective: 1.5000 s, not 1.4 s"),
        ({"tpot_objective": 0.1}, 14.0, 1, None),
        ({"tpot_objective": 0.1, "n": 2}, 14.0, 5, None),
    ],
)
def test_what_was_missed(
    objectives: dict[str, float], first_at: float | None, num_tokens: int, miss: str | None
) -> None:
    fields = dict(objectives)
    params = SamplingParams(n=int(fields.pop("n", 1)))
    request = Request("r", array("i", [1]), params, arrival=10.0, **fields)
    end = Event(EventKind.FINISHED, "r", 20.0, 3, num_tokens=num_tokens)
    found = find_miss(request, end, first_at)
    assert found == (None if miss is None else f"request r {miss}")
