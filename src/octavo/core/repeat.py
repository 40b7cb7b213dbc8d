"""Repeats decode steps for simulations: many steps in which every running request only decodes are made in one call.

Owns: RepeatingRows, the running requests that decode one token in every step; their counters, which are brought up to
date when anything else reads them; steps of these rows alone (find, repeat) and beside other rows (plan, commit).
Does not: know how long a step takes, or how many steps to repeat (the simulator does).
Invariant: the state afterwards is the same as after that many calls of plan and commit with results that have no token
ids. Blocks are allocated and published in the order of the single steps. tests/core/test_repeat.py compares with these.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain, repeat
from operator import attrgetter
from typing import NamedTuple

from octavo.core.commit import commit_step, deduplicate
from octavo.core.kv.effects import Effects
from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, Events, StepPlan, StepResult, WaitReason
from octavo.core.request import FinishReason
from octavo.core.request_state import RequestState, Sequence
from octavo.core.run import grant_running
from octavo.core.start import is_still_short, start_waiting
from octavo.core.state import State, Updates
from octavo.core.step import Step, is_fast

_MOST_STEPS = 2**31
_rank_of = attrgetter("request.rank")


@dataclass(slots=True)
class Repeat:
    """The next decode steps: up to `max_steps` steps, each with one row for every running request.

    The first step reads `kv_sum` positions; in each later step every row reads one position more. Steps whose `now`
    reaches `wake_at` must not be repeated. `has_end`: after `max_steps` requests reach their length limit.
    """

    num_rows: int
    max_steps: int
    kv_sum: int
    wake_at: float | None
    has_end: bool


def find_rows(state: State) -> RepeatingRows | None:
    """Return the first running requests that only decode, with at most one plan in flight. O(running)."""
    running = state.running.requests
    if not running or not state.is_plain or (state.flight and not _is_whole_flight(state)):
        return None
    rows = RepeatingRows(state)
    rows.join()
    return rows if len(rows) else None


class RowsBeside(NamedTuple):
    """Repeating rows that a plan leaves out: their number, and the positions that they read in sum."""

    num_rows: int
    kv_sum: int

    def lengths(self) -> list[int]:
        """Return lengths of as many rows with the same sum, for cost models."""
        mean, num_longer = divmod(self.kv_sum, self.num_rows)
        return [mean + 1] * num_longer + [mean] * (self.num_rows - num_longer)


class RepeatingRows:
    """The first running requests, in order, which all decode one token in every step.

    Before step number `_num_steps` (from 0 on), a row's num_scheduled is `_num_steps` plus its entry in `_offsets`; its
    counters lag behind until it is settled. Blocks that are only counted lag too, but the pool's number of them does
    not. `_ends` is a heap of the steps before which rows must leave. Rows that take a new block in step s are in
    `_growing[s % block_size]`; if they have keys, they publish the block before in step s - 1.
    If each plan is committed before the next is made, rows end by themselves; else they leave before their last step.
    """

    __slots__ = (
        "_depth", "_ends", "_growing", "_is_planned", "_keyed", "_most_used", "_num_joined", "_num_steps",
        "_num_with_tables", "_offset_sum", "_offsets", "_size", "_state",
    )  # fmt: skip

    def __init__(self, state: State) -> None:
        self._state = state
        self._size = state.cache.block_size
        self._depth = len(state.flight)
        self._offsets: dict[Sequence, int] = {}
        self._offset_sum = 0
        self._ends: list[tuple[int, int, Sequence]] = []  # (step, number in the order of joining, row)
        self._growing: list[list[Sequence]] = [[] for _ in range(self._size)]
        self._num_joined = 0
        self._num_with_tables = 0  # rows whose blocks are not only counted
        self._keyed: set[Sequence] = set()  # rows with blocks to publish
        self._num_steps = 0
        self._is_planned = False  # the plan in flight was made by `plan`
        self._most_used = 0

    def __len__(self) -> int:
        return len(self._offsets)

    # --- membership

    def join(self) -> None:
        """Add the running requests after these rows, up to the first that does not only decode."""
        for request in self._state.running.requests[len(self._offsets) :]:
            row = request.sequences[0]
            left = _steps_of(request, row, self._depth)
            publishes_in = _steps_to_publish(self._state, row)
            if self._depth:  # blocks are published in single steps
                left = min(left, publishes_in - 1)
            if left < 1 or publishes_in < 1 or row.capacity - row.num_scheduled >= self._size:
                return
            offset = self._offsets[row] = row.num_scheduled - self._num_steps
            self._offset_sum += offset
            heappush(self._ends, (self._num_steps + left, self._num_joined, row))
            self._num_joined += 1
            self._growing[-offset % self._size].append(row)
            self._num_with_tables += not row.is_counted
            if publishes_in < _MOST_STEPS:
                self._keyed.add(row)

    def _leave(self, row: Sequence) -> None:
        offset = self._offsets.pop(row)
        self._offset_sum -= offset
        self._growing[-offset % self._size].remove(row)
        self._num_with_tables -= not row.is_counted
        self._keyed.discard(row)

    def settle(self) -> None:
        """Bring all counters up to date, and complete the plan in flight; the rows must not be used afterwards."""
        for row in self._offsets:
            self._settle_row(row)
        if self._is_planned:
            flight = self._state.flight[0]
            flight.plan = self._whole(flight.plan)
            flight.rows = [*self._offsets, *flight.rows]
            for row in self._offsets:
                row.num_scheduled += 1
                row.num_pending += 1
                row.in_flight += 1
                if row.num_scheduled > row.capacity:
                    self._state.cache.resize(row, row.capacity // self._size + 1)

    def _settle_row(self, row: Sequence) -> None:
        behind = self._offsets[row] + self._num_steps - row.num_scheduled
        row.num_scheduled += behind
        row.num_computed += behind
        row.num_committed += behind
        num_blocks = -(-row.num_scheduled // self._size) if row.is_counted else len(row.tables[0])
        if num_blocks * self._size != row.capacity:
            self._state.cache.resize(row, num_blocks)

    # --- steps of these rows alone

    def find(self) -> Repeat | None:
        """Find steps that can be repeated; None if the next step may do more than decode these rows."""
        state, num_rows = self._state, len(self._offsets)
        has_waiting = len(state.waiting) > 0
        if (
            not num_rows
            or num_rows != len(state.running)
            or num_rows > state.max_step_tokens
            or not _is_calm(state)
            or (has_waiting and not _is_stuck(state))
        ):
            return None
        max_steps = to_end = self._ends[0][0] - self._num_steps
        if has_waiting and self._keyed:  # a published block may let a request start
            max_steps = min(max_steps, self._steps_to_publish())
        max_steps = self._steps_that_fit(max_steps)
        if not max_steps:
            return None
        has_end = not self._depth and max_steps == to_end
        return Repeat(num_rows, max_steps, self._reads().kv_sum, state.deadlines.next(), has_end)

    def repeat(self, num_steps: int, planned: float, committed: float) -> int:
        """Make `num_steps` of the steps that `find` found; the last is planned and committed at these times.

        Return the most blocks of the leading group that were in use in any of them.

        A plan in flight is replaced by the last repeated step. A policy that tracks service is notified of each token.
        """
        state, updates = self._state, self._state.updates
        state.step += num_steps
        state.updates = Updates()
        state.totals.num_steps += num_steps
        self._count(num_steps)
        _note_shortage(state)
        effects = state.cache.begin_plan(state.step - 1)
        self._most_used = 0
        if self._num_with_tables:
            for steps_left in range(num_steps - 1, -1, -1):
                if self._growing[self._num_steps % self._size]:
                    self._grow(effects if not steps_left else None)
                self._end_step(steps_left, effects, committed)
        else:  # nothing is published, so these blocks may be taken together
            state.cache.pools[0].take(self._num_new_blocks(num_steps))
            self._num_steps += num_steps - 1
            self._end_step(0, effects, committed)
        state.cache.end_plan()
        if state.flight:
            self._replace_flight(planned, updates if num_steps == 1 else Updates())
        state.report_ended()
        return self._most_used

    def _reads(self) -> RowsBeside:
        """Return what these rows read in the next step."""
        num_rows = len(self._offsets)
        return RowsBeside(num_rows, self._offset_sum + num_rows * (self._num_steps + 1))

    def _steps_to_publish(self) -> int:
        """Return after how many steps the next block is published; too few if rows without keys take a block sooner."""
        size = self._size
        return next(count for count in range(1, size + 1) if self._growing[(self._num_steps + count) % size])

    def _steps_that_fit(self, max_steps: int) -> int:
        """Return a number of steps, at most `max_steps`, for which the pool has enough free blocks."""
        free, num_rows = self._state.cache.num_free(), len(self._offsets)
        while max_steps and num_rows * (max_steps // self._size + 1) > free:  # an upper bound, usually far below `free`
            if self._num_new_blocks(max_steps) <= free:
                break
            max_steps //= 2
        return max_steps

    def _num_new_blocks(self, num_steps: int) -> int:
        """Return how many blocks of each group the rows take in the next `num_steps` steps."""
        rounds, rest = divmod(num_steps, self._size)
        first = self._num_steps
        num_last = sum([len(self._growing[step % self._size]) for step in range(first, first + rest)])
        return rounds * len(self._offsets) + num_last

    def _replace_flight(self, now: float, updates: Updates) -> None:
        """Replace the plan in flight by the last repeated step. Only the first step reports freed slots and ended ids.

        So `updates` are those before the repeated steps if there is only one, else empty.
        """
        state, flight = self._state, self._state.flight[0]
        starts = array("i", [offset + self._num_steps - 1 for offset in self._offsets.values()])
        counts = array("i", [1]) * len(starts)
        flight.effects = state.cache.effects
        flight.plan = StepPlan(
            state.step - 1,
            now,
            array("i", [row.slot for row in self._offsets]),
            starts,
            counts,
            array("i", [ROW_SAMPLE | ROW_CARRY]) * len(starts),
            edits=flight.effects.edits,
            freed_slots=updates.freed_slots,
            finished_ids=tuple(updates.finished_ids),
            preempted_ids=tuple(updates.preempted_ids),
            num_query_tokens=len(starts),
            num_kv_read=sum(starts) + len(starts),
            is_fast_path=is_fast(starts, counts, state.limits),
            wake_at=state.deadlines.next(),
        )

    # --- steps of these rows beside others

    def plan(self, now: float) -> tuple[StepPlan, RowsBeside] | None:
        """Make the plan of a step in which other requests may have rows too; None if a row of these might be left out.

        The plan has the other rows only. Until its commit, the counters of these rows do not include it.
        """
        state, num_rows = self._state, len(self._offsets)
        others, wake_at = state.running.requests[num_rows:], state.deadlines.next()
        most_blocks = num_rows + state.max_step_tokens // self._size + 2 * len(others)
        if (
            not num_rows
            or state.flight
            or state.updates.sequences
            or state.updates.id_edits
            or state.overdue
            or state.policy.preempt_on_arrival
            or num_rows > state.max_step_tokens
            or most_blocks > state.cache.num_free()
            or (wake_at is not None and wake_at <= now)
            or any([request.has_several for request in others])
        ):
            return None
        state.report_ended()
        step = Step(state, now, None)
        step.begin_turn(None)
        step.tokens_left -= num_rows
        self._grow(step.effects)
        grant_running(step, num_rows)
        start_waiting(step)
        self._is_planned = True
        return step.finish(num_rows), self._reads()

    def commit(self, plan: StepPlan, outcome: StepResult, now: float) -> Events | None:
        """Commit the plan that `plan` made; the events have no tokens of these rows. None if it is another plan."""
        state = self._state
        if not self._is_planned or state.flight[0].plan.step != plan.step:
            return None
        self._is_planned = False
        flight = state.flight.popleft()
        if self._keyed:
            state.cache.confirm(flight.effects)
        self._count(1)
        self._end_step(0, flight.effects, now)
        state.flight.appendleft(flight)
        events = commit_step(state, flight.plan, outcome, now)
        if self.are_first:
            self.join()
        return events

    def _whole(self, plan: StepPlan) -> StepPlan:
        """Return a plan that `plan` made with all its rows."""
        starts = array("i", [offset + self._num_steps for offset in self._offsets.values()]) + plan.starts
        counts = array("i", [1]) * len(self._offsets) + plan.counts
        return replace(
            plan,
            slots=array("i", [row.slot for row in self._offsets]) + plan.slots,
            starts=starts,
            counts=counts,
            flags=array("i", [ROW_SAMPLE]) * len(self._offsets) + plan.flags,
            num_query_tokens=sum(counts),
            num_kv_read=sum(starts) + sum(counts),
            is_fast_path=is_fast(starts, counts, self._state.limits),
        )

    @property
    def are_first(self) -> bool:
        """True if these rows are the first running requests, in order."""
        last = next(reversed(self._offsets), None)
        return last is None or self._state.running.requests[len(self._offsets) - 1] is last.request

    # --- the parts of a step

    def _grow(self, effects: Effects | None) -> None:
        """Give a block of each group to the rows that need one in the next step; `effects` get the table edits."""
        cache, growing = self._state.cache, self._growing[self._num_steps % self._size]
        if not self._num_with_tables:
            cache.pools[0].take(len(growing))
            return
        for row in growing:
            if row.is_counted:
                cache.pools[0].take(1)
                continue
            for group, table in enumerate(row.tables):
                block = cache.allocate(group)
                if effects is not None:
                    effects.edits.fromlist([row.slot, group, len(table), block])  # `extend` takes three times as long
                table.append(block)

    def _end_step(self, steps_left: int, effects: Effects, now: float) -> None:
        """Commit the next step: publish full blocks, and end the requests that reach their length limit.

        `effects` are those of the last repeated step, which is `steps_left` steps later.
        """
        self._num_steps += 1
        if not steps_left:
            self._note_used()
        due = self._growing[self._num_steps % self._size] if self._keyed else []
        ended: list[Sequence] = []
        while not self._depth and self._ends and self._ends[0][0] == self._num_steps:
            ended.append(heappop(self._ends)[2])
        if not due and not ended:
            return
        for row in sorted(dict.fromkeys((*due, *ended)), key=_rank_of) if due and ended else (due or ended)[:]:
            self._end_row(row, steps_left, effects, now)

    def _end_row(self, row: Sequence, steps_left: int, effects: Effects, now: float) -> None:
        is_last = not self._depth and self._offsets[row] + self._num_steps == row.limit - 1
        is_keyed = row in self._keyed
        if not is_last and not is_keyed:
            return
        self._settle_row(row)
        if is_keyed:
            self._publish(row, steps_left, effects)
            if _steps_to_publish(self._state, row) == _MOST_STEPS:
                self._keyed.discard(row)
        if is_last:
            self._leave(row)
            self._state.end_choice(row, now, FinishReason.LENGTH)

    def _publish(self, row: Sequence, steps_left: int, effects: Effects) -> None:
        """Publish a row's full blocks. The next step's plan has the table edits of duplicates."""
        state = self._state
        made = state.cache.publish(row, row.num_computed, None)
        if made:
            self._note_used()
            deduplicate(state, made)
            if steps_left:
                if steps_left == 1:
                    effects.edits.extend(state.updates.table_edits)
                state.updates.table_edits = array("i")

    def _note_used(self) -> None:
        """Note how many blocks are in use; called before blocks are released."""
        self._most_used = max(self._most_used, self._state.cache.pools[0].num_used)

    def _count(self, num_steps: int) -> None:
        """Add the rows' tokens to the totals, and notify a policy that tracks service."""
        num_tokens, totals = len(self._offsets) * num_steps, self._state.totals
        totals.num_computed_tokens += num_tokens
        totals.num_output_tokens += num_tokens
        if self._state.policy.tracks_service:
            requests = [row.request for row in self._offsets]
            self._state.policy.notify_served(chain.from_iterable(repeat(requests, num_steps)))


# --- conditions


def _steps_of(request: RequestState, row: Sequence, depth: int) -> int:
    """Return for how many steps a running request only decodes; 0 if not even in the next.

    If each plan is committed before the next is made, the last of these steps ends the request.
    """
    start, committed = row.num_scheduled, row.num_committed
    if (
        not request.is_decoding
        or not request.samples
        or request.has_several
        or row.num_pending != depth
        or committed + depth - start != 1
        or row.in_flight != depth
        or committed == row.num_prompt  # its first token changes its rank
        or row.token_ids is not None
        or (start >= row.in_place_end and start != row.capacity)
    ):
        return 0
    return row.limit - committed - depth


def _steps_to_publish(state: State, row: Sequence) -> int:
    """Return after how many steps a row has its next block to publish; less than 1 if it has one now."""
    keys = row.request.request.block_keys
    if not state.cache.caching or keys is None or len(keys) <= row.num_published:
        return _MOST_STEPS
    return (row.num_published + 1) * state.cache.block_size - row.num_computed


def _is_calm(state: State) -> bool:
    """Return True if the next plan has only rows, freed slots and ended requests."""
    updates = state.updates
    return not (updates.sequences or updates.id_edits or updates.table_edits or state.events or state.ended)


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


def _note_shortage(state: State) -> None:
    """Update the wait numbers of the first waiting request if every repeated step would have looked at it."""
    if not len(state.waiting) or state.is_paused or state.free_slots:
        return
    head = state.waiting.peek()
    if head is not None:
        head.wait_numbers = (head.num_slots, 0, state.step - 1)
