"""Computes a simulation's figures: latencies, goodput, throughput, utilisation, fairness, cost.

Owns: the figures and their definitions. Does not: define latencies (columns), draw or print (charts, report). Times are
seconds, memory is in blocks. Invariant: a request that was refused, or never answered, meets no objective.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from octavo.core.request import FinishReason
from octavo.simulator.columns import METRICS, Columns, Facts, spread, within
from octavo.simulator.curves import Spans, pool_shares
from octavo.simulator.deployment import (
    describe_groups,
    describe_scaling,
    describe_transfers,
    most_held,
    price_of,
    up_seconds,
)
from octavo.simulator.outcomes import NEVER, Outcomes, SimulatedRun

MAX_TENANTS = 50


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
        "scaling": describe_scaling(run, columns),
        "transfers": describe_transfers(run, span),
        "groups": describe_groups(run, columns, span, price_per_hour),
    }
    if objectives:
        facts["goodput"] = _goodput(columns, span, objectives)
    return facts


def jain(values: np.ndarray) -> float:
    """Return Jain's fairness index (Jain, Chiu and Hawe, 1984): 1 if all n values are equal, 1 / n if one has all."""
    squares = float((values * values).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares else 1.0


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
    prompt, output = int(columns.prompt_tokens[columns.served].sum()), int(columns.output_tokens.sum())
    return {
        "requests_per_s": int(columns.served.sum()) * per_s,
        "prompt_tokens": prompt, "output_tokens": output,
        "prompt_tokens_per_s": prompt * per_s, "output_tokens_per_s": output * per_s,
    }  # fmt: skip


def _replicas(run: SimulatedRun, span: float) -> Facts:
    """Return utilisation: the share of time in which the devices computed, and the share of the pool in use."""
    totals, up = run.replicas, up_seconds(run, span)
    busy = [one.busy_s / up_s if up_s > 0 else 0.0 for one, up_s in zip(totals, up, strict=True)]
    steps = sum(one.steps for one in totals)
    used = pool_shares(run)
    blocks, total_s = max((one.num_blocks for one in totals), default=0), sum(up)
    return {
        "count": len(totals), "busy_share": sum(one.busy_s for one in totals) / total_s if total_s > 0 else 0.0,
        "busy_share_least": min(busy, default=0.0), "busy_share_most": max(busy, default=0.0),
        "host_s": sum(one.host_s for one in totals), "steps": steps,
        "tokens_per_step": sum(one.computed_tokens for one in totals) / steps if steps else 0.0,
        "step_s": sum(one.busy_s for one in totals) / steps if steps else 0.0,
        "num_blocks": blocks, "kv_use_most": most_held(totals),
        "kv_use_mean": float(used.mean()) if len(used) else None,
        "failures": sum(one.failures for one in totals), "down_s": sum(one.down_s for one in totals),
    }  # fmt: skip


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
    totals, spans = run.replicas, Spans.of(run)
    steps, total_s = sum(one.steps for one in totals) or 1, sum(up_seconds(run, span))
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
    service = np.bincount(columns.tenants, columns.prompt_tokens + 2.0 * columns.output_tokens, minlength=len(names))
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
    prices = [price_of(price, one.group) for one in run.replicas]
    total = sum(each * up_s for each, up_s in zip(prices, up_seconds(run, span), strict=True)) / 3600
    served, output = int(columns.served.sum()), int(columns.output_tokens.sum())
    tokens = output + int(columns.prompt_tokens[columns.served].sum())
    return {
        "price_per_hour": total / span * 3600 if span > 0 else sum(prices), "total": total,
        "per_million_output_tokens": total / output * 1e6 if output else None,
        "per_million_tokens": total / tokens * 1e6 if tokens else None,
        "per_thousand_requests": total / served * 1e3 if served else None,
    }  # fmt: skip


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
