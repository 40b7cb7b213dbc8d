"""Computes a simulation's figures (percentiles, goodput, throughput, utilisation, fairness, cost) and curves.

Owns: the figures and their definitions; reducing a run to the few hundred points that a chart can show.
Does not: draw or print (charts, report). Times are seconds, memory is in blocks.
Percentiles are of the nearest rank. A mean has a 95 % interval from batch means: twenty batches in order of arrival
(Law and Kelton). The interval shows how much a longer run might change the mean, not the cost model's accuracy. All
curves except memory and batch are computed from the requests' times, so they are exact at any scale.
Invariant: a request that was refused, or never answered, meets no objective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.core.request import FinishReason
from octavo.simulator.outcomes import NEVER, Outcomes, SimulatedRun

POINTS = (50, 90, 95, 99)
METRICS = ("ttft", "tpot", "e2e", "queue")
NUM_BATCHES = 20
STUDENT_T = 2.093  # two-sided 95 % for 19 degrees of freedom
MAX_TENANTS = 50
NUM_BUCKETS = 160  # time buckets of a curve
NUM_QUANTILES = 200  # points of a distribution
Facts = dict[str, Any]
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Columns:
    """Outcomes as numpy arrays, in order of arrival. A latency that a request does not have is NaN."""

    arrivals: np.ndarray
    starts: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray
    prompts: np.ndarray
    outputs: np.ndarray
    longest: np.ndarray
    tenants: np.ndarray
    reasons: np.ndarray
    served: np.ndarray

    @staticmethod
    def of(outcomes: Outcomes, first: int = 0) -> Columns:
        """Convert outcomes from the entry `first` on."""
        out = outcomes
        order = np.argsort(np.asarray(out.arrivals[first:]), kind="stable")

        def ordered(column: Any) -> np.ndarray:
            return np.asarray(column[first:])[order]

        reasons = ordered(out.reasons)
        return Columns(
            ordered(out.arrivals),
            ordered(out.starts),
            ordered(out.first_tokens),
            ordered(out.ends),
            ordered(out.prompt_tokens),
            ordered(out.output_tokens),
            ordered(out.longest),
            ordered(out.tenants),
            reasons,
            np.isin(reasons, (FinishReason.STOP, FinishReason.LENGTH)),
        )

    def latency(self, name: str) -> np.ndarray:
        """Return one latency per request, in seconds: ttft, tpot (per token after the first), e2e, or queue."""
        if name == "ttft":
            return np.where(self.firsts != NEVER, self.firsts - self.arrivals, np.nan)
        if name == "queue":
            return np.where(self.starts != NEVER, self.starts - self.arrivals, np.nan)
        if name == "e2e":
            return np.where(self.served, self.ends - self.arrivals, np.nan)
        has_pace = self.served & (self.longest > 1) & (self.firsts != NEVER)
        return np.where(has_pace, (self.ends - self.firsts) / np.maximum(self.longest - 1, 1), np.nan)


def summarise(run: SimulatedRun, objectives: Mapping[str, float] | None = None, price_per_hour: float = 0.0) -> Facts:
    """Return all figures of a run as plain values. `objectives` maps latencies to bounds in seconds.

    `price_per_hour` is the price of one replica.
    """
    columns = Columns.of(run.outcomes)
    span = run.duration - float(columns.arrivals[0]) if len(columns.arrivals) else 0.0
    facts: Facts = {
        "requests": _requests(columns),
        "span_s": span,
        **{name: spread(columns.latency(name)) for name in METRICS},
        "throughput": _throughput(columns, span),
        "replicas": _replicas(run, span),
        "cache": _cache(run),
        "preemptions": _preemptions(run.outcomes),
        "tenants": _tenants(run.outcomes, columns),
        "cost": _cost(run, columns, span, price_per_hour),
    }
    if objectives:
        facts["goodput"] = _goodput(columns, span, objectives)
    return facts


def spread(values: np.ndarray) -> Facts:
    """Return the count, the mean with its interval, percentiles and the maximum of the values that are not NaN."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {"count": 0, "mean": None, **{f"p{point}": None for point in POINTS}, "max": None}
    ordered = np.sort(known)
    ranks = {f"p{point}": float(ordered[nearest_rank(point, len(ordered))]) for point in POINTS}
    return {
        "count": len(known), "mean": float(known.mean()), "mean_within": _half_width(known), **ranks,
        "max": float(ordered[-1]),
    }  # fmt: skip


def nearest_rank(point: float, count: int) -> int:
    """Return the index of a percentile in `count` sorted values, by the nearest-rank definition."""
    return max(0, math.ceil(point / 100 * count) - 1)


def jain(values: np.ndarray) -> float:
    """Return Jain's fairness index (Jain, Chiu and Hawe, 1984): 1 if all n values are equal, 1 / n if one has all."""
    squares = float((values * values).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares else 1.0


def _half_width(values: np.ndarray) -> float | None:
    if len(values) < 5 * NUM_BATCHES:
        return None
    means = np.array([batch.mean() for batch in np.array_split(values, NUM_BATCHES)])
    return float(STUDENT_T * means.std(ddof=1) / math.sqrt(NUM_BATCHES))


def _requests(columns: Columns) -> Facts:
    names = {reason: reason.name.lower() for reason in FinishReason}
    ended = {name: int((columns.reasons == reason).sum()) for reason, name in names.items()}
    served = int(columns.served.sum())
    refused = int((columns.starts == NEVER)[columns.reasons == FinishReason.ERROR].sum())
    return {
        "came": len(columns.reasons), "served": served, "refused": refused,
        **{name: count for name, count in ended.items() if count and name not in ("stop", "length")},
    }  # fmt: skip


def _throughput(columns: Columns, span: float) -> Facts:
    per_s = 1 / span if span > 0 else 0.0
    prompt, output = int(columns.prompts[columns.served].sum()), int(columns.outputs.sum())
    return {
        "requests_per_s": int(columns.served.sum()) * per_s,
        "prompt_tokens": prompt, "output_tokens": output,
        "prompt_tokens_per_s": prompt * per_s, "output_tokens_per_s": output * per_s,
    }  # fmt: skip


def _replicas(run: SimulatedRun, span: float) -> Facts:
    """Return utilisation: the share of time in which the devices computed, and the share of the pool in use."""
    totals = run.replicas
    busy = [one.busy_s / span if span > 0 else 0.0 for one in totals]
    steps = sum(one.steps for one in totals)
    used = np.frombuffer(run.samples.used, dtype=np.int32) if len(run.samples) else np.zeros(0, np.int32)
    blocks = max((one.num_blocks for one in totals), default=0)
    return {
        "count": len(totals), "busy_share": float(np.mean(busy)) if busy else 0.0,
        "busy_share_least": min(busy, default=0.0), "busy_share_most": max(busy, default=0.0),
        "host_s": sum(one.host_s for one in totals), "steps": steps,
        "tokens_per_step": sum(one.computed_tokens for one in totals) / steps if steps else 0.0,
        "step_s": sum(one.busy_s for one in totals) / steps if steps else 0.0,
        "num_blocks": blocks, "peak_blocks_used": max((one.max_blocks_used for one in totals), default=0),
        "kv_use_mean": float(used.mean()) / blocks if len(used) and blocks else None,
        "failures": sum(one.failures for one in totals), "down_s": sum(one.down_s for one in totals),
    }  # fmt: skip


def _cache(run: SimulatedRun) -> Facts:
    queried, hit = sum(one.queried_tokens for one in run.replicas), sum(one.hit_tokens for one in run.replicas)
    return {"queried_tokens": queried, "hit_tokens": hit, "hit_rate": hit / queried if queried else 0.0}


def _preemptions(outcomes: Outcomes) -> Facts:
    counts = np.asarray(outcomes.preemptions)
    return {
        "count": int(counts.sum()), "requests": int((counts > 0).sum()), "most": int(counts.max(initial=0)),
        "restarts": int(np.asarray(outcomes.restarts).sum()),
    }  # fmt: skip


def _tenants(outcomes: Outcomes, columns: Columns) -> Facts:
    """Return service by tenant, as the fair policy counts it (prompt tokens + 2 x output tokens), most served first."""
    names = outcomes.tenant_names
    service = np.bincount(columns.tenants, columns.prompts + 2.0 * columns.outputs, minlength=len(names))
    ttft, e2e = columns.latency("ttft"), columns.latency("e2e")
    listed = {}
    for tenant in np.argsort(-service, kind="stable")[:MAX_TENANTS]:
        own = columns.tenants == tenant
        listed[names[tenant]] = {
            "requests": int(own.sum()), "service": float(service[tenant]),
            "ttft_mean": spread(ttft[own])["mean"], "ttft_p99": spread(ttft[own])["p99"],
            "e2e_mean": spread(e2e[own])["mean"],
        }  # fmt: skip
    return {"count": len(names), "jain_service": jain(service), "by_name": listed}


def _cost(run: SimulatedRun, columns: Columns, span: float, price_per_hour: float) -> Facts:
    total = price_per_hour * len(run.replicas) * span / 3600
    served, output = int(columns.served.sum()), int(columns.outputs.sum())
    tokens = output + int(columns.prompts[columns.served].sum())
    return {
        "price_per_hour": price_per_hour * len(run.replicas), "total": total,
        "per_million_output_tokens": total / output * 1e6 if output else None,
        "per_million_tokens": total / tokens * 1e6 if tokens else None,
        "per_thousand_requests": total / served * 1e3 if served else None,
    }  # fmt: skip


def _goodput(columns: Columns, span: float, objectives: Mapping[str, float]) -> Facts:
    met = {name: ~(columns.latency(name) > bound) for name, bound in objectives.items()}
    good = columns.served.copy()
    for name, kept in met.items():
        # A one-token answer has no tpot, so it cannot miss a tpot bound. A missing ttft misses its bound.
        good &= kept & (~np.isnan(columns.latency(name)) if name != "tpot" else True)
    count, came = int(good.sum()), len(good)
    return {
        "objectives": dict(objectives), "requests": count, "share": count / came if came else 0.0,
        "requests_per_s": count / span if span > 0 else 0.0,
        "met": {name: int((kept & columns.served).sum()) / came if came else 0.0 for name, kept in met.items()},
    }  # fmt: skip


# --- curves


def distribution(values: np.ndarray) -> Points:
    """Return the cumulative distribution as (value, per cent of requests with at most this value)."""
    ordered = np.sort(values[~np.isnan(values)])
    if not len(ordered):
        return []
    shares = np.concatenate([np.linspace(0, 99, NUM_QUANTILES), [99.5, 99.9, 100]])
    places = np.maximum(0, np.ceil(shares / 100 * len(ordered)).astype(int) - 1)
    return _points(ordered[places], shares)


def over_time(columns: Columns, name: str, point: float, span: float) -> Points:
    """Return a percentile of a latency by time of arrival, in equal intervals; skip intervals without requests."""
    values = columns.latency(name)
    buckets = _buckets(columns.arrivals, span)
    points = []
    for bucket in range(NUM_BUCKETS):
        low, high = np.searchsorted(buckets, (bucket, bucket + 1))
        own = values[low:high]
        own = own[~np.isnan(own)]
        if len(own):
            points.append(((bucket + 0.5) * span / NUM_BUCKETS, float(np.percentile(own, point, method="higher"))))
    return points


def waiting(columns: Columns, span: float) -> Points:
    """Return the number of requests that have arrived and are not yet scheduled."""
    gone = np.where(columns.starts == NEVER, columns.ends, columns.starts)
    return _level(columns.arrivals, gone, span)


def running(columns: Columns, span: float) -> Points:
    """Return the number of requests between their first step and their end, preempted ones included."""
    began = columns.starts != NEVER
    return _level(columns.starts[began], columns.ends[began], span)


def output_rate(columns: Columns, span: float) -> Points:
    """Return output tokens per second. A request's tokens are spread evenly between its first token and its end."""
    given = columns.firsts != NEVER
    grid = np.linspace(0, span, NUM_BUCKETS + 1)
    total = _ramps(columns.firsts[given], columns.ends[given], columns.outputs[given].astype(float), grid)
    return _points((grid[1:] + grid[:-1]) / 2, np.diff(total) * NUM_BUCKETS / span if span else np.diff(total))


def prompt_rate(columns: Columns, span: float) -> Points:
    """Return prompt tokens per second. A request's prompt tokens count at the time of its first output token."""
    given = columns.firsts != NEVER
    counts, edges = np.histogram(
        columns.firsts[given], NUM_BUCKETS, (0, span or 1.0), weights=columns.prompts[given].astype(float)
    )
    return _points((edges[1:] + edges[:-1]) / 2, counts * NUM_BUCKETS / (span or 1.0))


def memory(run: SimulatedRun, span: float) -> Points:
    """Return the per cent of the KV pool that running requests hold: the mean of all replicas' samples."""
    blocks = max((one.num_blocks for one in run.replicas), default=0)
    if not len(run.samples) or not blocks:
        return []
    times, used = np.asarray(run.samples.times), np.asarray(run.samples.used, float)
    places = _buckets(times, span)
    sums, counts = np.bincount(places, used, NUM_BUCKETS), np.bincount(places, minlength=NUM_BUCKETS)
    seen = counts > 0
    at = (np.arange(NUM_BUCKETS) + 0.5) * span / NUM_BUCKETS
    return _points(at[seen], 100 * sums[seen] / counts[seen] / blocks)


def batch(run: SimulatedRun, span: float) -> Points:
    """Return the mean number of tokens per step, over all replicas' steps between two samples."""
    tokens, steps = np.zeros(NUM_BUCKETS), np.zeros(NUM_BUCKETS)
    numbers = np.asarray(run.samples.replicas)
    for number in range(len(run.replicas)):
        own = numbers == number
        places = _buckets(np.asarray(run.samples.times)[own], span)[1:]
        for sums, column in ((tokens, run.samples.tokens), (steps, run.samples.steps)):
            grown = np.diff(np.asarray(column, float)[own])
            np.add.at(sums, places, np.maximum(grown, 0))  # a replica that restarted counts from 0 again
    seen = steps > 0
    at = (np.arange(NUM_BUCKETS) + 0.5) * span / NUM_BUCKETS
    return _points(at[seen], tokens[seen] / steps[seen])


def service(columns: Columns, tenant: int, grid: np.ndarray) -> np.ndarray:
    """Return a tenant's service up to each time. Prompt tokens count at the first step, output tokens (twice) later."""
    own = (columns.tenants == tenant) & (columns.starts != NEVER)
    starts = np.sort(columns.starts[own])
    order = np.argsort(columns.starts[own], kind="stable")
    prompts = np.concatenate([[0.0], np.cumsum(columns.prompts[own][order])])
    given = own & (columns.firsts != NEVER)
    outputs = _ramps(columns.firsts[given], columns.ends[given], 2.0 * columns.outputs[given], grid)
    total: np.ndarray = prompts[np.searchsorted(starts, grid, side="right")] + outputs
    return total


def service_points(columns: Columns, tenant: int, span: float) -> Points:
    """Return a tenant's service over time."""
    grid = np.linspace(0, span, NUM_BUCKETS + 1)
    return _points(grid, service(columns, tenant, grid))


def service_gap(columns: Columns, tenants: Sequence[int], span: float) -> Points:
    """Return the difference in service between the most and the least served of these tenants."""
    grid = np.linspace(0, span, NUM_BUCKETS + 1)
    rows = np.array([service(columns, tenant, grid) for tenant in tenants])
    return _points(grid, rows.max(axis=0) - rows.min(axis=0))


def _level(ins: np.ndarray, outs: np.ndarray, span: float) -> Points:
    """Return the highest number of requests inside, for each interval, from their times of entry and exit."""
    times = np.concatenate([ins, outs])
    steps = np.concatenate([np.ones(len(ins)), -np.ones(len(outs))])
    order = np.lexsort((steps, times))  # at equal times, exits come first
    levels = np.cumsum(steps[order])
    places = _buckets(times[order], span)
    highest = np.zeros(NUM_BUCKETS)
    np.maximum.at(highest, places, levels)
    ends = np.searchsorted(places, np.arange(NUM_BUCKETS), side="left")
    carried = np.where(ends > 0, levels[np.maximum(ends - 1, 0)], 0) if len(levels) else np.zeros(NUM_BUCKETS)
    return _points((np.arange(NUM_BUCKETS) + 0.5) * span / NUM_BUCKETS, np.maximum(highest, carried))


def _ramps(begins: np.ndarray, ends: np.ndarray, amounts: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return the sum of amounts up to each grid time. Each amount is spread evenly from its begin to its end."""
    lengths = np.maximum(ends - begins, 1e-9)
    slopes = amounts / lengths

    def before(times: np.ndarray) -> np.ndarray:
        order = np.argsort(times, kind="stable")
        places = np.searchsorted(times[order], grid, side="right")
        rate = np.concatenate([[0.0], np.cumsum(slopes[order])])
        offset = np.concatenate([[0.0], np.cumsum((slopes * times)[order])])
        made: np.ndarray = rate[places] * grid - offset[places]
        return made

    total: np.ndarray = before(begins) - before(begins + lengths)
    return total


def _buckets(times: np.ndarray, span: float) -> np.ndarray:
    places: np.ndarray = np.clip((times / (span or 1.0) * NUM_BUCKETS).astype(int), 0, NUM_BUCKETS - 1)
    return places


def _points(xs: np.ndarray, ys: np.ndarray) -> Points:
    return [(float(f"{x:.6g}"), float(f"{y:.6g}")) for x, y in zip(xs, ys, strict=True)]
