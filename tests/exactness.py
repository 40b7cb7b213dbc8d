"""Drives scheduler and executor step by step, without an engine, for tests that compare tokens.

Owns: one synchronous loop over an opened executor, with a fresh scheduler a run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from octavo.core.invariants import check_no_leaks
from octavo.core.limits import Limits
from octavo.core.plan import TokenLogprobs
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.executors.protocol import Capacity, Executor


@dataclass
class Run:
    """What a run gave: ids and their log-probabilities per request, and the scheduler's counters."""

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs | None]]
    num_steps: int = 0
    num_preemptions: int = 0
    hit_tokens: int = 0
    max_rows: int = 0
    cached: list[int] = field(default_factory=list)


def limits_of(capacity: Capacity, **changes: object) -> Limits:
    """Limits that fit an opened executor; `changes` may only make them smaller."""
    limits = Limits(
        block_size=capacity.block_size,
        num_blocks=capacity.num_blocks,
        max_model_len=capacity.max_model_len,
        vocab_size=capacity.vocab_size,
        groups=capacity.groups,
        max_sequences=capacity.num_slots,
        max_batch_tokens=256,
    )
    return replace(limits, **changes)  # type: ignore[arg-type]


def run(
    executor: Executor,
    limits: Limits,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    rounds: int = 1,
) -> Run:
    """Serve all prompts together, `rounds` times on the same prefix cache; returns the last round's tokens."""
    scheduler = Scheduler(limits)
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    for number in range(rounds):
        result = _round(scheduler, executor, number, prompts, each)
    check_no_leaks(scheduler)
    statistics = scheduler.statistics()
    result.num_preemptions = statistics.num_preemptions
    result.hit_tokens = statistics.prefix_hit_tokens
    return result


def _round(
    scheduler: Scheduler,
    executor: Executor,
    number: int,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
) -> Run:
    names = {f"{number}-{index}": index for index in range(len(prompts))}
    for name, index in names.items():
        scheduler.admit(Request(name, array("i", prompts[index]), params[index]), 0.0)
    out = Run([[] for _ in prompts], [[] for _ in prompts])
    while True:
        plan = scheduler.plan(float(out.num_steps))
        if plan.is_empty:
            assert not scheduler.has_work, plan.waits
            return out
        events = scheduler.commit(plan, executor.collect(executor.submit(plan)), float(out.num_steps))
        out.num_steps += 1
        out.max_rows = max(out.max_rows, plan.num_rows)
        for at, (name, token) in enumerate(zip(events.request_ids, events.token_ids, strict=True)):
            out.token_ids[names[name]].append(token)
            out.logprobs[names[name]].append(events.logprobs[at] if events.logprobs else None)


def explain_difference(expected: Sequence[int], run: Run, index: int) -> str:
    """Say where a request's tokens leave the expected ones, and how close the two best logits were there."""
    got = run.token_ids[index]
    for at, (want, have) in enumerate(zip(expected, got, strict=False)):
        if want != have:
            entry = run.logprobs[index][at]
            gap = ""
            if entry is not None and len(entry.top_logprobs) > 1:
                distance = entry.top_logprobs[0] - entry.top_logprobs[1]
                gap = f"; the two best logits there are {distance:.3e} apart {entry.top_ids}"
            return f"request {index} differs at output {at}: expected {want}, got {have}{gap}"
    return f"request {index}: {len(got)} tokens, expected {len(expected)}"


def assert_equal(expected: Sequence[Sequence[int]], run: Run) -> None:
    """Assert that every request's tokens are the expected ones; the message gives the logit gaps."""
    wrong = [
        explain_difference(want, run, index)
        for index, want in enumerate(expected)
        if list(want) != run.token_ids[index]
    ]
    assert not wrong, "\n".join(wrong)
