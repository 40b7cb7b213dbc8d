"""Simulated drafts: the gain follows acceptance and cost, and drafts that do not pay hardly cost."""

from __future__ import annotations

from typing import Any

import pytest
from tests.simulator.fakes import ConstantCosts, limits, workload

from octavo.errors import ConfigError
from octavo.simulator.drafts import DraftSettings
from octavo.simulator.outcomes import SimulatedRun
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup


def run(drafts: DraftSettings | None, **more: Any) -> SimulatedRun:
    sizes = limits(max_draft_tokens=7, has_draft_model=True) if drafts else limits()
    arrivals = workload(60, rate=3.0, seed=2)
    return simulate(arrivals, Setup(sizes, ConstantCosts(), drafts=drafts, **more))


def seconds(made: SimulatedRun) -> float:
    return sum(replica.busy_s for replica in made.replicas)


def tokens(made: SimulatedRun) -> dict[int, int]:
    return dict(zip(made.outcomes.indices, made.outcomes.output_tokens, strict=True))


@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_gets_its_tokens_in_fewer_steps(depth: int) -> None:
    plain, drafted = run(None, depth=depth), run(DraftSettings(0.9, 0.1), depth=depth)
    assert tokens(drafted) == tokens(plain)
    assert sum(one.steps for one in drafted.replicas) < sum(one.steps for one in plain.replicas) / 1.5
    assert seconds(drafted) < seconds(plain) / 1.3


def test_drafts_that_are_rejected_cost_little() -> None:
    plain, drafted = seconds(run(None)), seconds(run(DraftSettings(0.0, 0.5)))
    assert drafted < plain * 1.1, "a short run: the first trials are not spread over many steps"


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (run(DraftSettings(0.6, 0.2), seed=3) for _ in range(2))
    assert list(first.outcomes.ends) == list(second.outcomes.ends)


@pytest.mark.parametrize(("acceptance", "cost"), [(1.5, 0.2), (0.5, 0.0)])
def test_settings_are_checked(acceptance: float, cost: float) -> None:
    with pytest.raises(ConfigError, match="draft"):
        DraftSettings(acceptance, cost)
