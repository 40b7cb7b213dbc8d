"""The cheapest fleet that reaches goals, by trials alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.simulator.fakes import LinearCosts, limits, workload

from octavo.core.limits import Limits
from octavo.errors import ConfigError
from octavo.simulator import run
from octavo.simulator.arrival import Arrival
from octavo.simulator.run import simulate
from octavo.simulator.search import CapacitySearch, Goals, SearchTrial, Verdict, _SearchRun, read_goals, read_space
from octavo.simulator.setup import Setup

ARRIVALS = workload(100, rate=120.0, seed=4)
SETUP = Setup(limits(), LinearCosts(), router="least_loaded")


def make_limits(chosen: dict[str, str]) -> Limits:
    numbers = {name: int(value) for name, value in chosen.items() if name.startswith("max_")}
    return replace(SETUP.limits, policy=chosen.get("policy", SETUP.limits.policy), **numbers)


def capacity_search(goals: str, **changes: Any) -> CapacitySearch:
    search = CapacitySearch(lambda: ARRIVALS, len(ARRIVALS), SETUP, read_goals(goals), make_limits, price=2.5)
    return replace(search, **changes)


def reaches(goals: Goals, replicas: int) -> bool:
    return goals.judge(simulate(ARRIVALS, replace(SETUP, replicas=replicas))).is_reached


def test_the_answer_reaches_the_goals_and_one_replica_less_does_not() -> None:
    for text in ("e2e_p90=0.7,tpot_p99=0.03", "ttft=0.05,tpot=0.02,goodput=0.9"):
        goals = read_goals(text)
        fewest = next(number for number in range(1, 33) if reaches(goals, number))
        for first in (1, 9):
            found = capacity_search(text, setup=replace(SETUP, replicas=first)).run()
            assert found.setup is not None and found.verdict is not None, text
            assert found.setup.replicas == fewest and found.verdict.is_reached
            assert found.cost == 2.5 * fewest
            tried = {trial.replicas: trial.verdict.is_reached for trial in found.trials}
            assert tried[fewest] and tried[fewest + 1] and not tried.get(fewest - 1, False)
            assert fewest == 1 or fewest - 1 in tried


def test_giving_up_early_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LOOK_EVERY", 16)
    goals = read_goals("ttft_p95=0.1,e2e_p50=0.5")
    given_up = 0
    for number in range(1, 6):
        setup = replace(SETUP, replicas=number)
        whole = goals.judge(simulate(ARRIVALS, setup))
        short = simulate(ARRIVALS, replace(setup, give_up=goals.unreachable(len(ARRIVALS))))
        assert goals.judge(short).is_reached == whole.is_reached
        given_up += short.gave_up
    assert given_up


def test_settings_are_compared_and_the_widest_margin_wins_among_the_cheapest() -> None:
    reported: list[SearchTrial] = []
    space = read_space("max_sequences=1|6,router=round_robin|least_loaded")
    found = capacity_search("ttft_p95=0.1", space=space, report=reported.append).run()
    assert found.setup is not None and found.setup.limits.max_sequences == 6
    assert "max_sequences=6" in found.label and len(reported) == len(found.trials)
    same = [one for one in found.trials if one.replicas == found.setup.replicas and one.verdict.is_reached]
    assert found.verdict is not None
    assert found.verdict.margin == max(trial.verdict.margin for trial in same)


def test_nothing_is_found_where_nothing_can_be() -> None:
    found = capacity_search("ttft_p95=0.000001", max_replicas=4).run()
    assert found.setup is None and [trial.replicas for trial in found.trials] == [1, 2, 4]


def test_a_request_that_is_refused_misses_every_goal() -> None:
    goals = read_goals("ttft_p99=100")
    assert not goals.judge(simulate([Arrival(0.0, 999, 1), Arrival(0.0, 9, 1)], SETUP)).is_reached


def test_more_that_is_worse_is_seen_and_told() -> None:
    searching = _SearchRun(capacity_search("ttft_p95=1", max_replicas=12, setup=replace(SETUP, replicas=3)))
    good = {3: True, 4: False, 5: True, 6: True}
    assert searching._fewest(lambda number: good.get(number, number > 6), "as set") == 5
    assert "3 replicas reach the goals, 4 do not" in searching._best.notes[0]
    assert searching._fewest(lambda number: number == 3, "as set") is None


def test_goals_and_spaces_that_make_no_sense_are_refused_by_name() -> None:
    for text in ("ttft_p98=1", "ttft", "speed=1", "ttft=-1", "ttft=1,ttft=2", "goodput=0.9", "goodput=2,ttft=1", "",
                 "ttft_p99=nan"):  # fmt: skip
        with pytest.raises(ConfigError):
            read_goals(text)
    for text in ("replicas=3", "max_sequences=0", "max_sequences=", "router=nearest", "policy=best",
                 "router=random,router=random"):  # fmt: skip
        with pytest.raises(ConfigError):
            read_space(text)
    assert read_space("max_sequences=4|8, policy=fair") == {"max_sequences": ("4", "8"), "policy": ("fair",)}
    assert isinstance(read_goals("ttft=1").judge(simulate(ARRIVALS[:5], SETUP)), Verdict)
