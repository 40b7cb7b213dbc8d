"""Explanations: a request's state and queue position, why it waits, and the numbers behind the wait, as typed facts.

Owns: the record, and how it is read from the state. Does not: change anything, turn facts into sentences
(observe.explainer does), or know the past (observe.history does). Costs O(waiting log waiting); no step calls it.
Invariants: a waiting request's blocks are counted as admission counts them, so a request that was refused for
blocks is short of blocks here until one is released. Other requests are named only in `behind` and `ahead`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from enum import Enum

from octavo.core.branching import own_blocks
from octavo.core.kv.host_tier import distinct_blocks
from octavo.core.plan import WaitReason
from octavo.core.request_state import RequestState, Status
from octavo.core.start import growth_blocks, needed_blocks, swapped_blocks
from octavo.core.state import State

NUM_AHEAD = 5  # most requests listed in `ahead`
_BLOCKS = frozenset({WaitReason.KV_BLOCKS, WaitReason.HEADROOM, WaitReason.SWAP_SPACE})


class Standing(Enum):
    """What a request is doing."""

    WAITING = "waiting"  # never ran
    PREEMPTED = "preempted"  # waits again, and will be recomputed
    SWAPPED = "swapped"  # waits again; its KV is on the host
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Shortage:
    """The resource that a request lacked when admission last looked at the request, in step `step`.

    `limit` is the resource's total; 0 if it has none.
    """

    reason: WaitReason
    needed: int = 0
    available: int = 0
    limit: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """What one group of the KV pool has for a waiting request now, in blocks.

    The request would share `found` cached blocks and needs `needed` more. Of `total` blocks, `free` are empty, and
    `evictable` hold an unused prefix that is not this request's. `promised` blocks are reserved for prompts in
    progress. `headroom` and `growth` blocks stay free for running requests.
    """

    group: int
    total: int
    needed: int
    found: int
    free: int
    evictable: int
    promised: int
    headroom: int
    growth: int

    @property
    def short(self) -> int:
        """The number of missing blocks; 0 or less if the request would fit."""
        return self.needed + self.promised + self.headroom + self.growth - self.free - self.evictable


@dataclass(frozen=True, slots=True)
class Ahead:
    """A request before the explained one in the queue. `why` is the policy's text for its queue position."""

    name: str
    tenant: str
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The state of one open request. Times are in seconds on the scheduler's clock.

    `position` counts from 1 among `num_waiting`, and is 0 for a running request. `reason` is why the request waits.
    `shortage` has the numbers: the request's own or, if `is_first_short`, those of the request that it waits for.
    `behind` is the request directly before it, or the barrier that no request may pass; `ahead` lists the first few of
    the queue. `rule` is the policy's order, and `why` gives the request's place in that order. `num_bypassed` counts
    the steps that admitted a later request first; at `max_bypass` no later request is admitted first.
    Tokens and blocks are summed over all sequences; a shared block counts once. Of `num_known` tokens (prompt and
    outputs), `num_computed` have KV; `cached_tokens` were found in the prefix cache at the first admission.
    `num_outputs` tokens were sampled; `max_tokens` bounds each choice.
    """

    name: str
    tenant: str
    state: Standing
    arrival: float
    position: int
    num_waiting: int
    num_running: int
    reason: WaitReason | None
    shortage: Shortage | None
    is_first_short: bool
    room: tuple[Room, ...]
    behind: str | None
    ahead: tuple[Ahead, ...]
    policy: str
    rule: str
    why: str
    num_bypassed: int
    max_bypass: int
    num_preemptions: int
    deadline: float | None
    queue_until: float | None
    num_prompt_tokens: int
    num_known: int
    num_computed: int
    num_outputs: int
    max_tokens: int
    cached_tokens: int
    num_blocks: int
    num_host_blocks: int
    num_choices: int
    num_drafted: int
    num_accepted: int


def explain(state: State, request_id: str) -> Explanation | None:
    """Explain an open request; None for one that is unknown or has ended."""
    entry = state.requests.get(request_id)
    if entry is None:
        return None
    order = state.waiting.in_order() if entry.status == Status.WAITING else []
    return _explain(state, entry, order, order.index(entry) + 1 if order else 0)


def explain_all(state: State, max_requests: int | None = None) -> list[Explanation]:
    """Explain open requests: the first `max_requests` waiting, then the first `max_requests` running; None means all.

    O(requests log requests), plus one cache lookup for each request that lacked blocks.
    """
    order = state.waiting.in_order()
    waiting = [_explain(state, entry, order, position) for position, entry in enumerate(order[:max_requests], 1)]
    return waiting + [_explain(state, entry, order, 0) for entry in state.running.requests[:max_requests]]


def shortage_of(state: State, entry: RequestState) -> Shortage | None:
    """Return the last shortage of an open request, or None. O(1)."""
    if entry.wait_reason < 0:
        return None
    reason = WaitReason(entry.wait_reason)
    needed, available, step = entry.wait_numbers
    return Shortage(reason, needed, available, _limit(state, reason), step)


def reason_of(state: State, entry: RequestState, barrier: RequestState | None) -> WaitReason:
    """Return why a waiting request waits now. O(1)."""
    if state.is_paused:
        return WaitReason.PAUSED
    if barrier is not None and barrier is not entry:
        return WaitReason.BARRIER
    return WaitReason.BEHIND if entry.wait_reason < 0 else WaitReason(entry.wait_reason)


def find_barrier(state: State) -> RequestState | None:
    """Return the first request that was bypassed `max_bypass` times: no other is admitted before it. None if none."""
    bound = state.limits.max_bypass
    overdue = [one for one in state.overdue if one.status == Status.WAITING and one.num_bypassed >= bound]
    return min(
        (one for one in overdue if not (one.in_flight or one.is_passable)), key=lambda one: one.rank, default=None
    )


def _explain(state: State, entry: RequestState, order: Many[RequestState], position: int) -> Explanation:
    """Explain a request. `position` is its place among the waiting requests, from 1; 0 if it runs."""
    request, sequences = entry.request, entry.sequences
    histories = [one.draft_history for one in sequences if one.draft_history is not None]
    shortage, behind, is_first_short = shortage_of(state, entry), None, False
    reason = None if shortage is None else shortage.reason
    if position:
        reason, shortage, behind, is_first_short = _wait(state, entry, order, position)
    return Explanation(
        name=entry.name,
        tenant=request.tenant,
        state=_standing(entry),
        arrival=request.arrival,
        position=position,
        num_waiting=len(state.waiting),
        num_running=len(state.running),
        reason=reason,
        shortage=shortage,
        is_first_short=is_first_short,
        room=_rooms(state, entry) if position and reason in _BLOCKS else (),
        behind=behind,
        ahead=tuple(
            Ahead(one.name, one.request.tenant, state.policy.why(one)) for one in order[: min(position - 1, NUM_AHEAD)]
        )
        if position
        else (),
        policy=state.limits.policy,
        rule=state.policy.rule(),
        why=state.policy.why(entry),
        num_bypassed=entry.num_bypassed,
        max_bypass=state.limits.max_bypass,
        num_preemptions=entry.num_preemptions,
        deadline=request.deadline,
        queue_until=request.queue_until if entry.first_scheduled_at is None else None,
        num_prompt_tokens=request.num_prompt_tokens,
        num_known=sum(one.num_known for one in sequences),
        num_computed=sum(one.num_computed for one in sequences),
        num_outputs=entry.num_ended_outputs + sum(one.num_outputs for one in sequences),
        max_tokens=entry.max_tokens,
        cached_tokens=entry.cached_tokens,
        num_blocks=len(distinct_blocks([one.tables for one in sequences])) + state.cache.num_counted(sequences),
        num_host_blocks=len(distinct_blocks([one.host_tables for one in sequences])),
        num_choices=len(sequences),
        num_drafted=sum(history.num_drafted for history in histories),
        num_accepted=sum(history.num_accepted for history in histories),
    )


def _standing(entry: RequestState) -> Standing:
    if entry.status == Status.RUNNING:
        return Standing.DECODE if entry.is_decoding else Standing.PREFILL
    if entry.is_swapped:
        return Standing.SWAPPED
    return Standing.WAITING if entry.first_scheduled_at is None else Standing.PREEMPTED


def _wait(
    state: State, entry: RequestState, order: Many[RequestState], position: int
) -> tuple[WaitReason | None, Shortage | None, str | None, bool]:
    """Return why a request waits, its numbers, the request before it, and True if the numbers are another request's."""
    barrier = find_barrier(state)
    reason, before = reason_of(state, entry, barrier), order[position - 2] if position > 1 else None
    if reason == WaitReason.BARRIER:
        before = blocker = barrier
    else:
        blocker = order[0] if reason == WaitReason.BEHIND else None
    shortage = None if reason == WaitReason.PAUSED else shortage_of(state, blocker or entry)
    is_known = reason != WaitReason.BEHIND or before is not None
    return (
        reason if is_known else None,
        shortage,
        None if before is None else before.name,
        blocker is not None and shortage is not None,
    )


def _rooms(state: State, entry: RequestState) -> tuple[Room, ...]:
    """Return the blocks available to a waiting request, counted as admission counts them."""
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
            pool.num_plain,
            len(pool.cached) - unreferenced[group],
            promised[group],
            state.headroom[group] if keeps else 0,
            growth_blocks(state, entry, group) if keeps else 0,
        )
        for group, pool in enumerate(cache.pools)
    )


def _promised(state: State) -> list[int]:
    """Return the blocks per group that running sequences still need for known tokens (see Step.outstanding)."""
    cache = state.cache
    needs = [
        cache.blocks_left(one) if one.is_entered else own_blocks(cache, one)
        for request in state.running.requests
        for one in request.sequences
        if one.num_scheduled < one.num_committed
    ]
    return [sum(need[group] for need in needs) for group in range(cache.num_groups)]


def _limit(state: State, reason: WaitReason) -> int:
    limits = state.limits
    if reason in _BLOCKS or reason == WaitReason.FORK_BLOCKS:
        return max(limits.num_blocks)
    return {
        WaitReason.TOKEN_BUDGET: state.max_step_tokens,
        WaitReason.SEQUENCE_CAP: limits.max_sequences,
        WaitReason.KV_READ_BUDGET: limits.max_kv_read,
        WaitReason.ENCODER_BUDGET: limits.encoder_budget,
        WaitReason.ADAPTER_SLOTS: limits.adapter_slots,
        WaitReason.PARTIAL_PREFILL_CAP: limits.max_partial_prefills,
    }.get(reason, 0)
