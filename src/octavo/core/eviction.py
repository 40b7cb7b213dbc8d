"""Makes room in a plan in the making: who goes, and what of theirs is taken back.

Owns: the choice of victims among running requests, and the undoing of their rows and promises in this very plan.
Does not: put them back in the queue (state), or decide who may ask (planning, intake).
Invariant: nobody is preempted for a request of later rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.plan import ROW_SAMPLE, WaitReason
from octavo.core.request import RequestState, Sequence

if TYPE_CHECKING:
    from octavo.core.planning import Planner


def make_room(planner: Planner, request: RequestState, sequence: Sequence, end: int) -> bool:
    """Preempt until positions up to `end` fit. False when the request itself had to go, or waits for a release."""
    cache = planner.state.cache
    if end <= sequence.capacity and sequence.num_scheduled < sequence.block_end:
        return True
    cache.slide(sequence)
    while not cache.fits(sequence, end):
        if is_release_due(planner) or not evict(planner, request):
            return False
    return True


def is_release_due(planner: Planner) -> bool:
    """Whether blocks come back with a plan in flight, so that nobody has to go for them."""
    return any(flight.releases for flight in planner.state.flight)


def evict(planner: Planner, request: RequestState) -> bool:
    """Preempt the last in the policy's order for a running request. False when that was the request itself."""
    state = planner.state
    victim = max(state.running.requests, key=state.policy.victim_rank)
    preempt(planner, victim, request, WaitReason.KV_BLOCKS)
    return victim is not request


def preempt(planner: Planner, victim: RequestState, by: RequestState, reason: WaitReason) -> None:
    """Take everything from a victim, its rows and promises in this very plan too."""
    planner.num_preempted += 1
    slots = frozenset(sequence.slot for sequence in victim.sequences)
    rows = [sequence for sequence in victim.sequences if sequence in planner.rows]
    is_fresh = any(new.slot in slots and new.slot not in planner.moved for new in planner.new)
    for sequence in rows:
        _take_back(planner, sequence)
    promised = [entry for entry in planner.published if entry.owner.request is victim]
    planner.state.cache.unpublish(promised, planner.state.step)
    planner.published = [entry for entry in planner.published if entry.owner.request is not victim]
    for group, count in enumerate(planner.kept.pop(victim.name, ())):
        planner.outstanding[group] -= count
    planner.new = [new for new in planner.new if new.slot not in slots]
    planner.effects.drop(slots)
    # What has begun to change in this plan is not whole yet: it can be recomputed, not swapped.
    planner.state.preempt(victim, planner.now, by.name, reason, may_swap=not (rows or is_fresh))


def _take_back(planner: Planner, sequence: Sequence) -> None:
    """Take a row out of the plan."""
    index = planner.rows.index(sequence)
    planner.tokens.give_back(planner.counts[index])
    if planner.is_careful:
        planner.reads.give_back(planner.reads.cost(planner.starts[index], planner.counts[index]))
    sequence.in_flight -= 1
    if planner.flags[index] & ROW_SAMPLE:
        sequence.num_pending -= 1
    for column in (planner.rows, planner.starts, planner.counts, planner.flags):
        del column[index]
