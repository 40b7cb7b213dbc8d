"""Moves whole sequences between device and host (S09).

Owns: what becomes of their tables. Does not: choose whom, or own host blocks (see host_tier).
Invariants: each unique block moves once; what sequences shared they share again; a sequence on the host keeps its
counts of scheduled and computed tokens.
"""

from __future__ import annotations

from octavo.core.kv.cache import NO_BLOCK, KVCache
from octavo.core.request import Sequence


def swap_out(cache: KVCache, sequences: list[Sequence]) -> bool:
    """Move all blocks of these sequences to the host tier. False, and they stay, when that can't be."""
    for sequence in sequences:
        cache.slide(sequence, is_leaving=True)
    if not cache.host.swap_out(sequences, cache.effects):
        return False
    for sequence in sequences:
        cache.release_device(sequence)
        sequence.capacity = sequence.block_end = sequence.num_published = 0
        sequence.first_live = [0] * cache.num_groups
    return True


def swap_in(cache: KVCache, sequences: list[Sequence]) -> None:
    """Bring swapped sequences back. The caller made sure that there is room (see room.num_swapped_blocks)."""
    placed: dict[tuple[int, int], int] = {}
    for sequence in sequences:
        for group, kept in enumerate(sequence.host_tables):
            for host_block in kept:
                sequence.tables[group].append(_place(cache, sequence.slot, (group, host_block), placed))
        cache.find_live(sequence)
        cache.host.release(sequence)
        cache.resize(sequence)
        sequence.block_end = 0  # its tail may be shared


def _place(cache: KVCache, slot: int, place: tuple[int, int], placed: dict[tuple[int, int], int]) -> int:
    """The device block for a (group, host block): loaded at its first sight, shared from then on."""
    group, host_block = place
    if host_block == NO_BLOCK:
        return NO_BLOCK
    block = placed.get(place)
    if block is not None:
        cache.pools[group].share(block)
        return block
    cache.host.pin(cache.effects, group, host_block)
    block = placed[place] = cache.allocate(group, is_load=True)
    cache.effects.load(slot, group, host_block, block)
    return block
