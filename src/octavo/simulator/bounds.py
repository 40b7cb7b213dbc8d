"""Bounds from below on what a workload needs: the engines of a fleet, and the latencies of each request.

Owns: Demand (what a workload makes an engine compute), and the bounds. Does not: simulate, or know objectives' syntax.
A bound holds for every router and policy. It follows from three facts: a step takes at least its TimeFloor; it has at
most max_sequences rows and max_batch_tokens tokens; and what an objective wants by a time is computed by then, but for
as many requests as the objective lets be late. Whichever those are, they have no more work than the largest ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from octavo.core.limits import Limits
from octavo.simulator.arrival import Arrival, block_keys
from octavo.simulator.cost_model import TimeFloor

# (bounds in seconds by latency, how many requests may be beyond any of them)
Requirement = tuple[Mapping[str, float], int]
LEVELS = 6  # windows have the length of the workload, and of its half, quarter, ...
SLACK_POINTS = (50, 90, 100)  # percentiles of the requests' longest times, added to a window
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests of a workload, in order of arrival, as columns.

    `prompts` counts the prompt tokens that no cache can have, `pairs` the pairs of positions of those. `decodes` counts
    the tokens after the first of all choices, `positions` what they attend to. `tails` counts the tokens after the
    first of the longest choice, `spans` the mean positions of those. `is_timed`: no request follows another.
    """

    times: np.ndarray
    prompts: np.ndarray
    pairs: np.ndarray
    decodes: np.ndarray
    positions: np.ndarray
    tails: np.ndarray
    spans: np.ndarray
    is_timed: bool

    @staticmethod
    def of(arrivals: Iterable[Arrival], limits: Limits) -> Demand:
        """Return the demand on engines with these limits: block size, prefix caching, longest request."""
        rows: list[tuple[float, ...]] = []
        seen: set[bytes] = set()
        is_timed = True
        for arrival in arrivals:
            prompt, is_timed = arrival.prompt_tokens, is_timed and arrival.follows is None
            cached = _cached_tokens(arrival, limits.block_size, seen) if limits.prefix_caching and arrival.keys else 0
            room = max(1, limits.max_model_len - prompt)  # an engine ends longer answers
            tails = [max(0, min(count, room) - 1) for count in arrival.choices or (arrival.output_tokens,)]
            rows.append((
                arrival.time, prompt - cached, prompt * (prompt + 1) / 2 - cached * (cached + 1) / 2, sum(tails),
                sum(tail * prompt + tail * (tail + 1) / 2 for tail in tails), max(tails), prompt + (max(tails) + 1) / 2,
            ))  # fmt: skip
        columns = np.array(rows, float).reshape(-1, 7)
        times, prompts, pairs, decodes, positions, tails, spans = columns[np.argsort(columns[:, 0], kind="stable")].T
        return Demand(times, prompts, pairs, decodes, positions, tails, spans, is_timed)


def _cached_tokens(arrival: Arrival, block_size: int, seen: set[bytes]) -> int:
    """Return the prompt tokens that an earlier request may have computed, all but one at most; add the keys to seen."""
    keys = block_keys(arrival, block_size)
    count = next((number for number, key in enumerate(keys) if key not in seen), len(keys))
    seen.update(keys)
    return max(0, min(count * block_size, arrival.prompt_tokens - 1))


def fewest_engines(
    demand: Demand, requirements: Sequence[Requirement], floors: Sequence[TimeFloor], limits: Limits
) -> float:
    """Return a number of engines below which the requirements cannot be met; infinity if no number meets them."""
    if not len(demand.times) or not floors:
        return 1
    if any(_num_late(demand, bounds, floors, limits) > spare for bounds, spare in requirements):
        return math.inf
    return max([1, *_engines_by_window(demand, requirements, floors, limits)]) if demand.is_timed else 1


def _num_late(demand: Demand, bounds: Mapping[str, float], floors: Sequence[TimeFloor], limits: Limits) -> int:
    """Return how many requests are beyond a bound even if each has an engine of its own."""
    per_row = 1 + limits.max_draft_tokens
    steps = np.ceil(demand.prompts / limits.max_batch_tokens)
    ttft, tpot = np.zeros(len(demand.times)), np.zeros(len(demand.times))
    for floor in floors:
        alone = steps * floor.fixed_s + demand.prompts * floor.token_s + demand.pairs * floor.pair_s
        ttft = np.maximum(ttft, alone)
        tpot = np.maximum(tpot, floor.fixed_s / per_row + floor.token_s + demand.spans * _kv_s(floor, limits))
    latencies = {"ttft": ttft, "tpot": np.where(demand.tails > 0, tpot, 0.0), "e2e": ttft + demand.tails * tpot}
    late = np.zeros(len(demand.times), bool)
    for name, bound in bounds.items():
        if name in latencies:
            late |= latencies[name] * (1 - ROUNDING) > bound
    return int(late.sum())


def _kv_s(floor: TimeFloor, limits: Limits) -> float:
    """Return a decode token's seconds for each position. A row with drafts is priced as a chunk."""
    return min(floor.kv_s, floor.pair_s) if limits.max_draft_tokens else floor.kv_s


def _engines_by_window(
    demand: Demand, requirements: Sequence[Requirement], floors: Sequence[TimeFloor], limits: Limits
) -> Iterator[int]:
    works = list(_works(demand, floors, limits))
    for bounds, spare in _merged(requirements):
        first, whole = _time_limits(demand, bounds)
        if not np.isfinite(first).any():
            continue
        for first_s, whole_s in works:
            yield _most_engines(demand.times, first, whole, first_s, whole_s, spare)


def _merged(requirements: Sequence[Requirement]) -> Iterator[Requirement]:
    """Yield the requirements, and each two of them together: what meets neither is beyond one or the other."""
    yield from requirements
    for (bounds, spare), (others, more) in combinations(requirements, 2):
        if not {*bounds} & {*others}:
            yield {**bounds, **others}, spare + more


def _works(demand: Demand, floors: Sequence[TimeFloor], limits: Limits) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield seconds of an engine for each request: up to its first token, and in all.

    Of a step's fixed seconds, each of its rows has an equal share, or each of its tokens.
    """
    rows = limits.max_sequences * (1 + limits.max_draft_tokens)
    for floor in floors:
        for per_row, per_token in ((floor.fixed_s / rows, 0.0), (0.0, floor.fixed_s / limits.max_batch_tokens)):
            token_s = floor.token_s + per_token
            first_s = per_row + demand.prompts * token_s + demand.pairs * floor.pair_s
            later_s = demand.decodes * (token_s + per_row) + demand.positions * _kv_s(floor, limits)
            yield first_s, first_s + later_s


def _time_limits(demand: Demand, bounds: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return when each request needs its first token, and its last one; infinity if no bound says so."""
    ttft, tpot, e2e = (bounds.get(name, math.inf) for name in ("ttft", "tpot", "e2e"))
    tails = np.where(demand.tails > 0, demand.tails * tpot, 0.0) if math.isfinite(tpot) else math.inf
    whole = demand.times + np.minimum(e2e, ttft + tails)
    return np.minimum(demand.times + ttft, whole), whole


def _most_engines(
    times: np.ndarray, first: np.ndarray, whole: np.ndarray, first_s: np.ndarray, whole_s: np.ndarray, spare: int
) -> int:
    """Return the engines that the fullest of some windows needs: its work, without the largest `spare` requests'."""
    slacks = {float((first - times).max())}
    if np.isfinite(whole).all():
        slacks |= {float(value) for value in np.percentile(whole - times, SLACK_POINTS)}
    most = 1.0
    for begin, end in _windows(times):
        begins, count = times[begin], end - begin
        for slack in slacks:
            limit = times[end - 1] + slack
            work = np.where(
                whole[begin:end] <= limit,
                whole_s[begin:end],
                np.where(first[begin:end] <= limit, first_s[begin:end], 0),
            )
            length = limit - begins
            if count > spare and length > 0 and work.sum() / length > most:
                kept = np.partition(work, count - spare - 1)[: count - spare] if spare else work
                most = max(most, float(kept.sum()) / length)
    return math.ceil(most * (1 - ROUNDING))


def _windows(times: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of requests that arrive within a time; of each length, windows that begin half a length apart."""
    start, span = times[0], times[-1] - times[0]
    for level in range(LEVELS):
        length = span / 2**level
        for part in range(2 ** (level + 1) - 1):
            low = start + part * length / 2
            begin, end = int(np.searchsorted(times, low)), int(np.searchsorted(times, low + length, "right"))
            if end > begin:
                yield begin, end
