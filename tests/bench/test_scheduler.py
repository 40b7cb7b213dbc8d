"""The scheduler bench reaches the steps of each load, sums them up, and says what it did not measure."""

from __future__ import annotations

import json
import sys
from array import array
from types import ModuleType
from typing import Any

import pytest
from tests.bench import fake_vllm

from octavo import cli
from octavo.bench import vllm_scheduler
from octavo.bench.scheduler import (
    CHUNK,
    LOADS,
    WARM_UP,
    BareLoop,
    LoadedScheduler,
    LoadSetting,
    StepTime,
    make_ids,
    measure,
    profile,
)
from octavo.core.plan import StepPlan
from octavo.core.policy import POLICIES
from octavo.errors import ConfigError


def setting(load: str = "decode", running: int = 4, waiting: int = 0, **fields: object) -> LoadSetting:
    return LoadSetting(LOADS[load], running, waiting, **{"steps": 5, **fields})


def typical_plans(loaded: LoadedScheduler, count: int) -> list[StepPlan]:
    """The next plans that are of the load's kind."""
    plans: list[StepPlan] = []
    for _ in range(100):
        plan = loaded._step()[0]
        if loaded._is_typical(plan):
            plans.append(plan)
        if len(plans) == count:
            return plans
    raise AssertionError(f"{len(plans)} steps of {loaded.setting.load.name} in 100")


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("waiting", [0, 20])
def test_each_load_is_measured(load: str, waiting: int) -> None:
    (cost,) = measure([LoadedScheduler(setting(load, waiting=waiting))])
    assert (cost.scheduler, cost.load, cost.running, cost.waiting) == ("octavo", load, 4, waiting)
    assert min(cost.plan_us, cost.commit_us, cost.admit_us, cost.bare_us) > 0
    assert cost.plan_us + cost.commit_us <= 3 * cost.step_us
    assert cost.step_us <= cost.step_p99_us


@pytest.mark.parametrize("load", ["decode", "edges", "choices", "windows"])
def test_a_decode_step_is_one_token_of_each_and_lets_nobody_in(load: str) -> None:
    for plan in typical_plans(LoadedScheduler(setting(load, 8, 5)), 20):
        assert list(plan.counts) == [1] * 8
        assert not plan.new_sequences


def test_edges_has_a_sequence_at_a_blocks_edge_in_every_step() -> None:
    plans = typical_plans(LoadedScheduler(setting("edges", 16)), 20)
    assert [len(plan.edits) for plan in plans] == [4] * 20


def test_a_mixed_step_has_a_whole_chunk_beside_the_decodes() -> None:
    for plan in typical_plans(LoadedScheduler(setting("mixed", 8, 5)), 20):
        assert sorted(plan.counts) == [1] * 8 + [CHUNK]


def test_a_step_of_prefix_lets_one_request_in_behind_the_shared_tokens() -> None:
    for plan in typical_plans(LoadedScheduler(setting("prefix", 8, 5)), 20):
        (new,) = plan.new_sequences
        row = list(plan.slots).index(new.slot)
        assert (plan.starts[row], plan.counts[row]) == (4096, 16)
        assert plan.num_rows == 9


def test_choices_share_a_request_and_windows_slide() -> None:
    loaded = LoadedScheduler(setting("choices", 8))
    assert (loaded.scheduler.num_running, len(loaded.scheduler._state.requests)) == (8, 2)
    assert setting("choices", 6).num_rows == 8
    loaded = LoadedScheduler(setting("windows", 2))
    edits: array[int] = array("i")
    for plan in typical_plans(loaded, 80):
        edits.extend(plan.edits)
    assert any(group == 1 and block < 0 for group, block in zip(edits[1::4], edits[3::4], strict=True))


def test_waiting_requests_wait_all_the_time() -> None:
    loaded = LoadedScheduler(setting("decode", 4, 30))
    typical_plans(loaded, 20)
    assert loaded.scheduler.num_waiting == 30
    assert len(loaded.admit_s) == 34


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_decodes(policy: str) -> None:
    (cost,) = measure([LoadedScheduler(setting("decode", 4, 10, policy=policy))])
    assert cost.policy == policy


class Fixed:
    """A scheduler whose steps take what they are told."""

    def __init__(self, name: str, one: LoadSetting, times: list[float], turns: list[str]) -> None:
        self.name, self.setting, self.times, self.turns = name, one, times, turns
        self.admit_s = [1e-5, 2e-5, 9e-5]
        self.num_steps = 0

    def step(self) -> StepTime:
        self.turns.append(self.name)
        self.num_steps += 1
        seconds = 1.0 if self.num_steps <= WARM_UP else self.times[(self.num_steps - 1) % len(self.times)]
        return StepTime(seconds, 2 * seconds, True)


def test_medians_leave_the_warm_up_out_and_schedulers_take_turns() -> None:
    turns: list[str] = []
    one = setting(running=256, steps=9)
    ours, theirs = (Fixed(name, one, [1e-4, 1e-4, 3e-4], turns) for name in ("octavo", "other"))
    cost, other = measure([ours, theirs])
    assert (cost.plan_us, cost.commit_us, cost.step_us, cost.step_p99_us, cost.admit_us) == (100, 200, 300, 900, 20)
    assert (cost.target_us, cost.is_met) == (300, True)
    assert (other.scheduler, other.step_us) == ("other", 300)
    assert turns == ["octavo", "other"] * (9 + WARM_UP)


@pytest.mark.parametrize(
    ("load", "running", "target"), [("decode", 1024, 1000), ("decode", 32, None), ("mixed", 256, None)]
)
def test_targets_are_for_decode_steps_of_named_sizes(load: str, running: int, target: float | None) -> None:
    (cost,) = measure([Fixed("octavo", setting(load, running), [1e-3], [])])
    assert cost.target_us == target
    assert cost.is_met is (None if target is None else False)


def test_a_load_without_steps_of_its_kind_is_refused() -> None:
    # Short prompts go first and stay, so that no long one comes in.
    loaded = LoadedScheduler(setting("mixed", 4, 5, policy="shortest_prefill"))
    with pytest.raises(ConfigError, match="shortest_prefill made 0 steps of load mixed"):
        measure([loaded])


def test_the_bare_loop_takes_time_and_counts_each_row() -> None:
    loop = BareLoop(3)
    assert loop.time() > 0 and loop.time() > 0
    assert [(row.scheduled, row.computed, row.known) for row in loop._rows] == [(2, 2, 2)] * 3


def test_the_profile_names_functions_of_the_scheduler_dearest_first() -> None:
    functions = profile(setting("decode", 32, steps=20))["functions"]
    names = [one["function"] for one in functions]
    assert any(name.startswith("core/run.py:") for name in names)
    assert any(name.startswith("core/commit.py:") for name in names)
    assert [one["own_us"] for one in functions] == sorted((one["own_us"] for one in functions), reverse=True)
    assert 0 < sum(one["share"] for one in functions) <= 1.01


def test_prompts_differ_from_the_first_id_on() -> None:
    assert len({make_ids(index, 4)[0] for index in range(200)}) == 200
    for index in (0, 305, 100_000):
        assert list(make_ids(index, 300)) == [(index * 131 + place) % 40_000 for place in range(300)]


# -- the command


def _report(capsys, *words: str) -> dict[str, Any]:
    assert cli.main(["bench", "scheduler", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_tables_or_json(capsys) -> None:
    words = ["--load", "decode", "policies", "--running", "2", "--waiting", "0", "3", "--steps", "3", "--profile"]
    report = _report(capsys, *words)
    assert [cost["waiting"] for cost in report["costs"]] == [0, 3] * (1 + len(POLICIES))
    assert [entry["policy"] for entry in report["profiles"]] == list(POLICIES)
    assert report["admit_target_us"] == 30
    assert cli.main(["bench", "scheduler", *words]) == 0
    out = capsys.readouterr().out
    assert "core/run.py" in out and "{" not in out


def test_json_alone_is_one_line(capsys) -> None:
    assert cli.main(["bench", "scheduler", "--load", "edges", "--running", "2", "--waiting", "0", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert [cost["load"] for cost in json.loads(line)["costs"]] == ["edges"]


@pytest.mark.parametrize(
    ("words", "text"),
    [(["--running", "0"], "--running is 0"), (["--steps", "2000"], "--steps is 2000"), (["--load", "x"], "'x'")],
)
def test_what_is_asked_must_be_possible(words: list[str], text: str, capsys) -> None:
    assert cli.main(["bench", "scheduler", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and text in err


# -- the peer


def test_without_vllm_the_report_says_that_it_was_not_measured(capsys, monkeypatch) -> None:
    monkeypatch.setattr(vllm_scheduler, "is_installed", lambda: False)
    words = ["--load", "decode", "--running", "2", "--waiting", "0", "--steps", "3"]
    assert cli.main(["bench", "scheduler", *words]) == 0
    assert "vllm is not installed here" in capsys.readouterr().out.splitlines()[-1]
    assert "not measured" in _report(capsys, *words)["peer"]


def test_a_vllm_of_another_build_is_told_and_ours_is_measured_all_the_same(capsys, monkeypatch) -> None:
    monkeypatch.setattr(vllm_scheduler, "is_installed", lambda: True)
    empty = ModuleType("vllm")
    empty.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", empty)
    words = ["--load", "decode", "--running", "2", "--waiting", "0", "1", "--steps", "3"]
    report = _report(capsys, *words)
    assert [cost["scheduler"] for cost in report["costs"]] == ["octavo", "octavo"]
    assert "could not be built (ModuleNotFoundError" in report["peer"]


def test_the_peer_is_stepped_in_turn_and_filled_as_ours_is(capsys, monkeypatch) -> None:
    monkeypatch.setattr(vllm_scheduler, "is_installed", lambda: True)
    for name, module in fake_vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    loaded = vllm_scheduler.VllmScheduler(setting("decode", 100, 7))
    assert (len(loaded._scheduler.running), len(loaded._scheduler.waiting)) == (100, 7)
    assert loaded.step().is_typical and len(loaded.admit_s) == 107
    words = ["--load", "decode", "edges", "--running", "2", "--waiting", "0", "1", "--steps", "3"]
    assert cli.main(["bench", "scheduler", *words]) == 0
    out = capsys.readouterr().out
    report = _report(capsys, *words)
    pairs = [("octavo", "decode"), ("vllm", "decode")] * 2 + [("octavo", "edges")] * 2
    assert [(cost["scheduler"], cost["load"]) for cost in report["costs"]] == pairs
    assert "measured in turn" in report["peer"] and "measured in turn" in out


def test_only_the_decode_load_has_a_peer() -> None:
    with pytest.raises(ConfigError, match="not mixed"):
        vllm_scheduler.VllmScheduler(setting("mixed"))
