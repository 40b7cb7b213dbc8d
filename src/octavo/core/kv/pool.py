"""The blocks of one cache group: reference counts, keys, reuse.

Owns: which block is referenced, cached or free, and under which key it can be found.
Does not: know sequences or tables (see cache).
Invariants: referenced + cached-unreferenced + plain free = total; a key names one block; a block has at
most one key; only full blocks have keys. A block under a `pending` step is being written by that plan.
"""

from __future__ import annotations

from octavo.core.kv.free_list import FreeList
from octavo.errors import InvariantError


class BlockPool:
    """A fixed pool of blocks. Every operation is O(1)."""

    __slots__ = (
        "block_of",
        "free",
        "ids_of",
        "key_of",
        "num_blocks",
        "num_freed",
        "num_published",
        "pending",
        "references",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.free = FreeList(num_blocks)
        self.key_of: list[bytes | None] = [None] * num_blocks
        self.ids_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}
        self.pending: dict[int, int] = {}
        self.num_freed = 0  # since the start: room can have grown by no more than this did
        self.num_published = 0  # likewise for what can be found

    @property
    def num_free(self) -> int:
        """Blocks that can be taken at once, cached unreferenced ones included."""
        return len(self.free)

    def allocate(self) -> int:
        """Take a block with one reference, evicting the least recently used cached one if no other is left."""
        block, is_cached = self.free.take()
        if is_cached:
            self._forget(block)
        self.references[block] = 1
        return block

    def allocate_plain(self, count: int) -> list[int]:
        """Take so many blocks as `allocate` would, one by one; there must be as many without a key."""
        plain, references = self.free.plain, self.references
        blocks = plain[-count:]
        del plain[-count:]
        blocks.reverse()
        for block in blocks:
            references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to a block that is referenced or cached."""
        if self.references[block] == 0:
            self.free.remove_cached(block)
        self.references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference. The last one makes the block free, or evictable while it has a key."""
        count = self.references[block] - 1
        if count < 0:
            raise InvariantError(f"block {block} is released but nobody holds it")
        self.references[block] = count
        if count == 0:
            self.free.add(block, self.key_of[block] is not None)
            self.num_freed += 1

    def release_table(self, table: list[int]) -> None:
        """Empty a table from its tail, as `release` does one by one (long sequences have hundreds); -1 is no block."""
        references, key_of = self.references, self.key_of
        held = list(map(references.__getitem__, table))
        if held.count(1) == len(held) and -1 not in table and not any(map(key_of.__getitem__, table)):
            for block in table:
                references[block] = 0
            self.num_freed += len(table)
            table.reverse()
            self.free.plain += table
            table.clear()
            return
        while table:
            block = table.pop()
            if block >= 0:
                self.release(block)

    def touch(self, block: int) -> None:
        """Count a cached, unreferenced block as just used."""
        if self.references[block] == 0:
            self.free.touch(block)

    def lookup(self, key: bytes, ids: bytes | None) -> int | None:
        """Return the block under `key`; where both sides know their ids, they must be equal."""
        block = self.block_of.get(key)
        if block is None:
            return None
        stored = self.ids_of[block]
        if ids is not None and stored is not None and ids != stored:
            return None
        return block

    def publish(self, block: int, key: bytes, ids: bytes | None, step: int | None) -> bool:
        """Make a full block findable; `step` = the plan that is still writing it. False if the key is taken."""
        if key in self.block_of:
            return False
        self.block_of[key] = block
        self.key_of[block] = key
        self.ids_of[block] = ids
        if step is not None:
            self.pending[block] = step
        self.num_published += 1
        return True

    def confirm(self, block: int, step: int) -> None:
        """The plan of `step` wrote the block."""
        if self.pending.get(block) == step:
            del self.pending[block]

    def unpublish(self, block: int, step: int) -> bool:
        """The plan of `step` will not write the block: withdraw its key. False if it no longer has that one."""
        if self.pending.get(block) != step:
            return False
        self.withdraw(block)
        return True

    def withdraw(self, block: int) -> None:
        """Nobody is to find this block any more; whoever holds it keeps it. It must have a key."""
        if self.references[block] == 0:
            self.free.remove_cached(block)
            self.free.add(block, is_cached=False)
        self._forget(block)

    def reset(self) -> bool:
        """Forget every key. False, and nothing changed, while any block is referenced."""
        if len(self.free) != self.num_blocks:
            return False
        for block in list(self.free.cached):
            self._forget(block)
            self.free.remove_cached(block)
            self.free.add(block, is_cached=False)
        return True

    def _forget(self, block: int) -> None:
        key = self.key_of[block]
        assert key is not None
        del self.block_of[key]
        self.key_of[block] = None
        self.ids_of[block] = None
        self.pending.pop(block, None)
