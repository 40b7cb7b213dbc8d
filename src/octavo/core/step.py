"""Builds the plan of one step: the plan's columns, its budgets, and every change to them.

Owns: the rows of the plan and the updates sent with it; the remaining budgets; the blocks reserved for running
requests; preemption, which also removes the victim's rows and effects from this plan.
Does not: choose which running requests get rows (run), choose which waiting requests start (start), or keep state
between steps (state).
Invariants: granted tokens <= token budget; running sequences <= sequence cap.
"""

from __future__ import annotations

from array import array

from octavo.core.composition import Turn
from octavo.core.kv.effects import NO_BLOCK, Effects
from octavo.core.limits import Limits
from octavo.core.plan import (
    ROW_BEAM,
    ROW_CARRY,
    ROW_FORK,
    ROW_POOL,
    ROW_SAMPLE,
    ROW_SCORE,
    EventKind,
    NewSequence,
    StepPlan,
    WaitReason,
)
from octavo.core.request_state import RequestState, Sequence, Status
from octavo.core.state import UNBOUNDED, Flight, State, Updates
from octavo.errors import InvariantError


class Step:
    """Builds one plan; `finish` returns the plan and adds it to the plans in flight.

    `waits` counts the waiting requests without a row by reason, and `skipped` the running ones. `reserved` has, for
    each running request, the blocks per group that it still needs for its known tokens; `outstanding` is their sum.
    """

    __slots__ = (
        "counts", "draft_ids", "effects", "flags", "forked_slots", "has_made_room", "has_preempted", "has_read_limit",
        "new_sequences", "now", "num_partial_left", "num_started", "only", "outstanding", "passed_over", "reads_left",
        "reserved", "rows", "skipped", "starts", "state", "tokens_left", "turn", "waits",
    )  # fmt: skip

    def __init__(self, state: State, now: float, only: frozenset[str] | None) -> None:
        self.state = state
        self.now = now
        self.only = only  # names of the requests that may be in the plan; None = all
        self.rows: list[Sequence] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.flags: list[int] = []
        self.draft_ids = array("i")
        self.effects: Effects = state.cache.begin_plan(state.step)
        self.tokens_left = state.max_step_tokens
        self.reads_left = state.limits.max_kv_read or UNBOUNDED
        self.has_read_limit = bool(state.limits.max_kv_read)
        if state.limits.encoder_budget:
            state.encoder.begin_plan()
        self.num_started = 0
        self.has_preempted = False
        self.has_made_room = False  # a request was preempted for a waiting request
        self.new_sequences: list[NewSequence] = []
        self.forked_slots: frozenset[int] = frozenset()
        updates = state.updates
        if updates.sequences:
            self.forked_slots = frozenset([sequence.slot for sequence in updates.sequences])
            for sequence in updates.sequences:
                self.enter(sequence)
                state.cache.enter_tables(sequence)
            updates.sequences = []
        if updates.table_edits:
            self.effects.edits.extend(updates.table_edits)
            updates.table_edits = array("i")

    def begin_turn(self, turn: Turn | None) -> None:
        """Begin a pass over all requests for rows of this kind (None: any kind). No earlier pass has made a row."""
        self.turn = turn
        self.waits: dict[WaitReason, int] = {}
        self.skipped: dict[WaitReason, int] = {}
        self.passed_over: list[tuple[RequestState, WaitReason]] = []  # requests refused since the last one started
        self.outstanding = [0] * self.state.cache.num_groups
        self.reserved: dict[str, list[int]] = {}
        self.num_partial_left = self.state.limits.max_partial_prefills or UNBOUNDED

    # --- requests that are left out ---------------------------------------------------------------------

    def refusal(self, request: RequestState, is_decoding: bool) -> WaitReason | None:
        """Return why a step of this kind must not have a row of a request; None if it may."""
        return None if self.turn is None else self.turn.refusal(request, is_decoding)

    def count_waiting(self, reason: WaitReason, count: int) -> None:
        """Count `count` waiting requests that get no row for `reason`."""
        if count > 0:
            self.waits[reason] = self.waits.get(reason, 0) + count

    def count_rest(self, reason: WaitReason) -> None:
        """Count all waiting requests that are not counted yet, for `reason`."""
        self.count_waiting(reason, len(self.state.waiting) - sum(self.waits.values()))

    def skip(self, reason: WaitReason) -> None:
        """Count, under `reason`, a running request or choice that gets no row in this step."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def defer(self, request: RequestState, reason: WaitReason, needed: int = 0, available: int = 0) -> WaitReason:
        """Record why a request gets no row, and log an event if the reason is new; return the reason."""
        if request.status == Status.RUNNING:
            self.skip(reason)
        else:
            self.count_waiting(reason, 1)
        request.wait_numbers = (needed, available, self.state.step)
        if request.wait_reason != reason:
            request.wait_reason = reason
            self.state.log(
                EventKind.DEFERRED, request, self.now, reason=reason, needed=needed, available=available
            )  # fmt: skip
        return reason

    # --- rows ---------------------------------------------------------------------------------------------

    def chunk(self, todo: int) -> int:
        """Return how many of `todo` tokens the token budget and long_prefill_threshold allow now."""
        limits = self.state.limits
        if limits.long_prefill_threshold and limits.chunked_prefill and len(self.state.requests) > 1:
            todo = min(todo, limits.long_prefill_threshold)
        return min(todo, self.tokens_left)

    def may_split(self, todo: int) -> bool:
        """Return True if `todo` tokens may be computed in chunks: prompts are chunked, or no step could hold them."""
        return self.state.limits.chunked_prefill or todo > self.state.max_step_tokens

    def fit_chunk(
        self, start: int, todo: int, may_be_partial: bool = True
    ) -> tuple[int, tuple[WaitReason, int, int] | None]:
        """Return how many of `todo` tokens, from position `start` on, the budgets allow in this step, and None.

        If the budgets allow none, return 0 and (reason, amount needed, amount available).
        """
        count = self.chunk(todo)
        if count < todo and not self.may_split(todo):
            return 0, (WaitReason.TOKEN_BUDGET, todo, self.tokens_left)
        if count < todo and not may_be_partial:
            return 0, (WaitReason.PARTIAL_PREFILL_CAP, 1, 0)
        if self.has_read_limit:
            cost = self.read_cost(start, count)
            if not self.may_read(cost):
                return 0, (WaitReason.KV_READ_BUDGET, cost, self.reads_left)
        return count, None

    def read_cost(self, start: int, count: int) -> int:
        """Return how many tokens a row of positions [start, start + count) reads, including its own (S04)."""
        return min(start, self.state.read_window) + count if count else 0

    def may_read(self, cost: int) -> bool:
        """Return True if the budget allows a row to read `cost` tokens.

        A row above the whole limit is allowed if the budget is unused, and uses it up.
        """
        return cost <= self.reads_left or self.reads_left == self.state.limits.max_kv_read

    def take_reads(self, cost: int) -> None:
        """Take `cost` from the read budget, or all of it if less is left."""
        self.reads_left -= min(cost, self.reads_left)

    def add_row(self, sequence: Sequence, count: int) -> bool:
        """Add a row with a sequence's next `count` positions: allocate blocks, take budgets, publish full blocks.

        Return True if the row samples the first token of a request with several choices, so that they can fork from it.
        """
        state, request = self.state, sequence.request
        start = sequence.num_scheduled
        end = start + count
        if start >= sequence.in_place_end or end > sequence.capacity:
            if state.cache.has_windows:
                state.cache.slide(sequence)
            state.cache.extend(sequence, end)
        self.tokens_left -= count
        if self.has_read_limit:
            self.take_reads(self.read_cost(start, count))
        flags = self._flags(sequence, start, end)
        self.rows.append(sequence)
        self.starts.append(start)
        self.counts.append(count)
        self.flags.append(flags)
        sequence.num_scheduled = end
        sequence.in_flight += 1
        known = min(end, sequence.num_committed)
        if known >= (sequence.num_published + 1) * state.limits.block_size and start < known:
            self.effects.published += state.cache.publish(sequence, known, state.step)
        if request.beams is not None:
            sequence.in_place_end = 0  # so that run.grant_running never grants a beam's row on its fast path
            return False
        return request.has_several and bool(flags & ROW_SAMPLE) and end == sequence.num_prompt

    def add_fork(self, child: Sequence) -> None:
        """Add a row that has no positions, and samples from the logits of the row before it."""
        self.rows.append(child)
        self.starts.append(child.num_scheduled)
        self.counts.append(0)
        self.flags.append(ROW_SAMPLE | ROW_FORK)
        child.num_pending += 1
        child.in_flight += 1

    def add_drafts(self, index: int, drafts: array[int]) -> None:
        """Add drafts to a row of one token: the row also writes their positions, which do not count as scheduled."""
        sequence, count = self.rows[index], len(drafts)
        self.draft_ids.extend(drafts)
        self.counts[index] += count
        self.tokens_left -= count
        self.take_reads(count)
        sequence.num_drafts = count
        end = sequence.num_scheduled + count
        if end > sequence.capacity:
            self.state.cache.extend(sequence, end)

    def _flags(self, sequence: Sequence, start: int, end: int) -> int:
        """Return the flags of the row of positions [start, end). If the row samples, count its token as pending."""
        request = sequence.request
        flag = ROW_CARRY if start >= sequence.num_committed else 0
        if (
            request.scores
            and request.num_scored < sequence.num_prompt
            and start < sequence.num_prompt - 1
            and end >= request.num_scored
        ):
            flag |= ROW_SCORE
        if end == sequence.num_known:
            if not request.is_decoding and (not request.has_several or self._have_caught_up(request, sequence)):
                self.state.set_decoding(request, True)
            if request.pools and end == sequence.num_prompt and sequence is request.sequences[0]:  # the prompt's, once
                flag |= ROW_POOL
            if request.samples:
                flag |= ROW_SAMPLE if request.beams is None else ROW_SAMPLE | ROW_BEAM
                sequence.num_pending += 1
        return flag

    def _have_caught_up(self, request: RequestState, last: Sequence) -> bool:
        """Return True if every choice other than `last` has scheduled its known tokens, or forks from `last`'s row."""
        is_at_fork = self.state.cache.sharing and last.num_known == last.num_prompt  # no output sampled or in flight
        return all(
            other is last
            or (other.is_entered and other.num_scheduled >= other.num_committed)
            or (is_at_fork and not other.is_entered and other.num_committed == last.num_prompt)
            for other in request.sequences
        )

    def enter(self, sequence: Sequence) -> None:
        """Add all data of a sequence to the plan, for the executor; the plan's table edits have its blocks."""
        request = sequence.request.request
        ids = sequence.token_ids[:] if sequence.token_ids is not None else None
        sequence.is_entered = True
        self.new_sequences.append(
            NewSequence(
                sequence.slot, request.request_id, sequence.choice, sequence.num_prompt, ids, request.params,
                request.eos_token_ids, request.adapter_id,
            )
        )  # fmt: skip

    # --- blocks -------------------------------------------------------------------------------------------

    def note_rest(self, request: RequestState, sequence: Sequence, count: int) -> None:
        """Log that a row of `count` tokens does not cover all known tokens, and reserve blocks for the rest."""
        left = sequence.num_committed - sequence.num_scheduled
        self.state.log(EventKind.CHUNKED, request, self.now, num_tokens=count, needed=left)
        self.reserve_rest(sequence)

    def reserve_rest(self, sequence: Sequence) -> None:
        """Reserve blocks for a sequence's known tokens that this plan does not compute."""
        if sequence.num_scheduled < sequence.num_committed:
            self.num_partial_left = max(0, self.num_partial_left - 1)
            self.reserve(sequence.request, self.state.cache.blocks_left(sequence))

    def reserve(self, request: RequestState, blocks: list[int]) -> None:
        """Reserve `blocks` per group for a running request: requests that start in this step leave them free."""
        mine = self.reserved.setdefault(request.name, [0] * len(blocks))
        for group, count in enumerate(blocks):
            self.outstanding[group] += count
            mine[group] += count

    def make_room(self, sequence: Sequence, end: int) -> bool:
        """Preempt requests until blocks for the sequence's positions up to `end` can be allocated.

        Return False if the sequence's own request was preempted, or has to wait for blocks of a plan in flight.
        """
        cache = self.state.cache
        if end <= sequence.capacity and sequence.num_scheduled < sequence.in_place_end:
            return True
        cache.slide(sequence)
        while not cache.fits(sequence, end):
            if not self.evict(sequence.request):
                return False
        return True

    def evict(self, request: RequestState, may_wait: bool = True) -> bool:
        """Preempt the request with the greatest victim rank, to make room for the running `request`.

        Return False if the victim was the request itself. With `may_wait`, return False and preempt none if a plan in
        flight will release blocks.
        """
        state = self.state
        if may_wait and any(flight.releases for flight in state.flight):
            return False
        victim = max(state.running.requests, key=state.policy.victim_rank)
        self.preempt(victim, request, WaitReason.KV_BLOCKS)
        return victim is not request

    def preempt(self, victim: RequestState, by: RequestState, reason: WaitReason) -> None:
        """Preempt a running request, and remove its rows, published keys and effects from this plan."""
        self.has_preempted = True
        self.has_made_room |= by.status == Status.WAITING
        slots = frozenset([sequence.slot for sequence in victim.sequences])
        rows = [sequence for sequence in victim.sequences if sequence in self.rows]
        is_fresh = any(new.slot in slots and new.slot not in self.forked_slots for new in self.new_sequences)
        for sequence in rows:
            self._take_back(sequence)
        self.state.cache.unpublish(self.effects, victim.sequences)
        for group, count in enumerate(self.reserved.pop(victim.name, ())):
            self.outstanding[group] -= count
        self.new_sequences = [new for new in self.new_sequences if new.slot not in slots]
        self.effects.drop(slots)
        # A request that this plan has begun to change cannot be swapped, because its KV is incomplete: recompute it.
        self.state.preempt(victim, self.now, by.name, reason, may_swap=not (rows or is_fresh))

    def _take_back(self, sequence: Sequence) -> None:
        """Remove a row from the plan, and return its tokens and reads to the budgets."""
        index = self.rows.index(sequence)
        self.tokens_left += self.counts[index]
        cost = self.read_cost(self.starts[index], self.counts[index])
        self.reads_left = min(self.reads_left + cost, self.state.limits.max_kv_read or UNBOUNDED)
        sequence.in_flight -= 1
        if self.flags[index] & ROW_SAMPLE:
            sequence.num_pending -= 1
        for column in (self.rows, self.starts, self.counts, self.flags):
            del column[index]

    # --- the plan -----------------------------------------------------------------------------------------

    def finish(self, num_beside: int = 0) -> StepPlan:
        """Return the plan, and add it to the plans in flight unless it is empty.

        With `num_beside` (see repeat), the step also has rows that the plan leaves out, so it is not empty.
        """
        state, effects, updates = self.state, self.effects, self.state.updates
        if not 0 <= self.tokens_left <= state.max_step_tokens:
            raise InvariantError(f"{self.tokens_left} tokens are left of a budget of {state.max_step_tokens}")
        starts, counts = array("i", self.starts), array("i", self.counts)
        num_tokens = sum(counts)
        num_read = sum(starts) + num_tokens
        if state.read_window < UNBOUNDED or 0 in counts:
            num_read = sum(map(self.read_cost, starts, counts))
        encode_jobs, encoder_frees = state.encoder.end_plan() if state.limits.encoder_budget else ((), ())
        plan = StepPlan(
            state.step,
            self.now,
            array("i", [sequence.slot for sequence in self.rows]),
            starts,
            counts,
            array("i", self.flags),
            array("i", [sequence.num_drafts for sequence in self.rows] if self.draft_ids else ()),
            self.draft_ids,
            edits=effects.edits,
            copies=effects.copies,
            swap_outs=effects.swap_outs,
            host_loads=effects.host_loads,
            freed_slots=updates.freed_slots,
            id_edits=updates.id_edits,
            encode_jobs=encode_jobs,
            encoder_frees=encoder_frees,
            new_sequences=tuple(self.new_sequences),
            finished_ids=tuple(updates.finished_ids),
            preempted_ids=tuple(updates.preempted_ids),
            num_query_tokens=num_tokens,
            num_kv_read=num_read,
            is_fast_path=is_fast(starts, counts, state.limits),
            wake_at=state.deadlines.next(),
        )
        state.updates = Updates()
        state.cache.end_plan()
        if not num_beside and plan.is_empty:
            self.count_rest(WaitReason.BEHIND)
            for reason, count in self.skipped.items():
                self.count_waiting(reason, count)
            idle = WaitReason.DRAINING if state.is_draining else WaitReason.IDLE
            plan.waits = tuple(self.waits.items()) or ((idle, 0),)
        else:
            if state.limits.find_shared_prefixes:
                plan.shared_prefixes, plan.num_common_blocks = shared_prefixes(self.rows, counts)
            state.totals.num_copies += len(effects.copies) // 3
            state.flight.append(Flight(plan, self.rows, effects))
            state.step += 1
        plan.events = tuple(state.events)
        state.events = []
        return plan


# --- facts about a plan's rows for executors ------------------------------------------------------------------


def is_fast(starts: array[int], counts: array[int], limits: Limits) -> bool:
    """Return True if every row has one token, within the blocks that a captured graph covers (S14)."""
    if not counts or max(counts) != 1 or min(counts) != 1:
        return False
    bound = limits.max_blocks_per_sequence * limits.block_size
    return not bound or max(starts) < bound


def shared_prefixes(rows: list[Sequence], counts: array[int]) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], int]:
    """Return the sets of rows with equal leading blocks, and the number of leading blocks that all rows share (K08).

    Only cache group 0 is compared. Rows whose first block has left the window share nothing. O(rows + shared blocks).
    """
    by_first: dict[int, list[int]] = {}
    reading = [index for index, count in enumerate(counts) if count]
    for index in reading:
        first = rows[index].tables[0][0]
        if first != NO_BLOCK:
            by_first.setdefault(first, []).append(index)
    shared, common = [], 0
    for members in by_first.values():
        has_all = len(members) == len(reading)  # a single row shares all its blocks with all rows
        if has_all or len(members) > 1:
            num_blocks = _num_equal([rows[index].tables[0] for index in members])
            common = num_blocks if has_all else common
            if len(members) > 1:
                shared.append((num_blocks, tuple(members)))
    return tuple(shared), common


def _num_equal(tables: list[list[int]]) -> int:
    for index, blocks in enumerate(zip(*tables, strict=False)):
        if min(blocks) != max(blocks):
            return index
    return min(map(len, tables))
