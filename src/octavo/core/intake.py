"""Lets waiting requests into one plan: in order, while budgets, blocks and headroom allow.

Owns: the pass over the waiting queue of one step; the starvation bound; swap-ins. Does not: prove that a request can
ever run (admission), or grant running rows (planning).
Invariants: running <= sequence cap; an admission leaves the headroom free unless the batch is otherwise
empty or the request is the barrier; nobody is admitted in a step that preempted, unless the step would otherwise be
empty; nobody is admitted past the barrier.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.core import room
from octavo.core.eviction import preempt
from octavo.core.kv.cache import Match
from octavo.core.plan import EventKind, WaitReason
from octavo.core.planning import Planner
from octavo.core.request import BlockShortage, RequestState, Status

MAX_CANDIDATES = 64  # how far admission looks past a request that does not fit (S23)

# Reasons about this one request: the next may still fit. Any other ends admission, unless the policy skips ahead.
# TOKEN_BUDGET with tokens left means an unchunked prompt that is longer than the rest.
_SKIPPED = frozenset(
    {
        WaitReason.TOKEN_BUDGET,
        WaitReason.KV_READ_BUDGET,
        WaitReason.ENCODER_BUDGET,
        WaitReason.ADAPTER_SLOTS,
        WaitReason.MODALITY,
    }
)
_ROOM = frozenset({WaitReason.KV_BLOCKS, WaitReason.HEADROOM, WaitReason.SEQUENCE_CAP, WaitReason.SWAP_SPACE})
# Not lack of room: being passed over for these does not count towards the starvation bound.
_NO_LACK = frozenset({WaitReason.MODALITY, WaitReason.COMPOSITION, WaitReason.UNCOMMITTED})


class Intake:
    """The admissions of one step."""

    __slots__ = ("planner", "skipped", "state")

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.state = planner.state
        self.skipped: list[tuple[RequestState, WaitReason]] = []  # examined in this pass, and not let in

    def run(self) -> None:
        """Let in waiting requests in the policy's order while they fit (S05, S08, S10, S23)."""
        planner, num_waiting = self.planner, len(self.state.waiting)
        if not num_waiting:
            return
        if planner.num_preempted and (planner.rows or planner.has_cleared):
            head = self.state.waiting.peek()
            if head is not None:
                self._defer(head, WaitReason.PREEMPTED_THIS_STEP, 0, 0)
            planner.count_waits(WaitReason.PREEMPTED_THIS_STEP, num_waiting - 1)
        elif self.state.is_paused:
            planner.count_waits(WaitReason.PAUSED, num_waiting)
        elif planner.only is not None:
            named = self._named()
            planner.count_waits(WaitReason.EXCLUDED, num_waiting - len(named))
            self._pass(named)
        elif planner.turn.is_decoding:
            planner.count_waits(WaitReason.COMPOSITION, num_waiting)
        elif not self._pass_overdue():
            return
        elif self.state.policy.lookahead > 1 and planner.tokens.left and self.state.sequence_budget.left:
            self._run_preferred()
        else:
            self._run_queue()

    def _pass_overdue(self) -> bool:
        """Requests that were passed over too often go first; until the first of them is in, nobody else is."""
        state, bound = self.state, self.state.limits.max_bypass
        if not state.overdue:
            return True
        state.overdue = [r for r in state.overdue if r.status == Status.WAITING and r.num_bypassed >= bound]
        return all(r.in_flight or self._consider(r) for r in sorted(state.overdue, key=lambda r: r.rank))

    def _run_queue(self) -> None:
        waiting = self.state.waiting
        set_aside: list[RequestState] = []
        while len(set_aside) < MAX_CANDIDATES and (request := waiting.peek()) is not None:
            if not self._consider(request):
                break
            if request.status == Status.WAITING:
                set_aside.append(waiting.pop())
        for request in set_aside:
            waiting.add(request)

    def _run_preferred(self) -> None:
        """The first candidates in the order that the policy prefers, knowing what is cached of each."""
        waiting, policy, cache = self.state.waiting, self.state.policy, self.state.cache
        candidates: list[RequestState] = []
        while len(candidates) < min(self.state.policy.lookahead, MAX_CANDIDATES) and waiting.peek() is not None:
            candidates.append(waiting.pop())
        for request in candidates:
            waiting.add(request)
        ranked = []
        for request in candidates:
            seen = request.seen
            if request.is_swapped:
                cached = 0
            elif seen is None or cache.may_find_more(seen[1], seen[2]):
                cached = self._look(request).num_tokens
            else:
                cached = seen[0]
            ranked.append((policy.preference(request, cached), request))
        ranked.sort(key=lambda entry: entry[0])
        self._pass([request for _, request in ranked])

    def _pass(self, requests: list[RequestState]) -> None:
        for request in requests:
            if not self._consider(request):
                break

    def _named(self) -> list[RequestState]:
        """Waiting requests of `only`, in order."""
        assert self.planner.only is not None
        named = [self.state.requests[name] for name in sorted(self.planner.only) if name in self.state.requests]
        waiting = [request for request in named if request.status == Status.WAITING]
        return sorted(waiting, key=lambda request: request.rank)

    def _consider(self, request: RequestState) -> bool:
        """Try to admit a request; whether the next one may be looked at."""
        reason = self._try_admit(request)
        if reason is None:
            self._count_bypasses()
            return True
        is_overdue = request.num_bypassed >= self.state.limits.max_bypass and reason != WaitReason.UNCOMMITTED
        has_cleared = False
        if reason in _ROOM and (is_overdue or self.state.policy.preempt_on_arrival):
            has_cleared = self._clear_way(request, WaitReason.BARRIER if is_overdue else reason)
            # The step would be empty without it, so it may come in at once (S07).
            if has_cleared and not self.planner.rows and self._try_admit(request) is None:
                self._count_bypasses()
        if is_overdue and request.status == Status.WAITING:
            behind = len(self.state.waiting) - sum(self.planner.waits.values())
            self.planner.count_waits(WaitReason.BARRIER, max(0, behind))
        if is_overdue or has_cleared:
            return False
        self.skipped.append((request, reason))
        if not self.planner.tokens.left or not self.state.sequence_budget.left:
            return False
        return reason in _SKIPPED or (self.state.policy.skip_ahead and reason in _ROOM)

    def _count_bypasses(self) -> None:
        """Somebody was admitted past those examined before: once per step and request."""
        for request, reason in self.skipped:
            if reason not in _NO_LACK:
                request.num_bypassed += 1
                if request.num_bypassed == self.state.limits.max_bypass:
                    self.state.overdue.append(request)
                self.state.totals.num_bypasses += 1
        self.skipped = []

    def _clear_way(self, request: RequestState, reason: WaitReason) -> bool:
        """Preempt running work of later rank until a waiting request would fit. False when that cannot be.

        Not in a step that admitted somebody: then the next step does it.
        """
        if self.planner.num_admitted:
            return False
        policy, running = self.state.policy, self.state.running.requests
        own = policy.victim_rank(request)
        ranked = sorted(((policy.victim_rank(other), other) for other in running), key=lambda entry: entry[0])
        victims = [other for rank, other in ranked if rank > own]
        floors = [0] * self.state.cache.num_groups
        if reason != WaitReason.BARRIER:
            floors = [
                floor + room.growth(self.state, request, group)
                for group, floor in enumerate(self.state.headroom.floors)
            ]
        if not victims or not room.fits_without(self.planner, request, victims, floors):
            return False
        while victims and not room.fits_without(self.planner, request, [], floors):
            self.planner.has_cleared = True
            preempt(self.planner, victims.pop(), request, reason)
        return self.planner.has_cleared

    # --- one request ----------------------------------------------------------------------------------

    def _try_admit(self, request: RequestState) -> WaitReason | None:
        """Admit one request, or say why not."""
        reason = self._refusal(request)
        if reason is not None:
            return reason
        has_company = bool(self.planner.rows or self.state.running.requests)
        if has_company and request.shortage is not None and room.still_lacks(self.planner, request, request.shortage):
            reason = WaitReason(request.shortage.reason)
            self.planner.count_waits(reason, 1)
            return reason
        request.shortage = None
        if request.is_swapped:
            return self._try_swap_in(request, has_company)
        return self._try_start(request, has_company)

    def _refusal(self, request: RequestState) -> WaitReason | None:
        """Reasons that need no look at the cache."""
        state, planner = self.state, self.planner
        if request.in_flight:
            return self._defer(request, WaitReason.UNCOMMITTED, request.in_flight, 0)
        for gate in state.gates:
            lack = gate.lack(request)
            if lack is not None:
                return self._defer(request, gate.reason, *lack)
        if not planner.tokens.left:
            return self._defer(request, WaitReason.TOKEN_BUDGET, 1, 0)
        refusal = planner.turn.refusal(request, is_decoding=False)
        if refusal is not None:
            return self._defer(request, refusal, 0, 0)
        return None

    def _try_start(self, request: RequestState, has_company: bool) -> WaitReason | None:
        """Let a request in by what the cache has of it, or say why not."""
        state = self.state
        match = self._look(request)
        if match.loads and not state.cache.may_load:
            state.cache.host.is_load_wanted = True
            return self._defer(request, WaitReason.HOST_LOAD, len(match.loads), 0)
        count, reason = self._first_chunk(request, match)
        if reason is None:
            reason = self._lacks_room(request, self._room_for(request, match), has_company)
        if reason is None and request.request.spans:
            count, reason = self._encode(request, match, count)
        if reason is None:
            state.waiting.remove(request)
            self._admit(request, match, count)
        return reason

    def _encode(self, request: RequestState, match: Match, count: int) -> tuple[int, WaitReason | None]:
        """Have the media of the first chunk encoded; the chunk ends before an item that has to wait."""
        state, spans = self.state, request.request.spans
        todo = request.sequences[0].num_known - match.num_tokens
        slot = state.free_slots[-1]  # the one it will get
        granted = state.encoder.grant(request.name, slot, spans, match.num_tokens, count)
        if granted == count:
            return count, None
        is_whole = not state.limits.chunked_prefill and todo <= self.planner.tokens.limit
        if granted and not is_whole and state.partial_budget.left:
            return granted, None
        state.encoder.release(request.name)
        reason = WaitReason.PARTIAL_PREFILL_CAP if granted and not is_whole else WaitReason.ENCODER_BUDGET
        return 0, self._defer(request, reason, 1, 0)

    def _look(self, request: RequestState) -> Match:
        """What the cache has of a request."""
        cache, root = self.state.cache, request.sequences[0]
        match = cache.match(root, request.match_cap(root))
        request.seen = (match.num_tokens, match.missing, cache.num_published)
        return match

    def _first_chunk(self, request: RequestState, match: Match) -> tuple[int, WaitReason | None]:
        """Tokens that the request would be granted now; or why it has to wait for another step."""
        planner = self.planner
        todo = request.sequences[0].num_known - match.num_tokens
        count = planner.chunk(todo)
        if count < todo and not self.state.limits.chunked_prefill and todo <= planner.tokens.limit:
            return 0, self._defer(request, WaitReason.TOKEN_BUDGET, todo, planner.tokens.left)
        if count < todo and not self.state.partial_budget.left:
            return 0, self._defer(request, WaitReason.PARTIAL_PREFILL_CAP, 1, 0)
        cost = planner.reads.cost(match.num_tokens, count)
        if planner.is_careful and not planner.reads.fits(cost):
            return 0, self._defer(request, WaitReason.KV_READ_BUDGET, cost, planner.reads.left)
        return count, None

    def _room_for(self, request: RequestState, match: Match) -> tuple[list[int], list[int]]:
        """(blocks needed, blocks left free) per group if the request came in with this match."""
        cache = self.state.cache
        peaks = room.num_blocks(self.state.cache, request)
        free = cache.room_after(match, peaks)
        needed = [peak - held for peak, held in zip(peaks, match.num_held, strict=True)]
        return needed, [left - kept for left, kept in zip(free, self.planner.outstanding, strict=True)]

    def _lacks_room(
        self, request: RequestState, blocks: tuple[list[int], list[int]], has_company: bool
    ) -> WaitReason | None:
        """Check blocks and headroom; None when the request fits."""
        needed, left = blocks
        group = left.index(min(left))
        if left[group] < 0:
            reason = WaitReason.SWAP_SPACE if request.is_swapped else WaitReason.KV_BLOCKS
            return self._defer_for_room(request, reason, (group, -left[group], needed[group]), has_company)
        if not has_company or request.num_bypassed >= self.state.limits.max_bypass:
            return None
        for group, floor in enumerate(self.state.headroom.floors):
            growth = room.growth(self.state, request, group)
            short = floor + growth - left[group]
            if short > 0:
                wanted = needed[group] + floor + growth
                return self._defer_for_room(request, WaitReason.HEADROOM, (group, short, wanted), has_company)
        return None

    def _defer_for_room(
        self, request: RequestState, reason: WaitReason, short: tuple[int, int, int], has_company: bool
    ) -> WaitReason:
        """Defer a request that is `short` of blocks: (group, how many, how many it needs in all)."""
        group, deficit, needed = short
        if has_company:
            lack = BlockShortage(reason, group, deficit, self.state.cache.pools[group].num_freed, 0)
            request.shortage = replace(lack, kept=room.kept_beside(self.planner, request, lack))
        return self._defer(request, reason, needed, max(0, needed - deficit))

    def _admit(self, request: RequestState, match: Match, count: int) -> None:
        state, planner, root = self.state, self.planner, request.sequences[0]
        is_resumed = self._enter(request)
        planner.published += state.cache.adopt(root, match)
        state.cache.count_hit(root.num_known, match.num_tokens)
        state.totals.num_host_hit_tokens += len(match.loads) * state.cache.block_size // state.cache.num_groups
        if not is_resumed:
            request.cached_tokens = match.num_tokens
        state.policy.tell("admitted", request, root.num_known - match.num_tokens)
        planner.announce(root)
        kind = EventKind.RESUMED if is_resumed else EventKind.ADMITTED
        planner.event(kind, request, num_tokens=count, cached_tokens=match.num_tokens)
        if root.num_scheduled + count < root.num_committed:
            left = root.num_committed - root.num_scheduled - count
            planner.event(EventKind.CHUNKED, request, num_tokens=count, needed=left)
        planner.enter(root, count)
        planner.count_rest(root)
        for sequence in request.sequences[1:]:
            if not sequence.is_entered:
                planner.choices.keep_room(request, sequence)

    def _enter(self, request: RequestState) -> bool:
        """Move a request from the queue to the running list; whether it has run before."""
        state = self.state
        is_resumed = request.first_scheduled_at is not None
        state.enter_running(request)
        self.planner.num_admitted += 1
        request.num_bypassed = 0
        request.wait_reason = -1
        request.shortage = request.seen = None
        if not is_resumed:
            request.first_scheduled_at = self.planner.now
            state.totals.num_admitted += 1
            state.totals.num_prompt_tokens += request.request.num_prompt_tokens
        return is_resumed

    # --- swapped requests -------------------------------------------------------------------------------

    def _try_swap_in(self, request: RequestState, has_company: bool) -> WaitReason | None:
        """Bring a request back from the host: its blocks, one more for each sequence, and the headroom (S09)."""
        state, planner = self.state, self.planner
        needed = room.num_swapped_blocks(state.cache, request, 1 if has_company else 0)
        if not state.cache.may_load:
            state.cache.host.is_load_wanted = True
            return self._defer(request, WaitReason.HOST_LOAD, sum(needed), 0)
        left = [
            pool.num_free - count - kept
            for pool, count, kept in zip(state.cache.pools, needed, planner.outstanding, strict=True)
        ]
        lack = self._lacks_room(request, (needed, left), has_company)
        if lack is not None and not has_company:
            # Alone, and its copies still need more than there is: computed anew it fits, as was proved.
            state.unswap(request)
            return self._try_start(request, has_company)
        if lack is not None:
            return lack
        left_over = max(sequence.num_known - sequence.num_scheduled for sequence in request.sequences)
        if planner.chunk(left_over) < left_over and not state.partial_budget.left:
            return self._defer(request, WaitReason.PARTIAL_PREFILL_CAP, 1, 0)
        state.waiting.remove(request)
        self._enter(request)
        sequences = [sequence for sequence in request.sequences if sequence.host_tables]
        num_tokens = sum(sequence.num_scheduled for sequence in sequences)
        state.cache.swap_in(sequences)
        request.is_swapped = False
        state.num_swapped -= 1
        state.totals.num_swapped_in_tokens += num_tokens
        for sequence in sequences:
            planner.announce(sequence)
            state.cache.announce(sequence)
        state.policy.tell("admitted", request, 0)
        planner.event(EventKind.RESUMED, request, cached_tokens=num_tokens)
        planner.grant_sequences(request, sequences)
        return None

    def _defer(self, request: RequestState, reason: WaitReason, needed: int, available: int) -> WaitReason:
        self.planner.count_waits(reason, 1)
        request.wait_numbers = (needed, available, self.state.step)
        if request.wait_reason != reason:
            request.wait_reason = reason
            self.planner.event(EventKind.DEFERRED, request, reason=reason, needed=needed, available=available)
        return reason
