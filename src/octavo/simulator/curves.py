"""Curves: a run over time and its distributions, reduced to the few hundred points that a chart can show.

Owns: the curves, and Spans (what happened between two samples of an engine). Does not: draw (charts, report).
All curves except those from samples are computed from the requests' times, so they are exact at any scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.core.plan import WaitReason
from octavo.simulator.columns import Columns, Points
from octavo.simulator.outcomes import NEVER, SimulatedRun

NUM_BUCKETS = 160  # time buckets of a curve
MIN_BUCKETS, SAMPLES_PER_BUCKET = 20, 6  # of a curve from samples
NUM_QUANTILES = 200  # points of a distribution


def of_engine(run: SimulatedRun, name: str, numbers: Any = None) -> np.ndarray:
    """Return a field of the totals of each sample's engine, or of each of these engines, as floats."""
    values = np.array([getattr(one, name) for one in run.replicas], float)
    taken: np.ndarray = values[np.asarray(run.samples.replicas if numbers is None else numbers, np.int32)]
    return taken


def pool_shares(run: SimulatedRun) -> np.ndarray:
    """Return the share of its KV pool that an engine's running requests hold, for each sample."""
    shares: np.ndarray = np.asarray(run.samples.used, float) / np.maximum(of_engine(run, "num_blocks"), 1)
    return shares


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
    given = columns.first_tokens != NEVER
    grid = np.linspace(0, span, NUM_BUCKETS + 1)
    total = _ramps(columns.first_tokens[given], columns.ends[given], columns.output_tokens[given].astype(float), grid)
    return _points((grid[1:] + grid[:-1]) / 2, np.diff(total) * NUM_BUCKETS / span if span else np.diff(total))


def prompt_rate(columns: Columns, span: float) -> Points:
    """Return prompt tokens per second. A request's prompt tokens count at the time of its first output token."""
    given = columns.first_tokens != NEVER
    counts, edges = np.histogram(
        columns.first_tokens[given], NUM_BUCKETS, (0, span or 1.0), weights=columns.prompt_tokens[given].astype(float)
    )
    return _points((edges[1:] + edges[:-1]) / 2, counts * NUM_BUCKETS / (span or 1.0))


def memory(run: SimulatedRun, span: float) -> Points:
    """Return the per cent of the KV pool that running requests hold: the mean of all replicas' samples."""
    if not len(run.samples):
        return []
    places = _buckets(np.asarray(run.samples.times), span)
    sums, counts = np.bincount(places, pool_shares(run), NUM_BUCKETS), np.bincount(places, minlength=NUM_BUCKETS)
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
class Spans:
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
    def of(run: SimulatedRun) -> Spans:
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
        return Spans(
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
        grid, sums = self._sums(level, span)
        return _points((grid[1:] + grid[:-1]) / 2, sums * len(sums) / (span or 1.0))

    def share(self, run: SimulatedRun, level: np.ndarray, span: float) -> Points:
        """Return a level in per cent of the engines whose devices are held, in equal intervals of time."""
        grid, sums = self._sums(level, span)
        held = np.full(len(sums), (span or 1.0) / len(sums) * sum(one.up_s is None for one in run.replicas))
        for life in run.lifetimes:
            inside = np.minimum(grid[1:], life.end) - np.maximum(grid[:-1], life.begin)
            held += life.num_engines * np.maximum(0.0, inside)
        return _points((grid[1:] + grid[:-1]) / 2, 100 * np.minimum(1.0, sums / np.maximum(held, 1e-9)))

    def _sums(self, level: np.ndarray, span: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the borders of equal intervals of time, and the integral of a level in each."""
        # One step stands for a second, in which steps differ, so an interval needs several samples.
        count = min(NUM_BUCKETS, max(MIN_BUCKETS, len(self.begins) // SAMPLES_PER_BUCKET))
        grid = np.linspace(0, span or 1.0, count + 1)
        total = _ramps(self.begins, self.ends, level * self.lengths, grid)
        return grid, np.maximum(0.0, np.diff(total))


def bounds_over_time(run: SimulatedRun, span: float) -> dict[str, Points]:
    """Return the per cent of all devices' time by what bounds it; the host's time if the devices wait for it."""
    spans = Spans.of(run)
    if not len(spans.begins):
        return {}
    levels = {name: spans.busy * share / spans.lengths for name, share in spans.shares.items()}
    levels["host"] = np.minimum(spans.host, np.maximum(0.0, spans.lengths - spans.busy)) / spans.lengths
    return {name: spans.share(run, level, span) for name, level in levels.items() if level.any()}


def waits_over_time(run: SimulatedRun, span: float) -> dict[str, Points]:
    """Return the number of waiting requests by what the first of them waits for."""
    spans = Spans.of(run)
    return {name: spans.mean(level, span) for name, level in spans.waiting.items() if level.any()}


def use_over_time(run: SimulatedRun, span: float) -> dict[str, Points]:
    """Return the use of the devices' time and compute, of slots, of the KV pool and of a step's tokens, in per cent."""
    spans = Spans.of(run)
    if not len(spans.begins):
        return {}
    is_known, busy = spans.compute >= 0, np.minimum(1.0, spans.busy / spans.lengths)

    def most(name: str) -> np.ndarray:
        found: np.ndarray = np.maximum(of_engine(run, name, spans.engines), 1)
        return found

    levels = {
        "device busy": busy,
        "compute": np.where(is_known, spans.compute * busy, 0.0),
        "slots": spans.active * spans.rows / most("max_sequences"),
        "KV pool": spans.active * spans.used / most("num_blocks"),
        "step tokens": spans.active * spans.step_tokens / most("max_batch_tokens"),
    }
    return {
        name: spans.share(run, level, span) for name, level in levels.items() if name != "compute" or is_known.any()
    }


def transfers_over_time(run: SimulatedRun, span: float) -> dict[str, Points]:
    """Return the requests whose KV waits for blocks or for the link, or crosses it: the most in each interval."""
    if not run.transfers:
        return {}
    handed, reserved, begins, ends = np.array([one[-4:] for one in run.transfers]).T
    return {
        "wait for blocks": _level(handed, reserved, span),
        "wait for the link": _level(reserved, begins, span),
        "in transfer": _level(begins, ends, span),
    }


def replicas_over_time(run: SimulatedRun, span: float) -> dict[str, Points]:
    """Return the replicas of each scaled group by status: the most in each interval."""
    curves = {}
    for group in dict.fromkeys(life.group for life in run.lifetimes):
        lives = [life for life in run.lifetimes if life.group == group]
        for status, times in (
            ("ready", [(life.ready, life.drained) for life in lives]),
            ("starting", [(life.begin, min(life.ready, life.end)) for life in lives]),
            ("draining", [(life.drained, life.end) for life in lives]),
        ):
            inside = np.array([(begin, min(end, span)) for begin, end in times if begin < min(end, span)])
            if len(inside):
                curves[f"{group} {status}".lstrip()] = _level(inside[:, 0], inside[:, 1], span)
    return curves


def service(columns: Columns, tenant: int, grid: np.ndarray) -> np.ndarray:
    """Return a tenant's service up to each time. Prompt tokens count at the first step, output tokens (twice) later."""
    own = (columns.tenants == tenant) & (columns.starts != NEVER)
    starts = np.sort(columns.starts[own])
    order = np.argsort(columns.starts[own], kind="stable")
    prompts = np.concatenate([[0.0], np.cumsum(columns.prompt_tokens[own][order])])
    given = own & (columns.first_tokens != NEVER)
    outputs = _ramps(columns.first_tokens[given], columns.ends[given], 2.0 * columns.output_tokens[given], grid)
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
