"""Finds the longest cached prefix of a sequence, over all groups and tiers. Peeks only.

Owns: Match and the search. Does not: change anything (see cache.adopt).
A full group needs every block in front of the match's end; a sliding group only those its window still reads. A hit
needs a hit in every group, so the groups shorten each other until they agree (a fixed point; each pass only shortens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core.kv.group import GroupSpec
from octavo.core.kv.pool import BlockPool

NO_BLOCK = -1  # table entry without a block: left the window, or never needed


@dataclass(slots=True)
class Match:
    """A prefix found: `num_tokens` of KV. Nothing is held until it is adopted.

    Per group: `blocks`, one entry per block index (NO_BLOCK where none is needed, or it comes from the host);
    `num_unreferenced` of them leave the free list when adopted; `num_held` is how many will be shared as they are.
    `loads`: (group, index, host block) to be loaded back. `sources` is empty unless every known token is cached:
    then those last blocks are copied, and only the last token is computed.
    """

    num_tokens: int
    blocks: list[list[int]]
    sources: list[int]
    loads: list[tuple[int, int, int]]
    num_unreferenced: list[int]
    num_held: list[int]
    missing: bytes | None = None  # the key whose lack ended the search; None when nothing longer is to be found


def empty_match(num_groups: int) -> Match:
    """Nothing found."""
    return Match(0, [[] for _ in range(num_groups)], [], [], [0] * num_groups, [0] * num_groups)


class Finder:
    """One search: keys against pools, and host pools where there are any."""

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

    def length(self, max_blocks: int, min_load_tokens: int) -> tuple[int, bool]:
        """Blocks of the longest match, and whether it uses the host tier (only from `min_load_tokens` on)."""
        plain = self._agree(max_blocks, with_host=False)
        if not self._hosts:
            return plain, False
        longer = self._agree(max_blocks, with_host=True)
        gained = (longer - plain) * self._block_size
        return (longer, True) if gained > 0 and gained >= min_load_tokens else (plain, False)

    def covers(self, group: int, first: int, end: int, with_host: bool) -> bool:
        """Whether a group has all blocks of indices [first, end)."""
        return all(self._has(group, index, with_host) for index in range(first, end))

    def collect(self, num_blocks: int, position: int, with_host: bool) -> Match:
        """The match of so many blocks for a sequence that goes on at `position`."""
        found = empty_match(len(self._pools))
        found.num_tokens = num_blocks * self._block_size
        for group, (spec, pool) in enumerate(zip(self._groups, self._pools, strict=True)):
            first = min(spec.first_block(position, self._block_size), num_blocks)
            blocks = found.blocks[group]
            blocks.extend([NO_BLOCK] * first)
            for index in range(first, num_blocks):
                block = self._lookup(group, index)
                if block is None and with_host:
                    host = self._hosts[group].lookup(self._keys[index], self._ids_of(index))
                    assert host is not None
                    found.loads.append((group, index, host))
                blocks.append(NO_BLOCK if block is None else block)
                if block is not None:
                    found.num_held[group] += 1
                    found.num_unreferenced[group] += pool.references[block] == 0
        return found

    def _agree(self, max_blocks: int, with_host: bool) -> int:
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
        """The longest match up to `length` that this group allows."""
        if spec.first_block(length * self._block_size, self._block_size):
            return self._shorten_window(group, spec, length, with_host)
        for index in range(length):  # from the front: the first miss ends it
            if not self._has(group, index, with_host):
                return index
        return length

    def _shorten_window(self, group: int, spec: GroupSpec, length: int, with_host: bool) -> int:
        """From the back: a miss within the window moves the end in front of it."""
        end, index = length, length - 1
        while end and index >= spec.first_block(end * self._block_size, self._block_size):
            if not self._has(group, index, with_host):
                end = index
            index -= 1
        return end

    def _has(self, group: int, index: int, with_host: bool) -> bool:
        if self._lookup(group, index) is not None:
            return True
        return with_host and self._hosts[group].lookup(self._keys[index], self._ids_of(index)) is not None

    def _lookup(self, group: int, index: int) -> int | None:
        found = self._found[group]
        if index not in found:
            found[index] = self._pools[group].lookup(self._keys[index], self._ids_of(index))
        return found[index]
