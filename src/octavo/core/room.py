"""How much room a waiting request needs, in blocks and slots.

Owns: pure functions of the state. Does not: let anybody in, or make anybody go (see intake).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo.core.kv.cache import NO_BLOCK, KVCache
from octavo.core.plan import WaitReason
from octavo.core.request import MAX_RETURNS, BlockShortage, RequestState
from octavo.core.state import State

if TYPE_CHECKING:
    from octavo.core.planning import Planner


class Asker(Protocol):
    """Who asks: a step in the making, with the blocks that running sequences will still need."""

    state: State
    outstanding: list[int]


def num_blocks(cache: KVCache, request: RequestState) -> list[int]:
    """Blocks per group for all known tokens of all sequences, what they share counted once."""
    if request.is_swapped:
        return num_swapped_blocks(cache, request, 1)
    root = request.sequences[0]
    total = cache.peak_blocks(root.num_known)
    shared = (root.num_prompt - 1) // cache.block_size if cache.sharing else 0
    for sequence in request.sequences[1:]:
        for group, peak in enumerate(cache.peak_blocks(sequence.num_known)):
            total[group] += max(1, peak - shared)
    return total


def num_swapped_blocks(cache: KVCache, request: RequestState, growth: int) -> list[int]:
    """Blocks per group to bring a request back: what it has on the host, and what its next rows write.

    That is at least `growth` for each sequence.
    """
    total = cache.host.num_swapped_blocks(request.sequences)
    for sequence in request.sequences:
        wanted = cache.num_blocks_for(sequence.num_known)
        for group, peak in enumerate(cache.peak_blocks(sequence.num_known)):
            kept = sequence.host_tables[group]
            live = sum(1 for block in kept if block != NO_BLOCK)
            total[group] += max(growth, min(wanted - len(kept), peak - live))
    return total


def growth(state: State, request: RequestState, group: int) -> int:
    """Blocks of a group by which those running must be able to grow before a request that was preempted comes back.

    A block each, and two after the second time, or it would be preempted again at once; after MAX_RETURNS times also
    all that it may still come to need itself: it is to go no more.
    """
    blocks = min(request.num_preemptions, 2) * state.sequence_budget.used
    if request.num_preemptions < MAX_RETURNS:
        return blocks
    peaks = state.cache.peak_blocks
    return blocks + sum(peaks(one.limit)[group] - peaks(one.num_known)[group] for one in request.sequences)


def still_lacks(planner: Asker, request: RequestState, shortage: BlockShortage) -> bool:
    """Whether too little can have changed since a request lacked room, so that nothing is to be looked up."""
    state, cache = planner.state, planner.state.cache
    if request.num_bypassed >= state.limits.max_bypass:
        return False
    gained = (
        cache.pools[shortage.group].num_freed - shortage.freed + shortage.kept - kept_beside(planner, request, shortage)
    )
    if gained >= shortage.deficit:
        return False
    return request.seen is None or not cache.may_find_more(request.seen[1], request.seen[2])


def kept_beside(planner: Asker, request: RequestState, shortage: BlockShortage) -> int:
    """Blocks that must stay free beside a newcomer, in the group that it lacked."""
    kept = planner.outstanding[shortage.group]
    if shortage.reason == WaitReason.HEADROOM:
        kept += planner.state.headroom.floors[shortage.group] + growth(planner.state, request, shortage.group)
    return kept


def fits_without(planner: Planner, request: RequestState, victims: list[RequestState], floors: list[int]) -> bool:
    """Whether a waiting request would fit beside the floors, by admission's measure, if these running ones left."""
    state, cache = planner.state, planner.state.cache
    if state.sequence_budget.left + sum(victim.num_slots for victim in victims) < request.num_slots:
        return False
    needed = num_blocks(cache, request)
    match = None if request.is_swapped else cache.match(request.sequences[0], request.match_cap(request.sequences[0]))
    for group, pool in enumerate(cache.pools):
        held: dict[int, int] = {}
        for victim in victims:
            for sequence in victim.sequences:
                for block in sequence.tables[group]:
                    held[block] = held.get(block, 0) + 1
        held.pop(NO_BLOCK, None)
        left = pool.num_free + sum(1 for block, count in held.items() if pool.references[block] == count)
        left -= needed[group] + planner.outstanding[group]
        left += sum(planner.kept[victim.name][group] for victim in victims if victim.name in planner.kept)
        # What it shares is not needed anew; what nobody else holds is not free any more then.
        for block in match.blocks[group] if match is not None else ():
            left += block != NO_BLOCK and pool.references[block] > held.get(block, 0)
        if left < floors[group]:
            return False
    return True
