"""Prefix caching: the keys of full KV blocks, and the search for the longest cached prefix of a sequence.

Owns: the key function, KeyMaker, Match, and the search over all groups and both tiers.
Does not: store blocks, or reference the blocks that it finds (see cache.adopt).
A block's key is a digest of its parent block's key and its token ids, salted by all else that changes KV. Equal keys
mean equal parent, ids, adapter, media and salt, up to a 128-bit collision of BLAKE2b (RFC 7693). The pool compares ids
where they are known, and so detects a collision. A full group needs every block before the match's end; a sliding group
needs only the blocks that its window reads. Each group shortens the match until all agree on its length.
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
    """Return the parent key of a request's first block: a digest of its adapter, cache salt and tenant."""
    salts = repr((request.adapter_id, request.cache_salt, request.tenant)).encode()
    return blake2b(salts, digest_size=KEY_BYTES).digest()


def private_key(key: bytes, order: int) -> bytes:
    """Return a key that only the request with this order has, so that only its own sequences share blocks."""
    return blake2b(b"private" + key + order.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()


def child_key(parent: bytes, ids: bytes, spans: tuple[Span, ...] = (), start: int = 0, end: int = 0) -> bytes:
    """Return the key of the block with `ids` (packed int32) after `parent`; it covers the media in [start, end)."""
    state = blake2b(parent, digest_size=KEY_BYTES)
    state.update(ids)
    for span in spans:
        if span.start < end and start < span.start + span.length:
            state.update(b"media" + span.key + (span.start - start).to_bytes(8, "little", signed=True))
    return state.digest()


def extend_keys(
    keys: list[bytes], token_ids: array[int], num_tokens: int, block_size: int, request: Request, root: bytes = b""
) -> None:
    """Append to `keys` the missing keys of the full blocks among the first `num_tokens` ids.

    `root` is the parent key of the first block; by default it is root_key(request).
    """
    parent = keys[-1] if keys else (root or root_key(request))
    for start in range(len(keys) * block_size, num_tokens - block_size + 1, block_size):
        end = start + block_size
        parent = child_key(parent, token_ids[start:end].tobytes(), request.spans, start, end)
        keys.append(parent)


def prompt_keys(request: Request, block_size: int) -> tuple[bytes, ...]:
    """Return the keys of a request's full prompt blocks. A front end computes them outside the step loop."""
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
    """Gives sequences the keys of their full blocks: first the keys submitted with the request, then digests of ids.

    If a request has no token ids, its submitted keys after the prompt's full blocks belong to its first choice's
    outputs. Without prefix caching every key is private to its request.
    """

    __slots__ = ("block_size", "caching")

    def __init__(self, block_size: int, caching: bool) -> None:
        self.block_size = block_size
        self.caching = caching

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Give a sequence the keys of its first `num_blocks` blocks of committed ids, as far as they are known."""
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
    """A cached prefix of `num_tokens` tokens. It references no block until it is adopted.

    Per group, `blocks` has one entry per block index: NO_BLOCK if the block is not needed or is loaded from the host.
    `num_held` counts the device blocks that the sequence will share; `num_unreferenced` of those are free until the
    match is adopted. `loads` are (group, index, host block). `sources` is empty unless every known token is cached: in
    that case each group's last block, in `sources`, is copied and only the last token is computed.
    """

    num_tokens: int
    blocks: list[list[int]]
    sources: list[int]
    loads: list[tuple[int, int, int]]
    num_unreferenced: list[int]
    num_held: list[int]
    missing: bytes | None = None  # the key that ended the search because it was not found


def empty_match(num_groups: int) -> Match:
    """Return a match of no tokens."""
    if num_groups == 1:
        return Match(0, [[]], [], [], [0], [0])
    return Match(0, [[] for _ in range(num_groups)], [], [], [0] * num_groups, [0] * num_groups)


class PrefixSearch:
    """One search for a sequence's cached blocks, in the device pools and in the host's pools, if any."""

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
        """Return the length of the longest match in blocks, and True if the match loads from the host.

        The host is used only if it lengthens the match by at least `min_load_tokens` tokens.
        """
        plain = self._agree(max_blocks, with_host=False)
        if not self._hosts:
            return plain, False
        longer = self._agree(max_blocks, with_host=True)
        gained = (longer - plain) * self._block_size
        return (longer, True) if gained > 0 and gained >= min_load_tokens else (plain, False)

    def covers(self, group: int, first: int, end: int) -> bool:
        """Return True if a group has all blocks with indices in [first, end) on the device."""
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
