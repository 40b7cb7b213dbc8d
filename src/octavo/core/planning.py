"""Composes one plan: who runs, how many tokens each, whose blocks are taken, who is let in.

Owns: the pass over running and waiting requests of one step. Does not: keep anything between steps (state)
or check what can never run (admission).
Invariants: granted <= token budget; running <= sequence cap; nobody is preempted for one of later rank;
no admission in a step that preempted, unless the step would otherwise be empty.
"""

from __future__ import annotations

from array import array

from octavo.core.kv.cache import Match, Publication
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

MAX_CANDIDATES = 64  # how far admission looks past a request that does not fit (S23)

# Reasons about this one request: the next may still fit. Any other ends admission, unless the policy skips ahead.
# TOKEN_BUDGET with tokens left means an unchunked prompt that is longer than the rest.
_SKIPPED = frozenset({WaitReason.TOKEN_BUDGET, WaitReason.KV_READ_BUDGET, WaitReason.ENCODER_BUDGET, WaitReason.ADAPTER_SLOTS})
_ROOM = frozenset({WaitReason.KV_BLOCKS, WaitReason.HEADROOM, WaitReason.SEQUENCE_CAP})


class Planner:
    """One step in the making. Made anew for every plan; `finish` hands the plan over."""

    __slots__ = (
        "copies",
        "edits",
        "new",
        "now",
        "num_partial",
        "num_preempted",
        "only",
        "outstanding",
        "published",
        "rows",
        "state",
        "tokens",
        "waits",
    )

    def __init__(self, state: State, now: float, only: frozenset[str] | None) -> None:
        self.state = state
        self.now = now
        self.only = only
        self.rows: list[Sequence] = []
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
        """Go on with what runs, in rank order. Decodes of one token are the hot path: keep it flat."""
        only, rows, tokens = self.only, self.rows, self.tokens
        left = tokens.left
        for request in tuple(self.state.running.requests):
            if not left:
                break
            if only is not None and request.request.request_id not in only:
                continue
            for sequence in request.sequences:
                known = sequence.num_committed + sequence.num_pending
                todo = known - sequence.num_scheduled
                if todo == 1 and known < sequence.limit and sequence.num_scheduled < sequence.capacity:
                    if sequence.in_flight and not request.ahead_ok:
                        continue
                    if request.status != Status.RUNNING:
                        continue
                    sequence.grant = 1
                    rows.append(sequence)
                    left -= 1
                elif todo > 0:
                    tokens.left = left
                    self._grant(request, sequence, known, todo)
                    left = tokens.left
        tokens.left = left
        if self.num_preempted:
            self.rows = [sequence for sequence in rows if sequence.grant]

    def _grant(self, request: RequestState, sequence: Sequence, known: int, todo: int) -> None:
        """Grant a row that needs a block, or more than one token."""
        if request.status != Status.RUNNING or not self.tokens.left or (sequence.in_flight and not request.ahead_ok):
            return
        if known >= sequence.limit and request.request.wants & Want.SAMPLE:
            return  # its last token is in flight: a stop by length is foreseen
        count = self._chunk(todo)
        end = sequence.num_scheduled + count
        if end > sequence.capacity and not self._make_room(request, sequence, end):
            return
        self._enter(sequence, count)
        if count < todo:
            self._count_partial(sequence, known)
            self._event(EventKind.CHUNKED, request, num_tokens=count, needed=todo - count)

    def _chunk(self, todo: int) -> int:
        """Tokens to grant of `todo`: the budget's rest, under the threshold for long prompts."""
        threshold = self.state.limits.long_prefill_threshold
        if threshold and self.state.limits.chunked_prefill and len(self.state.requests) > 1:
            todo = min(todo, threshold)
        return min(todo, self.tokens.left)

    def _enter(self, sequence: Sequence, count: int) -> None:
        """Make a row of a sequence: blocks, budget, and prompt blocks that others may now match."""
        end = sequence.num_scheduled + count
        if end > sequence.capacity:
            self.state.cache.extend(sequence, end, self.edits)
        sequence.grant = count
        self.tokens.take(count)
        self.rows.append(sequence)
        if sequence.num_scheduled < sequence.num_prompt:
            self.published += self.state.cache.publish(sequence, min(end, sequence.num_prompt), self.state.step)

    def _count_partial(self, sequence: Sequence, known: int) -> None:
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
        return self.state.policy.victim_key(request), request.order

    def _preempt(self, victim: RequestState, by: RequestState) -> None:
        """Take everything from a victim, its row and promises in this very plan too."""
        self.num_preempted += 1
        slots = {sequence.slot for sequence in victim.sequences}
        for sequence in victim.sequences:
            if sequence.grant:
                self.tokens.give_back(sequence.grant)
                mine = [entry for entry in self.published if entry.sequence is sequence]
                self.state.cache.unpublish(mine, self.state.step)
                self.published = [entry for entry in self.published if entry.sequence is not sequence]
        flat = self.edits
        kept = [i for i in range(0, len(flat), 4) if flat[i] not in slots]
        self.edits = array("i", [flat[i + k] for i in kept for k in range(4)])
        self.state.preempt(victim, self.now, by.request.request_id, WaitReason.KV_BLOCKS)

    # --- waiting requests ---------------------------------------------------------------------------

    def admit_waiting(self) -> None:
        """Let in waiting requests in the policy's order while they fit (S05, S08, S23)."""
        state = self.state
        if self.num_preempted and self.rows:
            self._count_waits(WaitReason.PREEMPTED_THIS_STEP, len(state.waiting))
            return
        if state.is_paused:
            self._count_waits(WaitReason.PAUSED, len(state.waiting))
            return
        skipped: list[RequestState] = []
        candidates = self._named() if self.only is not None else None
        num_named = len(candidates) if candidates is not None else 0
        while len(skipped) < MAX_CANDIDATES:
            request = state.waiting.peek() if candidates is None else (candidates.pop() if candidates else None)
            if request is None:
                break
            reason = self._try_admit(request, queued=candidates is None)
            if reason is None:
                continue
            if not self._goes_on(reason):
                break
            skipped.append(request)
            if candidates is None:
                state.waiting.pop()
        if candidates is None:
            for request in skipped:
                state.waiting.add(request)
        elif num_named < len(state.waiting):
            self._count_waits(WaitReason.EXCLUDED, len(state.waiting) - num_named)

    def _named(self) -> list[RequestState]:
        """Waiting requests of `only`, last first."""
        assert self.only is not None
        named = [self.state.requests[name] for name in sorted(self.only) if name in self.state.requests]
        waiting = [request for request in named if request.status == Status.WAITING]
        return sorted(waiting, key=lambda request: request.rank, reverse=True)

    def _goes_on(self, reason: WaitReason) -> bool:
        """Whether admission looks at the next request after one that waits for `reason`."""
        if not self.tokens.left or not self.state.sequence_budget.left:
            return False
        return reason in _SKIPPED or (self.state.policy.skip_ahead and reason in _ROOM)

    def _try_admit(self, request: RequestState, queued: bool) -> WaitReason | None:
        """Admit one request, or say why not."""
        state = self.state
        if request.in_flight:
            return self._defer(request, WaitReason.UNCOMMITTED, request.in_flight, 0)
        if not state.sequence_budget.fits(len(request.sequences)):
            return self._defer(request, WaitReason.SEQUENCE_CAP, len(request.sequences), state.sequence_budget.left)
        if not self.tokens.left:
            return self._defer(request, WaitReason.TOKEN_BUDGET, 1, 0)
        has_company = bool(self.rows or state.running.requests)
        if has_company and request.deferred_version == state.cache.version:
            reason = WaitReason(request.wait_reason)
            self._count_waits(reason, 1)
            return reason
        sequence = request.sequences[0]
        match = state.cache.match(sequence, self._match_cap(request, sequence), state.step)
        reason = self._lacks_room(request, match, has_company)
        if reason is not None:
            return reason
        if queued:
            state.waiting.pop()
        else:
            state.waiting.discard(request)
        self._admit(request, match)
        return None

    def _match_cap(self, request: RequestState, sequence: Sequence) -> int:
        """Longest usable match: a score needs the logits in front of the first position it still owes."""
        if request.request.wants & Want.SCORE and request.num_scored < sequence.num_prompt:
            return request.num_scored - 1
        return sequence.num_known

    def _lacks_room(self, request: RequestState, match: Match, has_company: bool) -> WaitReason | None:
        """Check budgets and blocks for a request with this match; None when it fits."""
        state, sequence = self.state, request.sequences[0]
        limits = state.limits
        known = sequence.num_known
        todo = known - match.num_tokens
        count = self._chunk(todo)
        if count < todo and not limits.chunked_prefill and todo <= limits.max_batch_tokens:
            return self._defer(request, WaitReason.TOKEN_BUDGET, todo, self.tokens.left)
        if count < todo and limits.max_partial_prefills and self.num_partial >= limits.max_partial_prefills:
            return self._defer(request, WaitReason.PARTIAL_PREFILL_CAP, 1, 0)
        room = state.cache.room_after(match, known) - self.outstanding
        needed = state.cache.num_blocks_for(known) - len(match.blocks[0])
        if room < 0:
            return self._defer(request, WaitReason.KV_BLOCKS, needed, max(0, room + needed), has_company)
        # A request that was preempted comes back only when those running can grow by a block each (by two
        # after the second time), or it would be preempted again at once.
        spare = state.headroom_blocks + min(request.num_preemptions, 2) * state.running.num_sequences
        if has_company and room < spare:
            return self._defer(request, WaitReason.HEADROOM, needed + spare, room + needed, has_company)
        return None

    def _admit(self, request: RequestState, match: Match) -> None:
        state, sequence = self.state, request.sequences[0]
        is_resumed = request.first_scheduled_at is not None
        state.enter_running(request)
        state.cache.adopt(sequence, match, self.edits, self.copies)
        state.cache.count_hit(sequence.num_known, match.num_tokens)
        asked = request.request
        known = sequence.num_known
        if not is_resumed:
            request.first_scheduled_at = self.now
            request.cached_tokens = match.num_tokens
            state.totals.num_admitted += 1
            state.totals.num_prompt_tokens += sequence.num_prompt
        request.wait_reason = request.deferred_version = -1
        count = self._chunk(known - match.num_tokens)
        ids = sequence.token_ids[:] if sequence.token_ids is not None else None
        self.new.append(
            NewSequence(sequence.slot, asked.request_id, sequence.choice, sequence.num_prompt, ids, asked.params, asked.eos_token_ids, asked.adapter_id)
        )
        self._enter(sequence, count)
        kind = EventKind.RESUMED if is_resumed else EventKind.ADMITTED
        self._event(kind, request, num_tokens=count, cached_tokens=match.num_tokens)
        left = known - match.num_tokens - count
        if left:
            self._count_partial(sequence, known)
            self._event(EventKind.CHUNKED, request, num_tokens=count, needed=left)

    def _defer(self, request: RequestState, reason: WaitReason, needed: int, available: int, remember: bool = False) -> WaitReason:
        self._count_waits(reason, 1)
        request.deferred_version = self.state.cache.version if remember else -1
        if request.wait_reason != reason:
            request.wait_reason = reason
            self._event(EventKind.DEFERRED, request, reason=reason, needed=needed, available=available)
        return reason

    def _count_waits(self, reason: WaitReason, count: int) -> None:
        if count:
            self.waits[reason] = self.waits.get(reason, 0) + count

    def _event(self, kind: EventKind, request: RequestState, **fields: object) -> None:
        self.state.events.append(Event(kind, request.request.request_id, self.now, self.state.step, **fields))  # type: ignore[arg-type]

    # --- the plan -----------------------------------------------------------------------------------

    def finish(self) -> StepPlan:
        """Turn the grants into columns, hand over pending effects, and enter the plan in flight."""
        state = self.state
        rows = self.rows
        slots = array("i", [sequence.slot for sequence in rows])
        starts = array("i", [sequence.num_scheduled for sequence in rows])
        counts = array("i", [sequence.grant for sequence in rows])
        flags = array("i", [0]) * len(rows)
        for index, sequence in enumerate(rows):
            flags[index] = self._advance(sequence)
        num_query = sum(counts)
        plan = StepPlan(
            state.step,
            self.now,
            slots,
            starts,
            counts,
            flags,
            edits=self.edits,
            copies=self.copies,
            freed_slots=state.freed_slots,
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
            state.freed_slots = array("i")
            state.finished_ids = []
            state.preempted_ids = []
            state.flight.append(Flight(plan, rows, self.published))
            state.step += 1
        plan.events = tuple(state.events)
        state.events = []
        return plan

    def _advance(self, sequence: Sequence) -> int:
        """Move a sequence past its grant; returns the row's flags."""
        request = sequence.request
        wants = request.request.wants
        start = sequence.num_scheduled
        end = start + sequence.grant
        sequence.num_scheduled = end
        sequence.grant = 0
        sequence.in_flight += 1
        flag = 0
        if start >= sequence.num_committed:
            flag = ROW_CARRY
        if wants & Want.SCORE and start < sequence.num_prompt - 1 and end >= request.num_scored:
            flag |= ROW_SCORE
        if end == sequence.num_committed + sequence.num_pending:
            if wants & Want.SAMPLE:
                flag |= ROW_SAMPLE
                sequence.num_pending += 1
            if wants & Want.POOL:
                flag |= ROW_POOL
            if not request.is_decoding:
                self.state.start_decoding(request)
        return flag

    def _is_fast(self, starts: array[int], counts: array[int]) -> bool:
        if not counts or max(counts) != 1:
            return False
        bound = self.state.limits.max_blocks_per_sequence * self.state.limits.block_size
        return not bound or max(starts) < bound

    def _reasons(self) -> tuple[tuple[WaitReason, int], ...]:
        named = sum(self.waits.values())
        behind = len(self.state.waiting) - named
        if behind > 0:
            self._count_waits(WaitReason.BEHIND, behind)
        if not self.waits:
            return ((WaitReason.IDLE, 0),)
        return tuple(self.waits.items())


def compose(state: State, now: float, only: frozenset[str] | None) -> StepPlan:
    """Make the next plan."""
    planner = Planner(state, now, only)
    planner.grant_running()
    planner.admit_waiting()
    return planner.finish()
