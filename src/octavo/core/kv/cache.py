"""All cache groups together: prefix matches, tables that grow, release.

Owns: the pools, and the tables of sequences. Does not: decide who gets blocks.
Invariants: a match changes nothing until `adopt`; allocation is all-or-nothing over groups; a block that
is shared or findable is never written: a prompt found whole copies its last block and writes the copy.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from octavo.core.kv.keys import extend_keys
from octavo.core.kv.pool import BlockPool
from octavo.core.limits import Limits
from octavo.core.request import Sequence


@dataclass(slots=True)
class Match:
    """A prefix found in the cache: `num_tokens` of KV; per group the shared blocks and the block to copy.

    `num_unreferenced` shared blocks (per group) leave the free list when adopted. `sources` is empty unless
    every known token is cached: then its blocks are copied, and only the last token is computed.
    """

    num_tokens: int
    blocks: list[list[int]]
    sources: list[int]
    num_unreferenced: list[int]


@dataclass(slots=True)
class Publication:
    """One block made findable by a plan before that plan ran."""

    group: int
    block: int
    sequence: Sequence


class KVCache:
    """The paged KV cache's bookkeeping, for every group of layers."""

    __slots__ = ("block_size", "caching", "hit_tokens", "num_groups", "pools", "queried_tokens")

    def __init__(self, limits: Limits) -> None:
        self.block_size = limits.block_size
        self.caching = limits.prefix_caching
        self.pools = [BlockPool(count) for count in limits.num_blocks]
        self.num_groups = len(self.pools)
        self.queried_tokens = 0
        self.hit_tokens = 0

    @property
    def version(self) -> int:
        """Moves whenever a waiting request might find more room or a longer match."""
        return sum(pool.version for pool in self.pools)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def num_free(self) -> int:
        """Blocks that every group can give at once."""
        return min(pool.num_free for pool in self.pools)

    def match(self, sequence: Sequence, max_tokens: int, step: int) -> Match:
        """Find the longest cached prefix of a sequence without blocks; peeks only. Cost: one lookup a block.

        At most `max_tokens`, and at most known - 1, so that there are logits to sample from.
        """
        found: list[list[int]] = [[] for _ in self.pools]
        if self.caching and max_tokens > 0:
            self._extend_keys(sequence)
            self._find(sequence, max_tokens // self.block_size, found)
        num_tokens = len(found[0]) * self.block_size
        sources: list[int] = []
        if num_tokens >= sequence.num_known:
            last = [blocks.pop() for blocks in found]
            num_tokens -= self.block_size
            written_now = any(pool.pending.get(block) == step for pool, block in zip(self.pools, last, strict=True))
            # A copy reads what was there before the step, so a block being written in this very step can't be one.
            if not written_now and self.block_size > 1 and self._can_copy(found, last):
                sources = last
                num_tokens = sequence.num_known - 1
        return Match(num_tokens, found, sources, self._count_unreferenced(found))

    def room_after(self, match: Match, num_tokens: int) -> int:
        """Blocks left free in the tightest group once a match is adopted and `num_tokens` positions are held."""
        wanted = self.num_blocks_for(num_tokens)
        return min(
            pool.num_free - unreferenced - (wanted - len(blocks))
            for pool, blocks, unreferenced in zip(self.pools, match.blocks, match.num_unreferenced, strict=True)
        )

    def adopt(self, sequence: Sequence, match: Match, edits: array[int], copies: array[int]) -> None:
        """Give a match's blocks to the sequence and enter them in the plan."""
        for group, (pool, blocks) in enumerate(zip(self.pools, match.blocks, strict=True)):
            table = sequence.tables[group]
            for block in blocks:
                pool.share(block)
                edits.extend((sequence.slot, group, len(table), block))
                table.append(block)
        sequence.capacity = len(match.blocks[0]) * self.block_size
        sequence.num_published = len(match.blocks[0])
        if match.sources:
            self._copy_last(sequence, match.sources, edits, copies)
        sequence.num_scheduled = sequence.num_computed = match.num_tokens

    def extend(self, sequence: Sequence, end: int, edits: array[int]) -> None:
        """Grow the tables to hold positions [0, end). The caller made sure that there is room."""
        for group, pool in enumerate(self.pools):
            table = sequence.tables[group]
            for index in range(len(table), self.num_blocks_for(end)):
                block = pool.allocate()
                table.append(block)
                edits.extend((sequence.slot, group, index, block))
        sequence.capacity = len(sequence.tables[0]) * self.block_size
        sequence.hot_end = min(sequence.capacity, sequence.limit - 1)

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks, the tail first, so that the head of a chain is evicted last."""
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            while table:
                pool.release(table.pop())
        sequence.capacity = sequence.hot_end = 0
        sequence.num_published = 0
        sequence.num_scheduled = 0
        sequence.num_computed = 0

    def publish(self, sequence: Sequence, end: int, step: int | None) -> list[Publication]:
        """Make the full blocks of positions [0, end) findable; with `step`, as pending on that plan."""
        made: list[Publication] = []
        num_full = end // self.block_size
        if not self.caching or num_full <= sequence.num_published:
            return made
        self._extend_keys(sequence)
        for index in range(sequence.num_published, min(num_full, len(sequence.keys))):
            ids = self._ids_of(sequence, index)
            for group, pool in enumerate(self.pools):
                block = sequence.tables[group][index]
                if pool.publish(block, sequence.keys[index], ids, step) and step is not None:
                    made.append(Publication(group, block, sequence))
            sequence.num_published = index + 1
        return made

    def confirm(self, made: list[Publication], step: int) -> None:
        """A plan ran: what it published is now cached."""
        for publication in made:
            self.pools[publication.group].confirm(publication.block, step)

    def unpublish(self, made: list[Publication], step: int) -> list[Publication]:
        """A plan did not run: withdraw what it published; returns what was still there to withdraw."""
        return [entry for entry in made if self.pools[entry.group].unpublish(entry.block, step)]

    def reset(self) -> bool:
        """Forget all cached prefixes. False, and nothing changed, while blocks are held."""
        if any(pool.num_free != pool.num_blocks for pool in self.pools):
            return False
        return all([pool.reset() for pool in self.pools])

    def count_hit(self, num_known: int, num_cached: int) -> None:
        """Enter one admission in the hit statistics (tokens)."""
        self.queried_tokens += num_known
        self.hit_tokens += num_cached

    def _find(self, sequence: Sequence, max_blocks: int, found: list[list[int]]) -> None:
        for index, key in enumerate(sequence.keys[:max_blocks]):
            ids = self._ids_of(sequence, index)
            hits = [pool.lookup(key, ids) for pool in self.pools]
            if None in hits:
                return
            for blocks, block in zip(found, hits, strict=True):
                assert block is not None
                blocks.append(block)

    def _count_unreferenced(self, found: list[list[int]]) -> list[int]:
        return [
            sum(1 for block in blocks if pool.references[block] == 0)
            for pool, blocks in zip(self.pools, found, strict=True)
        ]

    def _can_copy(self, found: list[list[int]], sources: list[int]) -> bool:
        """Whether a block for the copy is free beside the matched ones and the source itself."""
        held = [
            count + (pool.references[source] == 0)
            for pool, source, count in zip(self.pools, sources, self._count_unreferenced(found), strict=True)
        ]
        return all(pool.num_free > count for pool, count in zip(self.pools, held, strict=True))

    def _copy_last(self, sequence: Sequence, sources: list[int], edits: array[int], copies: array[int]) -> None:
        for group, (pool, source) in enumerate(zip(self.pools, sources, strict=True)):
            # Held while the copy is allocated, so that a block is never copied onto itself.
            pool.share(source)
            block = pool.allocate()
            pool.release(source)
            copies.extend((group, source, block))
            edits.extend((sequence.slot, group, len(sequence.tables[group]), block))
            sequence.tables[group].append(block)
        sequence.capacity += self.block_size

    def _extend_keys(self, sequence: Sequence) -> None:
        if sequence.token_ids is not None:
            extend_keys(
                sequence.keys, sequence.token_ids, sequence.num_committed, self.block_size, sequence.request.request
            )

    def _ids_of(self, sequence: Sequence, index: int) -> bytes | None:
        if sequence.token_ids is None:
            return None
        return sequence.token_ids[index * self.block_size : (index + 1) * self.block_size].tobytes()
