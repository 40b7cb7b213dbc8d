"""Undoes what a failed row or a failed step did.

Owns: the choice of requests that a failure touches, and their return to the waiting queue. Does not: decide which
request caused a failed step (engine.suspects does).
Invariants: no block that a failed step or row wrote can be found in the cache. Sequences that may have read such a
block are computed again. The slots and request ids that a failed plan freed are sent to the executor again.
"""

from __future__ import annotations

from octavo.core.plan import ROW_FORK
from octavo.core.request import FinishError, FinishReason
from octavo.core.request_state import RequestState, Sequence, Status
from octavo.core.state import Flight, State
from octavo.errors import ErrorKind


def discard(state: State, sequence: Sequence, now: float) -> None:
    """Preempt a sequence's request, or drop its host blocks if it waits; the sequence's rows in flight are void."""
    request = sequence.request
    sequence.stale = sequence.in_flight
    sequence.num_pending = 0
    if request.status == Status.RUNNING:
        state.preempt(request, now, None, None)
    else:
        state.unswap(request)


# --- failed rows ------------------------------------------------------------------------------------------------


def retry_bad_rows(state: State, flight: Flight, errors: tuple[tuple[int, str], ...], now: float) -> dict[int, str]:
    """Requeue the requests of bad rows to be computed again; fail a request whose row failed at the same token before.

    Call this before the step's rows are taken. A sequence that has new tokens since its last failure is tried again.
    Return the reason for each row without a usable result, forks included: a fork shares its root row's KV and logits.
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
    """Return the indices of the rows that fork from row `index`."""
    flags, stop = flight.plan.flags, index + 1
    while stop < len(flags) and flags[stop] & ROW_FORK:
        stop += 1
    return range(index + 1, stop)


def _forks_ahead(state: State, root: Sequence) -> list[Sequence]:
    """Return the choices that a plan in flight forks from `root`."""
    for flight in state.flight:
        if root in flight.rows:
            forks = _forks_of(flight, flight.rows.index(root))
            if forks:
                return [flight.rows[index] for index in forks]
    return []


def _withdraw_all(state: State, flight: Flight, first: Sequence, now: float) -> None:
    """Withdraw the blocks that a bad row's sequence published or found, and discard the readers of published blocks.

    A block that the sequence found in the cache may have caused the fault. Other sequences that hold a found block
    continue: if the block is bad, their own rows fail too.
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
                # If this sequence also has a row in this step, the commit drops that row, because it is now stale.
                discard(state, other, now)


def _withdraw(state: State, flights: list[Flight], sequence: Sequence) -> set[tuple[int, int]]:
    """Unpublish the blocks that plans in flight publish for a sequence; return the blocks and their copies."""
    blocks: set[tuple[int, int]] = set()
    for flight in flights:
        blocks.update(*[made.places for made in state.cache.unpublish(flight.effects, [sequence])])
        copies = flight.plan.copies
        for group, source, to in zip(copies[::3], copies[1::3], copies[2::3], strict=True):
            if (group, source) in blocks:
                blocks.add((group, to))
    return blocks


def _readers(state: State, flights: list[Flight], blocks: set[tuple[int, int]]) -> list[Sequence]:
    """Return the sequences in flight that may have read one of these blocks.

    They hold such a block, or no longer hold every block that they read (preempted, or sliding windows).
    """
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
    """Undo a plan and every later plan in flight.

    Cache effects are undone, touched requests are preempted, and freed slots and ended requests go into the next plan.
    """
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
    for plan in [flight.plan for flight in reversed(flights)]:  # so that earlier plans' updates precede later ones
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
