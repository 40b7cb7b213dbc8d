"""Requests and columns that are read from the records equal those of a replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.observe.recording import Recording, arrivals, open_recording, steps
from octavo.observe.recording.columns import read_columns
from octavo.observe.recording.requests import read_plain, read_requests
from octavo.simulator.costs.fitted import observe
from tests.core.harness import limits, prompt
from tests.core.random_config import BUILT_IN
from tests.observe.recording.driving import RecordedDriver, RecordedRun

REPLAYED = {
    "max_tokens": 0, "cached_tokens": 0, "num_preemptions": 0, "first_scheduled": None, "first_token": None,
    "finish_reason": None,
}  # fmt: skip


def check(recording: Recording) -> bool:
    """Compare both readings with the replay and the steps; return True if no replay was needed."""
    columns, observed = read_columns(recording).arrays(), observe(steps(recording)).arrays()
    for name, values in observed.items():
        assert np.array_equal(columns[name], values, equal_nan=True), name
    replayed, plain = arrivals(recording), read_plain(recording)
    if plain is None:
        assert read_requests(recording) == replayed
        return False
    assert read_requests(recording) == plain == [replace(one, **REPLAYED) for one in replayed]
    return True


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
    assert check(open_recording(run.write(tmp_path, has_text)))


def test_choices_beams_and_expired_requests_need_a_replay(tmp_path: Path) -> None:
    for name, params in {"n": {"n": 2}, "beams": {"beam_width": 2}}.items():
        run = RecordedRun(limits())
        run.admit(prompt(9), 4, **params)
        run.finish_all()
        (tmp_path / name).mkdir()
        assert not check(open_recording(run.write(tmp_path / name)))
