"""Admits waiting requests to one step: in order, while budgets, blocks and headroom allow.

Owns: the pass over the waiting queue of one step, the room that a waiting request needs, the starvation bound, and
swap-ins. Does not: prove that a request can ever run (admission), or grant running requests (run).
Invariants: an admission leaves the headroom free unless the batch is otherwise empty or the request was bypassed too
often; in a step that preempted nothing is admitted, unless the step would otherwise be empty; nothing is admitted past
a request that was bypassed too often; no request is preempted for one of later rank.
"""

from __future__ import annotations

from octavo.core import branching
from octavo.core.kv.cache import KVCache
from octavo.core.kv.effects import NO_BLOCK
from octavo.core.kv.matching import Match
from octavo.core.plan import EventKind, WaitReason
from octavo.core.request import MAX_RETURNS, BlockShortage, RequestState, Status
from octavo.core.run import grant_row
from octavo.core.state import State
from octavo.core.step import Step

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
# Not lack of room: being bypassed for these does not count towards the starvation bound.
_NO_LACK = frozenset({WaitReason.MODALITY, WaitReason.COMPOSITION, WaitReason.UNCOMMITTED})


# --- the room that a waiting request needs ----------------------------------------------------------------------


def needed_blocks(cache: KVCache, request: RequestState) -> list[int]:
    """Return blocks per group for all known tokens of all sequences, what they share counted once."""
    if request.is_swapped:
        return swapped_blocks(cache, request, 1)
    root = request.sequences[0]
    total = cache.peak_blocks(root.num_known)
    shared = (root.num_prompt - 1) // cache.block_size if cache.sharing else 0
    for sequence in request.sequences[1:]:
        for group, peak in enumerate(cache.peak_blocks(sequence.num_known)):
            total[group] += max(1, peak - shared)
    return total


def swapped_blocks(cache: KVCache, request: RequestState, growth: int) -> list[int]:
    """Return blocks per group to swap a request in: what it has on the host, and what its next rows write.

    That is at least `growth` for each sequence.
    """
    total = cache.host.num_swapped_blocks(request.sequences)
    for sequence in request.sequences:
        wanted = cache.num_blocks_for(sequence.num_known)
        for group, peak in enumerate(cache.peak_blocks(sequence.num_known)):
            table = sequence.host_tables[group]
            live = sum(1 for block in table if block != NO_BLOCK)
            total[group] += max(growth, min(wanted - len(table), peak - live))
    return total


def growth_blocks(state: State, request: RequestState, group: int) -> int:
    """Return the blocks of a group by which running requests must be able to grow before a preempted one is resumed.

    A block each, and two after the second preemption, or it would be preempted again at once; after MAX_RETURNS
    preemptions also all blocks that the request may still need itself, since it is then the last to be preempted.
    """
    blocks = min(request.num_preemptions, 2) * state.num_sequences
    if request.num_preemptions < MAX_RETURNS:
        return blocks
    peaks = state.cache.peak_blocks
    return blocks + sum(peaks(one.limit)[group] - peaks(one.num_known)[group] for one in request.sequences)


def is_still_short(state: State, outstanding: list[int], request: RequestState, shortage: BlockShortage) -> bool:
    """Return True if too little can have changed since a request lacked room for another look at the cache."""
    cache, group = state.cache, shortage.group
    if request.num_bypassed >= state.limits.max_bypass:
        return False
    kept = _kept_free(state, outstanding, request, WaitReason(shortage.reason), group)
    if cache.pools[group].num_freed - shortage.freed + shortage.kept - kept >= shortage.deficit:
        return False
    return request.seen is None or not cache.may_find_more(request.seen[1], request.seen[2])


def _kept_free(state: State, outstanding: list[int], request: RequestState, reason: WaitReason, group: int) -> int:
    """Return the blocks of a group that must stay free beside a request which lacked room for `reason`."""
    return outstanding[group] + (_floors(state, request)[group] if reason == WaitReason.HEADROOM else 0)


def _floors(state: State, request: RequestState) -> list[int]:
    """Return the blocks of each group that the admission of a request leaves free (S05)."""
    return [floor + growth_blocks(state, request, group) for group, floor in enumerate(state.headroom)]


def _fits_without(step: Step, request: RequestState, victims: list[RequestState], floors: list[int]) -> bool:
    """Return True if a waiting request would fit beside the floors if these running requests were preempted."""
    state, cache = step.state, step.state.cache
    if len(state.free_slots) + sum(victim.num_slots for victim in victims) < request.num_slots:
        return False
    needed = needed_blocks(cache, request)
    match = None if request.is_swapped else cache.match(request.sequences[0], request.match_cap(request.sequences[0]))
    for group, pool in enumerate(cache.pools):
        held: dict[int, int] = {}
        for victim in victims:
            for sequence in victim.sequences:
                for block in sequence.tables[group]:
                    held[block] = held.get(block, 0) + 1
        held.pop(NO_BLOCK, None)
        left = pool.num_free + sum(1 for block, count in held.items() if pool.references[block] == count)
        left -= needed[group] + step.outstanding[group]
        left += sum(step.kept[victim.name][group] for victim in victims if victim.name in step.kept)
        # Shared blocks are not allocated again; those that no other sequence holds are then no longer free.
        for block in match.blocks[group] if match is not None else ():
            left += block != NO_BLOCK and pool.references[block] > held.get(block, 0)
        if left < floors[group]:
            return False
    return True


class Admitter:
    """The admissions of one step."""

    __slots__ = ("passed", "state", "step")

    def __init__(self, step: Step) -> None:
        self.step = step
        self.state = step.state
        self.passed: list[tuple[RequestState, WaitReason]] = []  # considered in this pass, and not admitted

    def run(self) -> None:
        """Admit waiting requests in the policy's order while they fit (S05, S08, S10, S23)."""
        step, state = self.step, self.state
        if not len(state.waiting):
            return
        if step.has_preempted and (step.rows or step.has_cleared):
            head = state.waiting.peek()
            assert head is not None
            step.defer(head, WaitReason.PREEMPTED_THIS_STEP)
            step.count_rest(WaitReason.PREEMPTED_THIS_STEP)
        elif state.is_paused:
            step.count_rest(WaitReason.PAUSED)
        elif step.only is not None:
            named = self._named(step.only)
            step.count_waiting(WaitReason.EXCLUDED, len(state.waiting) - len(named))
            self._consider_all(named)
        elif step.turn.is_decoding:
            step.count_rest(WaitReason.COMPOSITION)
        elif self._admit_overdue():
            if state.policy.lookahead > 1 and step.tokens.left and state.free_slots:
                self._consider_all(self._preferred())
            else:
                self._consider_queue()

    # --- which requests are considered ------------------------------------------------------------------

    def _admit_overdue(self) -> bool:
        """Admit the requests that were bypassed too often; return False if one of them has to wait."""
        state, bound = self.state, self.state.limits.max_bypass
        if not state.overdue:
            return True
        state.overdue = [r for r in state.overdue if r.status == Status.WAITING and r.num_bypassed >= bound]
        return all(r.in_flight or self._consider(r) for r in sorted(state.overdue, key=lambda r: r.rank))

    def _consider_queue(self) -> None:
        waiting = self.state.waiting
        set_aside: list[RequestState] = []
        while len(set_aside) < MAX_CANDIDATES and (request := waiting.peek()) is not None:
            if not self._consider(request):
                break
            if request.status == Status.WAITING:
                set_aside.append(waiting.pop())
        for request in set_aside:
            waiting.add(request)

    def _consider_all(self, requests: list[RequestState]) -> None:
        for request in requests:
            if not self._consider(request):
                break

    def _preferred(self) -> list[RequestState]:
        """Return the first candidates in the order that the policy prefers, knowing what is cached of each."""
        policy, cache = self.state.policy, self.state.cache
        ranked = []
        for request in self.state.waiting.first(min(policy.lookahead, MAX_CANDIDATES)):
            seen = request.seen
            if request.is_swapped:
                cached = 0
            elif seen is None or cache.may_find_more(seen[1], seen[2]):
                cached = self._look_up(request).num_tokens
            else:
                cached = seen[0]
            ranked.append((policy.preference(request, cached), request))
        return [request for _, request in sorted(ranked, key=lambda pair: pair[0])]

    def _named(self, only: frozenset[str]) -> list[RequestState]:
        """Return the waiting requests that `only` names, in order."""
        named = [self.state.requests[name] for name in sorted(only) if name in self.state.requests]
        return sorted((one for one in named if one.status == Status.WAITING), key=lambda request: request.rank)

    def _consider(self, request: RequestState) -> bool:
        """Try to admit a request, and make room for it where it may; return True if the next may be considered."""
        step, state = self.step, self.state
        reason = self._try_admit(request)
        if reason is None:
            self._count_bypasses()
            return True
        is_overdue = request.num_bypassed >= state.limits.max_bypass and reason != WaitReason.UNCOMMITTED
        has_cleared = False
        if reason in _ROOM and (is_overdue or state.policy.preempt_on_arrival):
            has_cleared = self._preempt_for(request, WaitReason.BARRIER if is_overdue else reason)
            # The step would be empty without it, so it may be admitted at once (S07).
            if has_cleared and not step.rows and self._try_admit(request) is None:
                self._count_bypasses()
        if is_overdue and request.status == Status.WAITING:
            step.count_rest(WaitReason.BARRIER)
        if is_overdue or has_cleared:
            return False
        self.passed.append((request, reason))
        if not step.tokens.left or not state.free_slots:
            return False
        return reason in _SKIPPED or (state.policy.skip_ahead and reason in _ROOM)

    def _count_bypasses(self) -> None:
        """Count an admission past those considered before: once per step and request."""
        for request, reason in self.passed:
            if reason not in _NO_LACK:
                request.num_bypassed += 1
                if request.num_bypassed == self.state.limits.max_bypass:
                    self.state.overdue.append(request)
                self.state.totals.num_bypasses += 1
        self.passed = []

    def _preempt_for(self, request: RequestState, reason: WaitReason) -> bool:
        """Preempt running requests of later rank until a waiting one would fit. Return False if that cannot be.

        Not in a step that admitted a request: then the next step does it.
        """
        step, state = self.step, self.state
        if step.num_admitted:
            return False
        rank_of = state.policy.victim_rank
        own = rank_of(request)
        ranked = sorted(((rank_of(other), other) for other in state.running.requests), key=lambda pair: pair[0])
        victims = [other for rank, other in ranked if rank > own]
        floors = [0] * state.cache.num_groups
        if reason != WaitReason.BARRIER:
            floors = _floors(state, request)
        if not victims or not _fits_without(step, request, victims, floors):
            return False
        while victims and not _fits_without(step, request, [], floors):
            step.preempt(victims.pop(), request, reason)
        return step.has_cleared

    # --- one request --------------------------------------------------------------------------------------

    def _try_admit(self, request: RequestState) -> WaitReason | None:
        """Admit one request, or return why it waits."""
        reason = self._refusal(request)
        if reason is not None:
            return reason
        has_company = bool(self.step.rows or self.state.running.requests)
        shortage = request.shortage
        if has_company and shortage and is_still_short(self.state, self.step.outstanding, request, shortage):
            reason = WaitReason(shortage.reason)
            self.step.count_waiting(reason, 1)
            return reason
        request.shortage = None
        if request.is_swapped:
            return self._try_swap_in(request, has_company)
        return self._try_start(request, has_company)

    def _refusal(self, request: RequestState) -> WaitReason | None:
        """Return a reason to wait that needs no look at the cache."""
        step, num_free = self.step, len(self.state.free_slots)
        if request.in_flight:
            return step.defer(request, WaitReason.UNCOMMITTED, request.in_flight)
        if request.num_slots > num_free:
            return step.defer(request, WaitReason.SEQUENCE_CAP, request.num_slots, num_free)
        for gate in self.state.gates:
            lack = gate.lack(request)
            if lack is not None:
                return step.defer(request, gate.reason, *lack)
        if not step.tokens.left:
            return step.defer(request, WaitReason.TOKEN_BUDGET, 1)
        refusal = step.turn.refusal(request, is_decoding=False)
        return None if refusal is None else step.defer(request, refusal)

    def _try_start(self, request: RequestState, has_company: bool) -> WaitReason | None:
        """Admit a request with what the cache has of it, or return why it waits."""
        state = self.state
        match = self._look_up(request)
        if match.loads and not state.cache.may_load:
            state.cache.host.is_load_wanted = True
            return self.step.defer(request, WaitReason.HOST_LOAD, len(match.loads))
        count, reason = self._first_chunk(request, match)
        if reason is None:
            peaks = needed_blocks(state.cache, request)
            free = state.cache.room_after(match, peaks)
            needed = [peak - held for peak, held in zip(peaks, match.num_held, strict=True)]
            reason = self._lacks_room(request, needed, free, has_company)
        if reason is None and request.request.spans:
            count, reason = self._encode(request, match, count)
        if reason is None:
            self._start(request, match, count)
        return reason

    def _look_up(self, request: RequestState) -> Match:
        """Return what the cache has of a request."""
        cache, root = self.state.cache, request.sequences[0]
        match = cache.match(root, request.match_cap(root))
        request.seen = (match.num_tokens, match.missing, cache.num_published)
        return match

    def _first_chunk(self, request: RequestState, match: Match) -> tuple[int, WaitReason | None]:
        """Return how many tokens the request would be granted now, or why it waits for another step."""
        step = self.step
        todo = request.sequences[0].num_known - match.num_tokens
        count = step.chunk(todo)
        if count < todo and not step.may_split(todo):
            return 0, step.defer(request, WaitReason.TOKEN_BUDGET, todo, step.tokens.left)
        if count < todo and not step.num_partial_left:
            return 0, step.defer(request, WaitReason.PARTIAL_PREFILL_CAP, 1)
        cost = step.reads.cost(match.num_tokens, count)
        if step.limits_reads and not step.reads.fits(cost):
            return 0, step.defer(request, WaitReason.KV_READ_BUDGET, cost, step.reads.left)
        return count, None

    def _encode(self, request: RequestState, match: Match, count: int) -> tuple[int, WaitReason | None]:
        """Have the media of the first chunk encoded; the chunk ends before an item that has to wait."""
        state, todo = self.state, request.sequences[0].num_known - match.num_tokens
        slot = state.free_slots[-1]  # the one it will get
        granted = state.encoder.grant(request.name, slot, request.request.spans, match.num_tokens, count)
        if granted == count:
            return count, None
        is_useful = granted and self.step.may_split(todo)
        if is_useful and self.step.num_partial_left:
            return granted, None
        state.encoder.release(request.name)
        reason = WaitReason.PARTIAL_PREFILL_CAP if is_useful else WaitReason.ENCODER_BUDGET
        return 0, self.step.defer(request, reason, 1)

    def _lacks_room(
        self, request: RequestState, needed: list[int], free: list[int], has_company: bool
    ) -> WaitReason | None:
        """Return why a request that needs these blocks, and leaves those free, waits; None when it fits."""
        state, outstanding = self.state, self.step.outstanding
        left = [count - kept for count, kept in zip(free, outstanding, strict=True)]
        group = left.index(min(left))
        short, wanted = -left[group], needed[group]
        reason = WaitReason.SWAP_SPACE if request.is_swapped else WaitReason.KV_BLOCKS
        if short <= 0:
            if not has_company or request.num_bypassed >= state.limits.max_bypass:
                return None
            floors, reason = _floors(state, request), WaitReason.HEADROOM
            group = next((group for group, floor in enumerate(floors) if floor > left[group]), -1)
            if group < 0:
                return None
            short, wanted = floors[group] - left[group], needed[group] + floors[group]
        if has_company:
            kept = _kept_free(state, outstanding, request, reason, group)
            request.shortage = BlockShortage(reason, group, short, state.cache.pools[group].num_freed, kept)
        return self.step.defer(request, reason, wanted, max(0, wanted - short))

    def _start(self, request: RequestState, match: Match, count: int) -> None:
        """Admit a request whose first row has `count` tokens."""
        state, step, root = self.state, self.step, request.sequences[0]
        is_resumed = state.enter_running(request, step.now)
        step.num_admitted += 1
        if not is_resumed:
            request.cached_tokens = match.num_tokens
        step.enter_match(root, match)
        state.totals.num_host_hit_tokens += len(match.loads) * state.cache.block_size // state.cache.num_groups
        state.policy.tell("admitted", request, root.num_known - match.num_tokens)
        kind = EventKind.RESUMED if is_resumed else EventKind.ADMITTED
        step.event(kind, request, num_tokens=count, cached_tokens=match.num_tokens)
        left = root.num_committed - root.num_scheduled - count
        if left > 0:
            step.event(EventKind.CHUNKED, request, num_tokens=count, needed=left)
        if step.add_row(root, count):
            branching.fork_choices(step, request, root)
        step.keep_rest(root)
        for sequence in request.sequences[1:]:
            if not sequence.is_entered:
                branching.keep_room(step, sequence)

    def _try_swap_in(self, request: RequestState, has_company: bool) -> WaitReason | None:
        """Swap a request in: its blocks, one more for each sequence, and the headroom (S09)."""
        state, step, cache = self.state, self.step, self.state.cache
        needed = swapped_blocks(cache, request, 1 if has_company else 0)
        if not cache.may_load:
            cache.host.is_load_wanted = True
            return step.defer(request, WaitReason.HOST_LOAD, sum(needed))
        free = [pool.num_free - count for pool, count in zip(cache.pools, needed, strict=True)]
        reason = self._lacks_room(request, needed, free, has_company)
        if reason is not None and not has_company:
            # It is alone, and its copies need more than the pool has: computed again it fits, as feasibility checked.
            state.unswap(request)
            return self._try_start(request, has_company)
        if reason is not None:
            return reason
        todo = max(sequence.num_known - sequence.num_scheduled for sequence in request.sequences)
        if step.chunk(todo) < todo and not step.num_partial_left:
            return step.defer(request, WaitReason.PARTIAL_PREFILL_CAP, 1)
        state.enter_running(request, step.now)
        step.num_admitted += 1
        sequences = state.swap_in(request)
        num_tokens = sum(sequence.num_scheduled for sequence in sequences)
        for sequence in sequences:
            step.announce_with_table(sequence)
        state.policy.tell("admitted", request, 0)
        step.event(EventKind.RESUMED, request, cached_tokens=num_tokens)
        for sequence in sequences:
            if sequence.num_known > sequence.num_scheduled and grant_row(step, request, sequence):
                break  # the other choices have their rows
        return None
