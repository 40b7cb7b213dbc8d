"""How the KV pool is filled at this moment: blocks and slots, what sharing saves, what tails waste.

Owns: the arithmetic over tables and pools. Does not: change anything, or run by itself: O(blocks in tables), so it
is asked for, never part of a step.
Invariants, per group: referenced + cached + free = blocks; saved blocks = logical - physical;
filled + reserved = slots of the physical blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.kv.pool import BlockPool
from octavo.core.plan import DROP_BLOCK
from octavo.core.request import Sequence
from octavo.core.state import State


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """One group's blocks and token slots; a slot holds the keys and values of one position.

    Logical: counted once for each sequence that has it. Physical: counted once. `reserved_slots` are in blocks held
    by sequences, and not written or being written; `wasted_share` is their share of those blocks' slots.
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
    """All groups: each by itself, and their sum. `block_size` is slots in a block."""

    step: int
    block_size: int
    num_sequences: int
    groups: tuple[GroupMemory, ...]
    total: GroupMemory


def analyse(state: State) -> MemoryAnalysis:
    """Look at every table of every running sequence, and at the pools."""
    sequences = [sequence for request in state.running.requests for sequence in request.sequences]
    size, host = state.limits.block_size, state.cache.host.pools
    groups = tuple(
        _group(index, pool, host[index] if host else None, sequences, size)
        for index, pool in enumerate(state.cache.pools)
    )
    return MemoryAnalysis(state.step, size, len(sequences), groups, _sum(groups))


def _group(index: int, pool: BlockPool, host: BlockPool | None, sequences: list[Sequence], size: int) -> GroupMemory:
    filled: dict[int, int] = {}  # physical block -> slots of it that are written or being written
    shared: dict[int, None] = {}
    num_logical = num_logical_tokens = 0
    for sequence in sequences:
        left = sequence.num_scheduled
        for block in sequence.tables[index]:
            used = max(0, min(size, left))
            left -= size
            if block == DROP_BLOCK:
                continue
            num_logical += 1
            num_logical_tokens += used
            if block in filled:
                shared[block] = None
                used = max(used, filled[block])
            filled[block] = used
    num_filled, num_slots = sum(filled.values()), len(filled) * size
    cached = len(pool.cached)
    return GroupMemory(
        num_blocks=pool.num_blocks,
        referenced_blocks=pool.num_blocks - pool.num_free,
        cached_blocks=cached,
        free_blocks=pool.num_free - cached,
        host_blocks=host.num_blocks if host is not None else 0,
        host_blocks_used=host.num_filled if host is not None else 0,
        logical_blocks=num_logical,
        physical_blocks=len(filled),
        saved_blocks=num_logical - len(filled),
        shared_blocks=len(shared),
        logical_tokens=num_logical_tokens,
        physical_slots=num_slots,
        filled_slots=num_filled,
        reserved_slots=num_slots - num_filled,
        wasted_share=_share(num_slots - num_filled, num_slots),
    )


def _sum(groups: tuple[GroupMemory, ...]) -> GroupMemory:
    names = [name for name in GroupMemory.__slots__ if name != "wasted_share"]
    sums = {name: sum(getattr(group, name) for group in groups) for name in names}
    return GroupMemory(**sums, wasted_share=_share(sums["reserved_slots"], sums["physical_slots"]))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
