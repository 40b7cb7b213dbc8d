"""The paged KV cache of all groups: prefix matches, block tables, forks, publication, deduplication, swaps.

Owns: the pools, and the block tables of sequences. Does not: decide which request gets blocks.
Invariants: a match changes nothing until `adopt`. A block that is shared or findable is never written; a sequence that
needs to write in the block gets a copy. A block that a plan in flight still writes never replaces a duplicate.
"""

from __future__ import annotations

from operator import attrgetter

from octavo.core.kv.effects import NO_BLOCK, Effects, Publication
from octavo.core.kv.host_tier import HostTier
from octavo.core.kv.pool import BlockPool
from octavo.core.kv.prefix import KeyMaker, Match, PrefixSearch, block_ids, empty_match
from octavo.core.limits import Limits
from octavo.core.plan import DROP_BLOCK
from octavo.core.request_state import Sequence

__all__ = ["NO_BLOCK", "Effects", "KVCache", "Match", "Publication"]

_index_of = attrgetter("index")


class KVCache:
    """The KV cache's bookkeeping for every group of layers. `effects` belong to the plan being made."""

    __slots__ = (
        "block_size", "caching", "chunk", "effects", "groups", "has_windows", "hit_tokens", "host",
        "host_load_min_tokens", "key_maker", "num_groups", "num_published", "pools", "queried_tokens", "sharing",
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
        self.num_published = 0  # blocks made findable since the start
        self.queried_tokens = 0
        self.hit_tokens = 0

    def begin_plan(self, step: int) -> Effects:
        """Start a plan and return its Effects, which record every later change to blocks until the next plan."""
        self.effects = Effects(step)
        if self.host.pools:
            self.host.begin_plan()
        return self.effects

    def end_plan(self) -> None:
        """End a plan: later plans may reuse the host blocks that this plan reads or writes."""
        if self.host.pools:
            self.host.unpin(self.effects)

    # --- room ----------------------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold `num_tokens` positions of a full group."""
        return -(-num_tokens // self.block_size)

    def peak_blocks(self, num_tokens: int) -> list[int]:
        """Return the most blocks per group that a sequence of `num_tokens` holds at once while it is computed."""
        if not self.has_windows:
            return [-(-num_tokens // self.block_size)] * self.num_groups
        return [spec.peak_blocks(num_tokens, self.chunk, self.block_size) for spec in self.groups]

    def blocks_left(self, sequence: Sequence) -> list[int]:
        """Return the blocks per group that a sequence still needs for the tokens it knows."""
        num_entries = sequence.capacity // self.block_size
        entries = zip(self.peak_blocks(sequence.num_known), sequence.first_live, strict=True)
        return [max(0, peak - num_entries + first) for peak, first in entries]

    def num_counted(self, sequences: list[Sequence]) -> int:
        """Return how many blocks these sequences hold that are only counted."""
        return sum(one.capacity for one in sequences if one.is_counted) // self.block_size

    def num_free(self) -> int:
        """Return how many blocks can be allocated in every group: the fewest free blocks of any pool."""
        return min(pool.num_free for pool in self.pools)

    def fits(self, sequence: Sequence, end: int) -> bool:
        """Return True if the pools have blocks to write positions up to `end`, including copies of shared blocks."""
        index = sequence.num_scheduled // self.block_size
        wanted = -(-end // self.block_size)
        if sequence.is_counted:
            return wanted - sequence.capacity // self.block_size <= self.pools[0].num_free
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            needed = max(0, wanted - len(table))
            if index < len(table) and pool.is_read_only(table[index]):
                needed += 1
            if needed > pool.num_free:
                return False
        return True

    def fits_together(self, sequences: list[Sequence]) -> bool:
        """Return True if the pools have the blocks for each sequence to write its next position.

        Counted are new blocks, and copies of last blocks that sequences share.
        """
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

    def room_after(self, match: Match, peaks: list[int]) -> list[int]:
        """Return the blocks per group that stay free once a sequence has adopted a match and holds `peaks` blocks."""
        return [
            pool.num_free - unreferenced - max(0, peak - held)
            for pool, peak, held, unreferenced in zip(
                self.pools, peaks, match.num_held, match.num_unreferenced, strict=True
            )
        ]

    # --- prefixes ------------------------------------------------------------------------------------

    def match(self, sequence: Sequence, max_tokens: int, use_host: bool = True) -> Match:
        """Find the longest cached prefix of a sequence that holds no blocks. Cost: one lookup per block and group.

        The prefix has at most `max_tokens` tokens and at most num_known - 1, so that the last token is computed and
        there are logits to sample from.
        """
        known, size = sequence.num_known, self.block_size
        max_blocks = min(max_tokens, known) // size
        if max_blocks < 1 or sequence.is_counted:
            return empty_match(self.num_groups)
        self.extend_keys(sequence)
        if not sequence.keys:
            return empty_match(self.num_groups)
        search = PrefixSearch(sequence, self.groups, self.pools, self.host.pools if use_host else [], size)
        length, with_host = search.longest(max_blocks, self.host_load_min_tokens)
        if length * size >= known:
            match = self._match_all(search, known, length)
            if match is not None:
                return match
            length, with_host = search.longest(length - 1, self.host_load_min_tokens)
        match = search.collect(length, length * size, with_host) if length else empty_match(self.num_groups)
        match.missing = sequence.keys[length] if length < min(max_blocks, len(sequence.keys)) else None
        return match

    def may_find_more(self, missing: bytes | None, num_published: int) -> bool:
        """Return True if an earlier match may be longer now.

        `missing` is the key that ended that match; `num_published` is the count of published blocks at that time.
        """
        if self.has_windows:
            return self.num_published != num_published
        return missing is not None and any(missing in pool.block_of for pool in (*self.pools, *self.host.pools))

    def _match_all(self, search: PrefixSearch, known: int, length: int) -> Match | None:
        """Return a match of every known token but the last: it copies each group's last block.

        Return None if the last blocks cannot be copied in this step.
        """
        if self.block_size == 1:
            return None  # the last token's block would be copied and then overwritten as a whole
        for group, spec in enumerate(self.groups):
            if not search.covers(group, spec.first_block(known - 1, self.block_size), length):
                return None
        match = search.collect(length, known - 1, with_host=False)
        step = self.effects.step
        sources = [blocks.pop() for blocks in match.blocks]
        for group, (pool, source) in enumerate(zip(self.pools, sources, strict=True)):
            # A copy reads the block as it was before the step, so the same step must not write the block.
            if pool.pending.get(source) == step:
                return None
            # The source is held while its copy is allocated, so there must be room for both.
            if pool.num_free <= match.num_unreferenced[group]:
                return None
            match.num_held[group] -= 1
            match.num_unreferenced[group] -= pool.references[source] == 0
        match.sources = sources
        match.num_tokens = known - 1
        return match

    def adopt(self, sequence: Sequence, match: Match) -> None:
        """Give a match's blocks to the sequence, and add its table edits, host loads and copies to the plan."""
        self.queried_tokens += sequence.num_known
        self.hit_tokens += match.num_tokens
        for group, (pool, blocks) in enumerate(zip(self.pools, match.blocks, strict=True)):
            for block in blocks:
                if block != NO_BLOCK:
                    pool.share(block)
            sequence.tables[group].extend(blocks)
        if match.loads:
            self._load(sequence, match)
        self.enter_tables(sequence)
        for group, source in enumerate(match.sources):
            # The source is held while the copy is allocated, so that a block is never copied onto itself.
            self.pools[group].share(source)
            self._write_copy(sequence, group, len(sequence.tables[group]), source)
        if self.has_windows:
            self._find_live(sequence)
        sequence.num_published = match.num_tokens // self.block_size
        sequence.num_scheduled = sequence.num_computed = match.num_tokens
        self.resize(sequence, len(sequence.tables[0]))

    def _load(self, sequence: Sequence, match: Match) -> None:
        """Load the match's host blocks into the table. All matched blocks are held, so no allocation evicts them."""
        for group, _, host_block in match.loads:
            self.host.pin(self.effects, group, host_block)
        for group, index, host_block in match.loads:
            block = self.allocate(group, is_load=True)
            self.effects.load(sequence.slot, group, host_block, block)
            sequence.tables[group][index] = block
            ids = self._ids_of(sequence, index, index + 1)
            if not self.pools[group].publish([block], [sequence.keys[index]], ids, self.effects.step):
                self.num_published += 1
                self.effects.published.append(Publication(group, [block], index, sequence))

    @property
    def may_load(self) -> bool:
        """True if this plan may still load from the host.

        False if the plan saves to the host, or if a copy's source is unreferenced: a load could be given that block,
        and loads run before copies.
        """
        copies = self.effects.copies
        sources = zip(copies[::3], copies[1::3], strict=True)
        return not self.effects.swap_outs and all(self.pools[group].references[block] for group, block in sources)

    # --- block tables ----------------------------------------------------------------------------------

    def allocate(self, group: int, is_load: bool = False) -> int:
        """Allocate a block. A prefix in the block is saved to the host, unless the block is for a load (`is_load`)."""
        pool = self.pools[group]
        if not is_load and self.host.pools:
            victim = pool.next_evicted()
            if victim is not None:
                self.host.save(group, pool, victim, self.effects)
        return pool.allocate()

    def extend(self, sequence: Sequence, end: int) -> None:
        """Allocate and copy blocks so that positions [num_scheduled, end) can be written. Check `fits` before."""
        start, size, slot = sequence.num_scheduled, self.block_size, sequence.slot
        wanted, edits = -(-end // size), self.effects.edits
        if sequence.is_counted:
            if wanted * size > sequence.capacity:
                self.pools[0].take(wanted - sequence.capacity // size)
                self.resize(sequence, wanted)
            return
        for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            index = start // size
            if index < len(table) and pool.is_read_only(table[index]):
                self._write_copy(sequence, group, index, table[index])
            first, count = len(table), wanted - len(table)
            if count > 0:
                if pool.num_plain >= count:
                    table += pool.allocate_plain(count)
                elif self.host.pools:  # each evicted prefix is saved to the host
                    table += [self.allocate(group) for _ in range(count)]
                else:
                    table += pool.allocate_several(count)
                entry = [slot, group, 0, 0] * count
                entry[2::4] = range(first, wanted)
                entry[3::4] = table[first:]
                edits.fromlist(entry)
        self.resize(sequence, len(sequence.tables[0]))

    def _write_copy(self, sequence: Sequence, group: int, index: int, source: int) -> None:
        """Put a copy of `source` at an index of a sequence's table, and release one reference to `source`."""
        block = self.allocate(group)
        self.pools[group].release(source)
        sequence.tables[group][index : index + 1] = [block]
        self.effects.copy(sequence.slot, group, source, block)
        self.effects.edits.extend((sequence.slot, group, index, block))

    def slide(self, sequence: Sequence, is_leaving: bool = False) -> None:
        """Release blocks that have left the attention window. With `is_leaving` the plan gets no table edits."""
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

    def trim(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Release the blocks after the scheduled positions; return (group, index) of each, each group's last first."""
        wanted = self.num_blocks_for(sequence.num_scheduled)
        trimmed = []
        for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            while len(table) > wanted:
                pool.release(table.pop())
                trimmed.append((group, len(table)))
        if trimmed:
            self.resize(sequence, len(sequence.tables[0]))
        return trimmed

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all blocks of `parent` with `child`. The first of the two to write a shared last block copies it."""
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
        child.in_place_end = parent.in_place_end = 0

    def enter_tables(self, sequence: Sequence) -> None:
        """Add table edits for all blocks of a sequence to the plan."""
        for group, table in enumerate(sequence.tables):
            for index, block in enumerate(table):
                if block != NO_BLOCK:
                    self.effects.edits.fromlist([sequence.slot, group, index, block])

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence, on the device and on the host."""
        self._release_device(sequence)
        if sequence.host_tables:
            self.host.release(sequence)
        sequence.reset_tables()

    def _release_device(self, sequence: Sequence) -> None:
        """Release a sequence's device blocks, the last first, so that the first block of a prefix is evicted last."""
        if sequence.is_counted:
            self.pools[0].give_back(sequence.capacity // self.block_size)
            return
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release_table(table)

    def resize(self, sequence: Sequence, num_blocks: int) -> None:
        """Update `capacity` and `in_place_end` to the length of the sequence's tables, or to its counted blocks."""
        sequence.capacity = num_blocks * self.block_size
        sequence.in_place_end = min(sequence.capacity, sequence.limit - 1)

    @staticmethod
    def _find_live(sequence: Sequence) -> None:
        """Set `first_live` to each table's first entry that has a block."""
        for group, table in enumerate(sequence.tables):
            while sequence.first_live[group] < len(table) and table[sequence.first_live[group]] == NO_BLOCK:
                sequence.first_live[group] += 1

    # --- swaps (S09) -----------------------------------------------------------------------------------

    def swap_out(self, sequences: list[Sequence]) -> bool:
        """Move all blocks of these sequences to the host; if that is not possible, return False and move none.

        A block that the sequences share is moved once and stays shared. The sequences keep their token counts.
        """
        for sequence in sequences:
            self.slide(sequence, is_leaving=True)
        if not self.host.swap_out(sequences, self.effects):
            return False
        for sequence in sequences:
            self._release_device(sequence)
            sequence.capacity = sequence.in_place_end = sequence.num_published = 0
            sequence.first_live = [0] * self.num_groups
        return True

    def swap_in(self, sequences: list[Sequence]) -> None:
        """Move swapped sequences back to the device. The caller has checked that the blocks fit."""
        loaded: dict[tuple[int, int], int] = {}  # (group, host block) -> its device block
        for sequence in sequences:
            for group, host_table in enumerate(sequence.host_tables):
                for host_block in host_table:
                    block = NO_BLOCK
                    if host_block != NO_BLOCK:
                        block = self._load_once(sequence.slot, group, host_block, loaded)
                    sequence.tables[group].append(block)
            self._find_live(sequence)
            self.host.release(sequence)
            self.resize(sequence, len(sequence.tables[0]))
            sequence.in_place_end = 0  # its tail may be shared

    def _load_once(self, slot: int, group: int, host_block: int, loaded: dict[tuple[int, int], int]) -> int:
        """Return the device block for a host block: load the block the first time, share it after that."""
        block = loaded.get((group, host_block))
        if block is not None:
            self.pools[group].share(block)
            return block
        self.host.pin(self.effects, group, host_block)
        block = loaded[group, host_block] = self.allocate(group, is_load=True)
        self.effects.load(slot, group, host_block, block)
        return block

    # --- publication and deduplication (K04) -------------------------------------------------------------

    def publish(self, sequence: Sequence, end: int, step: int | None) -> list[Publication]:
        """Publish the full blocks of positions [0, end). With `step`, they are pending until that plan has run.

        Return the blocks that are pending, and the duplicates.
        """
        made: list[Publication] = []
        if end // self.block_size <= sequence.num_published:
            return made
        self.extend_keys(sequence)
        first, stop = sequence.num_published, min(end // self.block_size, len(sequence.keys))
        if stop <= first:
            return made
        for group, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            begin = max(first, sequence.first_live[group])
            blocks = table[begin:stop]
            taken = pool.publish(blocks, sequence.keys[begin:stop], self._ids_of(sequence, begin, stop), step)
            self.num_published += len(blocks) - len(taken)
            for at in reversed(taken):
                made.append(Publication(group, [blocks.pop(at)], begin + at, sequence, is_duplicate=True))
            if step is not None and blocks:
                made.append(Publication(group, blocks, begin, sequence))
        if len(made) > 1:
            made.sort(key=_index_of)  # duplicates are replaced in the order of the table
        sequence.num_published = stop
        return made

    def _ids_of(self, sequence: Sequence, first: int, stop: int) -> list[bytes] | None:
        """Return the ids of each of the blocks [first, stop), packed; None for a sequence known by length only."""
        if sequence.token_ids is None:
            return None
        size = self.block_size
        packed = sequence.token_ids[first * size : stop * size].tobytes()
        return [packed[start : start + 4 * size] for start in range(0, len(packed), 4 * size)]

    def confirm(self, effects: Effects) -> None:
        """Mark the blocks that a plan published or saved as written, because the plan ran."""
        for entry in effects.published:
            if not entry.is_duplicate:
                self.pools[entry.group].confirm(entry.blocks, effects.step)
        for group, block in effects.saved:
            self.host.pools[group].confirm([block], effects.step)

    def unpublish(self, effects: Effects, owners: list[Sequence]) -> list[Publication]:
        """Withdraw and return the publications of these sequences by a plan that did not run, or failed."""
        made = [entry for entry in effects.published if entry.owner in owners]
        effects.published = [entry for entry in effects.published if entry.owner not in owners]
        self._withdraw_pending(made, effects.step)
        return made

    def undo(self, effects: Effects) -> None:
        """Withdraw all blocks that a plan published or saved, because the plan did not run."""
        self._withdraw_pending(effects.published, effects.step)
        for group, block in effects.saved:
            self.host.pools[group].unpublish(block, effects.step)

    def _withdraw_pending(self, made: list[Publication], step: int) -> None:
        for entry in made:
            if not entry.is_duplicate:
                for block in entry.blocks:
                    self.pools[entry.group].unpublish(block, step)

    def find_duplicated(self, entry: Publication) -> int | None:
        """Return the cached block that equals a duplicate, or None if the owner no longer holds the duplicate."""
        sequence, block = entry.owner, entry.blocks[0]
        table = sequence.tables[entry.group]
        if entry.index >= len(table) or table[entry.index] != block or entry.index >= len(sequence.keys):
            return None
        pool = self.pools[entry.group]
        cached = pool.lookup(sequence.keys[entry.index], block_ids(sequence, entry.index, self.block_size))
        is_usable = cached is not None and cached != block and cached not in pool.pending
        return cached if is_usable and pool.key_of[block] is None else None

    def dedup(self, entry: Publication, cached: int) -> list[Sequence]:
        """Replace a duplicate by the cached block in the tables of all sequences of its request.

        Return the changed sequences. The caller releases the duplicate once for each of them.
        """
        changed = []
        for sequence in entry.owner.request.sequences:
            table = sequence.tables[entry.group]
            if entry.index < len(table) and table[entry.index] == entry.blocks[0]:
                self.pools[entry.group].share(cached)
                table[entry.index] = cached
                changed.append(sequence)
        return changed

    def withdraw(self, sequence: Sequence) -> None:
        """Remove a sequence's keys from the device and host pools, whichever sequence wrote the blocks."""
        for pool in (*self.pools, *self.host.pools):
            for block in [pool.block_of[key] for key in sequence.keys if key in pool.block_of]:
                pool.withdraw(block)

    def reset(self) -> bool:
        """Forget all cached prefixes on device and host. Return False, and change nothing, if any block is held."""
        pools = (*self.pools, *self.host.pools)
        if any(pool.num_free != pool.num_blocks for pool in pools):
            return False
        for pool in pools:
            pool.withdraw_all()
        return True

    def extend_keys(self, sequence: Sequence) -> None:
        """Compute the keys of a sequence's full blocks, if its blocks may be shared.

        Blocks are shared among all requests (prefix caching), or among the request's own choices (block sharing).
        """
        num_blocks = sequence.num_committed // self.block_size
        has_keys = self.caching or (self.sharing and sequence.request.has_several)
        if has_keys and len(sequence.keys) < num_blocks:
            self.key_maker.extend(sequence, num_blocks)
