"""The host tier: copies of swapped sequences and of evicted prefix blocks, in a bounded pool per group.

Owns: the host blocks, and which device blocks a plan copies to them. Does not: copy (executors do), or choose victims.
Invariants: a plan saves to the host or loads from it, never both. A host block that a plan reads or writes is pinned
until that plan is made, so the plan writes each host block at most once.
"""

from __future__ import annotations

from octavo.core.kv.effects import NO_BLOCK, Effects
from octavo.core.kv.pool import BlockPool
from octavo.core.request_state import Sequence


class HostTier:
    """Host blocks. `pools` is empty without a host tier; then nothing is saved or swapped."""

    __slots__ = ("_is_saving", "is_load_wanted", "pools")

    def __init__(self, num_blocks: tuple[int, ...]) -> None:
        self.pools = [BlockPool(count) for count in num_blocks] if any(num_blocks) else []
        self.is_load_wanted = False  # a request waits to load from the host, so the next plan saves no prefixes
        self._is_saving = True

    def begin_plan(self) -> None:
        """Start a plan, which saves evicted prefixes unless a request waits to load."""
        self._is_saving = not self.is_load_wanted
        self.is_load_wanted = False

    def pin(self, effects: Effects, group: int, block: int) -> None:
        """Hold a host block until the plan is made."""
        self.pools[group].share(block)
        effects.pinned.append((group, block))

    def unpin(self, effects: Effects) -> None:
        """Release the host blocks that the plan pinned."""
        for group, block in effects.pinned:
            self.pools[group].release(block)
        effects.pinned.clear()

    # --- evicted prefixes --------------------------------------------------------------------------------

    def save(self, group: int, pool: BlockPool, block: int, effects: Effects) -> None:
        """Copy a cached block that is about to be evicted to the host, if there is room and this plan does not load."""
        if not self.pools or effects.host_loads or not self._is_saving:
            return
        if block in pool.pending or (group, block) in effects.swapped:  # not written yet, or copied already
            return
        host, key = self.pools[group], pool.key_of[block]
        assert key is not None
        known = host.block_of.get(key)
        if known is not None:
            host.touch(known)
        elif host.num_free:
            kept = host.allocate()
            ids = pool.ids_of[block]
            host.publish([kept], [key], None if ids is None else [ids], effects.step)
            effects.swap_outs.extend((group, block, kept))
            effects.saved.append((group, kept))
            effects.pinned.append((group, kept))

    # --- swapped sequences -------------------------------------------------------------------------------

    def swap_out(self, sequences: list[Sequence], effects: Effects) -> bool:
        """Copy each device block of these sequences to a host block; shared blocks stay shared.

        Return False, and change nothing, if the host lacks room or this plan loads from the host.
        """
        if not self.pools or effects.host_loads:
            return False
        fresh = [place for place in distinct_blocks([one.tables for one in sequences]) if place not in effects.swapped]
        for group, host in enumerate(self.pools):
            if sum(1 for place in fresh if place[0] == group) > host.num_free:
                return False
        for group, block in fresh:  # the other blocks were copied with another victim of this plan
            kept = self.pools[group].allocate()
            effects.pinned.append((group, kept))  # the allocation's own reference
            effects.swap_outs.extend((group, block, kept))
            effects.swapped[group, block] = kept
        for sequence in sequences:
            sequence.host_tables = []
            for group, table in enumerate(sequence.tables):
                kept_table = [NO_BLOCK if block == NO_BLOCK else effects.swapped[group, block] for block in table]
                for kept in kept_table:
                    if kept != NO_BLOCK:
                        self.pools[group].share(kept)
                sequence.host_tables.append(kept_table)
        return True

    def num_swapped_blocks(self, sequences: list[Sequence]) -> list[int]:
        """Return how many different host blocks these sequences hold in each group."""
        counts = [0] * len(self.pools)
        for group, _ in distinct_blocks([one.host_tables for one in sequences]):
            counts[group] += 1
        return counts

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's host blocks."""
        for pool, table in zip(self.pools, sequence.host_tables, strict=False):
            pool.release_table(table)
        sequence.host_tables = []

    @property
    def num_used(self) -> int:
        """Host blocks that hold swapped sequences or prefixes, over all groups."""
        return sum(pool.num_filled for pool in self.pools)


def distinct_blocks(tables_of_sequences: list[list[list[int]]]) -> list[tuple[int, int]]:
    """Return each (group, block) in the tables of these sequences once."""
    places: dict[tuple[int, int], None] = {}
    for tables in tables_of_sequences:
        for group, table in enumerate(tables):
            places.update(((group, block), None) for block in table if block != NO_BLOCK)
    return list(places)
