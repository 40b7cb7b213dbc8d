"""Reads explanations off the scheduler's state. For people: O(waiting log waiting), never called by a step.

Owns: how a standing, its reason and its numbers are found. Does not: change anything, or word it (see explanation).
Invariant: the room of a waiting request is reckoned by admission's own measure (see admit), so that what admission
refused for blocks is short of blocks here, until a block is given back.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import replace

from octavo.core.admit import growth_blocks, needed_blocks, swapped_blocks
from octavo.core.explanation import Ahead, Explanation, Room, Shortage, Standing, Work
from octavo.core.kv.cache import NO_BLOCK
from octavo.core.plan import WaitReason
from octavo.core.request import RequestState, Sequence, Status
from octavo.core.state import State

NUM_AHEAD = 5  # who is named of those ahead
_BLOCKS = frozenset({WaitReason.KV_BLOCKS, WaitReason.HEADROOM, WaitReason.SWAP_SPACE})
_UNITS = {
    WaitReason.TOKEN_BUDGET: "tokens of a step",
    WaitReason.SEQUENCE_CAP: "sequences",
    WaitReason.KV_BLOCKS: "blocks",
    WaitReason.HEADROOM: "blocks",
    WaitReason.SWAP_SPACE: "blocks",
    WaitReason.FORK_BLOCKS: "blocks",
    WaitReason.KV_READ_BUDGET: "tokens of context to read in a step",
    WaitReason.ENCODER_BUDGET: "media items to encode in a step",
    WaitReason.ADAPTER_SLOTS: "adapter slots",
    WaitReason.PARTIAL_PREFILL_CAP: "partly computed prompts",
    WaitReason.HOST_LOAD: "blocks to load from the host",
    WaitReason.UNCOMMITTED: "rows in flight to be committed",
}


def explain(state: State, request_id: str, now: float) -> Explanation | None:
    """Where an open request stands; None for one that is unknown, or has ended."""
    entry = state.requests.get(request_id)
    if entry is None:
        return None
    order = state.waiting.in_order() if entry.status == Status.WAITING else []
    return _explain(state, entry, order, now)


def explain_all(state: State, now: float, most: int | None = None) -> list[Explanation]:
    """Where every open request stands: those that wait first, in order, then those that run; `most` of each.

    O(requests log requests), and a look into the cache for each that lacked blocks.
    """
    order = state.waiting.in_order()
    return [_explain(state, entry, order, now, place) for place, entry in enumerate(order[:most])] + [
        _explain(state, entry, [], now) for entry in state.running.requests[:most]
    ]


def shortage_of(state: State, entry: RequestState) -> Shortage | None:
    """What an open request was refused for when it was last looked at; None where it was refused nothing. O(1)."""
    if entry.wait_reason < 0:
        return None
    reason = WaitReason(entry.wait_reason)
    needed, available, step = entry.wait_numbers
    return Shortage(reason, needed, available, _limit(state, reason), _UNITS.get(reason, ""), step)


def reason_of(state: State, entry: RequestState, barrier: RequestState | None) -> WaitReason:
    """Why a waiting request waits now. O(1)."""
    if state.is_paused:
        return WaitReason.PAUSED
    if barrier is not None and barrier is not entry:
        return WaitReason.BARRIER
    return WaitReason.BEHIND if entry.wait_reason < 0 else WaitReason(entry.wait_reason)


def find_barrier(state: State) -> RequestState | None:
    """The first of those that were passed over too often: nobody else is let in before it."""
    bound = state.limits.max_bypass
    overdue = [one for one in state.overdue if one.status == Status.WAITING and one.num_bypassed >= bound]
    return min((one for one in overdue if not one.in_flight), key=lambda one: one.rank, default=None)


def _explain(
    state: State, entry: RequestState, order: Many[RequestState], now: float, place: int | None = None
) -> Explanation:
    shortage = shortage_of(state, entry)
    common = Explanation(
        entry.name,
        entry.request.tenant,
        Standing.DECODE if entry.is_decoding else Standing.PREFILL,
        now,
        entry.request.arrival,
        num_waiting=len(state.waiting),
        num_running=len(state.running),
        reason=None if shortage is None else shortage.reason,
        shortage=shortage,
        policy=state.limits.policy,
        rule=state.policy.rule(),
        why=state.policy.why(entry),
        num_bypassed=entry.num_bypassed,
        max_bypass=state.limits.max_bypass,
        work=_work(entry),
        num_preemptions=entry.num_preemptions,
        deadline=entry.request.deadline,
        queue_until=_queue_until(entry),
    )
    if entry.status == Status.RUNNING:
        return common
    return _waiting(state, entry, order, order.index(entry) if place is None else place, common)


def _waiting(
    state: State, entry: RequestState, order: Many[RequestState], place: int, common: Explanation
) -> Explanation:
    """The same of a waiting request, with its place and what it is about."""
    barrier = find_barrier(state)
    reason, shortage = reason_of(state, entry, barrier), common.shortage
    is_other = False
    before = order[place - 1] if place else None
    if reason == WaitReason.PAUSED:
        shortage = None
    elif reason == WaitReason.BARRIER and barrier is not None:
        before, shortage, is_other = barrier, shortage_of(state, barrier), True
    elif reason == WaitReason.BEHIND:
        shortage, is_other = shortage_of(state, order[0]), True
    standing = Standing.WAITING if entry.first_scheduled_at is None else Standing.PREEMPTED
    return replace(
        common,
        state=Standing.SWAPPED if entry.is_swapped else standing,
        position=place + 1,
        reason=None if reason == WaitReason.BEHIND and before is None else reason,
        shortage=shortage,
        is_first_short=is_other and shortage is not None,
        room=rooms(state, entry) if reason in _BLOCKS else (),
        behind=None if before is None else before.name,
        ahead=tuple(
            Ahead(one.name, one.request.tenant, state.policy.why(one)) for one in order[: min(place, NUM_AHEAD)]
        ),
    )


def _queue_until(entry: RequestState) -> float | None:
    asked = entry.request
    if asked.queue_timeout is None or entry.first_scheduled_at is not None or asked.emitted_token_ids:
        return None
    return asked.arrival + asked.queue_timeout


def rooms(state: State, entry: RequestState) -> tuple[Room, ...]:
    """The pool as a waiting request meets it, group by group, as admission reckons."""
    cache, root = state.cache, entry.sequences[0]
    has_company = bool(state.running.requests)
    found, unreferenced = [0] * cache.num_groups, [0] * cache.num_groups
    if entry.is_swapped:
        needed = swapped_blocks(cache, entry, 1 if has_company else 0)
    else:
        match = cache.match(root, entry.match_cap(root))
        found, unreferenced = match.num_held, match.num_unreferenced
        needed = [max(0, peak - held) for peak, held in zip(needed_blocks(cache, entry), found, strict=True)]
    promised = _promised(state)
    keeps = has_company and entry.num_bypassed < state.limits.max_bypass
    return tuple(
        Room(
            group,
            pool.num_blocks,
            needed[group],
            found[group],
            len(pool.plain),
            len(pool.cached) - unreferenced[group],
            promised[group],
            state.headroom.floors[group] if keeps else 0,
            growth_blocks(state, entry, group) if keeps else 0,
        )
        for group, pool in enumerate(cache.pools)
    )


def _promised(state: State) -> list[int]:
    """Blocks per group that running sequences will still need for tokens they know (see Step.outstanding)."""
    cache = state.cache
    total = [0] * cache.num_groups
    for request in state.running.requests:
        for one in request.sequences:
            if one.num_scheduled >= one.num_committed:
                continue
            held = cache.held_blocks(one) if one.is_entered else _shared(state, one)
            least = 0 if one.is_entered else 1
            for group, peak in enumerate(cache.peak_blocks(one.num_known)):
                total[group] += max(least, peak - held[group])
    return total


def _shared(state: State, sequence: Sequence) -> list[int]:
    """Blocks that a choice which is still to come in will share with its siblings."""
    cache = state.cache
    shared = (sequence.num_prompt - 1) // cache.block_size if cache.sharing else 0
    return [shared] * cache.num_groups


def _limit(state: State, reason: WaitReason) -> int:
    limits = state.limits
    if reason in _BLOCKS or reason == WaitReason.FORK_BLOCKS:
        return max(limits.num_blocks)
    return {
        WaitReason.TOKEN_BUDGET: state.token_budget.limit,
        WaitReason.SEQUENCE_CAP: limits.max_sequences,
        WaitReason.KV_READ_BUDGET: limits.max_kv_read,
        WaitReason.ENCODER_BUDGET: limits.encoder_budget,
        WaitReason.ADAPTER_SLOTS: limits.adapter_slots,
        WaitReason.PARTIAL_PREFILL_CAP: limits.max_partial_prefills,
    }.get(reason, 0)


def _work(entry: RequestState) -> Work:
    """Tokens, blocks, choices and drafts of a request."""
    sequences = entry.sequences
    tracks = [one.track for one in sequences if one.track is not None]
    groups = range(len(sequences[0].tables))
    host = [one.host_tables for one in sequences if one.host_tables]
    return Work(
        num_prompt_tokens=entry.request.num_prompt_tokens,
        num_known=sum(one.num_known for one in sequences),
        num_computed=sum(one.num_computed for one in sequences),
        num_outputs=entry.num_ended_outputs + sum(one.num_outputs for one in sequences),
        max_tokens=entry.max_tokens,
        cached_tokens=entry.cached_tokens,
        num_blocks=sum(_distinct(one.tables[group] for one in sequences) for group in groups),
        num_host_blocks=sum(_distinct(tables[group] for tables in host) for group in groups),
        num_choices=len(sequences),
        num_drafted=sum(track.num_drafted for track in tracks),
        num_accepted=sum(track.num_accepted for track in tracks),
    )


def _distinct(tables: Iterable[list[int]]) -> int:
    """Different blocks in some tables."""
    blocks = dict.fromkeys(block for table in tables for block in table)
    blocks.pop(NO_BLOCK, None)
    return len(blocks)
