"""The blocks of one cache group: reference counts, keys, and the order of reuse.

Owns: which blocks are referenced, cached or plain, and the key of each cached prefix block.
Does not: know sequences or block tables (see cache).
Invariants: referenced + cached + plain + counted = num_blocks. A cached block is unreferenced and has a key; a plain
block is unreferenced and has no key; of counted blocks only the number is known (simulations). A key names one block, a
block has at most one key, and only full blocks have keys. The lists have an entry for each block that was ever named.
`pending` maps each block that a plan in flight still writes to that plan's step.
"""

from __future__ import annotations

from collections import OrderedDict

from octavo.errors import InvariantError


class BlockPool:
    """A fixed pool of blocks. Operations on one block are O(1).

    Free blocks are reused in this order: `plain` ones, the last released first; then those that were never named, by
    number; then `cached` ones, least recently used first. A counted block takes no number, only the room of one.
    """

    __slots__ = (
        "block_of", "cached", "ids_of", "key_of", "num_blocks", "num_counted", "num_freed", "pending", "plain",
        "references",
    )  # fmt: skip

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references: list[int] = []
        self.plain: list[int] = []
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.key_of: list[bytes | None] = []
        self.ids_of: list[bytes | None] = []
        self.block_of: dict[bytes, int] = {}
        self.pending: dict[int, int] = {}
        self.num_counted = 0
        self.num_freed = 0  # blocks freed since the start: an upper bound on how far num_free has grown

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return self.num_blocks - len(self.references) - self.num_counted + len(self.plain) + len(self.cached)

    @property
    def num_plain(self) -> int:
        """Blocks that can be allocated now without evicting a cached one."""
        return self.num_blocks - len(self.references) - self.num_counted + len(self.plain)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free

    @property
    def num_filled(self) -> int:
        """Blocks that are held or have a cached prefix."""
        return self.num_blocks - self.num_plain

    def is_read_only(self, block: int) -> bool:
        """Return True if other sequences may read the block: a sequence must copy it to write there."""
        return self.references[block] > 1 or self.key_of[block] is not None

    # --- references ------------------------------------------------------------------------------------

    def allocate(self) -> int:
        """Take a free block with one reference; evict the least recently used cached block if no plain one is left."""
        if self.num_plain < 1:
            block = self._evict()
        elif self.plain:
            block = self.plain.pop()
        else:
            return self._name(1)[0]
        self.references[block] = 1
        return block

    def allocate_plain(self, count: int) -> list[int]:
        """Take `count` plain blocks in the order of `allocate`. The caller has checked that there are `count`."""
        plain, references = self.plain, self.references
        blocks = plain[-count:]
        del plain[-count:]
        blocks.reverse()
        for block in blocks:
            references[block] = 1
        if len(blocks) < count:
            blocks += self._name(count - len(blocks))
        return blocks

    def allocate_several(self, count: int) -> list[int]:
        """Take `count` free blocks in the order of `allocate`. The caller has checked that there are `count`."""
        num_plain = min(count, max(0, self.num_plain))
        blocks = self.allocate_plain(num_plain) if num_plain else []
        cached, references, pending = self.cached, self.references, self.pending
        block_of, key_of, ids_of = self.block_of, self.key_of, self.ids_of
        for _ in range(count - num_plain):  # as _evict: prompts of hundreds of blocks displace as many
            block = cached.popitem(last=False)[0]
            key = key_of[block]
            assert key is not None
            del block_of[key]
            key_of[block] = ids_of[block] = None
            if pending:
                pending.pop(block, None)
            references[block] = 1
            blocks.append(block)
        return blocks

    def _name(self, count: int) -> range:
        """Return blocks that were never used, with one reference each."""
        first = len(self.references)
        self.references += [1] * count
        self.key_of += [None] * count
        self.ids_of += [None] * count
        return range(first, first + count)

    def _evict(self) -> int:
        """Remove the least recently used cached block, and its key; return the block."""
        block = self.cached.popitem(last=False)[0]
        self._forget_key(block)
        return block

    def next_evicted(self) -> int | None:
        """Return the cached block that `allocate` would evict, or None if it would take a plain one."""
        return None if not self.cached or self.num_plain > 0 else next(iter(self.cached))

    def take(self, count: int) -> None:
        """Take `count` free blocks for a sequence that only counts its blocks. The caller has checked the number.

        The same cached blocks are evicted as if each block were allocated by `allocate`.
        """
        for _ in range(count - self.num_plain):
            self.plain.append(self._evict())
        self.num_counted += count

    def give_back(self, count: int) -> None:
        """Free blocks that `take` took."""
        self.num_counted -= count
        self.num_freed += count

    def share(self, block: int) -> None:
        """Add a reference to a referenced or cached block."""
        if self.references[block] == 0:
            del self.cached[block]
        self.references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference. A block without references becomes cached if it has a key, else plain."""
        count = self.references[block] - 1
        if count < 0:
            raise InvariantError(f"block {block} is released without a reference")
        self.references[block] = count
        if count == 0:
            self.num_freed += 1
            if self.key_of[block] is None:
                self.plain.append(block)
            else:
                self.cached[block] = None

    def release_table(self, table: list[int]) -> None:
        """Release all blocks of a table, the last first, and empty the table. Skip negative entries (NO_BLOCK)."""
        references = self.references
        held = list(map(references.__getitem__, table))
        has_keys = bool(self.block_of) and any(map(self.key_of.__getitem__, table))
        if held.count(1) == len(held) and -1 not in table and not has_keys:
            # Long sequences have hundreds of blocks of their own: release them together.
            for block in table:
                references[block] = 0
            self.num_freed += len(table)
            table.reverse()
            self.plain += table
            table.clear()
            return
        key_of, plain, cached = self.key_of, self.plain, self.cached
        for block in reversed(table):  # as `release`
            if block < 0:
                continue
            count = references[block] - 1
            if count < 0:
                raise InvariantError(f"block {block} is released without a reference")
            references[block] = count
            if not count:
                self.num_freed += 1
                if key_of[block] is None:
                    plain.append(block)
                else:
                    cached[block] = None
        table.clear()

    def touch(self, block: int) -> None:
        """Mark a cached block as just used."""
        if self.references[block] == 0:
            self.cached.move_to_end(block)

    # --- keys ------------------------------------------------------------------------------------------

    def lookup(self, key: bytes, ids: bytes | None) -> int | None:
        """Return the block under `key`, or None. If both the stored ids and `ids` are known, they must be equal."""
        block = self.block_of.get(key)
        if block is None:
            return None
        stored = self.ids_of[block]
        return block if ids is None or stored is None or ids == stored else None

    def publish(self, blocks: list[int], keys: list[bytes], ids: list[bytes] | None, step: int | None) -> list[int]:
        """Make full blocks findable, each under its key; `step` is the plan that still writes them.

        Return the positions in `blocks` of those whose key is taken.
        """
        taken: list[int] = []
        block_of, key_of, pending = self.block_of, self.key_of, self.pending
        for position, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            if key in block_of:
                taken.append(position)
                continue
            block_of[key] = block
            key_of[block] = key
            if ids is not None:
                self.ids_of[block] = ids[position]
            if step is not None:
                pending[block] = step
        return taken

    def confirm(self, blocks: list[int], step: int) -> None:
        """Mark the blocks as written by the plan of `step`."""
        pending = self.pending
        for block in blocks:
            if pending.get(block) == step:
                del pending[block]

    def unpublish(self, block: int, step: int) -> None:
        """Withdraw the key that the plan of `step` published, because the plan will not write the block."""
        if self.pending.get(block) == step:
            self.withdraw(block)

    def withdraw(self, block: int) -> None:
        """Remove a block's key, so that the block can no longer be found; its references stay."""
        if self.references[block] == 0:
            del self.cached[block]
            self.plain.append(block)
        self._forget_key(block)

    def withdraw_all(self) -> None:
        """Remove the keys of all cached blocks."""
        for block in list(self.cached):
            self.withdraw(block)

    def _forget_key(self, block: int) -> None:
        key = self.key_of[block]
        assert key is not None
        del self.block_of[key]
        self.key_of[block] = self.ids_of[block] = None
        self.pending.pop(block, None)
