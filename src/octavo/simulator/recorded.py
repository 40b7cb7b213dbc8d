"""Measures a recording, for comparison with simulations of the same requests.

Owns: measure, with or without a replay; how the recorded engine drafted; the check of a recording's policy.
Does not: read files, fit a cost model (costs), or open a recording as a workload (workloads).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from statistics import mean, median

from octavo.core.limits import Limits
from octavo.core.plan import ROW_SAMPLE, StepPlan, StepResult
from octavo.core.request import FinishReason
from octavo.core.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.observe.recording import RecordedRequest, RecordedStep, Recording, ReplayReport, replay
from octavo.observe.recording.columns import StepColumns
from octavo.observe.recording.reader import rare_collections
from octavo.observe.recording.requests import RequestCollector, read_plain
from octavo.plugins import find_policy
from octavo.simulator.costs.fitted import add_step, begin_of
from octavo.simulator.drafts import DraftSettings
from octavo.simulator.outcomes import NEVER, Outcomes, ReplicaTotals, RequestTracker, SimulatedRun
from octavo.simulator.workloads.traces import recorded_arrival

CHECKED_PLANS = 20_000  # plans that are replayed where the records tell the rest


def check_policy(name: str) -> None:
    """Check that a recording's policy is built in or an installed plug-in. Raises ConfigError with the remedy."""
    try:
        if not name.isidentifier():  # never import a module that a recording names
            raise ConfigError(f"{name!r} is no name of a policy")
        find_policy(name)
    except ConfigError as error:
        raise ConfigError(f"the engine ran under a policy that is not here: {error}; install its plug-in") from None


@dataclass(frozen=True, slots=True)
class MeasuredRecording:
    """What a recording says, for comparison with simulations of the same requests.

    `columns` are those of a fit, `drafts` how the engine drafted (None if it never did).
    """

    report: ReplayReport
    requests: list[RecordedRequest]
    run: SimulatedRun
    columns: StepColumns
    drafts: DraftSettings | None


def measure(
    recording: Recording, report: ReplayReport | None = None, pool: Executor | None = None
) -> MeasuredRecording:
    """Measure a recording, by its records where these tell all, else by a replay.

    The report is that of a whole replay, if one is given or needed. Else only the first CHECKED_PLANS plans are
    replayed and compared, in the pool if there is one, while the records are read here. If it is not equal, only the
    report is to be used. Raises replay's errors.
    """
    with rare_collections():
        columns = StepColumns()
        check = None if pool is None or report else pool.submit(replay, recording, max_plans=CHECKED_PLANS)
        plain = read_plain(recording, columns)
        if plain is None:
            return measure_by_replay(recording)
        if report is None:
            report = replay(recording, max_plans=CHECKED_PLANS) if check is None else check.result()
            if report.is_equal:
                left = plain.report.num_plans - report.num_equal
                report = replace(plain.report, num_equal=report.num_equal, num_left=left)
        totals, numbers = ReplicaTotals(), columns.by_name()
        totals.steps = plain.num_steps
        totals.computed_tokens = int(sum(numbers["decodes"]) + sum(numbers["chunk_tokens"]))
        totals.output_tokens = plain.report.num_tokens
        totals.preemptions = sum(one.num_preemptions for one in plain.requests)
        totals.queried_tokens, totals.hit_tokens = plain.queried_tokens, plain.hit_tokens
        totals.busy_s, totals.host_s = columns.busy_s, columns.host_s
        run = _run(recording, plain.requests, totals)
        return MeasuredRecording(report, plain.requests, run, columns, None)


def measure_by_replay(recording: Recording) -> MeasuredRecording:
    """Measure a recording by a replay. If it is not equal, the rest ends at the difference. Raises replay's errors."""
    totals, columns, drafts = ReplicaTotals(), StepColumns(), _Drafts(recording.header.limits)

    def count(scheduler: Scheduler) -> None:
        counted = scheduler.statistics()
        totals.steps += counted.num_steps
        totals.computed_tokens += counted.num_computed_tokens
        totals.output_tokens += counted.num_output_tokens
        totals.preemptions += counted.num_preemptions
        totals.queried_tokens += counted.prefix_queried_tokens
        totals.hit_tokens += counted.prefix_hit_tokens

    def add(step: RecordedStep) -> None:
        begin = begin_of(step)
        end = step.collected if uses_device(step.plan) else begin
        totals.busy_s += end - begin
        if step.next_plan is not None:
            totals.host_s += step.next_plan - end
        add_step(columns, step)
        drafts.add(step)

    collector = RequestCollector(count)
    report = replay(recording, collector.begin, add, collector.take)
    requests = collector.requests()
    return MeasuredRecording(report, requests, _run(recording, requests, totals), columns, drafts.settings())


def _run(recording: Recording, requests: list[RecordedRequest], totals: ReplicaTotals) -> SimulatedRun:
    """Return the recorded run; complete its totals."""
    merged = _merge_lives(requests)
    totals.requests = len(merged)
    totals.failures = len(recording.segments) - 1
    outcomes = _outcomes(merged)
    return SimulatedRun(outcomes, [totals], max(outcomes.ends, default=0.0))


class _Drafts:
    """How a recording's engine drafted, collected by step.

    The cost is the median planning time of steps with drafts above that of others, for each pass of a draft model, in
    median steps without drafts; lookups cost next to nothing.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_rows, self._num_tried, self._num_accepted = 0, 0, 0
        self._lengths: list[int] = []
        self._planning: tuple[list[float], list[float]] = ([], [])
        self._durations: list[float] = []

    def add(self, step: RecordedStep) -> None:
        """Add a step of an engine that could draft."""
        plan, result = step.plan, step.outcome
        if not self._limits.max_draft_tokens or not isinstance(result, StepResult):
            return
        decoding = [count for count, drafts in zip(plan.counts, plan.num_drafts or (0,) * len(plan.counts), strict=True)
                    if count == 1 or drafts]  # fmt: skip
        if not decoding or len(plan.slots) > self._limits.max_draft_rows:
            return
        self._num_rows += len(decoding)
        self._lengths += [count for count in plan.num_drafts if count]
        num_passes = max(plan.num_drafts, default=0)
        self._planning[bool(num_passes)].append((step.planned - plan.now) / max(1, num_passes))
        if not num_passes:
            self._durations.append(step.collected - step.planned)
        for drafted, num_ids in _verified(plan, result):
            self._num_accepted += num_ids - 1
            self._num_tried += min(drafted, num_ids)  # the first rejected draft is the last one tried

    def settings(self) -> DraftSettings | None:
        """Return the settings of a simulation; None if the engine never drafted."""
        if not self._lengths:
            return None
        cost = 0.0
        if self._limits.has_draft_model and self._planning[0] and self._durations:
            cost = (median(self._planning[1]) - median(self._planning[0])) / max(1e-9, median(self._durations))
        acceptance = self._num_accepted / max(1, self._num_tried)
        share = len(self._lengths) / self._num_rows
        return DraftSettings(acceptance, min(max(cost, 1e-6), 999.0), share, round(mean(self._lengths)))


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
