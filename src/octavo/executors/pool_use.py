"""Count the KV pool's blocks by use: referenced, cached and free, shared, and reserved but not filled.

Owns: the counts of each group and their sum, computed from a scheduler's snapshots. Does not: keep state.
Invariants, per group: referenced + cached + free = blocks; saved = logical - physical blocks; filled + reserved = slots
of the physical blocks. A logical count includes a block once per sequence that holds it, a physical count once in all.
A slot holds one position's keys and values.
"""

from __future__ import annotations

from typing import Any

from octavo.core.scheduler import Scheduler
from octavo.core.snapshots import SlotTables

_ALL = 1 << 62


def pool_use(scheduler: Scheduler) -> dict[str, Any]:
    """Return the use of each group's pool, and the sum, as plain values. O(blocks in tables); no step calls it.

    `reserved_slots` are the slots in held blocks that no plan has written or is writing. `wasted_share` is
    `reserved_slots` divided by all slots in held blocks.
    """
    sequences = scheduler.read_tables(0, _ALL)
    groups = [_group(scheduler, group, sequences) for group in range(len(scheduler.limits.groups))]
    total = {name: sum(group[name] for group in groups) for name in groups[0]}
    return {
        "step": scheduler.statistics().step,
        "block_size": scheduler.limits.block_size,
        "num_sequences": len(sequences),
        "groups": [_with_share(group) for group in groups],
        "total": _with_share(total),
    }


def _group(scheduler: Scheduler, group: int, sequences: list[SlotTables]) -> dict[str, int]:
    gauges, limits = scheduler.gauges(), scheduler.limits
    num_blocks, size = limits.num_blocks[group], limits.block_size
    held: dict[int, list[int]] = {}  # block -> slots written or being written, for each sequence that holds it
    for sequence in sequences:
        for index, block in enumerate(sequence.tables[group], sequence.first_index[group]):
            held.setdefault(block, []).append(max(0, min(size, sequence.num_scheduled - index * size)))
    num_logical, num_filled = sum(map(len, held.values())), sum(map(max, held.values()))
    return {
        "num_blocks": num_blocks,
        "referenced_blocks": gauges.blocks_used[group],
        "cached_blocks": gauges.blocks_cached[group],
        "free_blocks": num_blocks - gauges.blocks_used[group] - gauges.blocks_cached[group],
        "host_blocks": limits.host_blocks[group] if limits.host_blocks else 0,
        "host_blocks_used": gauges.host_blocks_used[group] if gauges.host_blocks_used else 0,
        "logical_blocks": num_logical,
        "physical_blocks": len(held),
        "saved_blocks": num_logical - len(held),
        "shared_blocks": sum(1 for slots in held.values() if len(slots) > 1),
        "logical_tokens": sum(map(sum, held.values())),
        "physical_slots": len(held) * size,
        "filled_slots": num_filled,
        "reserved_slots": len(held) * size - num_filled,
    }


def _with_share(counts: dict[str, int]) -> dict[str, float]:
    slots = counts["physical_slots"]
    return {**counts, "wasted_share": counts["reserved_slots"] / slots if slots else 0.0}
