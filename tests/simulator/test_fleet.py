"""Several replicas: routers, deaths and restarts, conversations; nobody is lost and nothing depends on the way."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from tests.core.random_config import BUILT_IN
from tests.simulator.fakes import LinearCosts, check_whole, columns, limits, workload

from octavo.errors import ConfigError
from octavo.fleet.routing import ROUTERS
from octavo.simulator.arrival import Arrival
from octavo.simulator.outcomes import NEVER, SimulatedRun
from octavo.simulator.run import simulate
from octavo.simulator.setup import ReplicaFailure, Setup

SETUP = Setup(limits(), LinearCosts(), replicas=3)


def by_index(run: SimulatedRun, name: str) -> dict[int, float]:
    return dict(zip(run.outcomes.indices, getattr(run.outcomes, name), strict=True))


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_a_fleet_serves_everybody_alike_with_steps_forwarded_or_not(router: str) -> None:
    arrivals = workload(90, rate=60.0, seed=3, followers=0.2)
    failures = (
        ReplicaFailure(0, 0.4, 0.5),
        ReplicaFailure(1, 0.9, None),
        ReplicaFailure(0, 1.5, 0.1),
        ReplicaFailure(2, 1.55, 0.2),
    )
    for depth in (1, 2):
        setup = replace(SETUP, router=router, failures=failures, depth=depth, sample_s=0.25, seed=5)
        fast = simulate(arrivals, setup)
        slow = simulate(arrivals, replace(setup, fast_forward=False))
        check_whole(fast, arrivals)
        assert columns(fast.outcomes) == columns(slow.outcomes)
        assert columns(fast.outcomes) == columns(simulate(arrivals, setup).outcomes)
        assert fast.duration == slow.duration == max(fast.outcomes.ends)
        assert sum(totals.forwarded_steps for totals in fast.replicas) > 0
        assert [replace(totals, forwarded_steps=0) for totals in fast.replicas] == slow.replicas
        assert sum(fast.outcomes.restarts) > 0
        assert sum(totals.failures for totals in fast.replicas) == 4


@pytest.mark.parametrize("policy", BUILT_IN)
def test_who_was_on_a_replica_that_dies_goes_on_elsewhere_with_what_it_was_given(policy: str) -> None:
    arrivals = [Arrival(0.0, 10, 30), Arrival(0.001, 10, 30)]
    setup = replace(SETUP, limits=limits(policy=policy), replicas=2, failures=(ReplicaFailure(0, 0.1, None),))
    run = simulate(arrivals, setup)
    check_whole(run, arrivals)
    calm = simulate(arrivals, replace(setup, failures=()))
    assert by_index(run, "replicas") == {0: 1, 1: 1} and by_index(calm, "replicas") == {0: 0, 1: 1}
    assert by_index(run, "restarts") == {0: 1, 1: 0}
    assert by_index(run, "first_tokens")[0] == by_index(calm, "first_tokens")[0]  # it had that one
    output = sum(totals.output_tokens for totals in run.replicas)
    assert 60 <= output <= 61  # none is given twice, but for one in flight


def test_with_nobody_up_requests_wait_for_a_restart_and_end_with_an_error_if_none_comes() -> None:
    arrivals = [Arrival(0.0, 10, 20), Arrival(0.2, 10, 20)]
    setup = replace(SETUP, replicas=1, failures=(ReplicaFailure(0, 0.05, 3.0),))
    run = simulate(arrivals, setup)
    check_whole(run, arrivals)
    assert min(run.outcomes.ends) > 3.05 and run.replicas[0].down_s == 3.0
    lost = simulate(arrivals, replace(setup, failures=(ReplicaFailure(0, 0.05, None),)))
    assert list(lost.outcomes.reasons) == [4, 4]
    assert by_index(lost, "starts")[1] == NEVER


def test_those_who_follow_come_behind_the_end_and_a_list_and_an_iterator_are_alike() -> None:
    rng = random.Random(1)
    arrivals, turns = [], 5
    for session in range(12):
        for turn in range(turns):
            follows = None if not turn else len(arrivals) - 1
            pause = session * 0.05 if not turn else rng.choice((0.0, 0.2))
            arrivals.append(Arrival(pause, 6 + 8 * turn, 8, session=f"s{session}", follows=follows))
    run = simulate(arrivals, replace(SETUP, router="sessions"))
    check_whole(run, arrivals)
    assert columns(run.outcomes) == columns(simulate(iter(arrivals), replace(SETUP, router="sessions")).outcomes)
    came, ended, served = by_index(run, "arrivals"), by_index(run, "ends"), by_index(run, "replicas")
    for index, arrival in enumerate(arrivals):
        if arrival.follows is not None:
            assert came[index] == pytest.approx(ended[arrival.follows] + arrival.time)
            assert came[index] > ended[arrival.follows] or arrival.time > 0
            assert served[index] == served[arrival.follows]  # the router's promise


def test_sharing_prefixes_pays_where_the_router_knows_them() -> None:
    arrivals = [
        Arrival(0.06 * index, 40, 4, keys=[family * 100 + place for place in range(5)], key_tokens=8)
        for index, family in enumerate(random.Random(2).choices(range(12), k=150))
    ]
    sizes = limits(num_blocks=(56,))
    hits = {}
    for router in ("prefix_affinity", "prefix_hash", "round_robin"):
        run = simulate(arrivals, replace(SETUP, limits=sizes, router=router))
        check_whole(run, arrivals)
        hits[router] = sum(totals.hit_tokens for totals in run.replicas)
    assert hits["prefix_affinity"] > 1.2 * hits["round_robin"]
    assert hits["prefix_hash"] > 1.2 * hits["round_robin"]


def test_a_setup_or_workload_that_cannot_be_is_refused_by_name() -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"depth": 3}, "depth"),
        ({"replicas": 0}, "replicas"),
        ({"failures": (ReplicaFailure(3, 1.0),)}, "replica 3"),
        ({"failures": (ReplicaFailure(0, -1.0),)}, "-1.0"),
    )
    for changes, word in wrong:
        with pytest.raises(ConfigError, match=word):
            replace(SETUP, **changes)
    with pytest.raises(ConfigError, match="least_loaded"):
        simulate([], replace(SETUP, router="nearest"))
    with pytest.raises(ConfigError, match="sort it"):
        simulate([Arrival(1.0, 5, 5), Arrival(0.5, 5, 5)], SETUP)
    for follows in (1, 5, -1):
        with pytest.raises(ConfigError, match=f"follows {follows}"):
            simulate([Arrival(0.0, 5, 5), Arrival(0.5, 5, 5, follows=follows)], SETUP)


def test_no_workload_is_served_in_no_time() -> None:
    run = simulate([], SETUP)
    assert len(run.outcomes) == 0 and run.duration == 0.0
