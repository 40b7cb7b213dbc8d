"""Undoes what a failed row or step did.

Owns: whom a failure touches, and putting them back. Does not: blame anybody for a failed step (the engine's loop does).
Invariants: nothing that a failed step or row wrote stays findable; whoever may have read it is computed anew; what
the executor was told by a failed plan is told again.
"""

from __future__ import annotations

from array import array

from octavo.core.plan import ROW_FORK
from octavo.core.request import FinishError, FinishReason, RequestState, Sequence, Status
from octavo.core.state import Flight, State
from octavo.errors import ErrorKind


def discard(state: State, sequence: Sequence, now: float) -> None:
    """Put a sequence back as if it had just been preempted; what it has in flight is void."""
    request = sequence.request
    sequence.stale = sequence.in_flight
    sequence.num_pending = 0
    if request.status == Status.RUNNING:
        state.preempt(request, now, None, None)
    else:
        state.unswap(request)


def reject(state: State, flight: Flight, bad: dict[int, str], now: float) -> None:
    """Rows gave nothing usable, for these reasons: compute their requests anew, and end those that failed there before.

    To be called before the step's rows are taken. A choice that got further since has another try.
    """
    for index in sorted(bad):
        _poison(state, flight, flight.rows[index], now)
    put_back: list[RequestState] = []
    for index in sorted(bad):
        sequence = flight.rows[index]
        request = sequence.request
        if request.status == Status.FINISHED or sequence.stale:
            continue
        if sequence.retried_at == sequence.num_committed and request not in put_back:
            state.finish(request, now, FinishReason.ERROR, error=FinishError(ErrorKind.ENGINE, bad[index]))
            continue
        sequence.retried_at = sequence.num_committed
        put_back.append(request)
        discard(state, sequence, now)
    for index in bad:
        for fork in _forks_ahead(state, flight.rows[index]):
            if fork.request.status != Status.FINISHED and not fork.stale:
                discard(state, fork, now)


def end(state: State, flight: Flight, dead_ends: tuple[tuple[int, FinishError], ...], now: float) -> None:
    """Nothing can follow these rows, with these errors: end their requests. What they computed is sound.

    To be called before the step's rows are taken.
    """
    for index, error in dead_ends:
        sequence = flight.rows[index]
        if sequence.request.status != Status.FINISHED and not sequence.stale:
            state.finish(sequence.request, now, FinishReason.ERROR, error=error)


def forks_behind(flight: Flight, index: int) -> range:
    """Rows that a plan forks from this one: they stand on the same KV and logits."""
    flags, stop = flight.plan.flags, index + 1
    while stop < len(flags) and flags[stop] & ROW_FORK:
        stop += 1
    return range(index + 1, stop)


def _forks_ahead(state: State, root: Sequence) -> list[Sequence]:
    """Choices that a plan in flight forks from a sequence, whose prompt it goes on with there."""
    for flight in state.flight:
        if root in flight.rows:
            forks = forks_behind(flight, flight.rows.index(root))
            if forks:
                return [flight.rows[index] for index in forks]
    return []


def _poison(state: State, flight: Flight, first: Sequence, now: float) -> None:
    """A row's KV is unusable: withdraw what it published or found, and put back all who may have built on it now.

    What it found may be what spoilt it. Others who hold that go on: if it is bad, their own rows say so.
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
                # Its own row of the current step is still to be read by the loop over rows.
                discard(state, other, now)


def _withdraw(state: State, flights: list[Flight], sequence: Sequence) -> set[tuple[int, int]]:
    """Unpublish what a sequence published in flight; returns those blocks and the copies made of them."""
    blocks: set[tuple[int, int]] = set()
    for flight in flights:
        mine = [entry for entry in flight.published if entry.owner is sequence]
        blocks.update((entry.group, entry.block) for entry in mine)
        state.cache.unpublish(mine, flight.plan.step)
        flight.published = [entry for entry in flight.published if entry.owner is not sequence]
        copies = flight.plan.copies
        for group, source, to in zip(copies[::3], copies[1::3], copies[2::3], strict=True):
            if (group, source) in blocks:
                blocks.add((group, to))
    return blocks


def _readers(state: State, flights: list[Flight], blocks: set[tuple[int, int]]) -> list[Sequence]:
    """Sequences in flight that hold one of these blocks, or no longer hold all that they read."""
    found = []
    for sequence in dict.fromkeys(sequence for flight in flights for sequence in flight.rows):
        if sequence.request.status != Status.RUNNING:
            found += [] if sequence.stale else [sequence]
        elif state.cache.has_windows or any(
            (group, block) in blocks for group, table in enumerate(sequence.tables) for block in table
        ):
            found.append(sequence)
    return found


def fail(state: State, first: Flight, now: float) -> None:
    """Undo a plan and every later one: their sequences are put back, their effects will be sent again."""
    flights = [first, *state.flight]
    state.flight.clear()
    state.totals.num_failed_steps += 1
    finished: list[str] = []
    preempted: list[str] = []
    freed: array[int] = array("i")
    for flight in flights:
        plan = flight.plan
        state.cache.unpublish(flight.published, plan.step)
        state.cache.host.unpublish(flight.saved, plan.step)
        release(state, flight)
        finished.extend(plan.finished_ids)
        preempted.extend(plan.preempted_ids)
        freed.extend(plan.freed_slots)
        for request in flight.swapped:
            state.unswap(request)
    for flight in reversed(flights):
        state.encoder.void(flight.plan.encode_jobs, flight.plan.encoder_frees)
    state.finished_ids[:0] = finished
    state.preempted_ids[:0] = preempted
    state.freed_slots = freed + state.freed_slots
    for flight in flights:
        for sequence in flight.rows:
            sequence.in_flight = sequence.stale = sequence.num_pending = 0
    for request in _touched(state, flights):
        state.preempt(request, now, None, None)


def _touched(state: State, flights: list[Flight]) -> list[RequestState]:
    """Running requests that have a row in these plans, or of which they tell the executor something."""
    slots: list[int] = []
    for flight in flights:
        plan = flight.plan
        slots += [sequence.slot for sequence in flight.rows]
        slots += [new.slot for new in plan.new_sequences]
        slots += [*plan.edits[::4], *plan.id_edits[::3]]
    owners = [state.slot_owner[slot] for slot in dict.fromkeys(slots) if slot >= 0]
    return list(dict.fromkeys(owner.request for owner in owners if owner is not None))


def release(state: State, flight: Flight) -> None:
    """Nobody names these blocks any more."""
    for group, block in flight.releases:
        state.cache.pools[group].release(block)
    flight.releases.clear()
