"""Prefix caching: the keys of full KV blocks, and the search for the longest cached prefix of a sequence.

Owns: the key function, the source of a sequence's keys, Match and the search over all groups and both tiers.
Does not: store blocks, or reference those that it finds (see cache.adopt).
A key is a digest in a chain over token ids, salted by everything else that changes KV. Equal keys mean equal parent,
ids, adapter, media and salt, up to a 128-bit collision of BLAKE2b (RFC 7693), which the pool's comparison of ids
catches where ids are known. A full group needs every block before the match's end, a sliding group only those that its
window still reads; each group shortens the match until all agree on its length (a fixed point).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass
from hashlib import blake2b

from octavo.core.kv.effects import NO_BLOCK
from octavo.core.kv.pool import BlockPool
from octavo.core.limits import GroupSpec
from octavo.core.request import Request, Span
from octavo.core.request_state import Sequence

KEY_BYTES = 16


def root_key(request: Request) -> bytes:
    """Return the parent key of a request's first block: its adapter and salts."""
    salts = repr((request.adapter_id, request.cache_salt, request.tenant)).encode()
    return blake2b(salts, digest_size=KEY_BYTES).digest()


def private_key(key: bytes, order: int) -> bytes:
    """Return a key that only the request of this number has: its sequences share blocks with each other alone."""
    return blake2b(b"private" + key + order.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()


def child_key(parent: bytes, ids: bytes, spans: tuple[Span, ...] = (), start: int = 0, end: int = 0) -> bytes:
    """Return the key of the block of `ids` (packed int32) after `parent`; media in [start, end) adds its content."""
    state = blake2b(parent, digest_size=KEY_BYTES)
    state.update(ids)
    for span in spans:
        if span.start < end and start < span.start + span.length:
            state.update(b"media" + span.key + (span.start - start).to_bytes(8, "little", signed=True))
    return state.digest()


def extend_keys(
    keys: list[bytes], token_ids: array[int], num_tokens: int, block_size: int, request: Request, root: bytes = b""
) -> None:
    """Append the keys of the full blocks among the first `num_tokens` ids that `keys` does not hold yet.

    `root` is the first block's parent; by default the request's own.
    """
    parent = keys[-1] if keys else (root or root_key(request))
    for start in range(len(keys) * block_size, num_tokens - block_size + 1, block_size):
        end = start + block_size
        parent = child_key(parent, token_ids[start:end].tobytes(), request.spans, start, end)
        keys.append(parent)


def prompt_keys(request: Request, block_size: int) -> tuple[bytes, ...]:
    """Return the keys of a request's full prompt blocks; a frontend computes them off the step loop."""
    keys: list[bytes] = []
    if request.prompt_token_ids is not None:
        extend_keys(keys, request.prompt_token_ids, request.num_prompt_tokens, block_size, request)
    return tuple(keys)


def block_ids(sequence: Sequence, index: int, block_size: int) -> bytes | None:
    """Return the ids of one block, packed; None for a sequence known by length only."""
    if sequence.token_ids is None:
        return None
    return sequence.token_ids[index * block_size : (index + 1) * block_size].tobytes()


class KeyMaker:
    """Gives sequences the keys of their full blocks: those that were submitted with the request, then digests of ids.

    For a request known by length only, keys after the prompt's full blocks are those of its first choice's outputs.
    Without caching across requests every key is private to its request.
    """

    __slots__ = ("block_size", "caching")

    def __init__(self, block_size: int, caching: bool) -> None:
        self.block_size = block_size
        self.caching = caching

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Give a sequence the keys of its first `num_blocks` blocks (of committed ids), or of those known."""
        keys, ids, state = sequence.keys, sequence.token_ids, sequence.request
        request, size = state.request, self.block_size
        if request.block_keys is not None and (self.caching or ids is None):
            known = num_blocks
            if ids is None and (sequence.choice or state.beams is not None):
                known = min(num_blocks, sequence.num_prompt // size)
            given = request.block_keys[len(keys) : known]
            keys.extend(given if self.caching else (private_key(key, state.order) for key in given))
        if ids is not None and len(keys) < num_blocks:
            root = b"" if self.caching else private_key(root_key(request), state.order)
            extend_keys(keys, ids, num_blocks * size, size, request, root)


@dataclass(slots=True)
class Match:
    """A cached prefix of `num_tokens` tokens. Nothing is held until it is adopted.

    Per group: `blocks` has an entry per block index (NO_BLOCK where none is needed, or it is loaded from the host);
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
    """One search for the blocks of a sequence, in the device pools and in those of the host, if any."""

    __slots__ = ("_block_size", "_found", "_groups", "_hosts", "_keys", "_pools", "_sequence")

    def __init__(
        self,
        sequence: Sequence,
        groups: Many[GroupSpec],
        pools: Many[BlockPool],
        hosts: Many[BlockPool],
        block_size: int,
    ) -> None:
        self._sequence, self._keys, self._block_size = sequence, sequence.keys, block_size
        self._groups, self._pools, self._hosts = groups, pools, hosts
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
            ids = block_ids(self._sequence, index, self._block_size)
            found[index] = self._pools[group].lookup(self._keys[index], ids)
        return found[index]

    def _lookup_host(self, group: int, index: int) -> int | None:
        return self._hosts[group].lookup(self._keys[index], block_ids(self._sequence, index, self._block_size))
