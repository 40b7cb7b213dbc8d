"""Computes the figures of a deployment: its groups of replicas, how they were scaled, and KV transfers.

Owns: the seconds in which devices were held; figures by group; what start-ups cost. Does not: define latencies
(columns).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from octavo.simulator.columns import METRICS, Columns, Facts, spread
from octavo.simulator.outcomes import NEVER, ReplicaTotals, SimulatedRun
from octavo.simulator.scaling import ReplicaLifetime

_FIRST = ("ttft", "queue")  # of the replica that made the first token


def up_seconds(run: SimulatedRun, span: float) -> list[float]:
    """Return the seconds in which the devices of each engine were held."""
    return [span if one.up_s is None else one.up_s for one in run.replicas]


def most_held(totals: Sequence[ReplicaTotals]) -> float:
    """Return the largest share of an engine's KV pool that was held at once."""
    return max((one.max_blocks_used / one.num_blocks for one in totals if one.num_blocks), default=0.0)


def price_of(price: float | Mapping[str, float], group: str) -> float:
    """Return the price of an engine of a group."""
    return price if isinstance(price, float | int) else price[group]


def describe_groups(
    run: SimulatedRun, columns: Columns, span: float, price: float | Mapping[str, float]
) -> dict[str, Facts]:
    """Return the figures of each group of replicas; none unless there are several groups."""
    names = list(dict.fromkeys(one.group for one in run.replicas))
    if len(names) < 2:
        return {}
    group_of = np.array([names.index(one.group) for one in run.replicas], np.int32)
    served_by, first_by = (
        np.where(numbers >= 0, group_of[numbers], -1) for numbers in (columns.replicas, columns.first_replicas)
    )
    groups = {}
    for index, name in enumerate(names):
        own, own_first = served_by == index, first_by == index
        engines = [
            (one, up_s) for one, up_s in zip(run.replicas, up_seconds(run, span), strict=True) if one.group == name
        ]
        total_s = sum(up_s for _, up_s in engines)
        groups[name] = {
            "engines": len(engines), "requests": int((own | own_first).sum()),
            **{name: spread(columns.latency(name)[own_first if name in _FIRST else own]) for name in METRICS},
            "output_tokens": sum(one.output_tokens for one, _ in engines),
            "busy_share": sum(one.busy_s for one, _ in engines) / total_s if total_s > 0 else 0.0,
            "kv_use_most": most_held([one for one, _ in engines]),
            "preemptions": sum(one.preemptions for one, _ in engines),
            "hours": total_s / 3600, "cost": price_of(price, name) * total_s / 3600,
        }  # fmt: skip
    return groups


def describe_scaling(run: SimulatedRun, columns: Columns) -> Facts:
    """Return the figures of scaled groups, and how long requests waited for their first step while a replica started.

    None of them if no group is scaled. Hours are counted from the first arrival to the last end.
    """
    if not run.lifetimes or not len(columns.arrivals):
        return {}
    first, last = float(columns.arrivals[0]), run.duration
    waits = _start_waits(run.lifetimes, columns)
    return {
        "groups": {
            group: _describe_lives([life for life in run.lifetimes if life.group == group], first, last)
            for group in dict.fromkeys(life.group for life in run.lifetimes)
        },
        "start_waits": spread(np.where(waits > 0, waits, np.nan)),
    }


def _describe_lives(lives: Sequence[ReplicaLifetime], first: float, last: float) -> Facts:
    def seconds(times: Sequence[tuple[float, float]]) -> float:
        return sum(max(0.0, min(end, last) - max(begin, first)) for begin, end in times)

    ready_s = seconds([(life.ready, life.drained) for life in lives])
    ins = sorted([(life.ready, 1) for life in lives if life.ready < min(life.drained, last)])
    outs = [(life.drained, -1) for life in lives if life.ready < life.drained <= last]
    levels = np.cumsum([change for _, change in sorted([*ins, *outs])])
    return {
        "ready_mean": ready_s / (last - first) if last > first else float(levels[0]) if len(levels) else 0.0,
        "ready_most": int(levels.max(initial=0)),
        "starts": sum(life.begin > 0 for life in lives), "drained": sum(life.drained <= last for life in lives),
        "hours": seconds([(life.begin, life.end) for life in lives]) / 3600,
        "starting_hours": seconds([(life.begin, min(life.ready, life.end)) for life in lives]) / 3600,
    }  # fmt: skip


def _start_waits(lives: Sequence[ReplicaLifetime], columns: Columns) -> np.ndarray:
    """Return, for each request, the seconds before its first step in which some replica was starting."""
    borders, total = [0.0], [0.0]
    for begin, end in sorted((life.begin, min(life.ready, life.end)) for life in lives):
        begin = max(begin, borders[-1])
        if end > begin:
            borders += [begin, end]
            total += [total[-1], total[-1] + end - begin]
    stops = np.where(columns.starts == NEVER, columns.ends, columns.starts)
    waits: np.ndarray = np.interp(stops, borders, total) - np.interp(columns.arrivals, borders, total)
    return waits


def describe_transfers(run: SimulatedRun, span: float) -> Facts:
    """Return the figures of KV transfers; none of them without any.

    A transfer waits for blocks at the decode replica (`block_wait`), then for both ports (`link_wait`).
    `sending` and `receiving` are the shares of time in which a port of these engines was in use.
    """
    moved = run.transfers
    if not moved:
        return {}
    handed, reserved, begins, ends = np.array([one[-4:] for one in moved]).T
    busy_s, up = float((ends - begins).sum()), up_seconds(run, span)

    def share(numbers: set[int]) -> float:
        held = sum(up[number] for number in sorted(numbers))
        return busy_s / held if held > 0 else 0.0

    return {
        "count": len(moved), "tokens": sum(one.tokens for one in moved), "bytes": sum(one.num_bytes for one in moved),
        "time": spread(ends - begins), "block_wait": spread(reserved - handed), "link_wait": spread(begins - reserved),
        "gap": spread(ends - handed),
        "sending": share({one.source for one in moved}), "receiving": share({one.target for one in moved}),
    }  # fmt: skip
