"""Replicas that a rule starts and drains: none of their requests is lost, and they cost what they were held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.simulator.fakes import ConstantCosts, LinearCosts, check_whole, columns, limits, workload

from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.outcomes import SimulatedRun
from octavo.simulator.pipeline import PipelineFacts
from octavo.simulator.report import Case, figures, page
from octavo.simulator.run import simulate
from octavo.simulator.scaling import Autoscaler, ScalingRule
from octavo.simulator.setup import ReplicaFailure, ReplicaGroup, ReplicaSetup, Setup
from octavo.simulator.summary import summarise

QUICK = ScalingRule("requests", 3.0, every_s=0.05, start_s=0.12, down_s=0.2)


def scaled(rule: ScalingRule, least: int, most: int, one: ReplicaSetup | None = None, **options: Any) -> Setup:
    one = one or ReplicaSetup(limits(), LinearCosts())
    group = ReplicaGroup("", one, least, rule, most)
    return Setup(one.limits, one.costs, groups=(group,), **options)


def check_lifetimes(run: SimulatedRun, least: int, most: int) -> None:
    """At no time are there more than `most`, and none but the drained is given up before its time."""
    times = sorted({time for life in run.lifetimes for time in (life.begin, life.ready, life.drained, life.end)})
    for time in times:
        assert sum(life.begin <= time < life.end for life in run.lifetimes) <= most
        if time < run.duration and not any(totals.failures for totals in run.replicas):
            assert sum(life.begin <= time < life.drained for life in run.lifetimes) >= least
    assert all(life.begin <= life.ready and life.drained <= life.end for life in run.lifetimes)


@pytest.mark.parametrize("router", ["round_robin", "least_requests", "prefix_affinity"])
@pytest.mark.parametrize("metric", ["requests", "kv"])
def test_with_equal_bounds_it_is_the_fixed_fleet(router: str, metric: str) -> None:
    arrivals = workload(120, rate=60.0, seed=3, followers=0.2)
    rule = replace(QUICK, metric=metric, target=0.5)
    run = simulate(arrivals, scaled(rule, 3, 3, router=router, sample_s=0.25))
    fixed = simulate(arrivals, Setup(limits(), LinearCosts(), replicas=3, router=router, sample_s=0.25))
    assert columns(run.outcomes) == columns(fixed.outcomes) and run.duration == fixed.duration
    assert [replace(totals, up_s=None, forwarded_steps=0) for totals in run.replicas] == [
        replace(totals, forwarded_steps=0) for totals in fixed.replicas
    ]
    facts, same = summarise(run, {"ttft": 0.1}, 3.6), summarise(fixed, {"ttft": 0.1}, 3.6)
    assert facts | {"scaling": {}} == same
    assert facts["scaling"]["groups"][""]["ready_mean"] == pytest.approx(3)
    case, other = (Case.of("a", one, told) for one, told in ((run, facts), (fixed, same)))
    assert case.curves == other.curves and case.bands["bounds"] == other.bands["bounds"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("metric", ["requests", "kv"])
@pytest.mark.parametrize("least", [0, 1, 2])
def test_every_request_ends_once_however_the_fleet_is_scaled(depth: int, metric: str, least: int) -> None:
    arrivals = workload(150, rate=40.0, seed=5 + least, followers=0.2)
    rule = replace(QUICK, metric=metric, target=3.0 if metric == "requests" else 0.2)
    failures = (ReplicaFailure(0, 0.5, 0.2), ReplicaFailure(1, 0.9, None), ReplicaFailure(0, 1.2, None))
    for those in ((), failures):
        setup = scaled(rule, least, 4, router="least_requests", depth=depth, sample_s=0.25, failures=those)
        run, slow = simulate(arrivals, setup), simulate(arrivals, replace(setup, fast_forward=False))
        check_whole(run, arrivals)
        assert columns(run.outcomes) == columns(slow.outcomes)
        assert run.lifetimes == slow.lifetimes == simulate(arrivals, setup).lifetimes
        assert [replace(totals, forwarded_steps=0) for totals in run.replicas] == slow.replicas
        assert sum(totals.failures for totals in run.replicas) >= bool(those)
        check_lifetimes(run, least, 4)
        assert any(life.begin > 0 for life in run.lifetimes) and any(life.end < run.duration for life in run.lifetimes)
        first = min(run.outcomes.arrivals)
        held = sum(max(0.0, min(life.end, run.duration) - max(life.begin, first)) for life in run.lifetimes)
        assert sum(totals.up_s or 0.0 for totals in run.replicas) == pytest.approx(held)
        assert summarise(run, price_per_hour=3600.0)["cost"]["total"] == pytest.approx(held)


@pytest.mark.parametrize("sizes", [{"ranks": 2}, {"pipeline": PipelineFacts(2)}])
def test_replicas_of_several_engines_start_and_stop_as_one(sizes: dict[str, Any]) -> None:
    arrivals = workload(120, rate=40.0, seed=6)
    run = simulate(arrivals, scaled(QUICK, 1, 3, ReplicaSetup(limits(), LinearCosts(), **sizes)))
    check_whole(run, arrivals)
    check_lifetimes(run, 1, 3)
    assert len(run.replicas) == 6 and {life.num_engines for life in run.lifetimes} == {2}
    assert all(run.replicas[index].up_s == run.replicas[index + 1].up_s for index in (0, 2, 4))
    assert any(life.end < run.duration for life in run.lifetimes)


def test_a_replica_gets_requests_once_it_has_started_and_stops_after_its_last_one() -> None:
    """A step takes 10 ms. The rule wants two replicas at 50 ms, and one once there is one request, at 1 s."""
    rule = ScalingRule("requests", 1.0, every_s=0.05, start_s=0.3, down_s=0.1)
    arrivals = [Arrival(0.0, 4, 100), Arrival(0.0, 4, 60), Arrival(0.4, 4, 100), Arrival(1.3, 4, 30)]
    run = simulate(arrivals, scaled(rule, 1, 2, ReplicaSetup(limits(), ConstantCosts(0.01)), router="least_requests"))
    served = dict(zip(run.outcomes.indices, run.outcomes.replicas, strict=True))
    assert served == {0: 0, 1: 0, 2: 1, 3: 0}  # replica 1 drains when the last one arrives
    first, second = run.lifetimes[:2]
    assert (first.replica, first.begin, first.ready) == (0, 0.0, 0.0)
    assert (second.replica, second.begin, second.ready) == (1, 0.05, pytest.approx(0.35))
    assert second.drained == pytest.approx(1.15) and second.end == pytest.approx(1.4)  # its request came at 0.4 s
    facts = summarise(run, price_per_hour=3600.0)
    assert facts["scaling"]["groups"][""]["starts"] == 1
    assert facts["cost"]["total"] == pytest.approx(run.duration + second.end - 0.05)


def test_a_fleet_of_none_starts_one_for_a_request_and_the_request_waits_for_it() -> None:
    rule = ScalingRule("requests", 4.0, every_s=0.5, start_s=2.0, down_s=1.0)
    arrivals = [Arrival(0.1, 4, 2), Arrival(10.0, 4, 2)]
    run = simulate(arrivals, scaled(rule, 0, 2, ReplicaSetup(limits(), ConstantCosts(0.01))))
    starts = sorted(run.outcomes.starts)
    assert starts == pytest.approx([2.5, 12.5])  # seen at 0.5 and 10.5 s
    waits = summarise(run)["scaling"]["start_waits"]
    assert waits["count"] == 2 and waits["max"] == pytest.approx(2.0)
    assert [life.end < 12 for life in run.lifetimes] == [True, False]


def test_the_rule_waits_before_it_changes_and_ignores_small_differences() -> None:
    scaler = Autoscaler(ScalingRule(up_s=10, down_s=30, tolerance=0.1), 1, 8)
    assert scaler.wanted(0, 2.0, 2) == 2
    assert scaler.wanted(5, 2.15, 2) == 2  # within a tenth
    assert scaler.wanted(8, 2.5, 2) == 2  # for no longer than it has lasted
    assert scaler.wanted(12, 2.9, 2) == 2
    assert scaler.wanted(19, 3.7, 2) == 3  # the least of the last 10 s, which was 3
    assert scaler.wanted(20, 1.0, 3) == 3
    assert scaler.wanted(49, 1.0, 3) == 3  # 4 were wanted at 19 s
    assert scaler.wanted(51, 0.2, 3) == 1
    assert scaler.wanted(195, 1.0, 1) == 1
    assert scaler.wanted(200, 90.0, 1) == 1
    assert scaler.wanted(211, 90.0, 1) == 8


def test_the_report_has_the_number_of_replicas() -> None:
    run = simulate(workload(150, rate=40.0, seed=5), scaled(QUICK, 1, 4, sample_s=0.25))
    case = Case.of("fcfs", run, summarise(run))
    assert set(case.bands["replicas"]) >= {"ready", "starting"}
    assert max(count for _, count in case.bands["replicas"]["ready"]) <= 4
    text = page("Simulation", [case], {}, [], [])
    assert "Replicas" in text and "replicas ready, mean" in text
    assert {"replica hours", "requests queued during a start-up"} <= {figure.name for figure in figures(case.facts)}
    assert all(0 <= share <= 100 for points in case.bands["use"].values() for _, share in points)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"metric": "load"}, "the metric 'load'; give one of requests, kv"),
        ({"target": 0.0}, "the target 0; give a number of requests above 0"),
        ({"metric": "kv", "target": 2.0}, "the target 2; give a share of the KV pool up to 1"),
        ({"every_s": 0.0}, "every_s of a scaling rule is 0; give seconds above 0"),
        ({"start_s": -1.0}, "start_s of a scaling rule is -1; give 0 or more"),
    ],
)
def test_rules_that_cannot_be_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ScalingRule(**fields)
    for least, most, word in ((2, 1, "max_replicas of group '' is 1; give at least 2"), (0, 0, "give at least 1")):
        with pytest.raises(ConfigError, match=word):
            scaled(QUICK, least, most)
