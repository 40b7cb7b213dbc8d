"""Blocks that nobody references: plain ones first, then cached ones, least recently used first.

Owns: the order of reuse. Does not: know keys or reference counts (see pool).
Invariant: a block is in at most one of the two lists. All operations are O(1).
"""

from __future__ import annotations

from collections import OrderedDict


class FreeList:
    """Unreferenced blocks. `plain` is a stack; `cached` keeps the order of release for LRU eviction."""

    __slots__ = ("cached", "plain")

    def __init__(self, num_blocks: int) -> None:
        self.plain = list(range(num_blocks - 1, -1, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.plain) + len(self.cached)

    def add(self, block: int, is_cached: bool) -> None:
        """Take in a block that lost its last reference."""
        if is_cached:
            self.cached[block] = None
        else:
            self.plain.append(block)

    def take(self) -> tuple[int, bool]:
        """Return the block to reuse next, and whether it still carries a key. The list must not be empty."""
        if self.plain:
            return self.plain.pop(), False
        return self.cached.popitem(last=False)[0], True

    def remove_cached(self, block: int) -> None:
        """Take out one cached block: a prefix hit, or its key was withdrawn."""
        del self.cached[block]

    def touch(self, block: int) -> None:
        """Move a cached block to the end of the order of reuse."""
        self.cached.move_to_end(block)

    def next_cached(self) -> int | None:
        """The cached block that `take` would give, or None when it would give a plain one."""
        return None if self.plain or not self.cached else next(iter(self.cached))
