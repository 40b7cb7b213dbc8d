"""Bounds from below: no simulation needs fewer engines, or is faster, and floors are below every step."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from tests.simulator.fakes import LinearCosts, limits, workload

from octavo.core.limits import Limits
from octavo.fleet.routing import ROUTERS
from octavo.simulator.arrival import Arrival
from octavo.simulator.bounds import Demand, fewest_engines
from octavo.simulator.cost_model import CostModel, ScaledCosts, StepShape, TimeFloor
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.costs.corrected import NUM_KINDS, CorrectedCosts, Correction
from octavo.simulator.costs.fitted import HOST_NAMES, NAMES, Coefficient, Fit, Fitted
from octavo.simulator.costs.table import CostTable, Profile, TableFiles
from octavo.simulator.drafts import DraftSettings
from octavo.simulator.goals import Goals, read_goals
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup
from octavo.simulator.summary import summarise

GOALS = (
    "ttft_p95=0.2", "ttft_max=0.3,tpot_p90=0.02", "e2e_p90=0.8", "ttft=0.1,tpot=0.02,goodput=0.9",
    "ttft_p50=0.05,e2e_p99=1.5", "queue_p99=0.2", "tpot_p95=0.02,e2e_mean=0.7",
)  # fmt: skip


class FlooredCosts(LinearCosts):
    """LinearCosts that knows its floor: a chunk reads at least its own tokens."""

    def floors(self, max_tokens: int) -> tuple[TimeFloor, ...]:
        return (TimeFloor(0.004, 0.0003, 0.000011, 0.0),)


def bound(arrivals: list[Arrival], goals: Goals, own: Limits, costs: CostModel) -> float:
    demand = Demand.of(arrivals, own)
    return fewest_engines(
        demand, goals.requirements(len(arrivals)), costs.floors(own.max_batch_tokens), own
    )  # fmt: skip


def fewest(arrivals: list[Arrival], goals: Goals, setup: Setup, most: int) -> float:
    """The fewest engines by simulation alone, without giving up."""
    for replicas in range(1, most + 1):
        if goals.judge(simulate(arrivals, replace(setup, replicas=replicas))).is_reached:
            return replicas
    return math.inf


@pytest.mark.parametrize("text", GOALS)
@pytest.mark.parametrize("rate", [60.0, 240.0])
def test_no_simulation_needs_fewer_engines(text: str, rate: float) -> None:
    rng, goals = random.Random(f"{text}{rate}"), read_goals(text)
    for seed in range(3):
        changes: dict[str, Any] = {
            "max_sequences": rng.choice((2, 6, 12)), "max_batch_tokens": rng.choice((16, 48)),
            "prefix_caching": rng.random() < 0.5,
        }  # fmt: skip
        own = limits(**changes)
        setup = Setup(own, FlooredCosts(), depth=rng.choice((1, 2)), router=rng.choice(sorted(ROUTERS)))
        arrivals = workload(80, rate=rate, seed=seed)
        least = bound(arrivals, goals, own, setup.costs)
        found = fewest(arrivals, goals, setup, 8)
        assert least <= found, (text, seed, changes, setup.router)


MACHINES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama-3.2-1b", "l4", {}), ("qwen3-30b-a3b", "h100", {"dp": 2, "is_expert_parallel": True}),
    ("llama-3.1-8b", "l40s", {"pp": 2}), ("gemma-3-4b", "l4", {}), ("mixtral-8x7b", "h100", {"tp": 4, "pp": 2}),
)  # fmt: skip


def mixed_workload(rng: random.Random, rate: float) -> list[Arrival]:
    """Requests of very different lengths; some have choices, and some a prefix in common."""
    at, arrivals = 0.0, []
    for _ in range(100):
        at += rng.expovariate(rate)
        prompt, choices = rng.randint(1, 900), (30, rng.randint(1, 29)) if rng.random() < 0.1 else ()
        family = rng.randrange(3) if rng.random() < 0.3 else -1
        keys = [100 * family + place for place in range(prompt // 16)] if family >= 0 else []
        arrivals.append(
            Arrival(at, prompt, 30 if choices else rng.randint(1, 60), keys=keys, key_tokens=16, choices=choices)
        )
    return arrivals


@pytest.mark.parametrize(("model", "device", "sizes"), MACHINES)
def test_what_a_fleet_reached_no_bound_forbids(model: str, device: str, sizes: dict[str, Any]) -> None:
    """Objectives are set to just what a fleet of random machines and settings reached: it needs no more engines."""
    hardware = replace(Hardware.of(model, device), **sizes)
    costs, rng = cost_model("roofline", hardware), random.Random(model)
    for _ in range(8):
        own = limits(
            block_size=16, num_blocks=(rng.choice((300, 3000)),), max_model_len=4096,
            max_batch_tokens=rng.choice((128, 1024)), max_sequences=rng.choice((2, 8, 64)),
            policy=rng.choice(("fcfs", "shortest_prefill", "prefill_first")),
        )  # fmt: skip
        arrivals = mixed_workload(rng, rng.choice((20, 80, 300)))
        setup = Setup(
            own, costs, replicas=rng.randint(1, 4), router=rng.choice(sorted(ROUTERS)), ranks=hardware.dp,
            pipeline=hardware.pipeline,
        )  # fmt: skip
        run = simulate(arrivals, setup)
        facts, (one, other) = summarise(run), rng.sample(("p50", "p90", "p99", "max"), 2)
        for text in (
            f"ttft_{one}={facts['ttft'][one] * 1.0001},tpot_{other}={facts['tpot'][other] * 1.0001}",
            f"e2e_{one}={facts['e2e'][one] * 1.0001}",
        ):
            goals = read_goals(text)
            assert goals.judge(run).is_reached
            assert bound(arrivals, goals, own, costs) <= len(run.replicas), (setup, text)


def measured_costs(rng: random.Random) -> list[CostModel]:
    """A fit, tables with and without captured sizes, whose times are as uneven as measured ones, and corrections."""
    priced = tuple(Coefficient(name, 10 ** rng.uniform(-6, -4), 0.0, 1.0) for name in NAMES)
    fit = Fit("a", 100, priced, tuple(Coefficient(name, 1e-5, 0.0, 1.0) for name in HOST_NAMES), 0.0, 0.0, 0.0)
    sizes = (1, 4, 16, 60, 200, 700)
    attention = {
        (chunk, rows, history, length): rng.uniform(1e-5, 1e-3)
        for chunk in (0, 16, 400) for rows in (0, 1, 8, 50) for history in (0, 300) for length in (16, 500)
        if (chunk or (rows and not history)) and (rows or length == 16)
    }  # fmt: skip
    dense = {name: {(size,): rng.uniform(1e-5, 4e-4) * (10 + size) for size in sizes} for name in ("qkv", "layernorm")}
    files = TableFiles("t", dense, {"lm_head": {(1,): 1e-4, (8,): 3e-4}}, attention, profile=Profile(num_layers=4))
    experts = {(size, used): rng.uniform(1e-4, 1e-3) for size in sizes for used in (2, 8)}
    routed = replace(files.profile, num_experts=8, active_experts=2)
    padded = replace(files.profile, padded_tokens=(4, 32, 128), step_s=0.0004)
    models: list[CostModel] = [
        Fitted(fit), CostTable(files), CostTable(replace(files, profile=padded)),
        CostTable(replace(files, experts=experts, profile=routed)),
    ]  # fmt: skip
    made = Correction("", "r", 50, "any", "", tuple(rng.uniform(0.7, 1.4) for _ in range(NUM_KINDS)), 0.0002, 0.001, 64)
    return models + [CorrectedCosts(one, replace(made, costs=one.name)) for one in models]


@pytest.mark.parametrize("seed", range(4))
def test_every_step_of_measured_costs_takes_at_least_its_floors(seed: int) -> None:
    rng = random.Random(seed)
    for costs in measured_costs(rng):
        floors, ratios = costs.floors(1024), []
        assert len(floors) == 2 and min(min(floor) for floor in floors) >= 0
        for _ in range(300):
            decode = [rng.randint(1, 900) for _ in range(rng.choice((0, 1, 9, 64)))]
            chunks = [(rng.randint(2, 300), rng.randint(0, 900)) for _ in range(rng.choice((0, 1, 3)))]
            shape = StepShape(decode, chunks, len(decode))
            if 0 < shape.num_tokens <= 1024:
                pairs = sum(count * before + count * (count + 1) // 2 for count, before in chunks)
                amounts = (1, shape.num_tokens, sum(decode), pairs)
                least = max(sum(a * b for a, b in zip(floor, amounts, strict=True)) for floor in floors)
                ratios.append(least / costs.step_s(shape))
        assert 0.05 < max(ratios) <= 1 + 1e-9, costs.name


@pytest.mark.parametrize("seed", range(3))
def test_no_bound_by_measured_costs_forbids_what_a_fleet_reached(seed: int) -> None:
    rng, num_above = random.Random(seed), 0
    for costs in measured_costs(rng):
        own = limits(
            block_size=16, num_blocks=(3000,), max_model_len=4096, max_batch_tokens=rng.choice((128, 1024)),
            max_sequences=rng.choice((4, 32)),
        )  # fmt: skip
        arrivals = mixed_workload(rng, 500)
        run = simulate(arrivals, Setup(own, costs, replicas=rng.randint(2, 6), router="least_loaded"))
        facts = summarise(run)
        for text in (
            f"ttft_p99={facts['ttft']['p99'] * 1.0001},tpot_p90={facts['tpot']['p90'] * 1.0001}",
            f"e2e_max={facts['e2e']['max'] * 1.0001}",
        ):
            goals = read_goals(text)
            assert goals.judge(run).is_reached
            least = bound(arrivals, goals, own, costs)
            assert least <= len(run.replicas), (costs.name, text)
            num_above += least > 1
    assert num_above, "some bound says more than one engine"


def test_costs_that_depend_on_other_ranks_or_have_odd_prices_have_no_floors() -> None:
    times = {(1,): 1e-4}
    attention = {(0, 1, 0, 16): 1e-5, (16, 0, 0, 0): 1e-5}
    profile = Profile(num_layers=1, hidden_size=8, num_experts=8, active_experts=2, ep=2, exchange_bandwidth=1e9)
    files = TableFiles("t", {"qkv": times}, {"lm_head": times}, attention, {(1, 1): 1e-4}, profile=profile)
    assert CostTable(files).floors(64) == ()
    odd = tuple(Coefficient(name, -1e-6, 0.0, 0.0) for name in NAMES)
    host = tuple(Coefficient(name, 0.0, 0.0, 0.0) for name in HOST_NAMES)
    assert Fitted(Fit("a", 9, odd, host, 0.0, 0.0, 0.0)).floors(64) == ()


def test_the_bound_is_near_what_a_saturated_fleet_needs() -> None:
    """Where batches are full all the time and few requests may be late, the bound has nearly all the work."""
    arrivals = [Arrival(index / 200, 20, 20) for index in range(2000)]
    own, goals = limits(max_sequences=12), read_goals("ttft_p99=0.5,tpot_p99=0.05")
    least = bound(arrivals, goals, own, FlooredCosts())
    found = fewest(arrivals, goals, Setup(own, FlooredCosts()), 12)
    assert 4 <= least <= found <= 1.5 * least


@pytest.mark.parametrize(
    ("model", "device", "sizes"),
    [
        ("llama-3.2-1b", "l4", {}),
        ("llama-3.1-8b:fp8", "h100", {"tp": 2}),
        ("mixtral-8x7b", "h100", {"tp": 4}),
        ("qwen3-30b-a3b", "h100", {"dp": 2, "is_expert_parallel": True}),
        ("gemma-3-4b", "l4", {}),
        ("llama-3.1-8b", "a100-80g", {"pp": 2}),
    ],
)
def test_every_step_of_the_roofline_takes_at_least_its_floors(model: str, device: str, sizes: dict[str, Any]) -> None:
    hardware = replace(Hardware.of(model, device, sizes.pop("tp", 1)), **sizes)
    rng = random.Random(model)
    for costs in (cost_model("roofline", hardware), ScaledCosts(cost_model("roofline", hardware), 1.3)):
        floors = costs.floors(4096)
        assert len(floors) == 2
        ratios = []
        for _ in range(400):
            decode = [rng.randint(1, 4000) for _ in range(rng.choice((0, 1, 16, 256)))]
            chunks = [(rng.randint(2, 900), rng.randint(0, 4000)) for _ in range(rng.choice((0, 1, 4)))]
            if not decode and not chunks:
                continue
            peers = (rng.randint(1, 500),) if hardware.dp > 1 else ()
            shape = StepShape(decode, chunks, len(decode), peer_tokens=peers)
            pairs = sum(count * before + count * (count + 1) // 2 for count, before in chunks)
            amounts = (1, shape.num_tokens, sum(decode), pairs)
            least = max(sum(a * b for a, b in zip(floor, amounts, strict=True)) for floor in floors)
            ratios.append(least / costs.step_s(shape))
        assert 0.3 < max(ratios) <= 1 + 1e-9
    assert LinearCosts().floors(4096) == (), "a cost model need not know floors"


def test_what_a_lone_request_misses_no_number_of_engines_meets() -> None:
    costs = cost_model("roofline", Hardware.of("llama-3.1-8b", "l4"))
    own = limits(max_model_len=4096, max_batch_tokens=512, num_blocks=(4000,))
    arrivals = [Arrival(index / 10, 2000, 50) for index in range(20)]
    alone = simulate(arrivals[:1], Setup(own, costs)).outcomes
    ttft = alone.first_tokens[0]
    tpot = (alone.ends[0] - ttft) / 49
    for text in (
        f"ttft_p90={0.8 * ttft}",
        f"tpot_p90={0.8 * tpot}",
        f"ttft={0.8 * ttft}",
        f"e2e_max={0.8 * alone.ends[0]}",
    ):
        assert bound(arrivals, read_goals(text), own, costs) == math.inf, text
    for text in (f"ttft_p90={1.01 * ttft}", f"tpot_p90={1.01 * tpot}", "queue_p90=0.0001", "ttft_mean=0.001"):
        assert bound(arrivals, read_goals(text), own, costs) < math.inf, text
    half = [*arrivals[:10], *(Arrival(1 + index / 10, 9, 9) for index in range(10))]
    assert bound(half, read_goals(f"ttft_p50={0.8 * ttft}"), own, costs) < math.inf, "half of them are short"


def test_what_a_cache_may_have_and_what_no_engine_computes_is_no_demand() -> None:
    keyed = [Arrival(float(index), 20, 5, keys=(1, 2, 3 + index), key_tokens=4) for index in range(3)]
    assert list(Demand.of(keyed, limits()).prompts) == [20, 12, 12]
    assert list(Demand.of(keyed, limits(prefix_caching=False)).prompts) == [20, 20, 20]
    whole = [Arrival(0.0, 12, 1, keys=(1, 2, 3), key_tokens=4), Arrival(1.0, 12, 1, keys=(1, 2, 3), key_tokens=4)]
    assert list(Demand.of(whole, limits()).prompts) == [12, 1], "a prompt has at least a token to compute"
    told = Arrival(0.0, 4, 4, keys=(1,), key_tokens=4, output_keys=(2,))
    later = Arrival(1.0, 10, 3, keys=(1, 2), key_tokens=4)
    assert list(Demand.of([told, later], limits()).prompts) == [4, 2], "the answer of the turn before is cached"
    choices = Demand.of([Arrival(0.0, 4, 9, choices=(9, 3)), Arrival(0.0, 120, 50)], limits())
    assert list(choices.decodes) == [10, 7] and list(choices.tails) == [8, 7], "128 tokens are the longest request"
    assert choices.positions[0] == (8 * 4 + 36) + (2 * 4 + 3)


def test_of_requests_that_follow_others_the_times_are_unknown() -> None:
    arrivals = [Arrival(index / 200, 20, 20) for index in range(100)]
    goals, own = read_goals("ttft_p95=0.2,tpot_p95=0.05"), limits()
    assert bound(arrivals, goals, own, FlooredCosts()) > 1
    follower = replace(arrivals[-1], follows=3)
    assert bound([*arrivals[:-1], follower], goals, own, FlooredCosts()) == 1


def test_drafts_let_a_row_give_several_tokens() -> None:
    costs, goals = FlooredCosts(), read_goals("ttft_p95=0.5,tpot_p95=0.03")
    own = limits(max_draft_tokens=4, has_draft_model=True)
    setup = Setup(own, costs, drafts=DraftSettings(0.9, 0.1))
    for seed in range(3):
        arrivals = workload(60, rate=200, seed=seed)
        assert bound(arrivals, goals, own, costs) <= fewest(arrivals, goals, setup, 12)
    assert bound(arrivals, goals, own, costs) <= bound(arrivals, goals, limits(), costs)
