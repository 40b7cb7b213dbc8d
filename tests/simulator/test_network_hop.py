"""The network hop between a fleet's router and its engines: added to latencies, and seen by the router."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean, pstdev

import pytest
from tests.simulator.fakes import ConstantCosts, LinearCosts, check_whole, columns, limits, workload

from octavo.errors import ConfigError
from octavo.fleet.routing import ROUTERS
from octavo.simulator.arrival import Arrival
from octavo.simulator.network_hop import NetworkHop, read_hop
from octavo.simulator.run import simulate
from octavo.simulator.scaling import ScalingRule
from octavo.simulator.setup import ReplicaFailure, ReplicaGroup, ReplicaSetup, Setup

SETUP = Setup(limits(), LinearCosts(), replicas=3)


def test_a_lone_request_takes_one_way_more_to_its_engine_and_one_back() -> None:
    near = Setup(limits(), ConstantCosts(0.01))
    for hop in (NetworkHop(0.003), NetworkHop(0.0)):
        mine, plain = (simulate([Arrival(1.0, 8, 5)], replace(near, hop=each)).outcomes for each in (hop, None))
        assert mine.arrivals[0] == plain.arrivals[0] == 1.0
        assert mine.starts[0] - plain.starts[0] == pytest.approx(hop.latency_s)
        assert mine.first_tokens[0] - plain.first_tokens[0] == pytest.approx(2 * hop.latency_s)
        assert mine.ends[0] - plain.ends[0] == pytest.approx(2 * hop.latency_s)


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_a_hop_of_no_time_changes_nothing(router: str) -> None:
    arrivals = workload(90, rate=60.0, seed=3, followers=0.2)
    setup = replace(SETUP, router=router, seed=5)
    near, far = simulate(arrivals, setup), simulate(arrivals, replace(setup, hop=NetworkHop(0.0)))
    assert columns(near.outcomes) == columns(far.outcomes) and near.duration == far.duration


def test_steps_forwarded_or_not_give_the_same_with_a_hop() -> None:
    arrivals = workload(90, rate=60.0, seed=4, followers=0.2)
    setup = replace(SETUP, router="least_loaded", hop=NetworkHop(0.004, 0.002), seed=5)
    for depth in (1, 2):
        fast, slow = (simulate(arrivals, replace(setup, depth=depth, fast_forward=fast)) for fast in (True, False))
        check_whole(fast, arrivals)
        assert columns(fast.outcomes) == columns(slow.outcomes)
        assert columns(fast.outcomes) == columns(simulate(arrivals, replace(setup, depth=depth)).outcomes)


def test_the_router_counts_a_request_until_its_end_has_come_back() -> None:
    arrivals = [Arrival(0.0, 8, 2), Arrival(0.025, 8, 2)]  # the first one ends at 0.02 s in its engine
    setup = Setup(limits(), ConstantCosts(0.01), replicas=2, router="least_loaded")
    near = simulate(arrivals, setup).outcomes
    far = simulate(arrivals, replace(setup, hop=NetworkHop(0.001))).outcomes
    late = simulate(arrivals, replace(setup, hop=NetworkHop(0.004))).outcomes
    assert list(near.replicas) == list(far.replicas) == [0, 0]
    assert list(late.replicas) == [0, 1]


def test_a_request_follows_when_the_end_has_come_back() -> None:
    arrivals = [Arrival(0.0, 8, 2), Arrival(0.5, 8, 2, follows=0)]
    run = simulate(arrivals, Setup(limits(), ConstantCosts(0.01), hop=NetworkHop(0.003)))
    assert run.outcomes.arrivals[1] == pytest.approx(run.outcomes.ends[0] + 0.5)


def test_a_scaled_replica_stops_when_its_last_end_has_come_back() -> None:
    arrivals = workload(300, rate=60.0, seed=3)
    group = ReplicaGroup("", ReplicaSetup(limits(), LinearCosts()), 1, ScalingRule(start_s=0.1, down_s=1.0), 4)
    run = simulate(arrivals, replace(SETUP, groups=(group,), hop=NetworkHop(0.01, 0.003)))
    check_whole(run, arrivals)
    assert run.lifetimes


def test_draws_have_the_mean_and_the_spread() -> None:
    rng = random.Random(0)
    drawn = [NetworkHop(0.002, 0.0005).draw(rng) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(0.002, rel=0.01) and pstdev(drawn) == pytest.approx(0.0005, rel=0.03)
    assert min(drawn) > 0


def test_a_hop_is_read_and_what_is_wrong_is_refused() -> None:
    assert read_hop("latency=0.5ms,spread=0.25s") == NetworkHop(0.0005, 0.25)
    assert read_hop("latency=0.001") == NetworkHop(0.001)
    for text in ("", "0.3ms", "latency=x", "latency=-1", "bandwidth=1"):
        with pytest.raises(ConfigError, match=r"give latency=0\.3ms,spread=0\.1ms"):
            read_hop(text)
    with pytest.raises(ConfigError, match="no latency"):
        read_hop("spread=1ms")
    with pytest.raises(ConfigError, match="fleet with failures is not simulated"):
        replace(SETUP, hop=NetworkHop(0.001), failures=(ReplicaFailure(0, 1.0),))
    with pytest.raises(ConfigError, match="latency of a network hop is inf"):
        NetworkHop(float("inf"))
