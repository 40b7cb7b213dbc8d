"""A recorded run in a simulation's terms, and the recorded durations as a cost model.

Owns: recorded_run, and as_recorded, by which a simulation reproduces a recording's times. Does not: read files or fit.
Invariant: as_recorded's times lie on a grid of 2 ** -20 s, so that sums of differences give the times themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from octavo.core.plan import StepPlan
from octavo.core.request import FinishReason
from octavo.core.scheduler import Scheduler
from octavo.core.tap import AdmitCall, PlanCall
from octavo.errors import ConfigError
from octavo.observe.recording import RecordedRequest, RecordedStep, Recording, arrivals, steps
from octavo.plugins import find_policy
from octavo.simulator.arrival import Arrival, choice_lengths
from octavo.simulator.cost_model import DecodeSeconds, StepShape
from octavo.simulator.outcomes import NEVER, Outcomes
from octavo.simulator.totals import ReplicaTotals, SimulatedRun

GRID = 2.0**20  # points in a second


def need_policy(name: str) -> None:
    """Check that a recording's policy is installed, plug-ins too. Raises ConfigError with the remedy."""
    try:
        if not name.isidentifier():  # a file is data: it does not name modules to import
            raise ConfigError(f"{name!r} is no policy's name")
        find_policy(name)
    except ConfigError as error:
        raise ConfigError(f"the engine ran under a policy that is not here: {error}; install its plug-in") from None


def recorded_run(recording: Recording) -> SimulatedRun:
    """Return a recording as a SimulatedRun of one replica. Raises what arrivals raises."""
    totals = ReplicaTotals()

    def count(scheduler: Scheduler) -> None:
        found = scheduler.statistics()
        totals.steps += found.num_steps
        totals.computed_tokens += found.num_computed_tokens
        totals.output_tokens += found.num_output_tokens
        totals.preemptions += found.num_preemptions
        totals.queried_tokens += found.prefix_queried_tokens
        totals.hit_tokens += found.prefix_hit_tokens

    requests = merged(arrivals(recording, count))
    totals.requests = len(requests)
    totals.failures = len(recording.segments) - 1
    for step in steps(recording):
        begun = step.plan.now if step.free_from is None else max(step.plan.now, step.free_from)
        end = step.collected if _uses_device(step.plan) else begun
        totals.busy_s += end - begun
        if step.next_plan is not None:
            totals.host_s += step.next_plan - end
    outcomes = _outcomes(requests)
    return SimulatedRun(outcomes, [totals], max(outcomes.ends, default=0.0))


def merged(requests: Iterable[RecordedRequest]) -> list[RecordedRequest]:
    """Return one entry for each request, merging those that continued in later processes of the engine."""
    found: dict[str, RecordedRequest] = {}
    for one in requests:
        first = found.get(one.name)
        if first is not None and (one.is_resumed or first.end is None):
            one = replace(
                one,
                arrival=first.arrival,
                first_scheduled=one.first_scheduled if first.first_scheduled is None else first.first_scheduled,
                first_token=one.first_token if first.first_token is None else first.first_token,
                num_preemptions=first.num_preemptions + one.num_preemptions,
                cached_tokens=first.cached_tokens,
            )
        found[one.name if first is None or one.is_resumed or first.end is None else f"{one.name} {one.life}"] = one
    return list(found.values())


def _outcomes(requests: list[RecordedRequest]) -> Outcomes:
    """Return the requests that ended, in the order of their ends."""
    out = Outcomes()
    ended = [(one.end, index, one) for index, one in enumerate(requests) if one.end is not None]
    for end, index, one in sorted(ended, key=lambda entry: entry[:2]):
        out.indices.append(index)
        out.arrivals.append(one.arrival)
        out.starts.append(NEVER if one.first_scheduled is None else one.first_scheduled)
        out.first_tokens.append(NEVER if one.first_token is None else one.first_token)
        out.ends.append(end)
        out.prompt_tokens.append(one.prompt_tokens)
        out.output_tokens.append(sum(one.output_tokens))
        out.longest.append(max(one.output_tokens))
        out.cached.append(one.cached_tokens)
        out.preemptions.append(one.num_preemptions)
        out.restarts.append(0)
        out.replicas.append(0)
        out.tenants.append(out.tenant(one.tenant))
        out.reasons.append(FinishReason.ERROR if one.finish_reason is None else one.finish_reason)
    return out


def _uses_device(plan: StepPlan) -> bool:
    """Return True if a simulation gives the plan device time; reporting finished requests is host work."""
    return bool(plan.slots or plan.copies or plan.swap_outs or plan.host_loads)


class RecordedCosts:
    """A CostModel of the recorded times, in the order of the recording. It can be used for one simulation."""

    name = "as recorded"
    decode_s: DecodeSeconds | None = None

    def __init__(self, recorded: Iterable[RecordedStep], origin: float) -> None:
        self._device: deque[float] = deque()
        self._host: deque[float] = deque()
        for step in recorded:
            plan = step.plan
            begun = snap(plan.now, origin)
            if step.free_from is not None:
                begun = max(begun, snap(step.free_from, origin))
            end = snap(step.collected, origin)
            after = end if step.next_plan is None else snap(step.next_plan, origin)
            if _uses_device(plan):
                self._device.append(end - begun)
                self._host.append(after - end)
            else:
                self._host.append(after - begun)

    def step_s(self, shape: StepShape) -> float:
        """Return seconds on the device of the next step. Raises ConfigError after the last."""
        del shape
        return self._next(self._device)

    def host_s(self, shape: StepShape) -> float:
        """Return seconds of the host after it."""
        del shape
        return self._next(self._host)

    @staticmethod
    def _next(times: deque[float]) -> float:
        if not times:
            raise ConfigError("the simulation makes more steps than were recorded: it decides otherwise; fit instead")
        return times.popleft()


def snap(time: float, origin: float) -> float:
    """Return seconds since `origin`, rounded to the grid."""
    return round((time - origin) * GRID) / GRID


def as_recorded(recording: Recording) -> tuple[list[Arrival], RecordedCosts, float]:
    """Return arrivals and durations that reproduce the recorded times, and their origin on the engine's clock.

    The simulation must have the recorded limits and depth. A request arrives when the first plan that knows it begins.
    Only a recording of one life without failed steps, and of requests that ended by their lengths, is reproduced
    exactly.
    """
    segment = recording.segments[0]
    turns: list[float] = []
    waiting = 0
    for recorded in segment.calls():
        call = recorded.call
        if isinstance(call, AdmitCall):
            waiting += 1
        elif isinstance(call, PlanCall) and waiting:
            turns += [call.now] * waiting
            waiting = 0
    origin = turns[0] if turns else segment.header.clock
    found = [
        Arrival(
            snap(turn, origin),
            one.prompt_tokens,
            max(1, *one.output_tokens),
            one.tenant,
            priority=one.priority,
            keys=one.keys,
            key_tokens=one.key_tokens,
            output_keys=one.output_keys,
            choices=choice_lengths(one.output_tokens),
            ttft_objective=one.ttft_objective,
            tpot_objective=one.tpot_objective,
        )
        for turn, one in zip(turns, sorted(arrivals(recording), key=lambda one: one.taken), strict=False)
    ]
    return found, RecordedCosts(steps(recording), origin), origin
