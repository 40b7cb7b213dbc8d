"""The cheapest fleet that reaches goals: as trials of every fleet find it, with fewer trials."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.quick import one_in
from tests.simulator.fakes import LinearCosts, limits, workload

from octavo.errors import ConfigError
from octavo.simulator import run
from octavo.simulator.arrival import Arrival
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.goals import Goals, Verdict, read_goals
from octavo.simulator.run import simulate
from octavo.simulator.search import (
    Candidate,
    CapacitySearch,
    Fate,
    SearchResult,
    SearchTrial,
    combine,
    label_of,
    read_space,
)  # fmt: skip
from octavo.simulator.setup import Setup
from octavo.simulator.workloads import open_workload

ARRIVALS = workload(100, rate=120.0, seed=4)
SETUP = Setup(limits(), LinearCosts(), router="least_loaded")


def candidates(space: str = "", setup: Setup = SETUP, price: float = 2.5) -> list[Candidate]:
    """The candidates of a space of limits and routers."""
    made = []
    for chosen in combine(read_space(space)):
        changes: dict[str, Any] = {name: value for name, value in chosen.items() if name != "router"}
        own = replace(setup, limits=replace(setup.limits, **changes), router=chosen.get("router", setup.router))
        made.append(Candidate(chosen, own, price))
    return made


def capacity_search(goals: str, space: str = "", setup: Setup = SETUP, **changes: Any) -> CapacitySearch:
    search = CapacitySearch(lambda: ARRIVALS, len(ARRIVALS), candidates(space, setup), read_goals(goals))
    return replace(search, **changes)


def reaches(goals: Goals, replicas: int) -> bool:
    return goals.judge(simulate(ARRIVALS, replace(SETUP, replicas=replicas))).is_reached


def test_the_answer_reaches_the_goals_and_one_replica_less_does_not() -> None:
    for text in ("e2e_p90=0.7,tpot_p99=0.03", "ttft=0.05,tpot=0.02,goodput=0.9"):
        goals = read_goals(text)
        fewest = next(number for number in range(1, 33) if reaches(goals, number))
        for first in (1, 9):
            found = capacity_search(text, setup=replace(SETUP, replicas=first)).run()
            assert found.best is not None, text
            assert found.best.replicas == fewest and found.best.verdict.is_reached
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


def test_a_run_is_given_up_as_soon_as_too_many_open_requests_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every metric, whether it is late is known before the end: a late first token, or a slow answer so far."""
    monkeypatch.setattr(run, "LOOK_EVERY", 1)
    arrivals, setup = [Arrival(0.0, 20, 60)] * 12, replace(SETUP, fast_forward=False)
    for text in ("ttft_max=0.1", "tpot_max=0.005", "queue_max=0.1", "e2e_max=0.1", "ttft=9,tpot=0.005,goodput=1"):
        short = simulate(arrivals, replace(setup, give_up=read_goals(text).unreachable(12)))
        assert short.gave_up and not len(short.outcomes), text
    assert not simulate(arrivals, replace(setup, give_up=read_goals("ttft_p50=9").unreachable(12))).gave_up


@pytest.mark.parametrize("text", one_in(2, ["ttft_p95=0.1,tpot_p90=0.04", "ttft=0.3,tpot=0.04,goodput=0.8"]))
def test_a_run_with_a_wider_margin_is_never_given_up(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LOOK_EVERY", 1)
    goals, given_up = read_goals(text), 0
    for replicas in range(2, 12):
        setup = replace(SETUP, replicas=replicas)
        margin = goals.judge(simulate(ARRIVALS, setup)).margin
        for other in (0.0, margin - 1e-6, margin, margin + 1e-6, margin + 0.05):
            give_up = goals.narrowed(other).unreachable(len(ARRIVALS))
            has_given_up = simulate(ARRIVALS, replace(setup, give_up=give_up)).gave_up
            assert not has_given_up or other > margin
            given_up += has_given_up
    assert given_up


@pytest.mark.parametrize("goals", ["ttft_p95=0.1,tpot_p95=0.02", "ttft_p95=0.00001"])
def test_several_jobs_change_no_trial_and_no_result(goals: str) -> None:
    source = open_workload("poisson:rate=150,requests=120,prompt=uniform(100,500),output=uniform(10,60)")
    search = CapacitySearch(source.arrivals, 120, machines(), read_goals(goals), 4)
    alone: list[SearchTrial] = []
    found = search.run(alone.append)
    assert found.trials == alone
    told: list[SearchTrial] = []
    assert repr(replace(search, jobs=3).run(told.append)) == repr(found) and repr(told) == repr(alone)


def test_settings_are_compared_and_the_widest_margin_wins_among_the_cheapest() -> None:
    reported: list[SearchTrial] = []
    space = "max_sequences=1|6,router=round_robin|least_loaded"
    found = capacity_search("ttft_p95=0.1", space).run(reported.append)
    best = found.best
    assert best is not None and best.candidate.setup.limits.max_sequences == 6
    assert "max_sequences=6" in best.candidate.label and len(reported) == len(found.trials)
    same = [one for one in found.trials if one.replicas == best.replicas and one.verdict.is_reached]
    assert best.verdict.margin == max(trial.verdict.margin for trial in same)


def machines() -> list[Candidate]:
    """Some machines of different sizes and prices, with one, two or sixteen sequences in a step."""
    made = []
    space = read_space("device=h100|l4|a10g,tensor_parallel_size=1|2,max_sequences=2|16")
    for chosen in combine(space):
        tp = chosen["tensor_parallel_size"]
        hardware = Hardware.of("llama-3.2-1b", chosen["device"], tp)
        own = limits(
            max_sequences=chosen["max_sequences"], max_batch_tokens=512, num_blocks=(2000,), max_model_len=2048,
            block_size=16,
        )  # fmt: skip
        setup = Setup(own, cost_model("roofline", hardware), sample_s=1.0, router="least_loaded")
        made.append(Candidate(chosen, setup, hardware.device.price * tp, tp))
    return made


@pytest.mark.parametrize("goals", ["ttft_p95=0.1,tpot_p95=0.02", "ttft=0.3,tpot=0.012,goodput=0.9", "e2e_p90=0.9"])
def test_pruning_and_bisecting_find_what_a_simulation_of_every_fleet_finds(goals: str) -> None:
    arrivals = [Arrival(index / 60, 200 + index * 37 % 400, 20 + index * 13 % 60) for index in range(120)]
    search = CapacitySearch(lambda: arrivals, len(arrivals), machines(), read_goals(goals), 8)
    fewest: list[tuple[int, Verdict] | None] = []
    for candidate in search.candidates:
        every = (
            (replicas, search.goals.judge(simulate(arrivals, replace(candidate.setup, replicas=replicas))))
            for replicas in range(1, 9)
        )
        fewest.append(next(((replicas, verdict) for replicas, verdict in every if verdict.is_reached), None))
    for is_priced in (True, False):
        made = [one if is_priced else replace(one, price=0.0) for one in search.candidates]
        check(replace(search, candidates=made).run(), made, fewest)


def check(found: SearchResult, made: list[Candidate], fewest: list[tuple[int, Verdict] | None]) -> None:
    """What a search found is the best of the fewest replicas of each candidate, and each candidate's fate is right."""
    ranks = [
        (round(found.cost_of(one, number[0]), 9), -number[1].margin, index, number[0])
        for index, (one, number) in enumerate(zip(made, fewest, strict=True))
        if number is not None
    ]
    best = found.best
    assert best is not None and found.is_priced == (made[0].price > 0)
    assert (found.cost, -best.verdict.margin, made.index(best.candidate), best.replicas) == min(ranks)
    assert len(found.trials) < 3 * len(made), "every fleet of up to 8 replicas would be 96 simulations"
    assert [outcome.candidate for outcome in found.outcomes] == made
    for outcome, number in zip(found.outcomes, fewest, strict=True):
        unit = found.cost_of(outcome.candidate)
        if outcome.fate is Fate.FOUND:
            assert number is not None and outcome.replicas == number[0] and unit * number[0] >= found.cost
        elif outcome.fate in (Fate.INFEASIBLE, Fate.MISSED):
            assert number is None
        else:
            cheap = number is not None and unit * number[0] <= found.cost
            has_less = number is not None and -number[1].margin >= min(ranks)[1]
            assert not cheap or (outcome.fate is Fate.BEATEN and unit * number[0] == found.cost and has_less)
        assert outcome.fate is not Fate.BOUNDED or unit * outcome.bound > found.cost


def test_what_cannot_cost_as_little_is_not_simulated_and_what_is_too_slow_alone_neither() -> None:
    arrivals = [Arrival(index / 60, 200, 20) for index in range(120)]
    made = machines()
    dear = [replace(one, price=1000.0 * one.price) if "h100" in one.label else one for one in made]
    search = CapacitySearch(lambda: arrivals, len(arrivals), dear, read_goals("ttft_p99=0.5,tpot_p99=0.05"), 8)
    found = search.run()
    fates = {one.candidate.label: one.fate for one in found.outcomes}
    assert {fate for label, fate in fates.items() if "h100" in label} == {Fate.BOUNDED}
    assert not [one for one in found.trials if "h100" in one.candidate.label]
    fast = replace(search, candidates=made, goals=read_goals("tpot_p99=0.004")).run()
    slow = {one.candidate.label for one in fast.outcomes if one.fate is Fate.INFEASIBLE}
    assert slow and all("h100" not in label for label in slow)
    assert not [one for one in fast.trials if one.candidate.label in slow]


def test_the_nearest_rejected_settings_cost_no_more_than_the_answer() -> None:
    arrivals = [Arrival(index / 60, 200 + index * 37 % 400, 20 + index * 13 % 60) for index in range(240)]
    goals = read_goals("ttft_p95=0.1,tpot_p95=0.02")
    found = CapacitySearch(lambda: arrivals, len(arrivals), machines(), goals, 8).run()
    nearest, best = found.nearest(), found.best
    assert best is not None and nearest and len({one.candidate.label for one in nearest}) == len(nearest)
    for trial in nearest:
        assert trial.candidate is not best.candidate
        assert not trial.verdict.is_reached or trial.verdict.margin <= best.verdict.margin
        assert found.cost_of(trial.candidate, trial.replicas) <= found.cost
    reached = [trial.verdict.is_reached for trial in nearest]
    assert reached == sorted(reached, reverse=True)
    if best.replicas > 1:
        less = found.one_less()
        assert less is not None and less.replicas == best.replicas - 1 and not less.verdict.is_reached


def test_nothing_is_found_where_nothing_can_be() -> None:
    found = capacity_search("ttft_p95=0.000001", max_replicas=4).run()
    assert found.best is None and [trial.replicas for trial in found.trials] == [1, 2, 4]
    assert [one.fate for one in found.outcomes] == [Fate.MISSED]


def test_a_request_that_is_refused_misses_every_goal() -> None:
    goals = read_goals("ttft_p99=100")
    assert not goals.judge(simulate([Arrival(0.0, 999, 1), Arrival(0.0, 9, 1)], SETUP)).is_reached


def test_more_that_is_worse_is_seen_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {3: True, 4: False, 5: True, 6: True}

    def judge(search: CapacitySearch, number: int, replicas: int, margin: float = 0.0) -> Verdict:
        candidate = search.candidates[number]
        return Verdict(good.get(replicas, replicas > most) if candidate is first else replicas >= 8, 0.0, "", {})

    first, other = candidates("max_sequences=4|5", replace(SETUP, replicas=3))
    monkeypatch.setattr(CapacitySearch, "judge", judge)
    most = 6
    found = capacity_search("ttft_p95=1", max_replicas=12, candidates=[first]).run()
    assert found.best is not None and found.best.replicas == 5
    assert "3 replicas reach the goals, 4 do not" in found.notes[0]
    good = {3: True}
    most = 12
    assert capacity_search("ttft_p95=1", max_replicas=12, candidates=[first]).run().best is None
    both = capacity_search("ttft_p95=1", max_replicas=12, candidates=[first, other]).run().best
    assert both is not None and both.candidate is other and both.replicas == 8, "what does not hold beats nothing"


def test_goals_and_spaces_that_make_no_sense_are_refused_by_name() -> None:
    for text in ("ttft_p98=1", "ttft", "speed=1", "ttft=-1", "ttft=1,ttft=2", "goodput=0.9", "goodput=2,ttft=1", "",
                 "ttft_p99=nan"):  # fmt: skip
        with pytest.raises(ConfigError):
            read_goals(text)
    for text in ("replicas=3", "max_sequences=0", "max_sequences=", "router=nearest", "policy=best", "device=abacus",
                 "router=random,router=random", "tensor_parallel_size=0", "data_parallel_size=x", "headroom=2",
                 "enable_expert_parallel=perhaps", "port=80"):  # fmt: skip
        with pytest.raises(ConfigError):
            read_space(text)
    assert isinstance(read_goals("ttft=1").judge(simulate(ARRIVALS[:5], SETUP)), Verdict)


def test_a_space_has_machines_and_every_scheduling_setting() -> None:
    space = read_space(
        "max-num-seqs=4|8, policy=fair, device=H100|a100, enable_expert_parallel=no|yes, headroom=auto|0.1"
    )
    assert space == {
        "max_sequences": (4, 8), "policy": ("fair",), "device": ("h100", "a100-80g"),
        "enable_expert_parallel": (False, True), "headroom": (None, 0.1),
    }  # fmt: skip
    made = combine(space)
    assert len(made) == 16 and math.prod(map(len, space.values())) == 16 and combine({}) == [{}]
    assert label_of(made[0]) == (
        "max_sequences=4, policy=fair, device=h100, enable_expert_parallel=no, headroom=auto"
    ) and label_of({}) == "as set"  # fmt: skip
    with pytest.raises(ConfigError, match="the search space has 10000 settings; give at most 4096"):
        combine({"max_sequences": range(100), "max_batch_tokens": range(100)})
