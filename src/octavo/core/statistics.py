"""A snapshot of the scheduler for people and metrics.

Owns: the record and how it is read off the state. Does not: keep history (engine.statistics does), or look into
blocks (memory_analysis does). Cost: O(requests) for the reasons of waiting; nothing here is called by a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.plan import WaitReason
from octavo.core.request import Status
from octavo.core.state import State


@dataclass(frozen=True, slots=True)
class Statistics:
    """Gauges now, totals since the start. Blocks are summed over groups; hits and swaps are in tokens.

    `waiting_by_reason` has the reasons that hold anybody, by name; `num_swapped` of the waiting have their KV on the
    host. Of the host's blocks, `used` counts those that hold a swapped sequence or a prefix.
    """

    step: int
    num_running: int
    num_waiting: int
    waiting_by_reason: dict[str, int]
    num_swapped: int
    num_in_flight: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_cached: int
    num_host_blocks: int
    num_host_blocks_used: int
    num_requests: int
    num_steps: int
    num_failed_steps: int
    num_admitted: int
    num_preemptions: int
    num_requeued: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    num_swapped_out_tokens: int
    num_swapped_in_tokens: int
    num_host_hit_tokens: int
    num_forks: int
    num_copies: int
    num_adopted_blocks: int
    num_bypasses: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    num_policy_errors: int
    first_policy_error: str
    finished: dict[str, int]


def snapshot(state: State) -> Statistics:
    """Read the statistics off the state."""
    pools, totals, host = state.cache.pools, state.totals, state.cache.host.pools
    return Statistics(
        step=state.step,
        num_running=state.sequence_budget.used,
        num_waiting=len(state.waiting),
        waiting_by_reason=_waiting_by_reason(state),
        num_swapped=state.num_swapped,
        num_in_flight=len(state.flight),
        num_blocks=sum(pool.num_blocks for pool in pools),
        num_blocks_used=sum(pool.num_blocks - pool.num_free for pool in pools),
        num_blocks_cached=sum(len(pool.cached) for pool in pools),
        num_host_blocks=sum(pool.num_blocks for pool in host),
        num_host_blocks_used=sum(pool.num_filled for pool in host),
        num_requests=state.next_order,
        num_steps=totals.num_steps,
        num_failed_steps=totals.num_failed_steps,
        num_admitted=totals.num_admitted,
        num_preemptions=totals.num_preemptions,
        num_requeued=totals.num_requeued,
        num_computed_tokens=totals.num_computed_tokens,
        num_prompt_tokens=totals.num_prompt_tokens,
        num_output_tokens=totals.num_output_tokens,
        num_drafted_tokens=totals.num_drafted_tokens,
        num_accepted_tokens=totals.num_accepted_tokens,
        num_swapped_out_tokens=totals.num_swapped_out_tokens,
        num_swapped_in_tokens=totals.num_swapped_in_tokens,
        num_host_hit_tokens=totals.num_host_hit_tokens,
        num_forks=totals.num_forks,
        num_copies=totals.num_copies,
        num_adopted_blocks=totals.num_adopted_blocks,
        num_bypasses=totals.num_bypasses,
        prefix_queried_tokens=state.cache.queried_tokens,
        prefix_hit_tokens=state.cache.hit_tokens,
        num_policy_errors=state.policy.num_errors,
        first_policy_error=state.policy.first_error,
        finished=dict(totals.finished),
    )


def _waiting_by_reason(state: State) -> dict[str, int]:
    """Waiting requests by the reason they were last told; those never told one stand behind others."""
    counts = [0] * len(WaitReason)
    for request in state.requests.values():
        if request.status == Status.WAITING:
            counts[WaitReason.BEHIND if request.wait_reason < 0 else request.wait_reason] += 1
    return {reason.name.lower(): counts[reason] for reason in WaitReason if counts[reason]}
