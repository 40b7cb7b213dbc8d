"""Prefill and decode replicas: every request crosses once, KV waits where it should, and no block is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from tests.core import invariants
from tests.simulator.fakes import ConstantCosts, LinearCosts, check_whole, columns, limits, workload

from octavo.core.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.drafts import DraftSettings
from octavo.simulator.kv_transfer import LINKS, KVLink, read_link
from octavo.simulator.outcomes import SimulatedRun
from octavo.simulator.pipeline import PipelineFacts
from octavo.simulator.report import Case, figures, page
from octavo.simulator.run import simulate
from octavo.simulator.scaling import ScalingRule
from octavo.simulator.setup import ReplicaFailure, ReplicaGroup, ReplicaSetup, Role, Setup
from octavo.simulator.summary import summarise

ONE = ReplicaSetup(limits(), LinearCosts())
SLOW = KVLink("slow", 1e6, 0.001)  # a millisecond for each token, and one more


def split(prefill: int, decode: int, one: ReplicaSetup = ONE, link: KVLink = SLOW, **options: Any) -> Setup:
    groups = (ReplicaGroup("p", one, prefill, role=Role.PREFILL), ReplicaGroup("d", one, decode, role=Role.DECODE))
    return Setup(one.limits, one.costs, groups=groups, link=link, kv_token_bytes=1000.0, **options)


def by_index(run: SimulatedRun, name: str) -> Sequence[Any]:
    return [value for _, value in sorted(zip(run.outcomes.indices, getattr(run.outcomes, name), strict=True))]


def check_transfers(run: SimulatedRun, arrivals: Sequence[Arrival]) -> None:
    """Each request that has a second token crosses at most once; a port serves one transfer at a time."""
    moved = run.transfers
    longer = [arrival for arrival in arrivals if arrival.output_tokens > 1]
    assert 0 < len(moved) <= len(longer)
    assert sum(totals.output_tokens for totals in run.replicas) == sum(arrival.output_tokens for arrival in arrivals)
    for one in moved:
        assert one.handed <= one.reserved <= one.begins < one.ends
    for name in ("source", "target"):
        for port in {getattr(one, name) for one in moved}:
            times = sorted((one.begins, one.ends) for one in moved if getattr(one, name) == port)
            assert all(before[1] <= after[0] for before, after in pairwise(times))
    roles = {number: totals.group for number, totals in enumerate(run.replicas)}
    assert {roles[one.source] for one in moved} == {"p"} and {roles[one.target] for one in moved} == {"d"}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("router", ["round_robin", "least_requests", "prefix_affinity"])
def test_every_request_crosses_once_alike_with_steps_forwarded_or_not(depth: int, router: str) -> None:
    arrivals = workload(120, rate=50.0, seed=3, followers=0.2)
    setup = split(2, 2, router=router, depth=depth, sample_s=0.25)
    run, slow = simulate(arrivals, setup), simulate(arrivals, replace(setup, fast_forward=False))
    check_whole(run, arrivals)
    check_transfers(run, arrivals)
    assert columns(run.outcomes) == columns(slow.outcomes) == columns(simulate(arrivals, setup).outcomes)
    assert run.transfers == slow.transfers
    assert [replace(totals, forwarded_steps=0) for totals in run.replicas] == slow.replicas
    assert sum(totals.forwarded_steps for totals in run.replicas) > 0
    assert {*by_index(run, "first_replicas")} == {0, 1} and {*by_index(run, "replicas")} <= {0, 1, 2, 3}


@pytest.mark.parametrize("sizes", [{}, {"ranks": 2}, {"pipeline": PipelineFacts(2)}])
def test_no_block_is_held_at_the_end(sizes: dict[str, Any]) -> None:
    schedulers: list[Scheduler] = []
    arrivals = workload(80, rate=50.0, seed=7)
    one = ReplicaSetup(limits(), LinearCosts(), **sizes)
    run = simulate(arrivals, split(1, 2, one, make_sink=schedulers.append))
    check_whole(run, arrivals)
    check_transfers(run, arrivals)
    assert len(schedulers) == 3 * one.num_engines
    for scheduler in schedulers:
        invariants.check_no_leaks(scheduler)


@pytest.mark.parametrize("seed", range(4))
def test_over_a_link_without_limits_first_tokens_are_those_of_prefill_replicas_alone(seed: int) -> None:
    arrivals = workload(150, rate=60.0, seed=seed)
    one = ReplicaSetup(limits(num_blocks=(4000,)), LinearCosts())
    run = simulate(arrivals, split(2, 2, one, KVLink("endless", inf, 0.0)))
    alone = simulate([replace(one, output_tokens=1) for one in arrivals], Setup(one.limits, one.costs, replicas=2))
    assert by_index(run, "first_tokens") == by_index(alone, "first_tokens")
    assert by_index(run, "first_replicas") == by_index(alone, "replicas")


def test_the_gap_after_the_first_token_is_the_transfer() -> None:
    """Steps of 10 ms; 4 tokens take 1 + 4 ms to cross."""
    one = ReplicaSetup(limits(), ConstantCosts(0.010))
    run = simulate([Arrival(0.0, 4, 3), Arrival(1.0, 4, 1)], split(1, 1, one))
    assert by_index(run, "first_tokens") == pytest.approx([0.010, 1.010])
    assert by_index(run, "ends") == pytest.approx([0.035, 1.010])  # the other one ends with its first token
    assert by_index(run, "replicas") == [1, 0]
    facts = summarise(run)
    assert facts["tpot"]["mean"] == pytest.approx(0.0125)
    transfers = facts["transfers"]
    assert (transfers["count"], transfers["tokens"], transfers["bytes"]) == (1, 4, 4000.0)
    assert transfers["time"]["mean"] == pytest.approx(0.005) and transfers["gap"]["mean"] == pytest.approx(0.005)
    assert transfers["sending"] == pytest.approx(0.005 / 1.010)
    assert facts["groups"]["p"]["ttft"]["count"] == 2 and facts["groups"]["p"]["tpot"]["count"] == 0
    assert facts["groups"]["d"]["ttft"]["count"] == 0 and facts["groups"]["d"]["tpot"]["count"] == 1


def test_ports_serve_one_transfer_at_a_time_and_each_device_has_its_own() -> None:
    arrivals = [Arrival(0.0, 4, 2), Arrival(0.0, 4, 2)]
    for devices, times in ((1, [0.010, 0.015, 0.020]), (2, [0.010, 0.013, 0.016])):
        one = ReplicaSetup(limits(), ConstantCosts(0.010), kv_devices=devices)
        moved = simulate(arrivals, split(1, 2, one)).transfers  # one sending port, two receiving ones
        assert [(one.begins, one.ends) for one in moved] == [pytest.approx(pair) for pair in pairwise(times)]


def test_kv_waits_at_the_prefill_replica_for_blocks_and_holds_its_own() -> None:
    """Each request needs 6 of the decode replica's 10 blocks, and 5 of 10 of the prefill replica's for its prompt."""
    one = ReplicaSetup(limits(num_blocks=(10,)), ConstantCosts(0.010))
    run = simulate([Arrival(0.0, 20, 5) for _ in range(4)], split(1, 1, one))
    ends, moved = sorted(run.outcomes.ends), run.transfers
    assert all(moved[at + 1].reserved >= ends[at] for at in range(3))
    firsts = sorted(run.outcomes.first_tokens)
    assert firsts[2] > moved[0].ends and firsts[3] > moved[1].ends  # the third prompt needs the blocks of the first
    assert run.replicas[0].max_blocks_used == 10


def test_tokens_that_the_decode_replica_has_cached_do_not_cross() -> None:
    arrivals = [Arrival(at, 43, 4, keys=range(5), key_tokens=8) for at in (0.0, 1.0)]
    run = simulate(arrivals, split(1, 1))
    assert [one.tokens for one in run.transfers] == [43, 3]
    check_whole(run, arrivals)


def test_prefill_and_decode_replicas_are_scaled() -> None:
    rule = ScalingRule("requests", 2.0, every_s=0.05, start_s=0.1, down_s=0.2)
    groups = tuple(
        ReplicaGroup(name, ONE, 1, rule, 3, role) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))
    )
    setup = replace(split(1, 1, router="least_requests"), groups=groups)
    arrivals = workload(150, rate=40.0, seed=5)
    run = simulate(arrivals, setup)
    check_whole(run, arrivals)
    check_transfers(run, arrivals)
    assert columns(run.outcomes) == columns(simulate(arrivals, replace(setup, fast_forward=False)).outcomes)
    assert {life.group for life in run.lifetimes if life.begin > 0} == {"p", "d"}
    for one in run.transfers:  # KV does not leave a replica that has stopped
        lives = [life for life in run.lifetimes if life.replica == one.source]
        assert any(life.begin <= one.begins <= life.end for life in lives)


def test_the_report_has_the_transfers() -> None:
    run = simulate(workload(60), split(1, 1, sample_s=0.25))
    case = Case.of("fcfs", run, summarise(run))
    assert set(case.bands["transfers"]) == {"wait for blocks", "wait for the link", "in transfer"}
    assert {"KV transfer, p99", "KV ports sending"} <= {figure.name for figure in figures(case.facts)}
    assert "KV transfers" in page("Simulation", [case], {}, [], [])


def test_links_are_known_by_name_or_given_by_numbers() -> None:
    assert read_link("ib-ndr") == LINKS["ib-ndr"] and LINKS["ib-ndr"].bandwidth == 400e9 / 8
    assert read_link("bandwidth=2e9,latency=20us") == KVLink("custom", 2e9, 20 * 1e-6)
    assert read_link("latency=1.5ms, bandwidth=inf") == KVLink("custom", inf, 1.5 * 1e-3)
    for text, reason in (
        ("ib-ndx", "unknown KV link 'ib-ndx'; did you mean 'ib-ndr'"),
        ("latency=1us", "bandwidth of link custom is 0; give bytes per second above 0"),
        ("bandwidth=fast", "KV link is 'bandwidth=fast'; give a name, or bandwidth=50e9"),
        ("bandwidth=1,speed=2", "give a name, or bandwidth=50e9,latency=20us"),
        ("bandwidth=-1", "give a name, or bandwidth=50e9,latency=20us"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read_link(text)


def test_setups_that_cannot_be_are_refused_by_name() -> None:
    setup = split(1, 1)
    for changes, reason in (
        ({"link": None}, "need a link for the KV; give one such as ib-ndr"),
        ({"groups": setup.groups[:1]}, "give every group one, prefill or decode, and at least one of each"),
        ({"groups": (*setup.groups, ReplicaGroup("w", ONE))}, "give every group one, prefill or decode"),
        ({"failures": (ReplicaFailure(0, 1.0),)}, "a failure of prefill or decode replicas is not simulated"),
        ({"drafts": DraftSettings(0.5, 0.2)}, "drafts of prefill and decode replicas are not simulated"),
    ):
        with pytest.raises(ConfigError, match=reason):
            replace(setup, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="arrival 0 has 2 choices; prefill and decode replicas serve one"):
        simulate([Arrival(0.0, 4, 4, choices=(4, 3))], setup)
