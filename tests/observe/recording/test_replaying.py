"""Recorded calls, replayed: every plan has the digest that it had, without any token id."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.tap import AdmitCall
from octavo.observe.recording import open_recording, replay
from tests.core.harness import limits, prompt
from tests.core.random_config import BUILT_IN, Hostile
from tests.observe.recording.driving import RecordedDriver, RecordedRun


def replayed(driver: RecordedDriver, folder: Path, has_text: bool = False) -> int:
    """Write, read and replay what a driver did; gives the plans compared."""
    folder.mkdir()
    report = replay(open_recording(driver.run.write(folder, has_text)))
    assert report.difference is None, (driver.seed, report.difference)
    made = sum(not plan.is_empty for plan in driver.run.plans)
    assert report.num_plans == report.num_equal == made
    assert report.num_segments == driver.run.num_epochs
    return made


def drive(seeds: range, folder: Path, has_text: bool = False, **changes: object) -> list[RecordedDriver]:
    """Drive each seed, replay it, and see that something was done."""
    drivers, num_plans = [], 0
    for seed in seeds:
        driver = RecordedDriver(seed, check_every=1000, **changes)
        if driver.run.limits.policy == Hostile.name:  # it draws lots whenever it is asked, checks included
            continue
        driver.drive(100)
        num_plans += replayed(driver, folder / str(seed), has_text)
        drivers.append(driver)
    assert num_plans > 20 * len(drivers)
    return drivers


@pytest.mark.parametrize("policy", BUILT_IN)
def test_random_runs_replay_digest_by_digest(policy: str, tmp_path: Path) -> None:
    """With faults, deaths, forks, beams, swaps, cancels, timeouts, drafts; prompts known by lengths and keys."""
    drivers = drive(range(8), tmp_path, policy=policy)
    assert sum(driver.run.num_epochs for driver in drivers) >= len(drivers)


def test_random_runs_with_text_replay_with_ids_in_the_digests(tmp_path: Path) -> None:
    drive(range(20), tmp_path, has_text=True)


def test_drafts_replay_by_stand_ins(tmp_path: Path) -> None:
    drivers = drive(range(12), tmp_path, max_draft_tokens=7, max_draft_rows=8)
    totals = [driver.run.scheduler.statistics() for driver in drivers]
    assert sum(each.num_drafted_tokens for each in totals) > 50
    assert sum(each.num_accepted_tokens for each in totals) > 20


@pytest.mark.parametrize("changes", [{"prefix_caching": False}, {"block_sharing": False}, {"preemption": "swap"}])
def test_switches_of_the_cache_replay(changes: dict[str, object], tmp_path: Path) -> None:
    drive(range(50, 58), tmp_path, host=1.0, **changes)


def test_no_id_is_in_a_recording_without_text(tmp_path: Path) -> None:
    driver = RecordedDriver(3, policy="fcfs")
    driver.drive(60)
    for segment in open_recording(driver.run.write(tmp_path)).segments:
        for call in segment.calls():
            request = getattr(call, "request", None)
            if request is not None:
                assert request.prompt_token_ids is None and not any(request.emitted_token_ids or ())
                stops = len(dict.fromkeys((*request.eos_token_ids, *request.params.stop_token_ids)))
                assert all(token < stops for token in (*request.eos_token_ids, *request.params.stop_token_ids))
                assert request.params.seed is None and request.cache_salt == b""
            tokens = getattr(getattr(call, "outcome", None), "token_ids", None)
            assert tokens is None or max(tokens, default=-1) < 3  # what ends a sequence, by number
            plan = getattr(call, "plan", None)
            assert plan is None or not any(token >= 3 for token in (*plan.id_edits[2::3], *plan.draft_token_ids))


def test_keys_mean_nothing_outside_their_segment(tmp_path: Path) -> None:
    driver = RecordedDriver(11, policy="fcfs", prefix_caching=True)
    driver.drive(60)
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        recording = open_recording(driver.run.write(tmp_path / name))
        calls = [one.call for one in recording.segments[0].calls()]
        found.append({key for call in calls for run in getattr(call, "keys", ()) for key in run.keys})
    assert found[0] and len(found[0]) == len(found[1]) and not found[0] & found[1]


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_with_a_grammar_replay_without_it(depth: int, tmp_path: Path) -> None:
    run = RecordedRun(limits(), depth=depth)
    run.admit(prompt(9), 12, grammar="start: /[a-z]+/", request_id="held")
    run.admit(prompt(7, 1), 12, n=2)
    run.finish_all()
    assert replay(open_recording(run.write(tmp_path))).is_equal
    calls = [one.call for one in open_recording(tmp_path).segments[0].calls()]
    asked = {call.request.request_id: call.request.params.grammar for call in calls if isinstance(call, AdmitCall)}
    assert asked == {"held": "-", "r1": ""}


def test_durations_only_executors_replay(tmp_path: Path) -> None:
    run = RecordedRun(limits(num_blocks=10), durations_only=True)
    for number in range(5):
        run.admit(9 + number, 7, block_keys=(bytes([number % 2]) * 16,))
        run.steps(2)
    run.finish_all()
    assert replay(open_recording(run.write(tmp_path))).is_equal
