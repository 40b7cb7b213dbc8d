"""Converts a recording to a SimulatedRun, for comparison with simulations of the same requests.

Owns: recorded_run; how the recorded engine drafted; the check of a recording's policy. Does not: read files, fit a cost
model (costs), or open a recording as a workload (workloads).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import mean, median

from octavo.core.plan import ROW_SAMPLE, StepPlan, StepResult
from octavo.core.request import FinishReason
from octavo.core.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.observe.recording import RecordedRequest, Recording, arrivals, steps
from octavo.plugins import find_policy
from octavo.simulator.costs.fitted import begin_of
from octavo.simulator.drafts import DraftSettings
from octavo.simulator.outcomes import NEVER, Outcomes, ReplicaTotals, RequestTracker, SimulatedRun
from octavo.simulator.workloads.traces import recorded_arrival


def check_policy(name: str) -> None:
    """Check that a recording's policy is built in or an installed plug-in. Raises ConfigError with the remedy."""
    try:
        if not name.isidentifier():  # never import a module that a recording names
            raise ConfigError(f"{name!r} is no name of a policy")
        find_policy(name)
    except ConfigError as error:
        raise ConfigError(f"the engine ran under a policy that is not here: {error}; install its plug-in") from None


def recorded_run(recording: Recording) -> SimulatedRun:
    """Return a recording as a SimulatedRun of one replica. Raises the errors of reading the recording."""
    totals = ReplicaTotals()

    def count(scheduler: Scheduler) -> None:
        counted = scheduler.statistics()
        totals.steps += counted.num_steps
        totals.computed_tokens += counted.num_computed_tokens
        totals.output_tokens += counted.num_output_tokens
        totals.preemptions += counted.num_preemptions
        totals.queried_tokens += counted.prefix_queried_tokens
        totals.hit_tokens += counted.prefix_hit_tokens

    requests = _merge_lives(arrivals(recording, count))
    totals.requests = len(requests)
    totals.failures = len(recording.segments) - 1
    for step in steps(recording):
        begin = begin_of(step)
        end = step.collected if uses_device(step.plan) else begin
        totals.busy_s += end - begin
        if step.next_plan is not None:
            totals.host_s += step.next_plan - end
    outcomes = _outcomes(requests)
    return SimulatedRun(outcomes, [totals], max(outcomes.ends, default=0.0))


def recorded_drafts(recording: Recording) -> DraftSettings | None:
    """Return how a recording's engine drafted, for a simulation of it; None if it never did.

    The cost is the median planning time of steps with drafts above that of others, for each pass of a draft model, in
    median steps without drafts; lookups cost next to nothing.
    """
    most = recording.header.limits.max_draft_rows
    num_rows, lengths, num_tried, num_accepted = 0, list[int](), 0, 0
    planning: tuple[list[float], list[float]] = ([], [])
    durations: list[float] = []
    for step in steps(recording):
        plan, result = step.plan, step.outcome
        decoding = [count for count, drafts in zip(plan.counts, plan.num_drafts or (0,) * len(plan.counts), strict=True)
                    if count == 1 or drafts]  # fmt: skip
        if not decoding or len(plan.slots) > most or not isinstance(result, StepResult):
            continue
        num_rows += len(decoding)
        lengths += [count for count in plan.num_drafts if count]
        num_passes = max(plan.num_drafts, default=0)
        planning[bool(num_passes)].append((step.planned - plan.now) / max(1, num_passes))
        if not num_passes:
            durations.append(step.collected - step.planned)
        for drafted, num_ids in _verified(plan, result):
            num_accepted += num_ids - 1
            num_tried += min(drafted, num_ids)  # the first rejected draft is the last one tried
    if not lengths:
        return None
    cost = 0.0
    if recording.header.limits.has_draft_model and planning[0] and durations:
        cost = (median(planning[1]) - median(planning[0])) / max(1e-9, median(durations))
    acceptance = num_accepted / max(1, num_tried)
    return DraftSettings(acceptance, min(max(cost, 1e-6), 999.0), len(lengths) / num_rows, round(mean(lengths)))


def _verified(plan: StepPlan, result: StepResult) -> Iterator[tuple[int, int]]:
    """Yield the number of drafts and of ids of each row with drafts that has a result."""
    if not plan.num_drafts:
        return
    lengths = iter(result.num_token_ids or ())
    for flags, drafted in zip(plan.flags, plan.num_drafts, strict=True):
        num_ids = next(lengths, 1) if flags & ROW_SAMPLE else 0
        if drafted and num_ids:
            yield drafted, num_ids


def uses_device(plan: StepPlan) -> bool:
    """Return True if a simulation gives the plan device time. A plan that only reports finished requests has none."""
    return bool(plan.slots or plan.copies or plan.swap_outs or plan.host_loads)


def _merge_lives(requests: Iterable[RecordedRequest]) -> list[RecordedRequest]:
    """Merge the records of each request that continued in a later process of the engine; return one per request."""
    merged: dict[str, RecordedRequest] = {}
    for one in requests:
        first = merged.get(one.name)
        is_continued = first is not None and (one.is_resumed or first.end is None)
        if first is not None and is_continued:
            one = replace(
                one,
                arrival=first.arrival,
                first_scheduled=one.first_scheduled if first.first_scheduled is None else first.first_scheduled,
                first_token=one.first_token if first.first_token is None else first.first_token,
                num_preemptions=first.num_preemptions + one.num_preemptions,
                cached_tokens=first.cached_tokens,
            )
        merged[one.name if first is None or is_continued else f"{one.name} {one.segment_index}"] = one
    return list(merged.values())


def _outcomes(requests: list[RecordedRequest]) -> Outcomes:
    """Return the outcomes of the requests that ended, in order of ends."""
    tracker = RequestTracker()
    ended = [(one.end, index, one) for index, one in enumerate(requests) if one.end is not None]
    for end, index, one in sorted(ended, key=lambda entry: entry[:2]):
        entry = tracker.begin(index, recorded_arrival(one, one.output_tokens, one.arrival), one.arrival)
        entry.start = NEVER if one.first_scheduled is None else one.first_scheduled
        entry.first = NEVER if one.first_token is None else one.first_token
        entry.counts = [count - one.earlier_tokens for count in one.output_tokens]
        entry.cached = one.cached_tokens
        entry.preemptions = one.num_preemptions
        entry.replica = 0
        reason = FinishReason.ERROR if one.finish_reason is None else one.finish_reason
        tracker.end(entry, end, reason, sum(entry.counts))
    return tracker.outcomes
