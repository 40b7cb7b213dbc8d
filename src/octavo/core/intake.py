"""Lets waiting requests into one plan: in order, while budgets, blocks and headroom allow.

Owns: the pass over the waiting queue of one step. Does not: prove that a request can ever run (admission),
or grant running rows (planning).
Invariants: running <= sequence cap; an admission leaves the headroom free unless the batch is otherwise
empty; nobody is admitted in a step that preempted, unless the step would otherwise be empty.
"""

from __future__ import annotations

from octavo.core.kv.cache import Match
from octavo.core.plan import EventKind, NewSequence, WaitReason
from octavo.core.planning import Planner
from octavo.core.request import RequestState, Sequence, Status, Want

MAX_CANDIDATES = 64  # how far admission looks past a request that does not fit (S23)

# Reasons about this one request: the next may still fit. Any other ends admission, unless the policy skips ahead.
# TOKEN_BUDGET with tokens left means an unchunked prompt that is longer than the rest.
_SKIPPED = frozenset(
    {WaitReason.TOKEN_BUDGET, WaitReason.KV_READ_BUDGET, WaitReason.ENCODER_BUDGET, WaitReason.ADAPTER_SLOTS}
)
_ROOM = frozenset({WaitReason.KV_BLOCKS, WaitReason.HEADROOM, WaitReason.SEQUENCE_CAP})


class Intake:
    """The admissions of one step."""

    __slots__ = ("planner", "state")

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.state = planner.state

    def run(self) -> None:
        """Let in waiting requests in the policy's order while they fit (S05, S08, S23)."""
        num_waiting = len(self.state.waiting)
        if self.planner.num_preempted and self.planner.rows:
            self.planner.count_waits(WaitReason.PREEMPTED_THIS_STEP, num_waiting)
        elif self.state.is_paused:
            self.planner.count_waits(WaitReason.PAUSED, num_waiting)
        elif self.planner.only is not None:
            named = self._named()
            self.planner.count_waits(WaitReason.EXCLUDED, num_waiting - len(named))
            for request in named:
                reason = self._try_admit(request)
                if reason is not None and not self._goes_on(reason):
                    break
        else:
            self._run_queue()

    def _run_queue(self) -> None:
        waiting = self.state.waiting
        skipped: list[RequestState] = []
        while len(skipped) < MAX_CANDIDATES and (request := waiting.peek()) is not None:
            reason = self._try_admit(request)
            if reason is None:
                continue
            if not self._goes_on(reason):
                break
            skipped.append(waiting.pop())
        for request in skipped:
            waiting.add(request)

    def _named(self) -> list[RequestState]:
        """Waiting requests of `only`, in order."""
        assert self.planner.only is not None
        named = [self.state.requests[name] for name in sorted(self.planner.only) if name in self.state.requests]
        waiting = [request for request in named if request.status == Status.WAITING]
        return sorted(waiting, key=lambda request: request.rank)

    def _goes_on(self, reason: WaitReason) -> bool:
        """Whether admission looks at the next request after one that waits for `reason`."""
        if not self.planner.tokens.left or not self.state.sequence_budget.left:
            return False
        return reason in _SKIPPED or (self.state.policy.skip_ahead and reason in _ROOM)

    def _try_admit(self, request: RequestState) -> WaitReason | None:
        """Admit one request, or say why not."""
        state = self.state
        if request.in_flight:
            return self._defer(request, WaitReason.UNCOMMITTED, request.in_flight, 0)
        if not state.sequence_budget.fits(len(request.sequences)):
            return self._defer(request, WaitReason.SEQUENCE_CAP, len(request.sequences), state.sequence_budget.left)
        if not self.planner.tokens.left:
            return self._defer(request, WaitReason.TOKEN_BUDGET, 1, 0)
        has_company = bool(self.planner.rows or state.running.requests)
        if has_company and request.deferred_version == state.cache.version:
            reason = WaitReason(request.wait_reason)
            self.planner.count_waits(reason, 1)
            return reason
        sequence = request.sequences[0]
        match = state.cache.match(sequence, self._match_cap(request, sequence), state.step)
        lack = self._lacks_room(request, match, has_company)
        if lack is not None:
            return lack
        state.waiting.remove(request)
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
        count = self.planner.chunk(todo)
        if count < todo and not limits.chunked_prefill and todo <= limits.max_batch_tokens:
            return self._defer(request, WaitReason.TOKEN_BUDGET, todo, self.planner.tokens.left)
        if count < todo and limits.max_partial_prefills and self.planner.num_partial >= limits.max_partial_prefills:
            return self._defer(request, WaitReason.PARTIAL_PREFILL_CAP, 1, 0)
        room = state.cache.room_after(match, known) - self.planner.outstanding
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
        state.cache.adopt(sequence, match, self.planner.edits, self.planner.copies)
        state.cache.count_hit(sequence.num_known, match.num_tokens)
        asked = request.request
        known = sequence.num_known
        if not is_resumed:
            request.first_scheduled_at = self.planner.now
            request.cached_tokens = match.num_tokens
            state.totals.num_admitted += 1
            state.totals.num_prompt_tokens += sequence.num_prompt
        request.wait_reason = request.deferred_version = -1
        count = self.planner.chunk(known - match.num_tokens)
        ids = sequence.token_ids[:] if sequence.token_ids is not None else None
        self.planner.new.append(
            NewSequence(
                sequence.slot,
                asked.request_id,
                sequence.choice,
                sequence.num_prompt,
                ids,
                asked.params,
                asked.eos_token_ids,
                asked.adapter_id,
            )
        )
        self.planner.enter(sequence, count)
        kind = EventKind.RESUMED if is_resumed else EventKind.ADMITTED
        self.planner.event(kind, request, num_tokens=count, cached_tokens=match.num_tokens)
        left = known - match.num_tokens - count
        if left:
            self.planner.count_partial(sequence, known)
            self.planner.event(EventKind.CHUNKED, request, num_tokens=count, needed=left)

    def _defer(
        self, request: RequestState, reason: WaitReason, needed: int, available: int, remember: bool = False
    ) -> WaitReason:
        self.planner.count_waits(reason, 1)
        request.deferred_version = self.state.cache.version if remember else -1
        if request.wait_reason != reason:
            request.wait_reason = reason
            self.planner.event(EventKind.DEFERRED, request, reason=reason, needed=needed, available=available)
        return reason
