"""Finds the longest cached prefix of a sequence, over all groups and both tiers, without changing anything.

Owns: Match and the search. Does not: hold what it finds (see cache.adopt).
A full group needs every block before the match's end; a sliding group only those that its window still reads.
All groups must agree on one length: each shortens the others until none does (a fixed point).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core.kv.effects import NO_BLOCK
from octavo.core.kv.group import GroupSpec
from octavo.core.kv.pool import BlockPool


@dataclass(slots=True)
class Match:
    """A cached prefix of `num_tokens` tokens. Nothing is held until it is adopted.

    Per group: `blocks` has an entry per block index (NO_BLOCK where none is needed, or it comes from the host);
    `num_held` of them are shared as they are; `num_unreferenced` of these leave the free blocks when adopted.
    `loads` are (group, index, host block) to be loaded back. `sources` is empty unless every known token is cached:
    then it has each group's last block, which is copied, and only the last token is computed.
    """

    num_tokens: int
    blocks: list[list[int]]
    sources: list[int]
    loads: list[tuple[int, int, int]]
    num_unreferenced: list[int]
    num_held: list[int]
    missing: bytes | None = None  # the key that ended the search because it was not found


def empty_match(num_groups: int) -> Match:
    """Return a match of nothing."""
    return Match(0, [[] for _ in range(num_groups)], [], [], [0] * num_groups, [0] * num_groups)


class PrefixSearch:
    """One search for a sequence's keys, in the device pools and in those of the host, if any."""

    __slots__ = ("_block_size", "_found", "_groups", "_hosts", "_ids_of", "_keys", "_pools")

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pools: Sequence[BlockPool],
        hosts: Sequence[BlockPool],
        keys: Sequence[bytes],
        ids_of: Callable[[int], bytes | None],
        block_size: int,
    ) -> None:
        self._groups, self._pools, self._hosts = groups, pools, hosts
        self._keys, self._ids_of, self._block_size = keys, ids_of, block_size
        self._found: list[dict[int, int | None]] = [{} for _ in pools]  # each index is looked up once

    def longest(self, max_blocks: int, min_load_tokens: int) -> tuple[int, bool]:
        """Return the blocks of the longest match, and whether it uses the host (for `min_load_tokens` or more)."""
        plain = self._agree(max_blocks, with_host=False)
        if not self._hosts:
            return plain, False
        longer = self._agree(max_blocks, with_host=True)
        gained = (longer - plain) * self._block_size
        return (longer, True) if gained > 0 and gained >= min_load_tokens else (plain, False)

    def covers(self, group: int, first: int, end: int) -> bool:
        """Return True if a group has all blocks of indices [first, end) on the device."""
        return all(self._has(group, index, with_host=False) for index in range(first, end))

    def collect(self, num_blocks: int, position: int, with_host: bool) -> Match:
        """Return the match of the first `num_blocks` blocks for a sequence that continues at `position`."""
        found = empty_match(len(self._pools))
        found.num_tokens = num_blocks * self._block_size
        for group, (spec, pool) in enumerate(zip(self._groups, self._pools, strict=True)):
            first = min(spec.first_block(position, self._block_size), num_blocks)
            blocks = found.blocks[group]
            blocks.extend([NO_BLOCK] * first)
            for index in range(first, num_blocks):
                block = self._lookup(group, index)
                if block is not None:
                    blocks.append(block)
                    found.num_held[group] += 1
                    found.num_unreferenced[group] += pool.references[block] == 0
                    continue
                blocks.append(NO_BLOCK)
                if with_host:
                    host_block = self._lookup_host(group, index)
                    assert host_block is not None
                    found.loads.append((group, index, host_block))
        return found

    def _agree(self, max_blocks: int, with_host: bool) -> int:
        """Return the greatest length in blocks that every group can serve."""
        length = min(max_blocks, len(self._keys))
        while length:
            agreed = length
            for group, spec in enumerate(self._groups):
                agreed = self._shorten(group, spec, agreed, with_host)
            if agreed == length or len(self._groups) == 1:
                return agreed
            length = agreed
        return 0

    def _shorten(self, group: int, spec: GroupSpec, length: int, with_host: bool) -> int:
        """Return the greatest length up to `length` that one group can serve."""
        size = self._block_size
        if not spec.first_block(length * size, size):
            for index in range(length):  # every block is needed: the first miss ends the match
                if not self._has(group, index, with_host):
                    return index
            return length
        end, index = length, length - 1
        while end and index >= spec.first_block(end * size, size):
            if not self._has(group, index, with_host):
                end = index  # a miss within the window: the match ends before it
            index -= 1
        return end

    def _has(self, group: int, index: int, with_host: bool) -> bool:
        if self._lookup(group, index) is not None:
            return True
        return with_host and self._lookup_host(group, index) is not None

    def _lookup(self, group: int, index: int) -> int | None:
        found = self._found[group]
        if index not in found:
            found[index] = self._pools[group].lookup(self._keys[index], self._ids_of(index))
        return found[index]

    def _lookup_host(self, group: int, index: int) -> int | None:
        return self._hosts[group].lookup(self._keys[index], self._ids_of(index))
