"""Checks of what must always hold. Slow on purpose: written from the promises, not from the code.

Owns: check and check_no_leaks. Does not: repair anything.
"""

from __future__ import annotations

from octavo.core.encoder import EncoderCache
from octavo.core.kv.effects import NO_BLOCK
from octavo.core.kv.pool import BlockPool
from octavo.core.request_state import RequestState, Sequence, Status
from octavo.core.scheduler import Scheduler
from octavo.core.state import State
from octavo.errors import InvariantError


def check(scheduler: Scheduler) -> None:
    """Raise InvariantError if any promise about the scheduler's state is broken. O(requests + blocks)."""
    state = scheduler._state
    _check_requests(state)
    for group, pool in enumerate(state.cache.pools):
        _check_references(state, group, pool)
        _check_pool(group, pool)
    for group, pool in enumerate(state.cache.host.pools):
        _check_host_references(state, group, pool)
        _check_pool(group, pool)
    _check_slots(state)
    _check_adapters(state)
    check_encoder(state.encoder)
    for entry in state.running.requests:
        for sequence in entry.sequences:
            _check_running(state, entry, sequence)


def check_encoder(cache: EncoderCache) -> None:
    """Raise InvariantError if the counts of an encoder cache disagree."""
    counts = dict.fromkeys(cache._outputs, 0)
    for held in cache._needs.values():
        for need in held.values():
            _require(need.key in counts, "encoder cache: an output that is needed is lost")
            counts[need.key] += 1
    counted = {key: output.num_needs for key, output in cache._outputs.items()}
    _require(counts == counted, f"encoder cache: {sum(counted.values())} needs are counted, {sum(counts.values())} are")
    used = sum(output.size for output in cache._outputs.values())
    _require(used <= cache._capacity, f"encoder cache: {used} tokens are kept, there is room for {cache._capacity}")


def check_cheap(scheduler: Scheduler) -> None:
    """The part of `check` that costs O(sequences running): counts and sums. Raises InvariantError."""
    state = scheduler._state
    used = sum(entry.num_slots for entry in state.running.requests)
    _require(used == state.num_sequences, f"{used} slots are in use, {state.num_sequences} are counted")
    _require(used <= state.limits.max_sequences, f"{used} sequences run, the cap is {state.limits.max_sequences}")
    _require(len(state.waiting) + len(state.running) == len(state.requests), "a request is in no queue, or in two")
    for entry in state.running.requests:
        for sequence in entry.sequences:
            ordered = sequence.num_computed <= sequence.num_scheduled <= sequence.num_known <= sequence.limit
            _require(ordered, f"{entry.name}: computed, scheduled, known, limit are out of order")
    for pool in (*state.cache.pools, *state.cache.host.pools):
        _require(pool.num_free >= 0 and len(pool.block_of) <= pool.num_blocks, "a pool has lost count")


def check_no_leaks(scheduler: Scheduler) -> None:
    """Raise InvariantError unless every block, slot and budget is free. Call when no request is left."""
    state = scheduler._state
    if state.requests:
        raise InvariantError(f"{len(state.requests)} requests are unfinished: {sorted(state.requests)[:5]}")
    for group, pool in enumerate((*state.cache.pools, *state.cache.host.pools)):
        held = [block for block, count in enumerate(pool.references) if count]
        _require(not held, f"group {group}: blocks {held[:5]} are held by nobody")
        _require(
            pool.num_free == pool.num_blocks, f"group {group}: {pool.num_free} of {pool.num_blocks} blocks are free"
        )
    _require(
        len(state.free_slots) == state.limits.max_sequences,
        f"{len(state.free_slots)} of {state.limits.max_sequences} slots are free",
    )
    _require(len(state.waiting) == 0 and len(state.running) == 0, "a queue is not empty")
    _require(not state.kept, f"the KV of {sorted(state.kept)[:5]} is kept")
    _require(state.num_swapped == 0, f"{state.num_swapped} requests count as swapped")
    _require(state.adapters.num_used == 0, f"{state.adapters.num_used} adapter slots are held")
    _require(state.encoder.num_needs == 0, "encoder outputs are held by nobody")
    updates = state.updates
    is_told = not (updates.sequences or updates.id_edits or updates.table_edits)
    _require(is_told, "the executor was not told all")


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
        _check_waiting(entry)
    _require(
        sum(entry.is_swapped for entry in waiting) == state.num_swapped, f"{state.num_swapped} swapped are counted"
    )
    ranks = [entry.rank for entry in running]
    _require(ranks == sorted(ranks), "the running list is out of order")
    for entry in (*waiting, *running):
        choices = [sequence.choice for sequence in entry.sequences]
        _require(choices == sorted(dict.fromkeys(choices)), f"{entry.name} has the choices {choices}")
    count = sum(len(entry.sequences) + len(entry.spare_slots) for entry in running)
    _require(count <= state.limits.max_sequences, f"{count} sequences run, the cap is {state.limits.max_sequences}")
    _require(count == state.num_sequences, "running sequences are miscounted")


def _check_waiting(entry: RequestState) -> None:
    """A waiting request holds nothing on the device, and on the host only what a swap moved there."""
    _require(not entry.spare_slots, f"{entry.name} waits and holds slots")
    for sequence in entry.sequences:
        _require(not any(sequence.tables), f"{entry.name} waits and holds blocks")
        _require(sequence.slot == -1 and not sequence.is_entered, f"{entry.name} waits and holds slot {sequence.slot}")
        if not entry.is_swapped:
            _require(not any(sequence.host_tables), f"{entry.name} is not swapped and holds host blocks")
            _require(
                sequence.num_scheduled == sequence.num_computed == 0,
                f"{entry.name} waits with computed tokens",
            )


def _check_host_references(state: State, group: int, pool: BlockPool) -> None:
    expected = [0] * pool.num_blocks
    for entry in state.requests.values():
        for sequence in entry.sequences:
            for block in sequence.host_tables[group] if sequence.host_tables else ():
                if block != NO_BLOCK:
                    expected[block] += 1
    for block, count in enumerate(pool.references):
        _require(
            count == expected[block],
            f"host group {group} block {block}: {count} references, {expected[block]} tables hold it",
        )


def _check_adapters(state: State) -> None:
    used = dict.fromkeys(e.request.adapter_id for e in state.running.requests if e.request.adapter_id)
    _require(len(used) == state.adapters.num_used, f"{len(used)} adapters run, {state.adapters.num_used} are counted")


def _check_references(state: State, group: int, pool: BlockPool) -> None:
    expected = [0] * pool.num_blocks
    holders = [*(entry.sequences for entry in state.requests.values()), *state.kept.values()]
    held = [block for sequences in holders for one in sequences for block in one.tables[group] if block != NO_BLOCK]
    for flight in state.flight:  # given up, and named by that plan still
        held += [block for owner_group, block in flight.releases if owner_group == group]
    for block in held:
        expected[block] += 1
    for block, count in enumerate(pool.references):
        _require(
            count == expected[block],
            f"group {group} block {block}: {count} references, {expected[block]} tables hold it",
        )
    _require(not any(expected[len(pool.references) :]), f"group {group}: a table holds a block that was never named")
    counted = [one.capacity for sequences in holders for one in sequences if one.is_counted]
    num_held = sum(counted) // state.limits.block_size
    _require(pool.num_counted == num_held, f"group {group}: {pool.num_counted} blocks are counted, {num_held} are held")


def _check_pool(group: int, pool: BlockPool) -> None:
    referenced = sum(1 for count in pool.references if count)
    plain, cached, named = pool.plain, list(pool.cached), len(pool.references)
    total = referenced + len(plain) + len(cached)
    _require(total == named, f"group {group}: referenced + free + cached = {total}, {named} blocks have been named")
    _require(named <= pool.num_blocks, f"group {group}: {named} blocks have names, the pool has {pool.num_blocks}")
    _require(named == len(pool.key_of) == len(pool.ids_of), f"group {group}: the lists differ in length")
    most = pool.num_blocks - referenced - len(cached)
    _require(0 <= pool.num_counted <= most, f"group {group}: {pool.num_counted} blocks are counted, {most} can be")
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
    used = [slot for entry in state.running.requests for slot in entry.spare_slots]
    for entry in state.running.requests:
        for sequence in entry.sequences:
            used.append(sequence.slot)
            _require(state.slot_owner[sequence.slot] is sequence, f"slot {sequence.slot} of {entry.name} is another's")
    every = sorted((*used, *state.free_slots))
    _require(every == list(range(state.limits.max_sequences)), f"slots are lost or doubled: {every}")


def _check_running(state: State, entry: RequestState, sequence: Sequence) -> None:
    name, size = entry.name, state.limits.block_size
    is_told = sequence.is_entered or sequence in state.updates.sequences
    _require(is_told or not entry.is_decoding, f"{name} decodes, but a choice of it has not come in")
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
        if sequence.is_counted:
            needed = -(-sequence.num_scheduled // size)
            _require(not table and sequence.capacity == needed * size, f"{name}: a counted block is lost")
            continue
        spec = state.limits.groups[group]
        needed = -(-(sequence.num_scheduled + sequence.num_drafts) // size)
        _require(
            len(table) == needed,
            f"{name}: {len(table)} blocks in group {group}, {needed} needed for {sequence.num_scheduled} tokens and "
            f"{sequence.num_drafts} drafts",
        )
        first = sequence.first_live[group]
        live = [index for index, block in enumerate(table) if block != NO_BLOCK]
        _require(live == list(range(first, len(table))), f"{name}: group {group} has holes in its table")
        # Blocks are given back when the next row is granted, so the window of the last one may still be there.
        must = min(spec.first_block(sequence.num_scheduled, size), len(table))
        _require(first <= must, f"{name}: group {group} lost block {first - 1}, its window begins in {must}")
        for index in live:
            block = table[index]
            # A fork's tail is shared until it is written; nothing else that is shared or findable is partial.
            full = (index + 1) * size <= sequence.num_scheduled
            _require(
                full or pool.key_of[block] is None, f"{name}: block {block} at index {index} is findable, and not full"
            )
            is_shared = pool.references[block] > 1
            _require(
                full or not is_shared or entry.has_several,
                f"{name}: block {block} at index {index} is shared, and not full",
            )
            key = pool.key_of[block]
            if key is not None and index < len(sequence.keys):
                _require(
                    key == sequence.keys[index],
                    f"{name}: block {block} holds another prefix than index {index} of its table",
                )
