"""The figures of a simulation: percentiles, goodput, throughput, use of the machines, fairness, cost.

Owns: the figures and their definitions. Does not: draw or print (report, cli). Times are seconds, memory is in blocks.
Percentiles are of the nearest rank. A mean's interval is of batch means: twenty batches in order of arrival, 95 %
(Law and Kelton); it shows how much a longer run might move the mean, not how accurate the cost model is.
Invariant: a request that was refused, or never answered, meets no objective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.core.request import FinishReason
from octavo.simulator.outcomes import NEVER, Outcomes, SimulatedRun

POINTS = (50, 90, 95, 99)
METRICS = ("ttft", "tpot", "e2e", "queue")
OBJECTIVES = ("ttft", "tpot", "e2e", "queue")
NUM_BATCHES = 20
STUDENT_T = 2.093  # two-sided 95 % for 19 degrees of freedom
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Columns:
    """Outcomes as numpy arrays, in order of arrival; a latency is NaN if a request has none."""

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
    def of(outcomes: Outcomes) -> Columns:
        """Convert outcomes."""
        order = np.argsort(_array(outcomes.arrivals, float), kind="stable")
        reasons = _array(outcomes.reasons, np.int8)[order]
        return Columns(
            _array(outcomes.arrivals, float)[order],
            _array(outcomes.starts, float)[order],
            _array(outcomes.first_tokens, float)[order],
            _array(outcomes.ends, float)[order],
            _array(outcomes.prompt_tokens, np.int32)[order],
            _array(outcomes.output_tokens, np.int32)[order],
            _array(outcomes.longest, np.int32)[order],
            _array(outcomes.tenants, np.int32)[order],
            reasons,
            np.isin(reasons, (FinishReason.STOP, FinishReason.LENGTH)),
        )

    def latency(self, name: str) -> np.ndarray:
        """Return seconds by request: ttft, tpot (per token after the first), e2e, or queue (to the first step)."""
        if name == "ttft":
            return np.where(self.firsts != NEVER, self.firsts - self.arrivals, np.nan)
        if name == "queue":
            return np.where(self.starts != NEVER, self.starts - self.arrivals, np.nan)
        if name == "e2e":
            return np.where(self.served, self.ends - self.arrivals, np.nan)
        has_pace = self.served & (self.longest > 1) & (self.firsts != NEVER)
        return np.where(has_pace, (self.ends - self.firsts) / np.maximum(self.longest - 1, 1), np.nan)


def summarise(run: SimulatedRun, objectives: Mapping[str, float] | None = None, price_per_hour: float = 0.0) -> Facts:
    """Return all figures of a run as plain values. `price_per_hour` is one replica's; objectives: seconds by name."""
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
    """Return count, mean with its interval, percentiles and maximum of the values that are not NaN."""
    given = values[~np.isnan(values)]
    if not len(given):
        return {"count": 0, "mean": None, **{f"p{point}": None for point in POINTS}, "max": None}
    ordered = np.sort(given)
    ranks = {f"p{point}": float(ordered[nearest_rank(point, len(ordered))]) for point in POINTS}
    return {
        "count": len(given), "mean": float(given.mean()), "mean_within": _half_width(given), **ranks,
        "max": float(ordered[-1]),
    }  # fmt: skip


def nearest_rank(point: float, count: int) -> int:
    """Return the index of a percentile in `count` sorted values: the first that `point` per cent do not exceed."""
    return max(0, math.ceil(point / 100 * count) - 1)


def jain(values: np.ndarray) -> float:
    """Return Jain's index of shares (Jain, Chiu and Hawe, 1984): 1 if all are equal, 1 / n if one has all."""
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
    """Return the use of the machines: shares of the span in which devices computed, and of the pool that was held."""
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
    counts = _array(outcomes.preemptions, np.int32)
    return {
        "count": int(counts.sum()), "requests": int((counts > 0).sum()), "most": int(counts.max(initial=0)),
        "restarts": int(_array(outcomes.restarts, np.int32).sum()),
    }  # fmt: skip


def _tenants(outcomes: Outcomes, columns: Columns) -> Facts:
    """Return service by tenant: prompt tokens and twice the output's, as the fair policy counts; the 50 most served."""
    names = outcomes.tenant_names
    service = np.bincount(columns.tenants, columns.prompts + 2.0 * columns.outputs, minlength=len(names))
    ttft, e2e = columns.latency("ttft"), columns.latency("e2e")
    listed = {}
    for tenant in np.argsort(-service, kind="stable")[:50]:
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
        # An answer of one token has no tpot to miss; without a first token there is no ttft.
        good &= kept & (~np.isnan(columns.latency(name)) if name != "tpot" else True)
    count, came = int(good.sum()), len(good)
    return {
        "objectives": dict(objectives), "requests": count, "share": count / came if came else 0.0,
        "requests_per_s": count / span if span > 0 else 0.0,
        "met": {name: int((kept & columns.served).sum()) / came if came else 0.0 for name, kept in met.items()},
    }  # fmt: skip


def _array(column: Any, dtype: Any) -> np.ndarray:
    return np.asarray(column, dtype=dtype)
