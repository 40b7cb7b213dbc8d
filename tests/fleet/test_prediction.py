"""A fleet that serves and the simulator's prediction: the same choices at the same times, and the same prefix hits."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.live_fleet import OUTPUT_ID, LiveFleet, LiveRun, live_request
from tests.public_data import public_file
from tests.simulator.fakes import LinearCosts

from octavo.core.kv.prefix import prompt_keys
from octavo.core.limits import Limits
from octavo.fleet.fleet_router import FleetRouter
from octavo.fleet.routing import ROUTERS, create_router
from octavo.fleet.routing_log import RoutingHeader, RoutingLog, replay_routing
from octavo.simulator import run as simulation
from octavo.simulator.arrival import Arrival
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.outcomes import SimulatedRun
from octavo.simulator.run import simulate
from octavo.simulator.setup import ReplicaFailure, Setup
from octavo.simulator.workloads import Shaping, open_workload

SHARED = "poisson:rate=60,prompt=uniform(20,90),output=uniform(2,20),prefix=128,groups=12,group_zipf=1,requests=160"


def limits(**changes: Any) -> Limits:
    fields = {
        "block_size": 4, "num_blocks": (220,), "max_model_len": 512, "vocab_size": 97, "max_batch_tokens": 64,
        "max_sequences": 6,
    }  # fmt: skip
    return Limits(**{**fields, **changes})  # type: ignore[arg-type]


def served(setup: Setup, arrivals: list[Arrival], jitter: float = 0.0, log: RoutingLog | None = None) -> LiveRun:
    """Serve the arrivals, as token ids."""
    size, vocab = setup.limits.block_size, setup.limits.vocab_size
    requests = [live_request(index, one, size, vocab) for index, one in enumerate(arrivals)]
    fleet = LiveFleet(setup, FleetRouter(setup.router, size, setup.seed, log), jitter)
    return asyncio.run(fleet.serve(requests, setup.failures))


def hit_rate(run: SimulatedRun) -> float:
    return sum(one.hit_tokens for one in run.replicas) / sum(one.queried_tokens for one in run.replicas)


def with_live_keys(setup: Setup, arrivals: list[Arrival]) -> list[Arrival]:
    """The arrivals with the keys that the fleet makes of their ids, and of the ids of their outputs."""
    size, vocab, keyed = setup.limits.block_size, setup.limits.vocab_size, []
    for index, one in enumerate(arrivals):
        request = live_request(index, one, size, vocab)
        assert request.prompt_token_ids is not None
        ids = request.prompt_token_ids + array("i", [OUTPUT_ID]) * one.output_tokens
        keys = prompt_keys(replace(request, prompt_token_ids=ids), size)
        count = one.prompt_tokens // size
        keyed.append(replace(one, keys=keys[:count], output_keys=keys[count:], key_tokens=size))
    return keyed


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_the_fleet_and_the_simulator_make_equal_choices(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = (ReplicaFailure(1, 0.9, 0.5), ReplicaFailure(0, 1.6, None))
    setup = Setup(limits(), LinearCosts(), replicas=3, router=name, seed=5, failures=failures, fast_forward=False)
    arrivals = list(open_workload(SHARED + ",tenants=3", Shaping(seed=3)))
    predicted: list[int] = []

    class Noted:
        def __init__(self, name: str, seed: int) -> None:
            self._router = create_router(name, seed)

        def choose(self, request: Any, targets: Any) -> Any:
            chosen = self._router.choose(request, targets)
            predicted.append(chosen.number)
            return chosen

    monkeypatch.setattr(simulation, "create_router", Noted)
    run = simulate(with_live_keys(setup, arrivals), setup)
    monkeypatch.undo()
    live = served(setup, arrivals)
    assert [number for _, number in live.choices] == predicted
    assert len(predicted) > len(arrivals)  # some requests lost their replica
    assert live.num_outputs == sum(run.outcomes.output_tokens)
    assert live.hit_rate == pytest.approx(hit_rate(run), rel=0.01) and live.hit_rate > 0.1
    log = RoutingLog(tmp_path, 1 << 20, RoutingHeader(name, 5, 4, 0.0))
    logged = served(setup, arrivals, log=log)
    log.close()
    replay = replay_routing(log.path)
    assert replay.is_equal and replay.num_choices == len(logged.choices), replay.difference


def test_hits_of_a_fleet_are_those_that_the_simulator_predicts() -> None:
    setup = Setup(limits(), LinearCosts(), replicas=4, router="prefix_affinity")
    arrivals = list(open_workload(SHARED, Shaping(seed=1)))
    predicted = hit_rate(simulate(arrivals, setup))  # with the workload's keys, of more tokens than a block has
    rates = [served(setup, arrivals, jitter).hit_rate for jitter in (0.0, 0.2)]
    print(f"shared prefixes: predicted {predicted:.1%}, served {rates[0]:.1%}, with steps 20 % off {rates[1]:.1%}")
    assert predicted > 0.2
    for rate in rates:
        assert rate == pytest.approx(predicted, rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", [0, 600, 1200, 1800])
def test_hits_on_a_part_of_a_public_trace_are_within_five_per_cent_of_the_prediction(start: int) -> None:
    trace = public_file("mooncake/conversation_trace.jsonl.gz")
    hardware = Hardware.of("llama-3.1-8b", "h100")
    own = Limits(16, (hardware.pool_blocks(8192),), 131_072, hardware.model.vocab_size, 8192, 256)
    setup = Setup(own, cost_model("roofline", hardware), replicas=4, router="prefix_affinity")
    arrivals = list(open_workload(f"mooncake:{trace}", Shaping(start=start, end=start + 150, rate_scale=0.5)))
    predicted, rate = hit_rate(simulate(arrivals, setup)), served(setup, arrivals).hit_rate
    print(f"from {start} s, {len(arrivals)} requests: predicted {predicted:.2%}, served {rate:.2%}")
    assert predicted > 0.02 and rate == pytest.approx(predicted, rel=0.05)
