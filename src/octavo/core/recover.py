"""Undoes what a failed row or a failed step did.

Owns: which requests a failure touches, and putting them back in the queue. Does not: decide which request caused a
failed step (the engine's loop does).
Invariants: nothing that a failed step or row wrote can be found in the cache; sequences that may have read it are
computed again; what a failed plan sent to the executor is sent again.
"""

from __future__ import annotations

from octavo.core.plan import ROW_FORK
from octavo.core.request import FinishError, FinishReason
from octavo.core.request_state import RequestState, Sequence, Status
from octavo.core.state import Flight, State
from octavo.errors import ErrorKind


def discard(state: State, sequence: Sequence, now: float) -> None:
    """Put a sequence back as if it had just been preempted; its rows in flight are void."""
    request = sequence.request
    sequence.stale = sequence.in_flight
    sequence.num_pending = 0
    if request.status == Status.RUNNING:
        state.preempt(request, now, None, None)
    else:
        state.unswap(request)


# --- failed rows ------------------------------------------------------------------------------------------------


def retry_bad_rows(state: State, flight: Flight, errors: tuple[tuple[int, str], ...], now: float) -> dict[int, str]:
    """Put the requests of bad rows back to be computed again, and end those that failed at the same token before.

    Call it before the step's rows are taken. A choice that got further since its last failure is tried again.
    Return the rows without a usable result, with the reasons: forks share the KV and logits of their root row.
    """
    bad = dict(errors)
    for index, reason in errors:
        for forked in _forks_of(flight, index):
            bad.setdefault(forked, reason)
    for index in sorted(bad):
        _withdraw_all(state, flight, flight.rows[index], now)
    put_back: list[RequestState] = []
    for index in sorted(bad):
        sequence = flight.rows[index]
        request = sequence.request
        if sequence.is_void:
            continue
        if sequence.retried_at == sequence.num_committed and request not in put_back:
            state.finish(request, now, FinishReason.ERROR, error=FinishError(ErrorKind.ENGINE, bad[index]))
            continue
        sequence.retried_at = sequence.num_committed
        put_back.append(request)
        discard(state, sequence, now)
    for index in bad:
        for fork in _forks_ahead(state, flight.rows[index]):
            if not fork.is_void:
                discard(state, fork, now)
    return bad


def _forks_of(flight: Flight, index: int) -> range:
    """Return the rows that a plan forks from this one."""
    flags, stop = flight.plan.flags, index + 1
    while stop < len(flags) and flags[stop] & ROW_FORK:
        stop += 1
    return range(index + 1, stop)


def _forks_ahead(state: State, root: Sequence) -> list[Sequence]:
    """Return the choices that a plan in flight forks from a sequence whose prompt it continues."""
    for flight in state.flight:
        if root in flight.rows:
            forks = _forks_of(flight, flight.rows.index(root))
            if forks:
                return [flight.rows[index] for index in forks]
    return []


def _withdraw_all(state: State, flight: Flight, first: Sequence, now: float) -> None:
    """Withdraw the blocks that a bad row's sequence published or found; discard the sequences that may have read them.

    Blocks that it found may have caused the fault. Other sequences that hold those continue: if the blocks are bad,
    their own rows will fail, too.
    """
    state.cache.withdraw(first)
    flights = [flight, *state.flight]
    doubtful = [first]
    while doubtful:
        sequence = doubtful.pop()
        blocks = _withdraw(state, flights, sequence)
        if not blocks:
            continue
        for other in _readers(state, flights, blocks):
            if other is not sequence and other is not first:
                doubtful.append(other)
                # If it has a row in this step, too, the commit drops that later, because the sequence is stale.
                discard(state, other, now)


def _withdraw(state: State, flights: list[Flight], sequence: Sequence) -> set[tuple[int, int]]:
    """Unpublish what a sequence published in flight; return those blocks and the copies made of them."""
    blocks: set[tuple[int, int]] = set()
    for flight in flights:
        blocks.update((made.group, made.block) for made in state.cache.unpublish(flight.effects, [sequence]))
        copies = flight.plan.copies
        for group, source, to in zip(copies[::3], copies[1::3], copies[2::3], strict=True):
            if (group, source) in blocks:
                blocks.add((group, to))
    return blocks


def _readers(state: State, flights: list[Flight], blocks: set[tuple[int, int]]) -> list[Sequence]:
    """Return sequences in flight that hold one of these blocks, or no longer hold all that they read."""
    found = []
    for sequence in dict.fromkeys(sequence for flight in flights for sequence in flight.rows):
        if sequence.request.status != Status.RUNNING:
            found += [] if sequence.stale else [sequence]
        elif state.cache.has_windows or any(
            (group, block) in blocks for group, table in enumerate(sequence.tables) for block in table
        ):
            found.append(sequence)
    return found


# --- failed steps -----------------------------------------------------------------------------------------------


def undo_steps(state: State, first: Flight, now: float) -> None:
    """Undo a plan and every later one: their sequences are put back, and their effects are sent again."""
    flights, updates = [first, *state.flight], state.updates
    state.flight.clear()
    state.totals.num_failed_steps += 1
    for flight in flights:
        state.cache.undo(flight.effects)
        state.release_deferred(flight)
        for request in flight.effects.swapped_requests:
            state.unswap(request)
        for sequence in flight.rows:
            sequence.in_flight = sequence.stale = sequence.num_pending = 0
    for plan in [flight.plan for flight in reversed(flights)]:  # earlier updates precede later ones
        state.encoder.undo(plan.encode_jobs, plan.encoder_frees)
        updates.finished_ids[:0] = plan.finished_ids
        updates.preempted_ids[:0] = plan.preempted_ids
        updates.freed_slots = plan.freed_slots + updates.freed_slots
    for request in _touched(state, flights):
        state.preempt(request, now, None, None)


def _touched(state: State, flights: list[Flight]) -> list[RequestState]:
    """Return the running requests that have a row, a new sequence or an edit in these plans."""
    slots: list[int] = []
    for flight in flights:
        plan = flight.plan
        slots += [sequence.slot for sequence in flight.rows]
        slots += [new.slot for new in plan.new_sequences]
        slots += [*plan.edits[::4], *plan.id_edits[::3]]
    owners = [state.slot_owner[slot] for slot in dict.fromkeys(slots) if slot >= 0]
    return list(dict.fromkeys(owner.request for owner in owners if owner is not None))
