"""Checks of what must always hold. Slow on purpose: written from the promises, not from the code.

Owns: check and check_no_leaks. Does not: repair anything.
"""

from __future__ import annotations

from octavo.core.kv.pool import BlockPool
from octavo.core.request import RequestState, Sequence, Status
from octavo.core.scheduler import Scheduler
from octavo.core.state import State
from octavo.errors import InvariantError


def check(scheduler: Scheduler) -> None:
    """Raise InvariantError if any promise about the scheduler's state is broken. O(requests + blocks)."""
    state = scheduler.state
    _check_requests(state)
    for group, pool in enumerate(state.cache.pools):
        _check_references(state, group, pool)
        _check_pool(group, pool)
    _check_slots(state)
    for entry in state.running.requests:
        for sequence in entry.sequences:
            _check_running(state, entry, sequence)


def check_no_leaks(scheduler: Scheduler) -> None:
    """Raise InvariantError unless every block, slot and budget is free. Call when no request is left."""
    state = scheduler.state
    if state.requests:
        raise InvariantError(f"{len(state.requests)} requests are unfinished: {sorted(state.requests)[:5]}")
    for group, pool in enumerate(state.cache.pools):
        held = [block for block, count in enumerate(pool.references) if count]
        _require(not held, f"group {group}: blocks {held[:5]} are held by nobody")
        _require(
            pool.num_free == pool.num_blocks, f"group {group}: {pool.num_free} of {pool.num_blocks} blocks are free"
        )
    _require(
        len(state.free_slots) == state.limits.max_sequences,
        f"{len(state.free_slots)} of {state.limits.max_sequences} slots are free",
    )
    _require(state.sequence_budget.used == 0, f"{state.sequence_budget.used} sequences are still counted")
    _require(len(state.waiting) == 0 and len(state.running) == 0, "a queue is not empty")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvariantError(message)


def _check_requests(state: State) -> None:
    waiting, running = state.waiting.in_order(), state.running.requests
    _require(len(waiting) == len(state.waiting), f"the queue counts {len(state.waiting)}, holds {len(waiting)}")
    _require(len(waiting) + len(running) == len(state.requests), "a request is in no queue, or in two")
    names = [entry.name for entry in (*waiting, *running)]
    _require(sorted(names) == sorted(state.requests), "queues and requests differ")
    for entry in waiting:
        _require(entry.status == Status.WAITING, f"{entry.name} waits with status {entry.status}")
        for sequence in entry.sequences:
            _require(not any(sequence.tables), f"{entry.name} waits and holds blocks")
            _require(sequence.slot == -1, f"{entry.name} waits and holds slot {sequence.slot}")
            _require(
                sequence.num_scheduled == sequence.num_computed == 0,
                f"{entry.name} waits with computed tokens",
            )
    ranks = [entry.rank for entry in running]
    _require(ranks == sorted(ranks), "the running list is out of order")
    count = sum(len(entry.sequences) for entry in running)
    _require(count <= state.limits.max_sequences, f"{count} sequences run, the cap is {state.limits.max_sequences}")
    _require(count == state.running.num_sequences == state.sequence_budget.used, "running sequences are miscounted")


def _check_references(state: State, group: int, pool: BlockPool) -> None:
    expected = [0] * pool.num_blocks
    for entry in state.requests.values():
        for sequence in entry.sequences:
            for block in sequence.tables[group]:
                expected[block] += 1
    for block, count in enumerate(pool.references):
        _require(
            count == expected[block],
            f"group {group} block {block}: {count} references, {expected[block]} tables hold it",
        )


def _check_pool(group: int, pool: BlockPool) -> None:
    referenced = sum(1 for count in pool.references if count)
    plain, cached = pool.free.plain, list(pool.free.cached)
    total = referenced + len(plain) + len(cached)
    _require(
        total == pool.num_blocks, f"group {group}: referenced + free + cached = {total}, the pool has {pool.num_blocks}"
    )
    _require(len(dict.fromkeys((*plain, *cached))) == len(plain) + len(cached), f"group {group}: a block is free twice")
    for block in plain:
        _require(
            pool.references[block] == 0 and pool.key_of[block] is None, f"group {group}: free block {block} is in use"
        )
    for block in cached:
        _require(
            pool.references[block] == 0 and pool.key_of[block] is not None,
            f"group {group}: cached block {block} is wrong",
        )
    for key, block in pool.block_of.items():
        _require(pool.key_of[block] == key, f"group {group}: block {block} is found under a key it does not have")
    _require(len(pool.block_of) == sum(1 for key in pool.key_of if key is not None), f"group {group}: a key is lost")
    for block in pool.pending:
        _require(pool.key_of[block] is not None, f"group {group}: block {block} is pending without a key")


def _check_slots(state: State) -> None:
    used = [sequence.slot for entry in state.running.requests for sequence in entry.sequences]
    every = sorted((*used, *state.free_slots))
    _require(every == list(range(state.limits.max_sequences)), f"slots are lost or doubled: {every}")


def _check_running(state: State, entry: RequestState, sequence: Sequence) -> None:
    name, size = entry.name, state.limits.block_size
    _require(entry.status == Status.RUNNING, f"{name} runs with status {entry.status}")
    _require(
        sequence.num_computed <= sequence.num_scheduled <= sequence.num_known,
        f"{name}: computed, scheduled, known are out of order",
    )
    _require(
        sequence.num_committed < sequence.limit,
        f"{name} has {sequence.num_committed} tokens, its limit is {sequence.limit}",
    )
    _require(sequence.num_known <= sequence.limit, f"{name}: tokens in flight go past its limit")
    if sequence.token_ids is not None:
        _require(len(sequence.token_ids) == sequence.num_committed, f"{name}: ids and count differ")
    for group, (pool, table) in enumerate(zip(state.cache.pools, sequence.tables, strict=True)):
        needed = -(-sequence.num_scheduled // size)
        _require(
            len(table) == needed,
            f"{name}: {len(table)} blocks in group {group}, {needed} needed for {sequence.num_scheduled} tokens",
        )
        for index, block in enumerate(table):
            shared = pool.references[block] > 1 or pool.key_of[block] is not None
            full = (index + 1) * size <= sequence.num_scheduled
            _require(not shared or full, f"{name}: block {block} at index {index} is shared or findable, and not full")
            key = pool.key_of[block]
            if key is not None and index < len(sequence.keys):
                _require(
                    key == sequence.keys[index],
                    f"{name}: block {block} holds another prefix than index {index} of its table",
                )
