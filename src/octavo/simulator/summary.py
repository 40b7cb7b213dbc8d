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

from octavo.core.plan import WaitReason
from octavo.core.request import FinishReason
from octavo.simulator.outcomes import NEVER, Outcomes, ReplicaTotals, SimulatedRun

POINTS = (50, 90, 95, 99)
METRICS = ("ttft", "tpot", "e2e", "queue")
NUM_BATCHES = 20
STUDENT_T = 2.093  # two-sided 95 % for 19 degrees of freedom
MAX_TENANTS = 50
NUM_BUCKETS = 160  # time buckets of a curve
MIN_BUCKETS, SAMPLES_PER_BUCKET = 20, 6  # of a curve from samples
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
    replicas: np.ndarray
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
            ordered(out.replicas),
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


def summarise(
    run: SimulatedRun,
    objectives: Mapping[str, float] | None = None,
    price_per_hour: float | Mapping[str, float] = 0.0,
) -> Facts:
    """Return all figures of a run as plain values. `objectives` maps latencies to bounds in seconds.

    `price_per_hour` is the price of one engine, or has it by the name of the engine's group.
    """
    columns = Columns.of(run.outcomes)
    span = run.duration - float(columns.arrivals[0]) if len(columns.arrivals) else 0.0
    facts: Facts = {
        "requests": _requests(columns),
        "span_s": span,
        **{name: spread(columns.latency(name)) for name in METRICS},
        "throughput": _throughput(columns, span),
        "replicas": _replicas(run, span),
        "limits": _limits(run, span),
        "cache": _cache(run),
        "preemptions": _preemptions(run.outcomes),
        "tenants": _tenants(run.outcomes, columns),
        "cost": _cost(run, columns, span, price_per_hour),
        "groups": _groups(run, columns, span, price_per_hour),
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
    totals, up = run.replicas, _up(run, span)
    busy = [one.busy_s / up_s if up_s > 0 else 0.0 for one, up_s in zip(totals, up, strict=True)]
    steps = sum(one.steps for one in totals)
    used = _pool_shares(run)
    blocks, total_s = max((one.num_blocks for one in totals), default=0), sum(up)
    return {
        "count": len(totals), "busy_share": sum(one.busy_s for one in totals) / total_s if total_s > 0 else 0.0,
        "busy_share_least": min(busy, default=0.0), "busy_share_most": max(busy, default=0.0),
        "host_s": sum(one.host_s for one in totals), "steps": steps,
        "tokens_per_step": sum(one.computed_tokens for one in totals) / steps if steps else 0.0,
        "step_s": sum(one.busy_s for one in totals) / steps if steps else 0.0,
        "num_blocks": blocks, "kv_use_most": _most_held(totals),
        "kv_use_mean": float(used.mean()) if len(used) else None,
        "failures": sum(one.failures for one in totals), "down_s": sum(one.down_s for one in totals),
    }  # fmt: skip


def _up(run: SimulatedRun, span: float) -> list[float]:
    """Return the seconds in which the devices of each engine were held."""
    return [span if one.up_s is None else one.up_s for one in run.replicas]


def _most_held(totals: Sequence[ReplicaTotals]) -> float:
    """Return the largest share of an engine's KV pool that was held at once."""
    return max((one.max_blocks_used / one.num_blocks for one in totals if one.num_blocks), default=0.0)


def _of_engine(run: SimulatedRun, name: str, numbers: Any = None) -> np.ndarray:
    """Return a field of the totals of each sample's engine, or of each of these engines, as floats."""
    values = np.array([getattr(one, name) for one in run.replicas], float)
    taken: np.ndarray = values[np.asarray(run.samples.replicas if numbers is None else numbers, np.int32)]
    return taken


def _pool_shares(run: SimulatedRun) -> np.ndarray:
    """Return the share of its KV pool that an engine's running requests hold, for each sample."""
    shares: np.ndarray = np.asarray(run.samples.used, float) / np.maximum(_of_engine(run, "num_blocks"), 1)
    return shares


def _cache(run: SimulatedRun) -> Facts:
    queried, hit = sum(one.queried_tokens for one in run.replicas), sum(one.hit_tokens for one in run.replicas)
    return {
        "queried_tokens": queried, "hit_tokens": hit, "hit_rate": hit / queried if queried else 0.0,
        "requests_with_keys": run.outcomes.num_keyed,
    }  # fmt: skip


def _limits(run: SimulatedRun, span: float) -> Facts:
    """Return what bounds the run: shares of time by bound, mean waiting requests by reason, and the use of limits.

    `time`, `waiting`, and `compute` (the share of the device's compute, while it is busy) come from samples.
    """
    totals, spans = run.replicas, _Spans.of(run)
    steps, total_s = sum(one.steps for one in totals) or 1, sum(_up(run, span))
    sequences = max((one.max_sequences for one in totals), default=0)
    tokens = max((one.max_batch_tokens for one in totals), default=0)
    shares = {name: float((spans.busy * share).sum()) / total_s for name, share in spans.shares.items() if total_s > 0}
    busy_s = float(spans.busy[spans.compute >= 0].sum())
    used_s = float((spans.busy * spans.compute)[spans.compute >= 0].sum())
    waiting = {name: float((level * spans.lengths).sum()) / span for name, level in spans.waiting.items() if span > 0}
    return {
        "time": shares, "waiting": {name: level for name, level in waiting.items() if level},
        "compute": used_s / busy_s if busy_s else None,
        "max_sequences": sequences, "max_batch_tokens": tokens,
        "sequences_per_step": sum(one.rows for one in totals) / steps,
        "at_max_sequences": sum(one.steps_at_max_sequences for one in totals) / steps,
        "at_max_batch_tokens": sum(one.steps_at_max_batch_tokens for one in totals) / steps,
    }  # fmt: skip


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


def _cost(run: SimulatedRun, columns: Columns, span: float, price: float | Mapping[str, float]) -> Facts:
    prices = [_price_of(price, one.group) for one in run.replicas]
    total = sum(each * up_s for each, up_s in zip(prices, _up(run, span), strict=True)) / 3600
    served, output = int(columns.served.sum()), int(columns.outputs.sum())
    tokens = output + int(columns.prompts[columns.served].sum())
    return {
        "price_per_hour": total / span * 3600 if span > 0 else sum(prices), "total": total,
        "per_million_output_tokens": total / output * 1e6 if output else None,
        "per_million_tokens": total / tokens * 1e6 if tokens else None,
        "per_thousand_requests": total / served * 1e3 if served else None,
    }  # fmt: skip


def _price_of(price: float | Mapping[str, float], group: str) -> float:
    return price if isinstance(price, float | int) else price[group]


def _groups(run: SimulatedRun, columns: Columns, span: float, price: float | Mapping[str, float]) -> dict[str, Facts]:
    """Return the figures of each group of replicas; none unless there are several groups."""
    names = list(dict.fromkeys(one.group for one in run.replicas))
    if len(names) < 2:
        return {}
    group_of = np.array([names.index(one.group) for one in run.replicas], np.int32)
    of_request = np.where(columns.replicas >= 0, group_of[columns.replicas], -1)
    groups = {}
    for index, name in enumerate(names):
        own = of_request == index
        engines = [(one, up_s) for one, up_s in zip(run.replicas, _up(run, span), strict=True) if one.group == name]
        total_s = sum(up_s for _, up_s in engines)
        groups[name] = {
            "engines": len(engines), "requests": int(own.sum()),
            **{metric: spread(columns.latency(metric)[own]) for metric in METRICS},
            "output_tokens": sum(one.output_tokens for one, _ in engines),
            "busy_share": sum(one.busy_s for one, _ in engines) / total_s if total_s > 0 else 0.0,
            "kv_use_most": _most_held([one for one, _ in engines]),
            "preemptions": sum(one.preemptions for one, _ in engines),
            "hours": total_s / 3600, "cost": _price_of(price, name) * total_s / 3600,
        }  # fmt: skip
    return groups


def _goodput(columns: Columns, span: float, objectives: Mapping[str, float]) -> Facts:
    met = {name: ~(columns.latency(name) > bound) for name, bound in objectives.items()}
    good = columns.served.copy()
    for name, bound in objectives.items():
        good &= within(columns, name, bound)
    count, came = int(good.sum()), len(good)
    return {
        "objectives": dict(objectives), "requests": count, "share": count / came if came else 0.0,
        "requests_per_s": count / span if span > 0 else 0.0,
        "met": {name: int((kept & columns.served).sum()) / came if came else 0.0 for name, kept in met.items()},
    }  # fmt: skip


def within(columns: Columns, name: str, bound: float) -> np.ndarray:
    """Return True for each request whose latency is at most `bound` seconds.

    A one-token answer has no tpot, so it cannot miss a tpot bound. A missing ttft misses its bound.
    """
    values = columns.latency(name)
    kept: np.ndarray = columns.served & ((values <= bound) | (np.isnan(values) & (name == "tpot")))
    return kept


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
    if not len(run.samples):
        return []
    places = _buckets(np.asarray(run.samples.times), span)
    sums, counts = np.bincount(places, _pool_shares(run), NUM_BUCKETS), np.bincount(places, minlength=NUM_BUCKETS)
    seen = counts > 0
    at = (np.arange(NUM_BUCKETS) + 0.5) * span / NUM_BUCKETS
    return _points(at[seen], 100 * sums[seen] / counts[seen])


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


@dataclass(frozen=True, slots=True)
class _Spans:
    """The times between two samples of a replica, and what happened in them, for all replicas.

    `busy` and `host` are seconds, `active` the share of time in which either passed. `shares` (of busy, by what bounds
    it), `waiting` (requests, by reason), `rows`, `used` and `compute` (-1: unknown) are those at the span's begin.
    `step_tokens` is the mean of its steps. `engines` are numbers.
    """

    engines: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    busy: np.ndarray
    host: np.ndarray
    shares: dict[str, np.ndarray]
    waiting: dict[str, np.ndarray]
    rows: np.ndarray
    used: np.ndarray
    compute: np.ndarray
    step_tokens: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Return seconds."""
        lengths: np.ndarray = np.maximum(self.ends - self.begins, 1e-9)
        return lengths

    @property
    def active(self) -> np.ndarray:
        """Return the shares of time in which the device or the host worked."""
        active: np.ndarray = np.minimum(1.0, (self.busy + self.host) / self.lengths)
        return active

    @staticmethod
    def of(run: SimulatedRun) -> _Spans:
        """Read a run's samples. A replica's last span lasts until the end of the run."""
        samples, num_parts = run.samples, len(run.samples.part_names)
        columns: dict[str, list[np.ndarray]] = {name: [] for name in ("begins", "ends", "busy", "host", "step_tokens")}
        order = np.argsort(np.asarray(samples.replicas, np.int32), kind="stable")
        for number, totals in enumerate(run.replicas):
            own = order[np.asarray(samples.replicas, np.int32)[order] == number]
            times = np.append(np.asarray(samples.times)[own], run.duration)
            columns["begins"].append(times[:-1])
            columns["ends"].append(times[1:])
            columns["busy"].append(np.diff(np.append(np.asarray(samples.busy_s)[own], totals.busy_s)))
            columns["host"].append(np.diff(np.append(np.asarray(samples.host_s)[own], totals.host_s)))
            tokens, steps = (np.diff(np.asarray(column)[own]) for column in (samples.tokens, samples.steps))
            per_step = np.where(steps > 0, tokens / np.maximum(steps, 1), 0.0)  # steps fall when a replica restarts
            columns["step_tokens"].append(np.append(per_step, per_step[-1:] if len(per_step) else np.zeros(len(own))))
        flat = {name: np.concatenate(column) if column else np.zeros(0) for name, column in columns.items()}
        parts = np.asarray(samples.parts, float).reshape(-1, num_parts or 1)[order]
        sums = parts.sum(axis=1)
        planned = np.flatnonzero(sums > 0)
        nearest = np.searchsorted(planned, np.arange(len(sums))).clip(0, max(len(planned) - 1, 0))
        mix = parts[planned[nearest]] / sums[planned[nearest]][:, None] if len(planned) else np.zeros_like(parts)
        waiting, reasons = np.asarray(samples.waiting, float)[order], np.asarray(samples.reasons)[order]
        found = [reason for reason in WaitReason if (reasons == reason).any()]
        return _Spans(
            engines=np.asarray(samples.replicas, np.int32)[order],
            **flat,
            shares={name: mix[:, index] for index, name in enumerate(samples.part_names)},
            waiting={reason.name.lower(): np.where(reasons == reason, waiting, 0.0) for reason in found},
            rows=np.asarray(samples.rows, float)[order],
            used=np.asarray(samples.used, float)[order],
            compute=np.asarray(samples.compute, float)[order],
        )

    def mean(self, level: np.ndarray, span: float) -> Points:
        """Return the sum over replicas of a level, in equal intervals of time."""
        # One step stands for a second, in which steps differ, so an interval needs several samples.
        count = min(NUM_BUCKETS, max(MIN_BUCKETS, len(self.begins) // SAMPLES_PER_BUCKET))
        grid = np.linspace(0, span or 1.0, count + 1)
        total = _ramps(self.begins, self.ends, level * self.lengths, grid)
        return _points((grid[1:] + grid[:-1]) / 2, np.maximum(0.0, np.diff(total)) * count / (span or 1.0))


def bounds_over_time(run: SimulatedRun, span: float) -> dict[str, Points]:
    """Return the per cent of all devices' time by what bounds it; the host's time if the devices wait for it."""
    spans = _Spans.of(run)
    if not len(spans.begins):
        return {}
    each = 100 / len(run.replicas) / spans.lengths
    levels = {name: spans.busy * share * each for name, share in spans.shares.items()}
    levels["host"] = np.minimum(spans.host, np.maximum(0.0, spans.lengths - spans.busy)) * each
    return {name: spans.mean(level, span) for name, level in levels.items() if level.any()}


def waits_over_time(run: SimulatedRun, span: float) -> dict[str, Points]:
    """Return the number of waiting requests by what the first of them waits for."""
    spans = _Spans.of(run)
    return {name: spans.mean(level, span) for name, level in spans.waiting.items() if level.any()}


def use_over_time(run: SimulatedRun, span: float) -> dict[str, Points]:
    """Return the use of the devices' time and compute, of slots, of the KV pool and of a step's tokens, in per cent."""
    spans = _Spans.of(run)
    if not len(spans.begins):
        return {}
    each, is_known = 100 / len(run.replicas), spans.compute >= 0

    def most(name: str) -> np.ndarray:
        found: np.ndarray = np.maximum(_of_engine(run, name, spans.engines), 1)
        return found

    levels = {
        "device busy": np.minimum(1.0, spans.busy / spans.lengths) * each,
        "compute": np.where(is_known, spans.compute * np.minimum(1.0, spans.busy / spans.lengths), 0.0) * each,
        "slots": spans.active * spans.rows / most("max_sequences") * each,
        "KV pool": spans.active * spans.used / most("num_blocks") * each,
        "step tokens": spans.active * spans.step_tokens / most("max_batch_tokens") * each,
    }
    return {name: spans.mean(level, span) for name, level in levels.items() if name != "compute" or is_known.any()}


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
