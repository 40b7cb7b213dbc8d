"""Statistics of the scheduler, and how its KV pool is used, for people and metrics. Nothing here is called by a step.

Owns: the records and how they are read off the state. Does not: change anything, or keep history (observe does).
Invariants of the pool's use, per group: referenced + cached + free = blocks; saved blocks = logical - physical;
filled + reserved = slots of the physical blocks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from octavo.core.kv.effects import NO_BLOCK
from octavo.core.plan import WaitReason
from octavo.core.request import Sequence, Status
from octavo.core.state import State, Totals


@dataclass(slots=True, kw_only=True)
class Statistics(Totals):
    """Gauges now, and the totals since the start. Blocks are summed over groups; hits and swaps are in tokens.

    `waiting_by_reason` has the names of the reasons for which requests wait; `num_swapped` of the waiting have their KV
    on the host. Of the host's blocks, `used` counts those that hold a swapped sequence or a prefix.
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
        num_blocks_used=sum(pool.num_blocks - pool.num_free for pool in pools),
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
    """Count waiting requests by their last reason; those that admission did not reach yet wait behind others."""
    counts = [0] * len(WaitReason)
    for request in state.requests.values():
        if request.status == Status.WAITING:
            counts[WaitReason.BEHIND if request.wait_reason < 0 else request.wait_reason] += 1
    return {reason.name.lower(): counts[reason] for reason in WaitReason if counts[reason]}


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """One group's blocks and token slots; a slot holds the keys and values of one position.

    Logical counts once per sequence, physical once. `reserved_slots` are in blocks that sequences hold, but neither
    written nor being written; `wasted_share` is their share of those blocks' slots.
    """

    num_blocks: int
    referenced_blocks: int
    cached_blocks: int
    free_blocks: int
    host_blocks: int
    host_blocks_used: int
    logical_blocks: int
    physical_blocks: int
    saved_blocks: int
    shared_blocks: int
    logical_tokens: int
    physical_slots: int
    filled_slots: int
    reserved_slots: int
    wasted_share: float


@dataclass(frozen=True, slots=True)
class MemoryAnalysis:
    """The use of each group's pool, and the sum. `block_size` is slots in a block."""

    step: int
    block_size: int
    num_sequences: int
    groups: tuple[GroupMemory, ...]
    total: GroupMemory


def analyse_memory(state: State) -> MemoryAnalysis:
    """Read every table of every running sequence, and the pools. O(blocks in tables), never part of a step."""
    sequences = [sequence for request in state.running.requests for sequence in request.sequences]
    groups = tuple(_group_memory(state, group, sequences) for group in range(len(state.cache.pools)))
    names = [name for name in GroupMemory.__slots__ if name != "wasted_share"]
    total = _with_share({name: sum(getattr(group, name) for group in groups) for name in names})
    return MemoryAnalysis(state.step, state.limits.block_size, len(sequences), groups, total)


def _group_memory(state: State, group: int, sequences: list[Sequence]) -> GroupMemory:
    pool, size = state.cache.pools[group], state.limits.block_size
    host = state.cache.host.pools[group] if state.cache.host.pools else None
    filled: dict[int, int] = {}  # physical block -> slots of it that are written or being written
    shared: dict[int, None] = {}
    num_logical = num_logical_tokens = 0
    for sequence in sequences:
        for index, block in enumerate(sequence.tables[group]):
            if block == NO_BLOCK:
                continue
            used = max(0, min(size, sequence.num_scheduled - index * size))
            num_logical += 1
            num_logical_tokens += used
            if block in filled:
                shared[block] = None
            filled[block] = max(used, filled.get(block, 0))
    num_filled, num_slots = sum(filled.values()), len(filled) * size
    return _with_share(
        {
            "num_blocks": pool.num_blocks,
            "referenced_blocks": pool.num_blocks - pool.num_free,
            "cached_blocks": len(pool.cached),
            "free_blocks": len(pool.plain),
            "host_blocks": host.num_blocks if host is not None else 0,
            "host_blocks_used": host.num_filled if host is not None else 0,
            "logical_blocks": num_logical,
            "physical_blocks": len(filled),
            "saved_blocks": num_logical - len(filled),
            "shared_blocks": len(shared),
            "logical_tokens": num_logical_tokens,
            "physical_slots": num_slots,
            "filled_slots": num_filled,
            "reserved_slots": num_slots - num_filled,
        }
    )


def _with_share(counts: dict[str, int]) -> GroupMemory:
    slots = counts["physical_slots"]
    return GroupMemory(**counts, wasted_share=counts["reserved_slots"] / slots if slots else 0.0)
