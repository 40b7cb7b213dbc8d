"""The host tier: swapped sequences and evicted prefix blocks, in a bounded pool per group.

Owns: host blocks, and what is copied to them. Does not: copy (executors do), or choose whom to swap.
Invariants: a plan saves to the host or loads from it, never both; a host block that a plan reads or writes is held
until that plan is made, so that it is the destination of one copy at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.kv.matching import NO_BLOCK
from octavo.core.kv.pool import BlockPool

if TYPE_CHECKING:
    from octavo.core.kv.effects import Effects
    from octavo.core.request import Sequence


class HostTier:
    """Host blocks. Without any, everything here says no and does nothing."""

    __slots__ = ("_is_saving", "is_load_wanted", "pools")

    def __init__(self, num_blocks: tuple[int, ...]) -> None:
        self.pools = [BlockPool(count) for count in num_blocks] if any(num_blocks) else []
        self.is_load_wanted = False  # a request waits for a plan without swap-outs: the next one saves no prefixes
        self._is_saving = True

    def begin_plan(self) -> None:
        """A new plan saves evicted prefixes, unless somebody waits to load."""
        self._is_saving = not self.is_load_wanted
        self.is_load_wanted = False

    def pin(self, effects: Effects, group: int, block: int) -> None:
        """Hold a host block until the plan is made."""
        self.pools[group].share(block)
        effects.pinned.append((group, block))

    def unpin(self, effects: Effects) -> None:
        """Let go of what the plan held."""
        for group, block in effects.pinned:
            self.pools[group].release(block)
        effects.pinned.clear()

    def save(self, group: int, pool: BlockPool, block: int, effects: Effects) -> None:
        """Keep a cached block that is about to be evicted, if there is room and this plan does not load."""
        if not self.pools or effects.host_loads or not self._is_saving:
            return
        if block in pool.pending or (group, block) in effects.swapped:  # not written yet; or copied once already
            return
        host, key = self.pools[group], pool.key_of[block]
        assert key is not None
        known = host.block_of.get(key)
        if known is not None:
            host.touch(known)
        elif host.num_free:
            kept = host.allocate()
            host.publish(kept, key, pool.ids_of[block], effects.step)
            effects.swap_outs.extend((group, block, kept))
            effects.saved.append((group, kept))
            effects.pinned.append((group, kept))

    def confirm(self, saved: list[tuple[int, int]], step: int) -> None:
        """A plan ran: the prefixes it saved are there."""
        for group, block in saved:
            self.pools[group].confirm(block, step)

    def unpublish(self, saved: list[tuple[int, int]], step: int) -> None:
        """A plan did not run: the prefixes it was to save are not there."""
        for group, block in saved:
            self.pools[group].unpublish(block, step)

    def swap_out(self, sequences: list[Sequence], effects: Effects) -> bool:
        """Give each unique device block of these sequences a host block, shared where they shared it."""
        if not self.pools or effects.host_loads:
            return False
        unique = _unique_blocks(sequences)
        fresh = [place for place in unique if place not in effects.swapped]  # another victim may share the rest
        for group, host in enumerate(self.pools):
            if sum(1 for place in fresh if place[0] == group) > host.num_free:
                return False
        for group, block in fresh:
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
        """Unique host blocks per group that these sequences hold."""
        held: list[dict[int, None]] = [{} for _ in self.pools]
        for sequence in sequences:
            for group, table in enumerate(sequence.host_tables):
                held[group].update((block, None) for block in table if block != NO_BLOCK)
        return [len(blocks) for blocks in held]

    def release(self, sequence: Sequence) -> None:
        """Give back a sequence's host blocks."""
        for pool, table in zip(self.pools, sequence.host_tables, strict=False):
            for block in reversed(table):
                if block != NO_BLOCK:
                    pool.release(block)
        sequence.host_tables = []

    @property
    def num_used(self) -> int:
        """Host blocks that swapped sequences hold or prefixes fill, over all groups."""
        return sum(pool.num_blocks - len(pool.free.plain) for pool in self.pools)


def _unique_blocks(sequences: list[Sequence]) -> list[tuple[int, int]]:
    """(group, device block) of everything that these sequences hold, each once."""
    unique: dict[tuple[int, int], None] = {}
    for sequence in sequences:
        for group, table in enumerate(sequence.tables):
            unique.update(((group, block), None) for block in table if block != NO_BLOCK)
    return list(unique)
