"""Requests and columns that are read from the records equal those of a replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.cli.replay import _lines
from octavo.core.plan import ROW_SAMPLE
from octavo.observe.recording import Recording, arrivals, open_recording, replay, steps
from octavo.observe.recording.columns import ColumnsReader, StepColumns, read_columns
from octavo.observe.recording.format import COMMIT, PLAN, STATE, Header
from octavo.observe.recording.reader import Segment
from octavo.observe.recording.requests import read_plain, read_requests
from octavo.simulator import recorded
from octavo.simulator.recorded import measure, measure_by_replay
from tests.core.harness import limits, prompt
from tests.core.random_config import BUILT_IN
from tests.observe.recording.driving import RecordedDriver, RecordedRun
from tests.simulator.costs.steps_of import columns_of


def check(recording: Recording) -> bool:
    """Compare both readings with the replay and the steps; return True if no replay was needed."""
    columns, observed = read_columns(recording).by_name(), columns_of(steps(recording)).by_name()
    for name, values in observed.items():
        assert np.array_equal(columns[name], values, equal_nan=True), name
    replayed, plain = arrivals(recording), read_plain(recording)
    if plain is None:
        assert read_requests(recording) == replayed
        return False
    assert read_requests(recording) == plain.requests == replayed
    report = replay(recording)
    assert plain.report == replace(report, num_equal=0, num_left=report.num_equal, seconds=plain.report.seconds)
    assert plain.report.seconds == pytest.approx(report.seconds, abs=1e-9)
    measured, by_replay = measure(recording), measure_by_replay(recording)
    assert measured.report == replace(report, seconds=plain.report.seconds)
    ours, theirs = measured.run.replicas[0], by_replay.run.replicas[0]
    assert (ours.busy_s, ours.host_s) == pytest.approx((theirs.busy_s, theirs.host_s), abs=1e-9)
    assert replace(ours, busy_s=0.0, host_s=0.0) == replace(theirs, busy_s=0.0, host_s=0.0)
    for name, column in vars(by_replay.run.outcomes).items():
        assert getattr(measured.run.outcomes, name) == column, name
    assert measured.drafts is by_replay.drafts is None
    return True


def test_a_plan_without_rows_after_a_state_has_none() -> None:
    """Not those of the plan before the state."""

    def plan(now: float, rows: object, values: dict[str, object]) -> list[object]:
        return [PLAN, now, None, None, 1, rows, values, None, None, None]

    def commit(now: float) -> list[object]:
        return [COMMIT, now, None, None, None, None, None]

    columns = StepColumns()
    reader = ColumnsReader(Header("tiny", limits(), 1), columns)
    first = plan(1.0, ([3], [0], [5], [ROW_SAMPLE]), {})
    moving = plan(3.0, None, {"copies": [0, 1, 2]})
    reader.take([first, commit(2.0), [STATE], moving, commit(4.0)])
    reader.end()
    found = {name: column.tolist() for name, column in columns.by_name().items()}
    assert (found["chunks"], found["chunk_tokens"], found["decodes"]) == ([1, 0], [5, 0], [0, 0])
    assert (found["decode_kv"], found["samples"], found["copied"]) == ([0, 0], [1, 0], [0, 1])


@pytest.mark.parametrize("policy", BUILT_IN)
def test_random_recordings_are_read_as_they_replay(policy: str, tmp_path: Path) -> None:
    for seed in range(300, 306):
        driver = RecordedDriver(seed, check_every=1000, policy=policy)
        driver.drive(100)
        (tmp_path / str(seed)).mkdir()
        check(open_recording(driver.run.write(tmp_path / str(seed))))


@pytest.mark.parametrize("has_text", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_plain_requests_need_no_replay(depth: int, has_text: bool, tmp_path: Path) -> None:
    """With stops, limits, cancels of waiting and running requests, preemptions, and an id that is used again."""
    run = RecordedRun(limits(num_blocks=12 if depth == 1 else 64, max_sequences=3), depth=depth)
    for number in range(8):
        run.admit(prompt(9 + number, number % 3), 5 + number, request_id=f"r{number}", eos_token_ids=(7,))
    run.steps(4)
    run.cancel("r1", "r7", "unknown")
    run.end_choice("r2", 0)
    run.finish_all()
    run.admit(prompt(5), 3, request_id="r0")
    run.finish_all()
    recording = open_recording(run.write(tmp_path, has_text))
    assert check(recording)
    found = read_plain(recording)
    assert found is not None and found.hit_tokens and any(one.cached_tokens for one in found.requests)
    assert depth > 1 or any(one.num_preemptions for one in found.requests)


def test_choices_beams_and_expired_requests_need_a_replay(tmp_path: Path) -> None:
    for name, params in {"n": {"n": 2}, "beams": {"beam_width": 2}}.items():
        run = RecordedRun(limits())
        run.admit(prompt(9), 4, **params)
        run.finish_all()
        (tmp_path / name).mkdir()
        assert not check(open_recording(run.write(tmp_path / name)))


def test_only_the_first_plans_are_compared_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(limits())
    for number in range(4):
        run.admit(prompt(9 + number), 20)
    run.finish_all()
    recording = open_recording(run.write(tmp_path))
    whole = measure(recording).report
    assert whole.num_left == 0 and whole.num_equal == whole.num_plans > 20
    monkeypatch.setattr(recorded, "CHECKED_PLANS", 7)
    report = measure(recording).report
    assert (report.num_equal, report.num_left, report.num_plans) == (7, whole.num_plans - 7, whole.num_plans)
    assert report.is_equal and report.num_tokens == whole.num_tokens and report.ends == whole.ends
    assert any("the first 7 plans" in line and f"{report.num_left} were" in line for line in _lines(recording, report))
    different = replace(recording, segments=(replace_limits(recording.segments[0]),))
    assert not measure(different).report.is_equal


def replace_limits(segment: Segment) -> Segment:
    """Return the segment as of an engine with smaller steps, so that its plans differ from the first on."""
    header = segment.header
    return replace(segment, header=replace(header, limits=replace(header.limits, max_batch_tokens=4)))
