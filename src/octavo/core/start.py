"""Starts waiting requests in one step: in order, while budgets, blocks and headroom allow.

Owns: the pass over the waiting queue of one step, the blocks that a waiting request needs, the starvation bound, and
swap-ins. Does not: check that a request can ever run (limits), or grant running requests (run).
Invariants: a start leaves the headroom free, unless no request runs or the request was bypassed `max_bypass` times. A
step that preempted a request starts nothing, unless the step would otherwise be empty. No later request starts before
one that was bypassed `max_bypass` times. No waiting request preempts a request of earlier rank.
"""

from __future__ import annotations

from operator import sub

from octavo.core import branching
from octavo.core.encoder import whole_chunk
from octavo.core.kv.cache import KVCache
from octavo.core.kv.effects import NO_BLOCK
from octavo.core.kv.prefix import Match
from octavo.core.plan import EventKind, WaitReason
from octavo.core.request_state import MAX_RETURNS, BlockShortage, PrefixSeen, RequestState, Status
from octavo.core.run import grant_row
from octavo.core.state import State
from octavo.core.step import Step

MAX_CANDIDATES = 64  # how far a step looks past requests that do not fit (S23)

# Reasons that concern one request only: the next may still fit. After any other reason no request is considered, unless
# the policy skips ahead. TOKEN_BUDGET with tokens left means an unchunked prompt that is longer than the tokens left.
_NEXT_MAY_FIT = frozenset(
    {
        WaitReason.TOKEN_BUDGET,
        WaitReason.KV_READ_BUDGET,
        WaitReason.ENCODER_BUDGET,
        WaitReason.ADAPTER_SLOTS,
        WaitReason.MODALITY,
    }
)
# Lack of something that running requests hold: a preemption could help, and a policy may skip ahead.
_ROOM = frozenset({WaitReason.KV_BLOCKS, WaitReason.HEADROOM, WaitReason.SEQUENCE_CAP, WaitReason.SWAP_SPACE})
# Reasons that are no shortage: a request passed over for one of them does not count as bypassed.
_NOT_ITS_TURN = frozenset({WaitReason.MODALITY, WaitReason.COMPOSITION, WaitReason.UNCOMMITTED})


# --- the room that a waiting request needs ----------------------------------------------------------------------


def needed_blocks(cache: KVCache, request: RequestState) -> list[int]:
    """Return the blocks per group for all known tokens of all sequences; shared blocks count once."""
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
    """Return the blocks per group to swap a request in: its host blocks, and the new blocks of its next rows.

    Each sequence counts at least `growth` new blocks.
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
    """Return how many blocks of a group must stay free for the growth of running requests when this one resumes.

    After the first preemption that is one block per running sequence, and two after the second, or the request would be
    preempted again at once. After MAX_RETURNS preemptions, all blocks that the request itself may still need are added,
    because it is from then on the last to be preempted.
    """
    blocks = min(request.num_preemptions, 2) * state.num_sequences
    if request.num_preemptions < MAX_RETURNS:
        return blocks
    peaks = state.cache.peak_blocks
    return blocks + sum(peaks(one.limit)[group] - peaks(one.num_known)[group] for one in request.sequences)


def is_still_short(state: State, outstanding: list[int], request: RequestState, shortage: BlockShortage) -> bool:
    """Return True if a request that lacked blocks still lacks them, so that no new prefix lookup is needed."""
    cache, group = state.cache, shortage.group
    if request.num_bypassed >= state.limits.max_bypass:
        return False
    kept = _kept_free(state, outstanding, request, WaitReason(shortage.reason), group)
    if cache.pools[group].num_freed - shortage.freed + shortage.kept - kept >= shortage.deficit:
        return False
    return request.seen is None or not cache.may_find_more(request.seen.missing, request.seen.num_published)


def _kept_free(state: State, outstanding: list[int], request: RequestState, reason: WaitReason, group: int) -> int:
    """Return the blocks of a group that must stay free if a request that lacked room for `reason` starts."""
    return outstanding[group] + (_floors(state, request)[group] if reason == WaitReason.HEADROOM else 0)


def _floors(state: State, request: RequestState) -> list[int]:
    """Return the blocks of each group that must stay free when this request starts (S05)."""
    return [floor + growth_blocks(state, request, group) for group, floor in enumerate(state.headroom)]


def _fits_without(step: Step, request: RequestState, victims: list[RequestState], floors: list[int]) -> bool:
    """Return True if a waiting request would fit, with `floors` blocks left free, once these victims are preempted."""
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
        left = pool.num_free + sum(map(cache.num_counted, (victim.sequences for victim in victims)))
        left += sum(1 for block, count in held.items() if pool.references[block] == count)
        left -= needed[group] + step.outstanding[group]
        left += sum(step.reserved[victim.name][group] for victim in victims if victim.name in step.reserved)
        # `needed` counts the matched blocks, too. Matched blocks that a non-victim holds need no allocation.
        for block in match.blocks[group] if match is not None else ():
            left += block != NO_BLOCK and pool.references[block] > held.get(block, 0)
        if left < floors[group]:
            return False
    return True


# --- which requests are considered -------------------------------------------------------------------------------


def start_waiting(step: Step) -> None:
    """Start the waiting requests that fit, and record why the others wait."""
    state = step.state
    if not len(state.waiting):
        return
    if step.has_preempted and (step.rows or step.has_made_room):
        head = state.waiting.peek()
        assert head is not None
        step.defer(head, WaitReason.PREEMPTED_THIS_STEP)
        step.count_rest(WaitReason.PREEMPTED_THIS_STEP)
    elif state.is_paused:
        step.count_rest(WaitReason.PAUSED)
    elif step.only is not None:
        named = [
            one for name in sorted(step.only) if (one := state.requests.get(name)) and one.status == Status.WAITING
        ]
        step.count_waiting(WaitReason.EXCLUDED, len(state.waiting) - len(named))
        _consider_all(step, sorted(named, key=lambda request: request.rank))
    elif step.turn is not None and step.turn.is_decoding:
        step.count_rest(WaitReason.COMPOSITION)
    elif not state.overdue or _start_overdue(step):
        preferred: list[RequestState] = []
        if state.policy.lookahead > 1 and step.tokens_left and state.free_slots:
            preferred = _preferred(state)
            _consider_all(step, preferred)
        if not preferred or all(request.is_passable for request in preferred):
            step.waits.clear()  # the requests considered so far are considered again
            _consider_queue(step)


def _start_overdue(step: Step) -> bool:
    """Start the requests that were bypassed `max_bypass` times; return False if one of them has to wait."""
    state, bound = step.state, step.state.limits.max_bypass
    state.overdue = [one for one in state.overdue if one.status == Status.WAITING and one.num_bypassed >= bound]
    return all(one.in_flight or _consider(step, one) for one in sorted(state.overdue, key=lambda one: one.rank))


def _consider_queue(step: Step) -> None:
    waiting, num_left = step.state.waiting, MAX_CANDIDATES
    set_aside: list[RequestState] = []
    while num_left and (request := waiting.peek()) is not None and _consider(step, request):
        if request.status == Status.WAITING:
            set_aside.append(waiting.pop())
            num_left -= not request.is_passable
    for request in set_aside:
        waiting.add(request)


def _consider_all(step: Step, requests: list[RequestState]) -> None:
    for request in requests:
        if not _consider(step, request):
            break


def _preferred(state: State) -> list[RequestState]:
    """Return the first `lookahead` waiting requests in the policy's order of preference, by their cached tokens."""
    ranked = []
    for request in state.waiting.first(min(state.policy.lookahead, MAX_CANDIDATES)):
        seen = request.seen
        if request.is_swapped:
            cached = 0
        elif seen is None or state.cache.may_find_more(seen.missing, seen.num_published):
            cached = _look_up(state, request).num_tokens
        else:
            cached = seen.num_tokens
        ranked.append((state.policy.preference(request, cached), request))
    return [request for _, request in sorted(ranked, key=lambda pair: pair[0])]


def _consider(step: Step, request: RequestState) -> bool:
    """Try to start a request, if allowed by preempting others; return True if the next request may be considered."""
    state = step.state
    reason = _try_start(step, request)
    if reason is None:
        if step.passed_over:
            _count_bypasses(step)
        return True
    if request.is_passable:
        return bool(step.tokens_left and state.free_slots)
    is_overdue = request.num_bypassed >= state.limits.max_bypass and reason != WaitReason.UNCOMMITTED
    has_made_room = False
    if reason in _ROOM and (is_overdue or state.policy.preempt_on_arrival):
        has_made_room = _preempt_for(step, request, WaitReason.BARRIER if is_overdue else reason)
        # The step would be empty without this request, so the request may start at once (S07).
        if has_made_room and not step.rows and _try_start(step, request) is None:
            _count_bypasses(step)
    if is_overdue and request.status == Status.WAITING:
        step.count_rest(WaitReason.BARRIER)
    if is_overdue or has_made_room:
        return False
    step.passed_over.append((request, reason))
    if not step.tokens_left or not state.free_slots:
        return False
    return reason in _NEXT_MAY_FIT or (state.policy.skip_ahead and reason in _ROOM)


def _count_bypasses(step: Step) -> None:
    """Count one bypass for each request that was considered before the one that starts; at most one per step."""
    for request, reason in step.passed_over:
        if reason not in _NOT_ITS_TURN:
            request.num_bypassed += 1
            if request.num_bypassed == step.state.limits.max_bypass:
                step.state.overdue.append(request)
            step.state.totals.num_bypasses += 1
    step.passed_over.clear()


def _preempt_for(step: Step, request: RequestState, reason: WaitReason) -> bool:
    """Preempt running requests of later rank until a waiting request would fit.

    Return False, and preempt none, if that cannot make enough room or if this step has started a request.
    """
    state, rank_of = step.state, step.state.policy.victim_rank
    if step.num_started:
        return False
    own = rank_of(request)
    ranked = sorted(((rank_of(other), other) for other in state.running.requests), key=lambda pair: pair[0])
    victims = [other for rank, other in ranked if rank > own]
    floors = _floors(state, request) if reason != WaitReason.BARRIER else [0] * state.cache.num_groups
    if not victims or not _fits_without(step, request, victims, floors):
        return False
    while victims and not _fits_without(step, request, [], floors):
        step.preempt(victims.pop(), request, reason)
    return step.has_made_room


# --- one request -----------------------------------------------------------------------------------------------


def _try_start(step: Step, request: RequestState) -> WaitReason | None:
    """Start one request, or return why it waits."""
    reason = _refusal(step, request)
    if reason is not None:
        return reason
    shortage = request.shortage
    if shortage and step.state.running.requests and is_still_short(step.state, step.outstanding, request, shortage):
        reason = WaitReason(shortage.reason)
        step.count_waiting(reason, 1)
        return reason
    request.shortage = None
    return _swap_in(step, request) if request.is_swapped else _start_from_cache(step, request)


def _refusal(step: Step, request: RequestState) -> WaitReason | None:
    """Defer a request for a reason that needs no prefix lookup; return the reason, or None if there is none."""
    num_free = len(step.state.free_slots)
    request.is_passable = False
    if request.in_flight:
        return step.defer(request, WaitReason.UNCOMMITTED, request.in_flight)
    for gate in step.state.gates:
        lack = gate.lack(request)
        if lack is not None and (gate.is_passable or request.num_slots <= num_free):
            request.is_passable = gate.is_passable
            return step.defer(request, gate.reason, *lack)
    if request.num_slots > num_free:
        return step.defer(request, WaitReason.SEQUENCE_CAP, request.num_slots, num_free)
    if not step.tokens_left:
        return step.defer(request, WaitReason.TOKEN_BUDGET, 1)
    if step.turn is not None and (refusal := step.turn.refusal(request, is_decoding=False)) is not None:
        return step.defer(request, refusal)
    return None


def _start_from_cache(step: Step, request: RequestState) -> WaitReason | None:
    """Start a request from its cached prefix, or return why it waits."""
    state = step.state
    match = _look_up(state, request)
    if match.loads and not state.cache.may_load:
        state.cache.host.is_load_wanted = True
        return step.defer(request, WaitReason.HOST_LOAD, len(match.loads))
    begin = max(match.num_tokens, request.num_remote)
    todo = request.sequences[0].num_known - begin
    count, shortage = step.fit_chunk(begin, todo, may_be_partial=step.num_partial_left > 0)
    if shortage is not None:
        return step.defer(request, *shortage)
    if state.limits.whole_span_tokens and request.request.spans:
        count = whole_chunk(request.request.spans, match.num_tokens, count, step.tokens_left)
        if not count:
            return step.defer(request, WaitReason.TOKEN_BUDGET, state.limits.whole_span_tokens, step.tokens_left)
    peaks = needed_blocks(state.cache, request)
    needed = list(map(sub, peaks, match.num_held))
    reason = _lacks_room(step, request, needed, state.cache.room_after(match, peaks))
    if reason is None and request.request.spans:
        count, reason = _encode(step, request, match, count)
    if reason is None:
        _start(step, request, match, count)
    return reason


def _look_up(state: State, request: RequestState) -> Match:
    """Return the cached prefix of a request, and record the lookup in `seen`."""
    root = request.sequences[0]
    match = state.cache.match(root, request.match_cap(root))
    request.seen = PrefixSeen(match.num_tokens, match.missing, state.cache.num_published)
    return match


def _encode(step: Step, request: RequestState, match: Match, count: int) -> tuple[int, WaitReason | None]:
    """Schedule the encoding of the first chunk's media; the chunk ends before an item that has to wait.

    Return the chunk's tokens and None, or 0 and the reason to wait.
    """
    encoder, slot = step.state.encoder, step.state.free_slots[-1]  # the slot that the request will get
    granted = encoder.grant(request.name, slot, request.request.spans, match.num_tokens, count)
    if granted == count:
        return count, None
    is_useful = granted and step.may_split(request.sequences[0].num_known - match.num_tokens)
    if is_useful and step.num_partial_left:
        return granted, None
    encoder.release(request.name)
    return 0, step.defer(request, WaitReason.PARTIAL_PREFILL_CAP if is_useful else WaitReason.ENCODER_BUDGET, 1)


def _lacks_room(step: Step, request: RequestState, needed: list[int], free: list[int]) -> WaitReason | None:
    """Defer a request that does not fit; return the reason, or None if it fits.

    Per group, `needed` are the blocks that it would allocate, and `free` those left after that.
    """
    state, has_company = step.state, bool(step.state.running.requests)
    left = list(map(sub, free, step.outstanding))
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
        kept = _kept_free(state, step.outstanding, request, reason, group)
        request.shortage = BlockShortage(reason, group, short, state.cache.pools[group].num_freed, kept)
    return step.defer(request, reason, wanted, max(0, wanted - short))


def _start(step: Step, request: RequestState, match: Match, count: int) -> None:
    """Start a request whose first row has `count` tokens."""
    state, root = step.state, request.sequences[0]
    kind = state.enter_running(request, step.now)
    step.num_started += 1
    if kind == EventKind.ADMITTED:
        request.cached_tokens = match.num_tokens
    state.cache.adopt(root, match)
    step.enter(root)
    state.totals.num_host_hit_tokens += len(match.loads) * state.cache.block_size // state.cache.num_groups
    state.policy.notify("admitted", request, root.num_known - max(match.num_tokens, request.num_remote))
    if request.num_remote > match.num_tokens:
        state.cache.extend(root, request.num_remote)
        root.num_scheduled = root.num_computed = request.num_remote
        request.is_receiving = True
        count = 0
    state.log(kind, request, step.now, num_tokens=count, cached_tokens=match.num_tokens)
    if request.is_receiving:
        return
    if step.add_row(root, count):
        branching.fork_choices(step, request, root)
    if root.num_scheduled < root.num_committed:
        step.note_rest(request, root, count)
    for sequence in request.sequences[1:]:
        if not sequence.is_entered:
            branching.reserve_room(step, sequence)


def _swap_in(step: Step, request: RequestState) -> WaitReason | None:
    """Swap a request in, or return why it waits.

    It needs its host blocks, at least one new block for each sequence, and the headroom (S09).
    """
    state, cache = step.state, step.state.cache
    has_company = bool(state.running.requests)
    needed = swapped_blocks(cache, request, 1 if has_company else 0)
    if not cache.may_load:
        cache.host.is_load_wanted = True
        return step.defer(request, WaitReason.HOST_LOAD, sum(needed))
    reason = _lacks_room(
        step, request, needed, [pool.num_free - n for pool, n in zip(cache.pools, needed, strict=True)]
    )
    if reason is not None and not has_company:
        # No request runs, but its unshared copies do not fit the pool. If recomputed it fits: see check_feasible.
        state.unswap(request)
        return _start_from_cache(step, request)
    if reason is not None:
        return reason
    todo = max(sequence.num_known - sequence.num_scheduled for sequence in request.sequences)
    if step.chunk(todo) < todo and not step.num_partial_left:
        return step.defer(request, WaitReason.PARTIAL_PREFILL_CAP, 1)
    state.enter_running(request, step.now)
    step.num_started += 1
    sequences = state.swap_in(request)
    for sequence in sequences:
        step.enter(sequence)
        cache.enter_tables(sequence)
    state.policy.notify("admitted", request, 0)
    state.log(EventKind.RESUMED, request, step.now, cached_tokens=sum(sequence.num_scheduled for sequence in sequences))
    for sequence in sequences:
        if sequence.num_known > sequence.num_scheduled and grant_row(step, request, sequence):
            break  # the other choices have their rows
    return None
