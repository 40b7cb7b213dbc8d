"""Forward: many decode steps made as one, in which nobody comes, is preempted, waits anew or is ranked anew.

Owns: when that is so (look_ahead), and the state behind such steps (forward). Does not: know how long a step takes.
Invariant: the state is equal to the one behind as many calls of plan and commit with results of -1 each, as an
executor that knows only durations gives them; blocks are taken in the very order of those steps. The slow twin is the
scheduler itself (tests/core/test_forward.py).
"""

from __future__ import annotations

from array import array

from octavo.core.admit import is_still_short
from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, Event, StepPlan, WaitReason
from octavo.core.request import FinishReason, RequestState, Sequence
from octavo.core.state import State
from octavo.core.step import is_fast

_DECODE_AHEAD = ROW_SAMPLE | ROW_CARRY
_ROOM = (WaitReason.KV_BLOCKS, WaitReason.HEADROOM)
_FREE = 2**31


class Stretch:
    """Decode steps that may be made as one: these rows, at most `max_steps` times.

    `has_end`: in the last of so many steps some rows end by their length. The first step reads `kv_sum` positions, its
    longest row `kv_max`; each later one a position more for each row. A plan whose `now` reaches `wake_at` is not one
    of them.
    """

    __slots__ = ("has_end", "kv_max", "kv_sum", "max_steps", "rows", "wake_at")

    def __init__(self, rows: list[Sequence], max_steps: int, kv_sum: int, kv_max: int, wake_at: float | None) -> None:
        self.rows = rows
        self.max_steps = max_steps
        self.has_end = False
        self.kv_sum = kv_sum
        self.kv_max = kv_max
        self.wake_at = wake_at


def look_ahead(state: State) -> Stretch | None:
    """The decode steps that are certain to come next, from a state between two turns with at most one plan in flight.

    None where a step may do anything else. Cost: O(running).
    """
    running = state.running.requests
    if not running or not running[-1].is_decoding or not _is_calm(state):
        return None
    if len(state.waiting) and not _is_stuck(state):
        return None
    depth = len(state.flight)
    if depth and not _flies_all(state):
        return None
    if len(running) > state.token_budget.limit:
        return None
    rows: list[Sequence] = []
    max_steps, kv_sum, kv_max = _FREE, 0, 0
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
    max_steps = _that_fit(state, rows, max_steps)
    if not max_steps:
        return None
    stretch = Stretch(rows, max_steps, kv_sum + len(rows), kv_max + 1, state.deadlines.next())
    stretch.has_end = any(row.limit - row.num_committed <= max_steps for row in rows)
    return stretch


def _steps_of(request: RequestState, sequence: Sequence, depth: int) -> int:
    """Steps of a running request that only decode and make no block findable; 0 if not even the next.

    Where each plan is committed before the next is made, the last of them may be its last.
    """
    start, committed = sequence.num_scheduled, sequence.num_committed
    if (
        not request.is_decoding
        or not request.samples
        or request.has_several
        or sequence.num_pending != depth
        or committed + depth - start != 1
        or sequence.in_flight != depth
        or committed == sequence.num_prompt  # its first token is news
        or sequence.token_ids is not None
        or (start >= sequence.block_end and start != sequence.capacity)
    ):
        return 0
    left = sequence.limit - committed - depth
    keys = request.request.block_keys
    if keys is None or not sequence.capacity or len(keys) <= sequence.num_published:
        return left
    size = sequence.capacity // len(sequence.tables[0])
    return min(left, (sequence.num_published + 1) * size - sequence.num_computed - 1)


def _is_calm(state: State) -> bool:
    """Whether nothing but who left is to be told to anybody, and no step does more than its rows."""
    limits, cache = state.limits, state.cache
    return not (
        state.announced
        or state.events
        or state.ended
        or state.id_edits
        or state.table_edits
        or state.swapped_now
        or state.encoder.num_references
        or limits.max_kv_read
        or limits.max_draft_tokens
        or limits.find_shared_prefixes
        or limits.encoder_budget
        or cache.has_windows
        or cache.host.pools
        or not state.composition.is_mixed
    )


def _flies_all(state: State) -> bool:
    """Whether the only plan in flight has one token of each running request, and nothing to be undone or released."""
    flight, running = state.flight[0], state.running.requests
    return (
        len(state.flight) == 1
        and len(flight.rows) == len(running)
        and not (flight.published or flight.saved or flight.swapped or flight.releases)
        and flight.plan.is_fast_path
        and all(row.request is request for row, request in zip(flight.rows, running, strict=True))
    )


def _is_stuck(state: State) -> bool:
    """Whether the first that waits was refused for what no decode step changes, and nobody behind it is looked at."""
    if state.is_paused:
        return True
    policy, waiting = state.policy, state.waiting
    if state.overdue or policy.preempt_on_arrival or not waiting.has_one_line:
        return False
    head = waiting.peek()
    if head is None or head.in_flight or head.num_bypassed >= state.limits.max_bypass:
        return False
    if not state.sequence_budget.left:
        return head.wait_reason == WaitReason.SEQUENCE_CAP
    if policy.lookahead > 1 or policy.skip_ahead or head.wait_reason not in _ROOM or head.shortage is None:
        return False
    if head.shortage.reason != head.wait_reason or len(state.running) >= state.token_budget.limit:
        return False
    return _passes_gates(state, head) and is_still_short(state, [0] * state.cache.num_groups, head, head.shortage)


def _passes_gates(state: State, head: RequestState) -> bool:
    return all(gate.lack(head) is None for gate in state.gates)


def _that_fit(state: State, rows: list[Sequence], max_steps: int) -> int:
    """Steps of these rows, up to `max_steps`, whose blocks are all free."""
    free, size = state.cache.num_free(), state.cache.block_size
    while max_steps and len(rows) * (max_steps // size + 1) > free:  # at most so many, and mostly far fewer than free
        needed = sum(max(0, -(-(row.num_scheduled + max_steps - row.capacity) // size)) for row in rows)
        if needed <= free:
            break
        max_steps //= 2
    return max_steps


def forward(state: State, stretch: Stretch, num_steps: int, planned: float) -> None:
    """Make `num_steps` steps of a stretch just looked up, the last of them planned then; see `end_rows`.

    A plan in flight is replaced by the last of these. Cost: O(rows + blocks taken); a policy that tracks service is
    told of each token.
    """
    rows, cache = stretch.rows, state.cache
    state.step += num_steps
    effects = cache.begin_plan(state.step - 1)
    wanting: list[tuple[int, int]] = []  # (step, row) that takes a block before it
    size = cache.block_size
    for index, row in enumerate(rows):
        start = row.num_scheduled
        end = row.num_scheduled = start + num_steps
        row.num_computed += num_steps
        row.num_committed += num_steps
        if end > row.capacity:
            wanting.extend((step - start, index) for step in range(row.capacity, end, size))
    wanting.sort()
    last = num_steps - 1
    for step, index in wanting:
        row = rows[index]
        for group, table in enumerate(row.tables):
            block = cache.allocate(group)
            if step == last:
                effects.edits.extend((row.slot, group, len(table), block))
            table.append(block)
        row.capacity += size
        row.block_end = min(row.capacity, row.limit - 1)
    cache.end_plan()
    _count(state, rows, num_steps)
    _look_at_head(state)
    if state.flight:
        _replace_flight(state, planned, num_steps == 1)
    state.freed_slots = array("i")
    state.finished_ids = []
    state.preempted_ids = []


def end_rows(state: State, stretch: Stretch, committed: float) -> tuple[Event, ...]:
    """End the rows that the last step of a stretch brought to their length, as committed then; call after all of it."""
    for row in stretch.rows:
        if row.num_committed >= row.limit:
            state.end_choice(row, committed, FinishReason.LENGTH)
    state.settle()
    events, state.events = tuple(state.events), []
    return events


def _look_at_head(state: State) -> None:
    """Note what the first that waits lacked in the last step, where it was looked at in each (see Intake)."""
    if not len(state.waiting) or state.is_paused or state.sequence_budget.left:
        return
    head = state.waiting.peek()
    if head is not None:
        head.wait_numbers = (head.num_slots, 0, state.step - 1)


def _count(state: State, rows: list[Sequence], num_steps: int) -> None:
    """Budgets as the last step leaves them, totals, and what the policy is told."""
    num_tokens = len(rows) * num_steps
    state.token_budget.renew()
    state.token_budget.take(len(rows))
    state.read_budget.renew()
    state.partial_budget.renew()
    totals = state.totals
    totals.num_steps += num_steps
    totals.num_computed_tokens += num_tokens
    totals.num_output_tokens += num_tokens
    if state.policy.tracks_service:
        requests = [row.request for row in rows]
        for _ in range(num_steps):
            for request in requests:
                state.policy.tell("served", request, 1)


def _replace_flight(state: State, now: float, is_first: bool) -> None:
    """The plan in flight is the last of the steps; the first of them tells who left."""
    flight = state.flight[0]
    starts = array("i", [row.num_scheduled - 1 for row in flight.rows])
    counts = array("i", [1]) * len(starts)
    flight.plan = StepPlan(
        state.step - 1,
        now,
        array("i", [row.slot for row in flight.rows]),
        starts,
        counts,
        array("i", [_DECODE_AHEAD]) * len(starts),
        edits=state.cache.effects.edits,
        freed_slots=state.freed_slots if is_first else array("i"),
        finished_ids=tuple(state.finished_ids) if is_first else (),
        preempted_ids=tuple(state.preempted_ids) if is_first else (),
        num_query_tokens=len(starts),
        num_kv_read=sum(starts) + len(starts),
        is_fast_path=is_fast(starts, counts, state.limits),
        wake_at=state.deadlines.next(),
    )
