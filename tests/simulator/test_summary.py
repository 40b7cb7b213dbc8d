"""Figures against a slow twin, and by hand: percentiles, goodput, fairness, cost; and what a chart is given."""

from __future__ import annotations

import math
import random
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.request import FinishReason
from octavo.simulator import curves
from octavo.simulator.columns import Columns, spread
from octavo.simulator.outcomes import NEVER, Outcomes, ReplicaTotals, SimulatedRun
from octavo.simulator.summary import jain, summarise


def outcomes(*rows: tuple[float, ...], tenants: tuple[str, ...] = ()) -> Outcomes:
    """Rows of arrival, start, first token, end, prompt, output; refused ones with NEVER."""
    out = Outcomes()
    for index, (came, start, first, end, prompt, output) in enumerate(rows):
        out.indices.append(index)
        out.arrivals.append(came)
        out.starts.append(start)
        out.first_tokens.append(first)
        out.ends.append(end)
        out.prompt_tokens.append(int(prompt))
        out.output_tokens.append(int(output))
        out.longest.append(int(output))
        out.cached.append(0)
        out.preemptions.append(index % 2)
        out.restarts.append(0)
        out.replicas.append(0)
        out.first_replicas.append(0)
        out.tenants.append(out.tenant(tenants[index] if tenants else ""))
        out.reasons.append(FinishReason.ERROR if start == NEVER else FinishReason.LENGTH)
    return out


def random_outcomes(seed: int, count: int) -> Outcomes:
    """Any, in the order of their ends as a simulation gives them."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        came = rng.uniform(0, 100)
        start = came + rng.expovariate(1)
        first = start + rng.expovariate(2)
        output = rng.randint(1, 30)
        rows.append((came, start, first, first + rng.expovariate(0.2) * (output > 1), rng.randint(1, 400), output))
    rows.sort(key=lambda row: row[3])
    return outcomes(*rows, tenants=tuple(f"t{rng.randrange(3)}" for _ in rows))


def run_of(out: Outcomes, **totals: Any) -> SimulatedRun:
    """A run of one replica."""
    return SimulatedRun(out, [ReplicaTotals(**totals)], max(out.ends))


def slow_percentile(values: list[float], point: float) -> float:
    """The smallest value that at least so many per cent do not exceed."""
    return min(one for one in values if 100 * sum(other <= one for other in values) >= point * len(values))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_percentiles_are_of_the_nearest_rank(values: list[float]) -> None:
    made = spread(np.array(values))
    assert made["mean"] == pytest.approx(fmean(values))
    assert [made[f"p{point}"] for point in (50, 90, 99)] == [slow_percentile(values, point) for point in (50, 90, 99)]


def test_latencies_are_those_of_their_definitions() -> None:
    out = outcomes((1, 2, 3, 13, 10, 11), (2, 4, 9, 9, 10, 1), (5, NEVER, NEVER, 5, 10, 0))
    facts = summarise(run_of(out), {"ttft": 3.0, "tpot": 1.0})
    assert facts["ttft"]["count"] == 2 and facts["ttft"]["mean"] == pytest.approx((2 + 7) / 2)
    assert facts["tpot"]["count"] == 1 and facts["tpot"]["mean"] == pytest.approx(1.0)
    assert facts["e2e"]["mean"] == pytest.approx((12 + 7) / 2)
    assert facts["queue"]["mean"] == pytest.approx((1 + 2) / 2)
    assert facts["requests"] == {"came": 3, "served": 2, "refused": 1, "error": 1}
    assert facts["goodput"]["requests"] == 1 and facts["goodput"]["share"] == pytest.approx(1 / 3)
    assert facts["goodput"]["met"] == {"ttft": pytest.approx(1 / 3), "tpot": pytest.approx(2 / 3)}
    assert facts["throughput"]["output_tokens_per_s"] == pytest.approx(12 / 12)
    assert facts["preemptions"] == {"count": 1, "requests": 1, "most": 1, "restarts": 0}


def test_a_request_without_a_first_token_misses_its_objective_and_one_of_one_token_has_no_pace_to_miss() -> None:
    outs = outcomes((1, 2, NEVER, 13, 10, 11), (2, 3, 4, 14, 10, 11), (3, 4, 5, 5, 10, 1))
    unknown = summarise(run_of(outs), {"ttft": 99.0})["goodput"]
    assert unknown["requests"] == 2, "the first of them has no time to its first token"
    pace = summarise(run_of(outs), {"tpot": 99.0})["goodput"]
    assert pace["requests"] == 3


def test_what_it_costs() -> None:
    out = outcomes((0, 0, 1, 1800, 1000, 500))
    facts = summarise(run_of(out, busy_s=900, steps=10, computed_tokens=1500), price_per_hour=4.0)
    assert facts["cost"]["total"] == pytest.approx(2.0)
    assert facts["cost"]["per_million_output_tokens"] == pytest.approx(4000)
    assert facts["replicas"]["busy_share"] == pytest.approx(0.5)
    assert facts["replicas"]["tokens_per_step"] == pytest.approx(150)


def test_a_run_in_which_nothing_was_served_has_no_latencies() -> None:
    facts = summarise(run_of(outcomes((0, NEVER, NEVER, 0, 10, 0))), {"e2e": 1.0}, 1.0)
    assert facts["ttft"]["mean"] is None and facts["cost"]["per_million_output_tokens"] is None
    assert facts["goodput"]["share"] == 0


def test_the_interval_of_a_mean_holds_it_as_often_as_it_says() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(200):
        made = spread(np.array([rng.expovariate(1.0) for _ in range(400)]))
        held += abs(made["mean"] - 1.0) <= made["mean_within"]
    assert held / 200 == pytest.approx(0.95, abs=0.05)


def test_jains_index() -> None:
    assert jain(np.array([3.0, 3.0, 3.0])) == pytest.approx(1.0)
    assert jain(np.array([9.0, 0.0, 0.0])) == pytest.approx(1 / 3)


# --- what a chart is given --------------------------------------------------------------------------


def test_levels_are_the_highest_of_each_span() -> None:
    columns = Columns.of(random_outcomes(3, 300))
    span = float(columns.ends.max())
    made = curves.waiting(columns, span)
    assert len(made) == curves.NUM_BUCKETS
    for place, (_, level) in enumerate(made):
        low, high = place * span / curves.NUM_BUCKETS, (place + 1) * span / curves.NUM_BUCKETS
        times = [low, *(float(t) for t in columns.arrivals if low <= t < high)]
        slow = max(int(((columns.arrivals <= t) & (columns.starts > t)).sum()) for t in times)
        assert level == slow


def test_service_grows_to_all_that_was_served() -> None:
    columns = Columns.of(random_outcomes(4, 200))
    span = float(columns.ends.max())
    grid = np.linspace(0, span, 50)
    for tenant in range(3):
        own = columns.tenants == tenant
        made = curves.service(columns, tenant, grid)
        total = float((columns.prompt_tokens[own] + 2.0 * columns.output_tokens[own]).sum())
        assert made[-1] == pytest.approx(total, rel=1e-6)
        assert (np.diff(made) >= -1e-6).all()


def test_rates_add_up_to_all_tokens() -> None:
    columns = Columns.of(random_outcomes(5, 200))
    span = float(columns.ends.max())
    for points, total in (
        (curves.output_rate(columns, span), columns.output_tokens.sum()),
        (curves.prompt_rate(columns, span), columns.prompt_tokens.sum()),
    ):
        assert sum(y for _, y in points) * span / curves.NUM_BUCKETS == pytest.approx(float(total), rel=1e-3)


def test_a_distribution_rises_to_a_hundred() -> None:
    points = curves.distribution(np.array([3.0, math.nan, 1.0, 2.0]))
    assert points[0] == (1.0, 0.0) and points[-1] == (3.0, 100.0)
    assert points == sorted(points)
    assert curves.distribution(np.array([math.nan])) == []


def test_tokens_in_a_step_are_those_between_samples_and_a_restart_counts_anew() -> None:
    run = run_of(outcomes((0, 0, 1, 100, 10, 5)))
    rows = ((0, 0, 0), (10, 10, 50), (50, 20, 450), (80, 5, 100), (100, 15, 130))
    for time, steps, tokens in rows:
        run.samples.times.append(time)
        run.samples.replicas.append(0)
        run.samples.steps.append(steps)
        run.samples.tokens.append(tokens)
    made = dict(curves.batch(run, 100.0))
    assert list(made.values()) == [5.0, 40.0, 3.0]
