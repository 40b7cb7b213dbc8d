"""Engines that share devices: ranks in lock-step, pipeline stages, replicas that differ, and failures of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.simulator.fakes import ConstantCosts, Digests, LinearCosts, check_whole, columns, limits, workload

from octavo.core.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.cost_model import CostModel, StepShape
from octavo.simulator.outcomes import SimulatedRun
from octavo.simulator.pipeline import PipelineFacts, PipelineStages
from octavo.simulator.run import simulate
from octavo.simulator.setup import ReplicaFailure, ReplicaGroup, ReplicaSetup, Setup
from octavo.simulator.summary import summarise


class SharedCosts(CostModel):
    """A millisecond for each own token, and ten for each token of any rank; notes what it is asked."""

    name = "shared"

    def __init__(self) -> None:
        self.asked: list[tuple[int, tuple[int, ...]]] = []

    def step_s(self, shape: StepShape) -> float:
        self.asked.append((shape.num_tokens, shape.peer_tokens))
        return 0.001 * shape.num_tokens + 0.01 * (shape.num_tokens + sum(shape.peer_tokens))

    def host_s(self, shape: StepShape) -> float:
        return 0.002 * len(shape.decode_kv)


def by_index(run: SimulatedRun, name: str) -> Sequence[Any]:
    return [value for _, value in sorted(zip(run.outcomes.indices, getattr(run.outcomes, name), strict=True))]


def test_a_step_of_a_group_lasts_as_long_as_its_slowest_rank_and_all_tokens_meet() -> None:
    costs = SharedCosts()
    run = simulate([Arrival(0.0, 4, 2), Arrival(0.0, 8, 3)], Setup(limits(), costs, ranks=2))
    # Prompts of 4 and 8: 8 + 120 ms. One token each: 1 + 20 ms, then 2 ms of the host. Rank 0 has no plan: 1 + 20 ms.
    assert costs.asked == [(4, (8,)), (8, (4,)), (1, (1,)), (1, (1,)), (1, (1,))]
    assert by_index(run, "replicas") == [0, 1]
    assert by_index(run, "first_tokens") == pytest.approx([0.128, 0.128])
    assert by_index(run, "ends") == pytest.approx([0.149, 0.172])
    assert [totals.busy_s for totals in run.replicas] == pytest.approx([0.149, 0.170])


def test_a_request_that_meets_a_group_in_a_step_waits_for_its_end() -> None:
    run = simulate([Arrival(0.0, 4, 2), Arrival(0.01, 1, 1)], Setup(limits(), SharedCosts(), ranks=2))
    # 4 tokens and a dummy: 54 ms. Then both ranks have a token.
    assert by_index(run, "starts") == pytest.approx([0.0, 0.054])
    assert by_index(run, "ends") == pytest.approx([0.075, 0.075])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_without_anything_to_share_plans_as_engines_of_their_own(depth: int) -> None:
    """With steps of one length, ranks that are never idle alone have the plans of independent engines."""
    sinks: list[list[Digests]] = [[], []]
    arrivals = [Arrival(0.0, 5 + index, 12) for index in range(4)]
    for made, sizes in zip(sinks, ({"ranks": 2}, {"replicas": 2}), strict=True):

        def make_sink(scheduler: Scheduler, made: list[Digests] = made) -> Digests:
            made.append(Digests())
            return made[-1]

        simulate(arrivals, Setup(limits(), ConstantCosts(), depth=depth, make_sink=make_sink, **sizes))
    for grouped, alone in zip(*sinks, strict=True):
        assert len(grouped.steps) >= 12
        assert len(grouped.steps) == pytest.approx(len(alone.steps), abs=1)  # the last freed slots are told to nobody
        assert all(one == other for one, other in zip(grouped.steps, alone.steps, strict=False))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("router", ["round_robin", "least_requests"])
def test_groups_serve_every_request_once_also_with_failures(depth: int, router: str) -> None:
    arrivals = workload(120, rate=60.0, seed=3, followers=0.2)
    setup = Setup(
        limits(), LinearCosts(), depth=depth, replicas=2, ranks=3, router=router,
        failures=(ReplicaFailure(1, 0.4, 0.3), ReplicaFailure(0, 1.0, None)),
    )  # fmt: skip
    run = simulate(arrivals, setup)
    check_whole(run, arrivals)
    assert len(run.replicas) == 6
    assert [totals.failures for totals in run.replicas] == [1] * 6
    assert [totals.down_s for totals in run.replicas] == [0.0] * 3 + [0.3] * 3
    assert columns(run.outcomes) == columns(simulate(arrivals, setup).outcomes)


def test_a_pipeline_does_not_shorten_a_step_and_has_one_in_each_stage() -> None:
    setup = Setup(limits(), ConstantCosts(0.010), pipeline=PipelineFacts(2, 0.001))
    run = simulate([Arrival(0.0, 4, 2), Arrival(0.0, 4, 2)], setup)
    # Engine 0: 0 to 5 and 6 to 11 ms, then 11 to 16 and 17 to 22.
    # Engine 1: 5 to 10 and 11 to 16, then 16 to 21 and 22 to 27.
    assert by_index(run, "first_tokens") == pytest.approx([0.011, 0.016])
    assert by_index(run, "ends") == pytest.approx([0.022, 0.027])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pipeline_has_the_same_outcome_with_steps_forwarded_or_not(ranks: int, seed: int) -> None:
    arrivals = workload(120, rate=60.0, seed=seed, followers=0.2)
    setup = Setup(
        limits(), LinearCosts(), replicas=2, router="least_loaded", ranks=ranks, sample_s=0.25,
        failures=(ReplicaFailure(1, 0.4, 0.3),), pipeline=PipelineFacts(3, 0.0005, 0.0001),
    )  # fmt: skip
    fast, slow = simulate(arrivals, setup), simulate(arrivals, replace(setup, fast_forward=False))
    check_whole(fast, arrivals)
    assert columns(fast.outcomes) == columns(slow.outcomes) and fast.replicas == slow.replicas
    for name in ("times", "replicas", "used", "steps", "tokens", "busy_s", "host_s", "waiting", "reasons", "rows"):
        assert getattr(fast.samples, name) == getattr(slow.samples, name)


def test_stages_end_as_many_steps_as_they_are_in_the_time_of_one() -> None:
    stages = PipelineStages(PipelineFacts(4))
    ends = [stages.run(0.0, 0.020, 1) for _ in range(8)]
    assert ends == pytest.approx([0.020 + 0.005 * place for place in range(8)])
    late = PipelineStages(PipelineFacts(2, 0.001, 0.002)).run(1.0, 0.020, 3)
    assert late == pytest.approx(1.027)


def test_groups_of_a_pipeline_share_its_stages() -> None:
    setup = Setup(limits(), ConstantCosts(0.010), ranks=2, pipeline=PipelineFacts(2))
    arrivals = [Arrival(0.0, 4, 1) for _ in range(4)]
    run = simulate(arrivals, setup)
    assert by_index(run, "replicas") == [0, 1, 2, 3]  # ranks 0 and 1 of the first group, then those of the second
    assert by_index(run, "ends") == pytest.approx([0.010, 0.010, 0.015, 0.015])
    check_whole(simulate(workload(60), setup), workload(60))


def test_replicas_that_differ_keep_their_own_times_and_sizes() -> None:
    fast = ReplicaSetup(limits(), ConstantCosts(0.010))
    slow = ReplicaSetup(limits(num_blocks=(60,)), ConstantCosts(0.030))
    setup = Setup(fast.limits, fast.costs, groups=(ReplicaGroup("fast", fast, 2), ReplicaGroup("slow", slow)))
    run = simulate([Arrival(0.0, 4, 2) for _ in range(3)], setup)
    assert by_index(run, "ends") == pytest.approx([0.020, 0.020, 0.060])
    assert [totals.num_blocks for totals in run.replicas] == [120, 120, 60]
    assert [totals.group for totals in run.replicas] == ["fast", "fast", "slow"]
    facts = summarise(run, price_per_hour={"fast": 3600.0, "slow": 7200.0})
    assert facts["cost"]["total"] == pytest.approx(0.060 * 4) and facts["cost"]["price_per_hour"] == 14400.0
    assert {name: one["requests"] for name, one in facts["groups"].items()} == {"fast": 2, "slow": 1}
    assert facts["groups"]["slow"]["cost"] == pytest.approx(0.060 * 2)
    assert facts["groups"]["fast"]["ttft"]["max"] == pytest.approx(0.010)


@pytest.mark.parametrize("router", ["round_robin", "least_loaded", "random"])
def test_groups_of_equal_replicas_are_the_plain_fleet(router: str) -> None:
    arrivals, one = workload(150, rate=60.0, seed=4, followers=0.2), ReplicaSetup(limits(), LinearCosts())
    failures = (ReplicaFailure(2, 0.4, 0.3),)
    plain = Setup(one.limits, one.costs, replicas=3, router=router, failures=failures, sample_s=0.25)
    for sizes in ((3,), (1, 2), (1, 1, 1)):
        groups = tuple(ReplicaGroup(f"g{index}", one, count) for index, count in enumerate(sizes))
        run, same = simulate(arrivals, replace(plain, replicas=1, groups=groups)), simulate(arrivals, plain)
        assert columns(run.outcomes) == columns(same.outcomes)
        assert [replace(totals, group="") for totals in run.replicas] == same.replicas
        facts = summarise(run, {"ttft": 0.1}, dict.fromkeys((group.name for group in groups), 2.0))
        assert facts | {"groups": {}} == summarise(same, {"ttft": 0.1}, 2.0)


def test_setups_that_cannot_be_are_refused_by_name() -> None:
    setup = Setup(limits(), ConstantCosts())
    with pytest.raises(ConfigError, match="ranks is 0; give at least 1"):
        replace(setup, ranks=0)
    with pytest.raises(ConfigError, match="depth is 2; give 1 with a pipeline"):
        replace(setup, depth=2, pipeline=PipelineFacts(2))
    one = ReplicaSetup(limits(), ConstantCosts())
    with pytest.raises(ConfigError, match="two groups have the name 'a'; give each another name"):
        replace(setup, groups=(ReplicaGroup("a", one), ReplicaGroup("a", one)))
    with pytest.raises(ConfigError, match="replicas of group 'a' is 0; give at least 1"):
        replace(setup, groups=(ReplicaGroup("a", one, 0),))
    with pytest.raises(ConfigError, match="a pipeline has 1 stages; give at least 2"):
        PipelineFacts(1)
