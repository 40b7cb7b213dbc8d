"""Read-only snapshots of the scheduler's state, for gauges, frames and forecasts.

Owns: the records and how they are read. Does not: change anything, or explain a wait (explain does).
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from octavo.core.admit import needed_blocks
from octavo.core.explain import find_barrier, reason_of, shortage_of
from octavo.core.kv.effects import NO_BLOCK
from octavo.core.kv.pool import BlockPool
from octavo.core.plan import WaitReason
from octavo.core.request import RequestState, Sequence, Status
from octavo.core.state import State


class Gauges(NamedTuple):
    """What may change with every step: levels now, and totals since the start. Block levels are per group."""

    num_running: int  # sequences
    num_running_requests: int
    num_waiting: int
    num_swapped: int
    blocks_used: tuple[int, ...]
    blocks_cached: tuple[int, ...]
    host_blocks_used: int
    num_steps: int
    num_computed_tokens: int
    num_output_tokens: int
    num_accepted_tokens: int
    num_preemptions: int
    num_finished: int
    num_swapped_out_tokens: int
    num_swapped_in_tokens: int
    num_host_hit_tokens: int
    queried_tokens: int
    hit_tokens: int


def gauges(state: State) -> Gauges:
    """Read the gauges. O(groups), cheap enough for every step."""
    cache, totals = state.cache, state.totals
    used, cached = [], []
    for pool in cache.pools:
        num_cached = len(pool.cached)
        cached.append(num_cached)
        used.append(pool.num_blocks - len(pool.plain) - num_cached)
    host_used = 0
    for pool in cache.host.pools:
        host_used += pool.num_blocks - len(pool.plain)
    return Gauges(
        state.num_sequences,
        len(state.running),
        len(state.waiting),
        state.num_swapped,
        tuple(used),
        tuple(cached),
        host_used,
        totals.num_steps,
        totals.num_computed_tokens,
        totals.num_output_tokens,
        totals.num_accepted_tokens,
        totals.num_preemptions,
        sum(totals.finished.values()),
        totals.num_swapped_out_tokens,
        totals.num_swapped_in_tokens,
        totals.num_host_hit_tokens,
        cache.queried_tokens,
        cache.hit_tokens,
    )


class WaitingRequest(NamedTuple):
    """One waiting request: why it waits, the numbers of that (0 where it has none), and its known tokens."""

    name: str
    tenant: str
    reason: WaitReason
    needed: int
    available: int
    arrival: float
    num_known: int


def first_waiting(state: State, most: int) -> list[WaitingRequest]:
    """Return the first waiting requests, in order. O(most log waiting)."""
    barrier, found = find_barrier(state), []
    for entry in state.waiting.first(most):
        short, reason = shortage_of(state, entry), reason_of(state, entry, barrier)
        numbers = (short.needed, short.available) if short is not None and short.reason == reason else (0, 0)
        known = max([one.num_known for one in entry.sequences], default=entry.request.num_prompt_tokens)
        found.append(WaitingRequest(entry.name, entry.request.tenant, reason, *numbers, entry.request.arrival, known))
    return found


class RequestWork(NamedTuple):
    """What is left to do of one open request.

    `num_todo`: tokens to compute before its next one. `num_blocks` of the smallest group: needed if it waits, held if
    it runs. `max_tokens` is 0 if nothing is sampled.
    """

    name: str
    is_waiting: bool
    is_decoding: bool
    ignores_eos: bool
    num_slots: int
    num_todo: int
    num_blocks: int
    num_outputs: int
    max_tokens: int


class OpenWork(NamedTuple):
    """All open requests in the scheduler's order, and what is free for them in the smallest group."""

    running: list[RequestWork]
    waiting: list[RequestWork]
    block_size: int
    max_step_tokens: int
    num_free_slots: int
    num_free_blocks: int  # beside the headroom


def open_work(state: State) -> OpenWork:
    """Return what is left to do of every open request. O(requests log requests), never part of a step."""
    pools = state.cache.pools
    group = min(range(len(pools)), key=lambda index: pools[index].num_blocks)
    return OpenWork(
        [_work(state, entry, group) for entry in state.running.requests],
        [_work(state, entry, group) for entry in state.waiting.in_order()],
        state.cache.block_size,
        state.token_budget.limit,
        len(state.free_slots),
        pools[group].num_free - state.headroom[group],
    )


def _work(state: State, entry: RequestState, group: int) -> RequestWork:
    sequences = entry.sequences
    is_waiting = entry.status == Status.WAITING
    if not is_waiting:
        todo = sum(one.num_known - one.num_scheduled for one in sequences)
        blocks = sum(len(one.tables[group]) for one in sequences)
    else:
        todo = sequences[0].num_known - (entry.seen[0] if entry.seen is not None else 0)
        if entry.is_swapped:
            todo = len(sequences)
        blocks = needed_blocks(state.cache, entry)[group]
    return RequestWork(
        entry.name,
        is_waiting,
        entry.is_decoding,
        entry.request.params.ignore_eos,
        entry.num_slots,
        todo,
        blocks,
        max(one.num_outputs for one in sequences),
        entry.max_tokens if entry.samples else 0,
    )


NO_OWNER = 0xFFFF
FREE, HELD, SHARED, CACHED = range(4)
# Tables from a count of references, and from "has a key", to what a cell shows. They are applied to all cells at once,
# because one Python loop over 4,096 cells takes a tenth of a millisecond.
_HELD = bytes([FREE, HELD]) + bytes([SHARED]) * 254
_UNHELD = bytes([CACHED]) + bytes(255)
_KEYED = bytes([0, CACHED]) + bytes(254)
_Read = dict[int, tuple[Sequence, int, int]]  # slot -> its sequence, entries read, the last of them


class GroupCells(NamedTuple):
    """One group's pool, every `per`-th block: FREE, HELD, SHARED or CACHED, and the slot of an owner or NO_OWNER."""

    num_blocks: int
    per: int
    cells: bytes
    owners: array[int]


class BlockMap:
    """Maps the pools of one scheduler onto at most `max_cells` cells.

    A block's owner is found by reading tables, `max_read` entries per look, and kept. So the owners of a large pool are
    complete only after some looks, and a block that changed owners may show the previous one until then.
    """

    def __init__(self, state: State, max_cells: int, max_read: int) -> None:
        pools = state.cache.pools
        most = max(1, max_cells // len(pools))
        self._state = state
        self._max_read = max_read
        self._per = [-(-pool.num_blocks // most) for pool in pools]
        self._owners = [array("H", [NO_OWNER]) * pool.num_blocks for pool in pools]
        self._read: list[_Read] = [{} for _ in pools]
        self._next = 0  # the slot to read first, so that none is always the last

    def look(self) -> list[GroupCells]:
        """Return the pools as they are now, one entry per group."""
        self._find_owners()
        pools = self._state.cache.pools
        return [
            GroupCells(pool.num_blocks, per, _cells(pool, per), owners[::per])
            for pool, owners, per in zip(pools, self._owners, self._per, strict=True)
        ]

    def _find_owners(self) -> None:
        """Read the table entries that are new since the last look or not read yet."""
        owners_of, left = self._state.slot_owner, self._max_read
        num_slots = len(owners_of)
        for slot in (*range(self._next, num_slots), *range(self._next)):
            sequence = owners_of[slot]
            if sequence is None:
                continue
            for group, read in enumerate(self._read):
                left -= self._read_table(sequence, group, read, left)
            if left <= 0:
                self._next = slot
                return

    def _read_table(self, sequence: Sequence, group: int, read: _Read, most: int) -> int:
        """Note the owner of at most `most` blocks of a table; return how many entries were read."""
        table, owners, slot = sequence.tables[group], self._owners[group], sequence.slot
        known, at, last = read.get(slot, (None, 0, NO_BLOCK))
        if known is not sequence or at > len(table) or (at and table[at - 1] != last):
            at = sequence.first_live[group]  # the slot had another sequence, or this one was preempted and resumed
        end = min(len(table), at + max(0, most))
        for block in table[at:end]:
            if block != NO_BLOCK:
                owners[block] = slot
        read[slot] = (sequence, end, table[end - 1] if end else NO_BLOCK)
        return end - at


def _cells(pool: BlockPool, per: int) -> bytes:
    references = pool.references[::per]
    try:
        counts = bytes(references)
    except ValueError:  # a block that more than 255 hold
        counts = bytes([min(count, SHARED) for count in references])
    keyed = bytes([key is not None for key in pool.key_of[::per]])
    cached = int.from_bytes(counts.translate(_UNHELD)) & int.from_bytes(keyed.translate(_KEYED))
    return (int.from_bytes(counts.translate(_HELD)) | cached).to_bytes(len(counts))
