"""A snapshot of the scheduler for people and metrics.

Owns: the record and how it is read off the state. Does not: keep history (metrics does).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.state import State


@dataclass(frozen=True, slots=True)
class Statistics:
    """Gauges now, totals since the start. Blocks are summed over groups; hits are in tokens."""

    step: int
    num_running: int
    num_waiting: int
    num_in_flight: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_cached: int
    num_steps: int
    num_failed_steps: int
    num_admitted: int
    num_preemptions: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    finished: dict[str, int]


def snapshot(state: State) -> Statistics:
    """Read the statistics off the state."""
    pools, totals = state.cache.pools, state.totals
    return Statistics(
        step=state.step,
        num_running=state.running.num_sequences,
        num_waiting=len(state.waiting),
        num_in_flight=len(state.flight),
        num_blocks=sum(pool.num_blocks for pool in pools),
        num_blocks_used=sum(pool.num_blocks - pool.num_free for pool in pools),
        num_blocks_cached=sum(len(pool.free.cached) for pool in pools),
        num_steps=totals.num_steps,
        num_failed_steps=totals.num_failed_steps,
        num_admitted=totals.num_admitted,
        num_preemptions=totals.num_preemptions,
        num_computed_tokens=totals.num_computed_tokens,
        num_prompt_tokens=totals.num_prompt_tokens,
        num_output_tokens=totals.num_output_tokens,
        prefix_queried_tokens=state.cache.queried_tokens,
        prefix_hit_tokens=state.cache.hit_tokens,
        finished=dict(totals.finished),
    )
