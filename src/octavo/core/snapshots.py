"""Snapshots of the scheduler's state: gauges, statistics, requests and block tables.

Owns: the records, and how they are read from the state. Does not: change anything, explain a wait (explain does), or
keep history (observe does). Only Scheduler.gauges is cheap enough for every step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from octavo.core.explain import find_barrier, reason_of
from octavo.core.plan import WaitReason
from octavo.core.request_state import RequestState, Status
from octavo.core.start import needed_blocks
from octavo.core.state import State, Totals


class Gauges(NamedTuple):
    """Numbers that may change with every step: current levels and totals since the start. Blocks are per group."""

    num_running: int  # sequences
    num_running_requests: int
    num_waiting: int
    num_swapped: int
    blocks_used: tuple[int, ...]
    blocks_cached: tuple[int, ...]
    host_blocks_used: tuple[int, ...]  # that hold a swapped sequence or a prefix
    num_steps: int
    num_computed_tokens: int
    num_output_tokens: int
    num_accepted_tokens: int
    num_preemptions: int
    num_finished: int
    num_swapped_out_tokens: int
    num_swapped_in_tokens: int
    num_host_hit_tokens: int
    queried_tokens: int
    hit_tokens: int


@dataclass(slots=True, kw_only=True)
class Statistics(Totals):
    """Current levels, and totals since the start. Blocks are summed over groups; hits and swaps are in tokens.

    `waiting_by_reason` maps each reason's name to the number of requests that wait for it. `num_swapped` waiting
    requests have their KV on the host. `num_host_blocks_used` counts host blocks with a swapped sequence or a prefix.
    """

    step: int
    num_running: int
    num_waiting: int
    waiting_by_reason: dict[str, int]
    num_swapped: int
    num_in_flight: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_cached: int
    num_host_blocks: int
    num_host_blocks_used: int
    num_requests: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    num_policy_errors: int
    first_policy_error: str


def read_statistics(state: State) -> Statistics:
    """Read all gauges and totals. O(requests), never part of a step."""
    pools, host = state.cache.pools, state.cache.host
    return Statistics(
        **asdict(state.totals),
        step=state.step,
        num_running=state.num_sequences,
        num_waiting=len(state.waiting),
        waiting_by_reason=_waiting_by_reason(state),
        num_swapped=state.num_swapped,
        num_in_flight=len(state.flight),
        num_blocks=sum(pool.num_blocks for pool in pools),
        num_blocks_used=sum(pool.num_used for pool in pools),
        num_blocks_cached=sum(len(pool.cached) for pool in pools),
        num_host_blocks=sum(pool.num_blocks for pool in host.pools),
        num_host_blocks_used=host.num_used,
        num_requests=state.next_order,
        prefix_queried_tokens=state.cache.queried_tokens,
        prefix_hit_tokens=state.cache.hit_tokens,
        num_policy_errors=state.policy.num_errors,
        first_policy_error=state.policy.first_error,
    )


def _waiting_by_reason(state: State) -> dict[str, int]:
    """Count waiting requests by their last reason; a request that admission has not reached counts as `behind`."""
    counts = [0] * len(WaitReason)
    for request in state.requests.values():
        if request.status == Status.WAITING:
            counts[WaitReason.BEHIND if request.wait_reason < 0 else request.wait_reason] += 1
    return {reason.name.lower(): counts[reason] for reason in WaitReason if counts[reason]}


class RequestView(NamedTuple):
    """One open request, for lists and forecasts.

    `reason` is why the request waits, or None if it runs. `needed` and `available` are the reason's numbers, or 0.
    `num_todo`: tokens to compute before the next sampled token. `num_blocks`: blocks of the smallest cache group that a
    waiting request needs, or that a running request holds. `max_tokens` is 0 if the request samples nothing.
    `num_known` and `num_outputs` are those of the longest sequence.
    """

    name: str
    tenant: str
    arrival: float
    reason: WaitReason | None
    needed: int
    available: int
    is_decoding: bool
    ignores_eos: bool
    num_slots: int
    num_known: int
    num_todo: int
    num_blocks: int
    num_outputs: int
    max_tokens: int


class OpenWork(NamedTuple):
    """All open requests in the scheduler's order, and the free slots and blocks (of the smallest cache group)."""

    running: list[RequestView]
    waiting: list[RequestView]
    block_size: int
    max_step_tokens: int
    num_free_slots: int
    num_free_blocks: int  # without the headroom


def first_waiting(state: State, max_requests: int) -> list[RequestView]:
    """Return the first waiting requests, in order. O(max_requests log waiting)."""
    group, barrier = _smallest_group(state), find_barrier(state)
    return [_view(state, entry, group, reason_of(state, entry, barrier)) for entry in state.waiting.first(max_requests)]


def open_work(state: State) -> OpenWork:
    """Return the remaining work of every open request. O(requests log requests), never part of a step."""
    group, barrier = _smallest_group(state), find_barrier(state)
    return OpenWork(
        [_view(state, entry, group, None) for entry in state.running.requests],
        [_view(state, entry, group, reason_of(state, entry, barrier)) for entry in state.waiting.in_order()],
        state.cache.block_size,
        state.max_step_tokens,
        len(state.free_slots),
        state.cache.pools[group].num_free - state.headroom[group],
    )


def _smallest_group(state: State) -> int:
    pools = state.cache.pools
    return min(range(len(pools)), key=lambda index: pools[index].num_blocks)


def _view(state: State, entry: RequestState, group: int, reason: WaitReason | None) -> RequestView:
    """Return the view of a request. `reason` is why it waits, or None if it runs."""
    sequences, request = entry.sequences, entry.request
    if reason is None:
        todo = sum(one.num_known - one.num_scheduled for one in sequences)
        blocks = sum(len(one.tables[group]) for one in sequences) + state.cache.num_counted(sequences)
    else:
        todo = sequences[0].num_known - (entry.seen.num_tokens if entry.seen is not None else 0)
        if entry.is_swapped:
            todo = len(sequences)
        blocks = needed_blocks(state.cache, entry)[group]
    return RequestView(
        entry.name,
        request.tenant,
        request.arrival,
        reason,
        *(entry.wait_numbers[:2] if reason is not None and reason == entry.wait_reason else (0, 0)),
        entry.is_decoding,
        request.params.ignore_eos,
        entry.num_slots,
        max([one.num_known for one in sequences]),
        todo,
        blocks,
        max([one.num_outputs for one in sequences]),
        entry.max_tokens if entry.samples else 0,
    )


class PoolSample(NamedTuple):
    """Every `stride`-th block of one group's pool: one byte for its references (up to 255), one for its has_key."""

    num_blocks: int
    stride: int
    references: bytes
    has_key: bytes


def sample_pools(state: State, max_blocks: int) -> list[PoolSample]:
    """Sample about `max_blocks` blocks in all, evenly over the pools; counted blocks are left out. O(max_blocks)."""
    samples, pools = [], state.cache.pools
    per_pool = max(1, max_blocks // len(pools))
    for pool in pools:
        stride = -(-pool.num_blocks // per_pool)
        references = pool.references[::stride]
        if max(references, default=0) > 255:
            references = [min(count, 255) for count in references]
        has_key = bytes([key is not None for key in pool.key_of[::stride]])
        size = -(-pool.num_blocks // stride)  # blocks that were never used have no entry in the pool's lists
        sample = PoolSample(pool.num_blocks, stride, bytes(references).ljust(size, b"\0"), has_key.ljust(size, b"\0"))
        samples.append(sample)
    return samples


class SlotTables(NamedTuple):
    """The block tables of the sequence in a slot, one per group, each from entry `first_index` of that group on."""

    slot: int
    num_scheduled: int
    first_index: list[int]
    tables: list[list[int]]


def read_tables(state: State, first_slot: int, max_blocks: int) -> list[SlotTables]:
    """Copy the block tables of the sequences in slots from `first_slot` on, until they have `max_blocks` entries."""
    found, left = [], max_blocks
    for sequence in state.slot_owner[first_slot:]:
        if sequence is not None:
            tables = [table[first:] for table, first in zip(sequence.tables, sequence.first_live, strict=True)]
            found.append(SlotTables(sequence.slot, sequence.num_scheduled, sequence.first_live[:], tables))
            left -= sum(map(len, tables))
            if left <= 0:
                break
    return found
