"""Fairness between a tenant that floods and one that does not: bounded under fair, not under fcfs."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from tests.core.harness import Run, limits, prompt
from tests.source_tree import ROOT

from octavo.core.plan import EventKind
from octavo.core.policy.fair import Fair

specification = importlib.util.spec_from_file_location("fairness_plot", ROOT / "tools" / "fairness_plot.py")
assert specification is not None and specification.loader is not None
fairness_plot = importlib.util.module_from_spec(specification)
sys.modules["fairness_plot"] = fairness_plot
specification.loader.exec_module(fairness_plot)

LONGEST_PROMPT = 40
BLOCKS, BLOCK_SIZE = 30, 4
BOUND = 2 * max(Fair.prompt_weight * LONGEST_PROMPT, Fair.output_weight * BLOCKS * BLOCK_SIZE)


class Contest:
    """Two tenants with a checked scheduler; `modest` keeps two requests waiting, `flood` thirty."""

    def __init__(self, policy: str, seed: int, weights: tuple[tuple[str, float], ...] = (), depth: int = 1) -> None:
        sizes = limits(policy=policy, num_blocks=BLOCKS, max_sequences=6, tenant_weights=weights, max_batch_tokens=24)
        self.run = Run(sizes, depth=depth)
        self.run.is_ordered = False
        self.rng = random.Random(seed)

    def service(self, tenant: str) -> float:
        """Prompts of those that were admitted, and all outputs so far, by the policy's weights."""
        total = 0.0
        for record in self.run.records.values():
            if record.request.tenant == tenant and record.of_kind(EventKind.ADMITTED):
                total += Fair.prompt_weight * record.request.num_prompt_tokens
                total += Fair.output_weight * len(record.token_ids)
        return total

    def refill(self, tenant: str, wanted: int) -> None:
        waiting = [
            record
            for record in self.run.records.values()
            if record.request.tenant == tenant and not record.is_running and record.finished is None
        ]
        for _ in range(wanted - len(waiting)):
            length = self.rng.randint(4, LONGEST_PROMPT)
            max_tokens = self.rng.randint(2, 20)
            self.run.admit(prompt(length, self.rng.randrange(10**6)), max_tokens, tenant=tenant)

    def differences(self, num_steps: int) -> Iterator[float]:
        """Service of flood less that of modest, each divided by its weight, after each step."""
        weights = dict(self.run.limits.tenant_weights)
        for _ in range(num_steps):
            self.refill("flood", 30)
            self.refill("modest", 2)
            self.run.step()
            flood, modest = (self.service(name) / weights.get(name, 1.0) for name in ("flood", "modest"))
            yield flood - modest


@pytest.mark.parametrize(("seed", "depth"), [(0, 1), (1, 2), (2, 3)])
def test_S06_fair_bounds_the_difference_in_service_of_two_tenants_that_both_wait(seed: int, depth: int) -> None:
    differences = list(Contest("fair", seed, depth=depth).differences(250))
    assert max(differences) - min(differences) <= BOUND  # over any stretch of steps
    assert max(differences) > 0 > min(differences)


def test_S06_under_fcfs_the_difference_grows_without_bound() -> None:
    differences = list(Contest("fcfs", 0).differences(250))
    assert differences[-1] > 4 * BOUND
    quarters = differences[::62]
    assert all(later - earlier > BOUND / 2 for earlier, later in pairwise(quarters))


def test_S06_fair_shares_by_weight() -> None:
    """Twice the weight, twice the service, within the bound of the lighter one."""
    contest = Contest("fair", 3, (("modest", 2.0),))
    differences = list(contest.differences(250))
    assert max(differences) - min(differences) <= BOUND
    assert contest.service("modest") / contest.service("flood") == pytest.approx(2.0, rel=0.15)


def test_S06_a_flood_before_anybody_else_came_is_not_held_against_the_newcomer_or_for_it() -> None:
    """A newcomer starts level with the flood: neither behind what it took, nor with a claim to as much."""
    contest = Contest("fair", 4)
    for _ in range(60):
        contest.refill("flood", 30)
        contest.run.step()
    before = contest.service("flood")
    differences = [difference - before for difference in contest.differences(150)]
    assert before > BOUND
    assert max(differences) - min(differences) <= BOUND


def test_the_plot_of_the_docs_shows_what_the_simulation_gives() -> None:
    fair, fcfs = (fairness_plot.simulate(policy, 400) for policy in ("fair", "fcfs"))
    assert fair.range <= fair.bound
    assert fcfs.differences[-1] > fcfs.bound
    picture = fairness_plot.draw([fcfs, fair])
    assert picture.startswith("<svg") and picture.count("<polyline") == 4
    assert fairness_plot.PICTURE.read_text(encoding="utf-8").startswith("<svg")
