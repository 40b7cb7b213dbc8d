"""All cache groups together: prefix matches, tables that grow and slide, forks, release, publication.

Owns: the pools, and the tables of sequences. Does not: decide who gets blocks.
Invariants: a match changes nothing until `adopt`; allocation is all-or-nothing over groups; a block that
is shared or findable is never written: whoever writes first copies it.
"""

from __future__ import annotations

from octavo.core.kv.effects import Effects, Publication
from octavo.core.kv.host_tier import HostTier
from octavo.core.kv.keys import KeyMaker
from octavo.core.kv.matching import NO_BLOCK, Finder, Match, empty_match
from octavo.core.kv.pool import BlockPool
from octavo.core.limits import Limits
from octavo.core.plan import DROP_BLOCK
from octavo.core.request import Sequence

__all__ = ["NO_BLOCK", "Effects", "KVCache", "Match", "Publication"]


class KVCache:
    """The paged KV cache's bookkeeping, for every group of layers. `effects` belong to the plan being made."""

    __slots__ = (
        "block_size", "caching", "chunk", "effects", "groups", "has_windows", "hit_tokens", "host",
        "host_load_min_tokens", "key_maker", "num_groups", "pools", "queried_tokens", "sharing",
    )  # fmt: skip

    def __init__(self, limits: Limits) -> None:
        self.block_size = limits.block_size
        self.caching = limits.prefix_caching
        self.sharing = limits.block_sharing
        self.groups = limits.groups
        self.chunk = limits.max_batch_tokens
        self.has_windows = any(spec.window for spec in limits.groups)
        self.pools = [BlockPool(count) for count in limits.num_blocks]
        self.num_groups = len(self.pools)
        self.host = HostTier(limits.host_blocks)
        self.host_load_min_tokens = limits.host_load_min_tokens
        self.key_maker = KeyMaker(limits.block_size, limits.prefix_caching)
        self.effects = Effects(-1)
        self.queried_tokens = 0
        self.hit_tokens = 0

    def begin_plan(self, step: int) -> Effects:
        """Start a plan: what happens to blocks from now on belongs to it."""
        self.effects = Effects(step)
        self.host.begin_plan()
        return self.effects

    def end_plan(self) -> None:
        """The plan is made: host blocks that it reads or writes may be reused by later ones."""
        self.host.unpin(self.effects)

    # --- sizes ---------------------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions of a full group."""
        return -(-num_tokens // self.block_size)

    def peak_blocks(self, num_tokens: int) -> list[int]:
        """Most blocks per group that a sequence of `num_tokens` holds at once while it is computed."""
        return [spec.peak_blocks(num_tokens, self.chunk, self.block_size) for spec in self.groups]

    def held_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks per group in a sequence's tables."""
        return [len(table) - first for table, first in zip(sequence.tables, sequence.first_live, strict=True)]

    def num_free(self) -> int:
        """Blocks that every group can give at once."""
        return min(pool.num_free for pool in self.pools)

    def fits(self, sequence: Sequence, end: int) -> bool:
        """Whether positions up to `end` can be written, copies of shared blocks included."""
        start, size = sequence.num_scheduled, self.block_size
        wanted = -(-end // size)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            needed = max(0, wanted - len(table))
            if start // size < len(table) and self._is_protected(pool, table[start // size]):
                needed += 1
            if needed > pool.num_free:
                return False
        return True

    def fits_together(self, sequences: list[Sequence]) -> bool:
        """Whether each of these can write its next position: new blocks, and copies of tails that they share."""
        for group, pool in enumerate(self.pools):
            needed, writers = 0, dict[int, int]()
            for sequence in sequences:
                index, table = sequence.num_scheduled // self.block_size, sequence.tables[group]
                if index >= len(table):
                    needed += 1
                else:
                    writers[table[index]] = writers.get(table[index], 0) + 1
            for block, count in writers.items():  # the last holder of an unpublished block writes it in place
                is_last = count == pool.references[block] and pool.key_of[block] is None
                needed += count - 1 if is_last else count
            if needed > pool.num_free:
                return False
        return True

    @staticmethod
    def _is_protected(pool: BlockPool, block: int) -> bool:
        return pool.references[block] > 1 or pool.key_of[block] is not None

    # --- prefixes ------------------------------------------------------------------------------------

    def match(self, sequence: Sequence, max_tokens: int, use_host: bool = True) -> Match:
        """Find the longest cached prefix of a sequence without blocks; peeks only. Cost: a lookup a block and group.

        At most `max_tokens`, and at most known - 1, so that there are logits to sample from.
        """
        known, size = sequence.num_known, self.block_size
        max_blocks = min(max_tokens, known) // size
        if max_blocks < 1 or not self._has_keys(sequence):
            return empty_match(self.num_groups)
        self.extend_keys(sequence)
        finder = Finder(
            self.groups,
            self.pools,
            self.host.pools if use_host else [],
            sequence.keys,
            lambda index: self.ids_of(sequence, index),
            size,
        )
        length, with_host = finder.length(max_blocks, self.host_load_min_tokens)
        if length * size >= known:
            match = self._match_whole(finder, known, length)
            if match is not None:
                return match
            length, with_host = finder.length(length - 1, self.host_load_min_tokens)
        match = finder.collect(length, length * size, with_host) if length else empty_match(self.num_groups)
        match.missing = sequence.keys[length] if length < min(max_blocks, len(sequence.keys)) else None
        return match

    @property
    def num_published(self) -> int:
        """Blocks made findable since the start."""
        return sum(pool.num_published for pool in self.pools)

    def may_find_more(self, missing: bytes | None, num_published: int) -> bool:
        """Whether a match that ended for a missing key, when so many blocks had been published, may be longer now."""
        if self.has_windows:
            return self.num_published != num_published
        return missing is not None and any(missing in pool.block_of for pool in (*self.pools, *self.host.pools))

    def _match_whole(self, finder: Finder, known: int, length: int) -> Match | None:
        """Every known token is cached: copy the last block, compute the last token alone. None if that can't be."""
        if self.block_size == 1:
            return None  # a copy of which nothing stays
        for group, spec in enumerate(self.groups):
            if not finder.covers(group, spec.first_block(known - 1, self.block_size), length, with_host=False):
                return None
        match = finder.collect(length, known - 1, with_host=False)
        step = self.effects.step
        sources = [blocks.pop() for blocks in match.blocks]
        for group, (pool, source) in enumerate(zip(self.pools, sources, strict=True)):
            # A copy reads what was there before the step: a block written in this very step can't be one.
            if pool.pending.get(source) == step:
                return None
            # The source is held while its copy is allocated, so it takes room beside it.
            if pool.num_free <= match.num_unreferenced[group]:
                return None
            match.num_held[group] -= 1
            match.num_unreferenced[group] -= pool.references[source] == 0
        match.sources = sources
        match.num_tokens = known - 1
        return match

    def room_after(self, match: Match, peaks: list[int]) -> list[int]:
        """Blocks left free per group once a match is adopted and `peaks` blocks are held."""
        return [
            pool.num_free - unreferenced - max(0, peak - held)
            for pool, peak, held, unreferenced in zip(
                self.pools, peaks, match.num_held, match.num_unreferenced, strict=True
            )
        ]

    def adopt(self, sequence: Sequence, match: Match) -> list[Publication]:
        """Give a match's blocks to the sequence and enter them in the plan; returns blocks being loaded back."""
        for group, (pool, blocks) in enumerate(zip(self.pools, match.blocks, strict=True)):
            for block in blocks:
                if block != NO_BLOCK:
                    pool.share(block)
            sequence.tables[group].extend(blocks)
        made = self._load(sequence, match)
        self.announce(sequence)
        if match.sources:
            self._copy_last(sequence, match.sources)
        self.find_live(sequence)
        sequence.num_published = match.num_tokens // self.block_size
        sequence.num_scheduled = sequence.num_computed = match.num_tokens
        self.resize(sequence)
        return made

    def _load(self, sequence: Sequence, match: Match) -> list[Publication]:
        """Fill the table's holes from the host; everything found is held already, so that nothing of it is evicted."""
        made: list[Publication] = []
        for group, _, host_block in match.loads:
            self.host.pin(self.effects, group, host_block)
        for group, index, host_block in match.loads:
            block = self.allocate(group, is_load=True)
            self.effects.load(sequence.slot, group, host_block, block)
            sequence.tables[group][index] = block
            if self.pools[group].publish(block, sequence.keys[index], self.ids_of(sequence, index), self.effects.step):
                made.append(Publication(group, block, index, sequence))
        return made

    @staticmethod
    def find_live(sequence: Sequence) -> None:
        """Note where the tables of a sequence begin to have blocks."""
        for group, table in enumerate(sequence.tables):
            while sequence.first_live[group] < len(table) and table[sequence.first_live[group]] == NO_BLOCK:
                sequence.first_live[group] += 1

    def _copy_last(self, sequence: Sequence, sources: list[int]) -> None:
        for group, (pool, source) in enumerate(zip(self.pools, sources, strict=True)):
            # Held while the copy is allocated, so that a block is never copied onto itself.
            pool.share(source)
            block = self.allocate(group)
            pool.release(source)
            table = sequence.tables[group]
            self.effects.copy(sequence.slot, group, source, block)
            self.effects.edits.extend((sequence.slot, group, len(table), block))
            table.append(block)

    # --- tables that grow, slide, fork and go -----------------------------------------------------------

    def slide(self, sequence: Sequence, is_leaving: bool = False) -> None:
        """Give back blocks that the next position no longer reads; one that leaves needs no edits."""
        if not self.has_windows:
            return
        for group, (spec, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            first = min(spec.first_block(sequence.num_scheduled, self.block_size), len(sequence.tables[group]))
            table = sequence.tables[group]
            for index in range(sequence.first_live[group], first):
                if table[index] != NO_BLOCK:
                    pool.release(table[index])
                    table[index] = NO_BLOCK
                    if not is_leaving:
                        self.effects.edits.extend((sequence.slot, group, index, DROP_BLOCK))
                sequence.first_live[group] = index + 1

    def extend(self, sequence: Sequence, end: int) -> None:
        """Make positions [num_scheduled, end) writable: own blocks, and no shared one. The caller saw that it fits."""
        start, size, slot = sequence.num_scheduled, self.block_size, sequence.slot
        wanted, edits = -(-end // size), self.effects.edits
        for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            index = start // size
            if index < len(table) and self._is_protected(pool, table[index]):
                source = table[index]
                table[index] = block = self.allocate(group)
                pool.release(source)
                self.effects.copy(slot, group, source, block)
                edits.extend((slot, group, index, block))
            first, count = len(table), wanted - len(table)
            if count > 0:
                is_plain = len(pool.free.plain) >= count
                table += pool.allocate_plain(count) if is_plain else [self.allocate(group) for _ in range(count)]
                entry = [slot, group, 0, 0] * count
                entry[2::4] = range(first, wanted)
                entry[3::4] = table[first:]
                edits.fromlist(entry)
        self.resize(sequence)

    def trim(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Give back blocks behind the scheduled positions; returns (group, index) of each, the last first."""
        wanted = self.num_blocks_for(sequence.num_scheduled)
        gone = []
        for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            while len(table) > wanted:
                pool.release(table.pop())
                gone.append((group, len(table)))
        if gone:
            self.resize(sequence)
        return gone

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence without blocks share all of its parent's; whoever writes the tail first copies it."""
        for pool, table in zip(self.pools, parent.tables, strict=True):
            for block in table:
                if block != NO_BLOCK:
                    pool.share(block)
        child.tables = [table[:] for table in parent.tables]
        child.first_live = parent.first_live[:]
        child.keys = parent.keys[:]
        child.num_published = parent.num_published
        child.num_scheduled = parent.num_scheduled
        child.num_computed = parent.num_computed
        child.capacity = parent.capacity
        child.block_end = parent.block_end = 0

    def announce(self, sequence: Sequence) -> None:
        """Enter a sequence's whole tables in the plan."""
        for group, table in enumerate(sequence.tables):
            for index, block in enumerate(table):
                if block != NO_BLOCK:
                    self.effects.edits.extend((sequence.slot, group, index, block))

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks, on the host too."""
        self.release_device(sequence)
        self.host.release(sequence)
        sequence.reset_tables()

    def release_device(self, sequence: Sequence) -> None:
        """Give back the device's blocks, the tail first, so that the head of a chain is evicted last."""
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release_table(table)

    @property
    def may_load(self) -> bool:
        """Whether this plan may still load from the host.

        Not beside swap-outs; nor while the source of a copy is free, for a load into it would come before the copy.
        """
        copies = self.effects.copies
        sources = zip(copies[::3], copies[1::3], strict=True)
        return not self.effects.swap_outs and all(self.pools[group].references[block] for group, block in sources)

    def allocate(self, group: int, is_load: bool = False) -> int:
        """Take a block; the prefix that it held, if any, moves to the host tier, unless this is a load from there."""
        pool = self.pools[group]
        victim = pool.free.next_cached()
        if victim is not None and not is_load:
            self.host.save(group, pool, victim, self.effects)
        return pool.allocate()

    def resize(self, sequence: Sequence) -> None:
        """Note how far a sequence's tables reach."""
        sequence.capacity = len(sequence.tables[0]) * self.block_size
        sequence.block_end = min(sequence.capacity, sequence.limit - 1)

    # --- publication -----------------------------------------------------------------------------------

    def publish(self, sequence: Sequence, end: int, step: int | None) -> list[Publication]:
        """Make the full blocks of positions [0, end) findable; with `step`, as pending on that plan."""
        made: list[Publication] = []
        num_full = end // self.block_size
        if num_full <= sequence.num_published or not self._has_keys(sequence):
            return made
        self.extend_keys(sequence)
        for index in range(sequence.num_published, min(num_full, len(sequence.keys))):
            ids = self.ids_of(sequence, index)
            for group, pool in enumerate(self.pools):
                block = sequence.tables[group][index]
                if block == NO_BLOCK:
                    continue
                is_new = pool.publish(block, sequence.keys[index], ids, step)
                if step is not None or not is_new:
                    made.append(Publication(group, block, index, sequence, not is_new))
            sequence.num_published = index + 1
        return made

    def confirm(self, made: list[Publication], step: int) -> None:
        """A plan ran: what it published is now cached."""
        for entry in made:
            if not entry.is_duplicate:
                self.pools[entry.group].confirm(entry.block, step)

    def unpublish(self, made: list[Publication], step: int) -> None:
        """A plan did not run: withdraw what it published."""
        for entry in made:
            if not entry.is_duplicate:
                self.pools[entry.group].unpublish(entry.block, step)

    def withdraw(self, sequence: Sequence) -> None:
        """Let nobody find the prefix of a sequence any more, on the device or the host, whoever wrote it."""
        for pool in (*self.pools, *self.host.pools):
            for block in [pool.block_of[key] for key in sequence.keys if key in pool.block_of]:
                pool.withdraw(block)

    def reset(self) -> bool:
        """Forget all cached prefixes, the host's too. False, and nothing changed, while blocks are held."""
        if any(pool.num_free != pool.num_blocks for pool in (*self.pools, *self.host.pools)):
            return False
        return all([pool.reset() for pool in (*self.pools, *self.host.pools)])

    def count_hit(self, num_known: int, num_cached: int) -> None:
        """Enter one admission in the hit statistics (tokens)."""
        self.queried_tokens += num_known
        self.hit_tokens += num_cached

    def _has_keys(self, sequence: Sequence) -> bool:
        """Whether a sequence's blocks have keys: for all to find, or for the other sequences of its request."""
        return self.caching or (self.sharing and sequence.request.has_several)

    def extend_keys(self, sequence: Sequence) -> None:
        """Give a sequence the keys of its full blocks, if its blocks have keys."""
        num_blocks = sequence.num_committed // self.block_size
        if len(sequence.keys) < num_blocks and self._has_keys(sequence):
            self.key_maker.extend(sequence, num_blocks)

    def ids_of(self, sequence: Sequence, index: int) -> bytes | None:
        """The ids of one block, packed; None for a sequence known by length only."""
        if sequence.token_ids is None:
            return None
        return sequence.token_ids[index * self.block_size : (index + 1) * self.block_size].tobytes()
