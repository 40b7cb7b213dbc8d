"""Composes one plan: who runs, how many tokens each, whose blocks are taken, who is let in.

Owns: the pass over running and waiting requests of one step. Does not: keep anything between steps (state)
or check what can never run (admission).
Invariants: granted <= token budget; running <= sequence cap; nobody is preempted for one of later rank;
no admission in a step that preempted, unless the step would otherwise be empty.
"""

from __future__ import annotations

from array import array
from typing import Any

from octavo.core.kv.cache import Publication
from octavo.core.plan import (
    ROW_CARRY,
    ROW_POOL,
    ROW_SAMPLE,
    ROW_SCORE,
    Event,
    EventKind,
    NewSequence,
    StepPlan,
    WaitReason,
)
from octavo.core.request import RequestState, Sequence, Status, Want
from octavo.core.state import Flight, State

_DECODE_AHEAD = ROW_SAMPLE | ROW_CARRY


class Planner:
    """One step in the making. Made anew for every plan; `finish` hands the plan over."""

    __slots__ = (
        "copies",
        "counts",
        "edits",
        "flags",
        "new",
        "now",
        "num_partial",
        "num_preempted",
        "only",
        "outstanding",
        "published",
        "rows",
        "starts",
        "state",
        "tokens",
        "waits",
    )

    def __init__(self, state: State, now: float, only: frozenset[str] | None) -> None:
        self.state = state
        self.now = now
        self.only = only
        self.rows: list[Sequence] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.flags: list[int] = []
        self.edits: array[int] = array("i")
        self.copies: array[int] = array("i")
        self.new: list[NewSequence] = []
        self.published: list[Publication] = []
        self.waits: dict[WaitReason, int] = {}
        self.tokens = state.token_budget
        self.tokens.renew()
        self.num_preempted = 0
        self.num_partial = 0  # sequences whose known tokens are not all computed after this step
        self.outstanding = 0  # blocks that those will still need

    # --- running requests ---------------------------------------------------------------------------

    def grant_running(self) -> None:
        """Go on with what runs, in rank order. Rows that decode inside their last block are the hot path.

        They are entered right here: a call for each would cost more than all the rest of the step.
        """
        only, tokens = self.only, self.tokens
        rows, starts, counts, flags = self.rows, self.starts, self.counts, self.flags
        left = tokens.left
        for request in tuple(self.state.running.requests):
            if not left:
                break
            if only is not None and request.name not in only:
                continue
            for sequence in request.sequences:
                start = sequence.num_scheduled
                pending = sequence.num_pending
                todo = sequence.num_committed + pending - start
                if (
                    todo == 1
                    and start < sequence.hot_end
                    and request.is_decoding
                    and not (pending and not request.ahead_ok)
                ):
                    sequence.num_scheduled = start + 1
                    sequence.num_pending = pending + 1
                    sequence.in_flight += 1
                    rows.append(sequence)
                    starts.append(start)
                    counts.append(1)
                    flags.append(_DECODE_AHEAD if pending else ROW_SAMPLE)
                    left -= 1
                elif todo > 0:
                    tokens.left = left
                    self._grant(request, sequence, todo)
                    left = tokens.left
        tokens.left = left

    def _grant(self, request: RequestState, sequence: Sequence, todo: int) -> None:
        """Grant a row that needs a block, or more than one token."""
        known = sequence.num_known
        if request.status != Status.RUNNING or not self.tokens.left or (sequence.in_flight and not request.ahead_ok):
            return
        if known >= sequence.limit and request.request.wants & Want.SAMPLE:
            return  # its last token is in flight: a stop by length is foreseen
        count = self.chunk(todo)
        end = sequence.num_scheduled + count
        if end > sequence.capacity and not self._make_room(request, sequence, end):
            return
        self.enter(sequence, count)
        if count < todo:
            self.count_partial(sequence, known)
            self.event(EventKind.CHUNKED, request, num_tokens=count, needed=todo - count)

    def chunk(self, todo: int) -> int:
        """Tokens to grant of `todo`: the budget's rest, under the threshold for long prompts."""
        threshold = self.state.limits.long_prefill_threshold
        if threshold and self.state.limits.chunked_prefill and len(self.state.requests) > 1:
            todo = min(todo, threshold)
        return min(todo, self.tokens.left)

    def enter(self, sequence: Sequence, count: int) -> None:
        """Make a row of a sequence: blocks, budget, columns, and prompt blocks that others may now match."""
        start = sequence.num_scheduled
        end = start + count
        if end > sequence.capacity:
            self.state.cache.extend(sequence, end, self.edits)
        self.tokens.take(count)
        self.rows.append(sequence)
        self.starts.append(start)
        self.counts.append(count)
        self.flags.append(self._flags(sequence, start, end))
        sequence.num_scheduled = end
        sequence.in_flight += 1
        if start < sequence.num_prompt:
            self.published += self.state.cache.publish(sequence, min(end, sequence.num_prompt), self.state.step)

    def _flags(self, sequence: Sequence, start: int, end: int) -> int:
        """What the row of positions [start, end) gives and takes; the token it samples becomes pending."""
        request = sequence.request
        wants = request.request.wants
        flag = ROW_CARRY if start >= sequence.num_committed else 0
        if wants & Want.SCORE and start < sequence.num_prompt - 1 and end >= request.num_scored:
            flag |= ROW_SCORE
        if end == sequence.num_known:
            if not request.is_decoding:
                self.state.start_decoding(request)
            if wants & Want.POOL and end == sequence.num_prompt:  # the prompt's, once
                flag |= ROW_POOL
            if wants & Want.SAMPLE:
                flag |= ROW_SAMPLE
                sequence.num_pending += 1
        return flag

    def count_partial(self, sequence: Sequence, known: int) -> None:
        """A sequence will still need blocks and steps for tokens it knows already."""
        self.num_partial += 1
        self.outstanding += self.state.cache.num_blocks_for(known) - len(sequence.tables[0])

    def _make_room(self, request: RequestState, sequence: Sequence, end: int) -> bool:
        """Preempt until `end` positions fit. False when the request itself had to go."""
        cache = self.state.cache
        while cache.num_free() < cache.num_blocks_for(end) - len(sequence.tables[0]):
            victim = max(self.state.running.requests, key=self._victim_rank)
            self._preempt(victim, by=request)
            if victim is request:
                return False
        return True

    def _victim_rank(self, request: RequestState) -> tuple[tuple[float, ...], int]:
        return self.state.judge.victim_rank(request)

    def _preempt(self, victim: RequestState, by: RequestState) -> None:
        """Take everything from a victim, its row and promises in this very plan too."""
        self.num_preempted += 1
        slots = {sequence.slot for sequence in victim.sequences}
        for sequence in victim.sequences:
            if sequence in self.rows:
                self._withdraw(sequence)
        flat = self.edits
        kept = [i for i in range(0, len(flat), 4) if flat[i] not in slots]
        self.edits = array("i", [flat[i + k] for i in kept for k in range(4)])
        self.state.preempt(victim, self.now, by.name, WaitReason.KV_BLOCKS)

    def _withdraw(self, sequence: Sequence) -> None:
        """Take a row back out of the plan, with what it promised to write."""
        index = self.rows.index(sequence)
        self.tokens.give_back(self.counts[index])
        sequence.in_flight -= 1
        if self.flags[index] & ROW_SAMPLE:
            sequence.num_pending -= 1
        for column in (self.rows, self.starts, self.counts, self.flags):
            del column[index]
        mine = [entry for entry in self.published if entry.sequence is sequence]
        self.state.cache.unpublish(mine, self.state.step)
        self.published = [entry for entry in self.published if entry.sequence is not sequence]

    def count_waits(self, reason: WaitReason, count: int) -> None:
        """Enter `count` requests that wait for `reason`."""
        if count:
            self.waits[reason] = self.waits.get(reason, 0) + count

    def event(self, kind: EventKind, request: RequestState, **fields: Any) -> None:
        """Log a decision of this step."""
        self.state.events.append(Event(kind, request.name, self.now, self.state.step, **fields))

    # --- the plan -----------------------------------------------------------------------------------

    def finish(self) -> StepPlan:
        """Turn the grants into columns, hand over pending effects, and enter the plan in flight."""
        state = self.state
        slots = array("i", [sequence.slot for sequence in self.rows])
        starts, counts = array("i", self.starts), array("i", self.counts)
        num_query = sum(counts)
        freed_slots, state.freed_slots = state.freed_slots, array("i")
        plan = StepPlan(
            state.step,
            self.now,
            slots,
            starts,
            counts,
            array("i", self.flags),
            edits=self.edits,
            copies=self.copies,
            freed_slots=freed_slots,
            new_sequences=tuple(self.new),
            finished_ids=tuple(state.finished_ids),
            preempted_ids=tuple(state.preempted_ids),
            num_query_tokens=num_query,
            num_kv_read=sum(starts) + num_query,
            is_fast_path=self._is_fast(starts, counts),
            wake_at=state.deadlines.next(),
        )
        if plan.is_empty:
            plan.waits = self._reasons()
        else:
            state.finished_ids = []
            state.preempted_ids = []
            state.flight.append(Flight(plan, self.rows, self.published))
            state.step += 1
        plan.events = tuple(state.events)
        state.events = []
        return plan

    def _is_fast(self, starts: array[int], counts: array[int]) -> bool:
        if not counts or max(counts) != 1:
            return False
        bound = self.state.limits.max_blocks_per_sequence * self.state.limits.block_size
        return not bound or max(starts) < bound

    def _reasons(self) -> tuple[tuple[WaitReason, int], ...]:
        named = sum(self.waits.values())
        behind = len(self.state.waiting) - named
        if behind > 0:
            self.count_waits(WaitReason.BEHIND, behind)
        if not self.waits:
            return ((WaitReason.IDLE, 0),)
        return tuple(self.waits.items())
