"""Curves of a simulation over its time: distributions, latencies, queue, batch, memory, service by tenant.

Owns: reducing a run's columns to the few hundred points that a chart can show. Does not: draw (charts).
Everything but memory and batch is derived from the requests' own times, so it is exact at any scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.simulator.outcomes import NEVER, SimulatedRun
from octavo.simulator.summary import Columns

NUM_BUCKETS = 160
NUM_QUANTILES = 200
Points = list[tuple[float, float]]


def distribution(values: np.ndarray) -> Points:
    """Return the cumulative distribution: (value, per cent of requests up to it)."""
    ordered = np.sort(values[~np.isnan(values)])
    if not len(ordered):
        return []
    shares = np.concatenate([np.linspace(0, 99, NUM_QUANTILES), [99.5, 99.9, 100]])
    places = np.maximum(0, np.ceil(shares / 100 * len(ordered)).astype(int) - 1)
    return _points(ordered[places], shares)


def over_time(columns: Columns, name: str, point: float, span: float) -> Points:
    """Return a percentile of a latency over the time of arrival, in equal spans; empty spans are left out."""
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
    """Return output tokens a second: each request's are spread evenly between its first token and its end."""
    given = columns.firsts != NEVER
    grid = np.linspace(0, span, NUM_BUCKETS + 1)
    total = _ramps(columns.firsts[given], columns.ends[given], columns.outputs[given].astype(float), grid)
    return _points((grid[1:] + grid[:-1]) / 2, np.diff(total) * NUM_BUCKETS / span if span else np.diff(total))


def prompt_rate(columns: Columns, span: float) -> Points:
    """Return prompt tokens a second, each request's at its first token."""
    given = columns.firsts != NEVER
    counts, edges = np.histogram(
        columns.firsts[given], NUM_BUCKETS, (0, span or 1.0), weights=columns.prompts[given].astype(float)
    )
    return _points((edges[1:] + edges[:-1]) / 2, counts * NUM_BUCKETS / (span or 1.0))


def memory(run: SimulatedRun, span: float) -> Points:
    """Return the share of the KV pool that running requests hold, in per cent, the mean of all replicas' samples."""
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
    """Return the tokens computed in a step, the mean over all replicas' steps between samples."""
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
    """Return a tenant's service up to each time: prompts when first scheduled, twice the outputs when generated."""
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
    """Return the number of requests that are in, the highest of each span."""
    times = np.concatenate([ins, outs])
    steps = np.concatenate([np.ones(len(ins)), -np.ones(len(outs))])
    order = np.lexsort((steps, times))  # at equal times, those that leave are first
    levels = np.cumsum(steps[order])
    places = _buckets(times[order], span)
    highest = np.zeros(NUM_BUCKETS)
    np.maximum.at(highest, places, levels)
    ends = np.searchsorted(places, np.arange(NUM_BUCKETS), side="left")
    carried = np.where(ends > 0, levels[np.maximum(ends - 1, 0)], 0) if len(levels) else np.zeros(NUM_BUCKETS)
    return _points((np.arange(NUM_BUCKETS) + 0.5) * span / NUM_BUCKETS, np.maximum(highest, carried))


def _ramps(begins: np.ndarray, ends: np.ndarray, amounts: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return the sum of all amounts up to each grid time, each spread evenly between its two times."""
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
