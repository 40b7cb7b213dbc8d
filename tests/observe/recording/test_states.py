"""Recordings that begin in the middle of an engine's life: with the scheduler's state, and equal from there on."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.request_state import RequestState, Sequence
from octavo.core.saved_state import SavedRequest, SavedSequence, SavedState
from octavo.core.scheduler import Scheduler
from octavo.core.state import State
from octavo.errors import ConfigError, InvariantError
from octavo.observe.recording import open_recording, replay
from octavo.observe.recording.format import StateRecord
from tests.core.harness import limits, prompt
from tests.core.random_config import BUILT_IN, Hostile
from tests.observe.recording.driving import SavingDriver, SavingRun
from tests.quick import one_in


def drive(seeds: range, folder: Path, has_text: bool = False, **changes: object) -> list[SavingDriver]:
    """Drive each seed, and replay the rest of each life from each of its states."""
    drivers, num_states = [], 0
    for seed in seeds:
        driver = SavingDriver(seed, check_every=1000, **changes)
        if driver.run.limits.policy == Hostile.name:  # its state is a generator of random numbers
            continue
        driver.drive(100)
        (folder / str(seed)).mkdir()
        for path in driver.run.write_from_states(folder / str(seed), has_text):
            report = replay(open_recording(path))
            assert report.difference is None, (seed, path.name, report.difference)
            num_states += 1
        drivers.append(driver)
    num_in_flight = sum(bool(one.saved and one.saved.plans) for one in saved_states(drivers))
    assert num_states > 2 * len(drivers) and num_in_flight > len(drivers) / 4
    return drivers


def saved_states(drivers: list[SavingDriver]) -> list[StateRecord]:
    """All states of all lives."""
    items = [one.call for each in drivers for life in each.run.lives for one in life]
    return [call for call in items if isinstance(call, StateRecord)]


@pytest.mark.parametrize("policy", one_in(2, BUILT_IN))
def test_random_runs_replay_from_their_states(policy: str, tmp_path: Path) -> None:
    """With faults, forks, beams, swaps, media, adapters, cancels, timeouts, drafts, and plans in flight."""
    drive(range(8), tmp_path, policy=policy)


def test_random_runs_with_text_replay_from_their_states(tmp_path: Path) -> None:
    drive(range(20, 28), tmp_path, has_text=True)


def test_drafts_media_adapters_and_swaps_replay_from_their_states(tmp_path: Path) -> None:
    """Each wanted often, so that states are saved while they are under way."""
    drivers = drive(
        range(30, 42), tmp_path, max_draft_tokens=7, max_draft_rows=8, host=1.0, preemption="swap", encoder_budget=8,
        encoder_cache=12, adapter_slots=2,
    )  # fmt: skip
    states = [call.saved for call in saved_states(drivers) if call.saved is not None]
    assert any(flight.swapped for state in states for flight in state.flights) or any(
        one.values["is_swapped"] for state in states for one in state.progress
    )
    assert any(one.drafts for state in states for one in state.sequences)
    assert any(state.encoder.needs for state in states)
    assert any(request.adapter_id for state in states for request in state.requests)
    assert any(one.beams for state in states for one in state.progress)


def test_a_state_has_no_id_and_no_key_of_the_engine(tmp_path: Path) -> None:
    """What is read back has neither the ids nor the keys that the engine had, but as many."""
    driver = SavingDriver(11, policy="fair", prefix_caching=True)
    driver.drive(100)
    for path in driver.run.write_from_states(tmp_path):
        life, index = map(int, path.stem.split("-"))
        live = driver.run.lives[life][index].call
        read = next(iter(open_recording(path).segments[0].calls())).call
        assert isinstance(live, StateRecord) and isinstance(read, StateRecord) and live.saved and read.saved
        assert all(one.token_ids is None for one in read.saved.sequences)
        assert all(request.prompt_token_ids is None for request in read.saved.requests)
        for was, now in zip(
            (*live.saved.pools, *live.saved.host_pools), (*read.saved.pools, *read.saved.host_pools), strict=True
        ):
            assert len(was.keys) == len(now.keys) and not set(was.keys) & set(now.keys)
        assert all(token < 2 for plan in read.saved.plans for token in plan.draft_token_ids)


def test_a_policy_whose_state_is_no_plain_data_is_refused_by_name() -> None:
    driver = SavingDriver(1, policy=Hostile.name)
    driver.run.scheduler._tap = None
    with pytest.raises(ConfigError, match=r"policy 'hostile_driver' cannot be saved \(TypeError: Random is no plain"):
        driver.run.scheduler.save()


def test_a_state_of_other_limits_or_fields_is_refused() -> None:
    run = SavingRun(limits())
    run.admit(prompt(9), 8)
    run.steps(2)
    saved = run.scheduler.save()
    with pytest.raises(InvariantError, match="the limits have 5"):
        Scheduler(limits(num_blocks=5)).restore(saved)
    saved.values["unknown"] = 1
    with pytest.raises(InvariantError, match="State was saved by another version of Octavo: unknown"):
        Scheduler(run.limits).restore(saved)


def test_a_state_has_every_field_of_what_it_saves() -> None:
    """A new field of a sequence or request must be saved, or be named here with the reason why it need not."""
    run = SavingRun(limits(), depth=2)
    run.admit(prompt(9), 8, n=2)
    run.steps(3)
    saved = run.scheduler.save()
    derived = {"name", "stop_ids", "has_several", "samples", "scores", "pools", "request"}
    found = {*saved.progress[0].values, *SavedRequest.__slots__}
    assert set(RequestState.__slots__) - found == derived - set(saved.progress[0].values)
    found = {*saved.sequences[0].values, *SavedSequence.__slots__}
    assert set(Sequence.__slots__) - found == {"draft_history"}  # as `drafts`
    made = {"limits", "read_window", "headroom", "gates", "adapters", "running", "deadlines", "slot_owner", "requests",
            "events", "ended", "flight", "waiting", "is_plain", "counts_blocks",
            "kept"}  # fmt: skip  # simulations alone keep KV: a state with some is not saved
    assert set(State.__slots__) - {*saved.values, *SavedState.__slots__} == made - set(SavedState.__slots__)
