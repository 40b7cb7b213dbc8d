"""Repeats decode steps for simulations: many steps in which every running request only decodes are made in one call.

Owns: when steps repeat (find_repeat), and the state after them (repeat). Does not: know how long a step takes, or how
many steps to repeat (the simulator's fast_forward does).
Invariant: the state afterwards is the same as after that many calls of plan and commit with results that have no token
ids. Blocks are allocated in the order of the single steps. tests/core/test_repeat.py compares with the scheduler.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, StepPlan, WaitReason
from octavo.core.request_state import RequestState, Sequence
from octavo.core.start import is_still_short
from octavo.core.state import State, Updates
from octavo.core.step import is_fast

_MOST_STEPS = 2**31


@dataclass(slots=True)
class Repeat:
    """The next decode steps: up to `max_steps` steps, each with one row for every running request.

    The first step reads `kv_sum` positions, and its longest row reads `kv_max`; in each later step every row reads one
    position more. Steps whose `now` reaches `wake_at` must not be repeated. `ending` has the (request, choice) that
    reach their length limit after `max_steps`; the caller ends them.
    """

    num_rows: int
    max_steps: int
    kv_sum: int
    kv_max: int
    wake_at: float | None
    ending: tuple[tuple[str, int], ...]


def find_repeat(state: State) -> Repeat | None:
    """Find decode steps that can be repeated, with at most one plan in flight. O(running).

    Return None if the next step may do anything else: admit, preempt, change a rank or publish a block.
    """
    running = state.running.requests
    depth = len(state.flight)
    if (
        not running
        or not running[-1].is_decoding
        or len(running) > state.max_step_tokens
        or not _is_calm(state)
        or (len(state.waiting) and not _is_stuck(state))
        or (depth and not _is_whole_flight(state))
    ):
        return None
    rows: list[Sequence] = []
    max_steps, kv_sum, kv_max = _MOST_STEPS, 0, 0
    for request in running:
        sequence = request.sequences[0]
        start = sequence.num_scheduled
        steps = _steps_of(request, sequence, depth)
        if steps < max_steps:
            if steps < 1:
                return None
            max_steps = steps
        kv_sum += start
        if start > kv_max:
            kv_max = start
        rows.append(sequence)
    max_steps = _steps_that_fit(state, rows, max_steps)
    if not max_steps:
        return None
    ending = tuple([(row.request.name, row.choice) for row in rows if row.limit - row.num_committed <= max_steps])
    return Repeat(len(rows), max_steps, kv_sum + len(rows), kv_max + 1, state.deadlines.next(), ending)


def _steps_of(request: RequestState, sequence: Sequence, depth: int) -> int:
    """Return for how many steps a running request only decodes and publishes no block; 0 if not even in the next.

    If each plan is committed before the next is made, the last of these steps may end the request.
    """
    start, committed = sequence.num_scheduled, sequence.num_committed
    if (
        not request.is_decoding
        or not request.samples
        or request.has_several
        or sequence.num_pending != depth
        or committed + depth - start != 1
        or sequence.in_flight != depth
        or committed == sequence.num_prompt  # its first token changes its rank
        or sequence.token_ids is not None
        or (start >= sequence.in_place_end and start != sequence.capacity)
    ):
        return 0
    left = sequence.limit - committed - depth
    keys = request.request.block_keys
    if keys is None or not sequence.capacity or len(keys) <= sequence.num_published:
        return left
    size = sequence.capacity // len(sequence.tables[0])
    return min(left, (sequence.num_published + 1) * size - sequence.num_computed - 1)


def _is_calm(state: State) -> bool:
    """Return True if the next plan has only rows, freed slots and ended requests, and no optional feature acts."""
    limits, cache, updates = state.limits, state.cache, state.updates
    return not (
        updates.sequences
        or updates.id_edits
        or updates.table_edits
        or state.events
        or state.ended
        or state.encoder.num_needs
        or limits.max_kv_read
        or limits.max_draft_tokens
        or limits.num_stages > 1
        or limits.find_shared_prefixes
        or limits.encoder_budget
        or cache.has_windows
        or cache.host.pools
        or state.composition is not None
    )


def _is_whole_flight(state: State) -> bool:
    """Return True if the only plan in flight has one token for each running request, and nothing to undo or release."""
    flight, running = state.flight[0], state.running.requests
    effects = flight.effects
    return (
        len(state.flight) == 1
        and len(flight.rows) == len(running)
        and not (effects.published or effects.saved or effects.swapped_requests or flight.releases)
        and flight.plan.is_fast_path
        and all(row.request is request for row, request in zip(flight.rows, running, strict=True))
    )


def _is_stuck(state: State) -> bool:
    """Return True if no waiting request can start during decode steps.

    The first one lacks a resource that decode steps do not free, and admission considers none after it.
    """
    if state.is_paused:
        return True
    policy, waiting = state.policy, state.waiting
    if state.overdue or policy.preempt_on_arrival or not waiting.has_one_line:
        return False
    head = waiting.peek()
    if head is None or head.in_flight or head.num_bypassed >= state.limits.max_bypass:
        return False
    if not state.free_slots:
        return head.wait_reason == WaitReason.SEQUENCE_CAP
    if policy.lookahead > 1 or policy.skip_ahead or len(state.running) >= state.max_step_tokens:
        return False
    if head.shortage is None or head.shortage.reason != head.wait_reason:
        return False
    return (
        head.wait_reason in (WaitReason.KV_BLOCKS, WaitReason.HEADROOM)
        and head.num_slots <= len(state.free_slots)
        and all(gate.lack(head) is None for gate in state.gates)
        and is_still_short(state, [0] * state.cache.num_groups, head, head.shortage)
    )


def _steps_that_fit(state: State, rows: list[Sequence], max_steps: int) -> int:
    """Return a number of steps, at most `max_steps`, for which the pool has enough free blocks."""
    free, size = state.cache.num_free(), state.cache.block_size
    while max_steps and len(rows) * (max_steps // size + 1) > free:  # an upper bound, usually far below `free`
        needed = sum(max(0, -(-(row.num_scheduled + max_steps - row.capacity) // size)) for row in rows)
        if needed <= free:
            break
        max_steps //= 2
    return max_steps


def repeat(state: State, num_steps: int, planned: float) -> None:
    """Make `num_steps` of the steps that find_repeat found; `planned` is the last one's time. O(rows + new blocks).

    A plan in flight is replaced by the last repeated step. A policy that tracks service is notified of each token. The
    caller ends the requests that reach their length limit.
    """
    rows, cache = [request.sequences[0] for request in state.running.requests], state.cache
    state.step += num_steps
    effects = cache.begin_plan(state.step - 1)
    growing: list[tuple[int, int]] = []  # (step, row) that takes a block before it
    size = cache.block_size
    for index, row in enumerate(rows):
        start = row.num_scheduled
        end = row.num_scheduled = start + num_steps
        row.num_computed += num_steps
        row.num_committed += num_steps
        if end > row.capacity:
            growing.extend((step - start, index) for step in range(row.capacity, end, size))
    growing.sort()
    for step, index in growing:
        row = rows[index]
        for group, table in enumerate(row.tables):
            block = cache.allocate(group)
            if step == num_steps - 1:
                effects.edits.extend((row.slot, group, len(table), block))
            table.append(block)
        row.capacity += size
        row.in_place_end = min(row.capacity, row.limit - 1)
    cache.end_plan()
    _count(state, rows, num_steps)
    _note_shortage(state)
    if state.flight:
        _replace_flight(state, planned, num_steps == 1)
    state.updates = Updates()


def _note_shortage(state: State) -> None:
    """Update the wait numbers of the first waiting request if every repeated step would have looked at it."""
    if not len(state.waiting) or state.is_paused or state.free_slots:
        return
    head = state.waiting.peek()
    if head is not None:
        head.wait_numbers = (head.num_slots, 0, state.step - 1)


def _count(state: State, rows: list[Sequence], num_steps: int) -> None:
    """Update the totals, and notify a policy that tracks service."""
    num_tokens = len(rows) * num_steps
    totals = state.totals
    totals.num_steps += num_steps
    totals.num_computed_tokens += num_tokens
    totals.num_output_tokens += num_tokens
    if state.policy.tracks_service:
        requests = [row.request for row in rows]
        for _ in range(num_steps):
            for request in requests:
                state.policy.notify("served", request, 1)


def _replace_flight(state: State, now: float, is_first: bool) -> None:
    """Replace the plan in flight by the last repeated step. Only the first step reports freed slots and ended ids."""
    flight = state.flight[0]
    starts = array("i", [row.num_scheduled - 1 for row in flight.rows])
    counts = array("i", [1]) * len(starts)
    flight.effects = state.cache.effects
    flight.plan = StepPlan(
        state.step - 1,
        now,
        array("i", [row.slot for row in flight.rows]),
        starts,
        counts,
        array("i", [ROW_SAMPLE | ROW_CARRY]) * len(starts),
        edits=flight.effects.edits,
        freed_slots=state.updates.freed_slots if is_first else array("i"),
        finished_ids=tuple(state.updates.finished_ids) if is_first else (),
        preempted_ids=tuple(state.updates.preempted_ids) if is_first else (),
        num_query_tokens=len(starts),
        num_kv_read=sum(starts) + len(starts),
        is_fast_path=is_fast(starts, counts, state.limits),
        wake_at=state.deadlines.next(),
    )
