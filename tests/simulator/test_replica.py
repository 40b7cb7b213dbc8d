"""One simulated engine against the loop that serves: equal plans at equal times."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from tests.core.random_config import BUILT_IN
from tests.simulator.fakes import ConstantCosts, Digests, LinearCosts, columns, limits, workload

from octavo.core.plan import Events, StepFailure, StepPlan, StepResult, WaitReason
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.engine.loop import EngineLoop
from octavo.simulator.arrival import Arrival, make_request
from octavo.simulator.cost_model import CostModel, shape_of
from octavo.simulator.outcomes import Samples
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup


class Clock:
    """Stands still until the executor or a wait moves it; a wait ends at the next arrival at the latest."""

    def __init__(self, arrivals: list[Arrival]) -> None:
        self.at = 0.0
        self.coming = deque(enumerate(arrivals))

    def now(self) -> float:
        return self.at

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        times = [time for time in (until, self.coming[0][1].time if self.coming else None) if time is not None]
        self.at = max(self.at, min(times)) if times else self.at


class Device:
    """An executor that knows only durations: a step begins when the one in front of it has ended."""

    def __init__(self, clock: Clock, costs: CostModel) -> None:
        self._clock, self._costs, self._free_at = clock, costs, 0.0

    def submit(self, plan: StepPlan) -> float:
        step_s = self._costs.step_s(shape_of(plan)) if plan.slots else 0.0
        self._free_at = max(self._clock.at, self._free_at) + step_s
        return self._free_at

    def collect(self, ticket: float) -> StepResult:
        self._clock.at = max(self._clock.at, ticket)
        return StepResult(None)

    def supply(self, ticket: float, masks: object) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


class Host(Digests):
    """Keeps digests; what the host does behind a commit takes its time."""

    def __init__(self, clock: Clock, costs: CostModel) -> None:
        super().__init__()
        self._clock, self._costs = clock, costs

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        super().stepped(plan, outcome, events)
        self._clock.at += self._costs.host_s(shape_of(plan))


def serve(arrivals: list[Arrival], setup: Setup) -> Digests:
    """The same workload through the real loop, turn by turn."""
    clock = Clock(arrivals)
    host = Host(clock, setup.costs)
    scheduler = Scheduler(setup.limits)
    loop = EngineLoop(scheduler, Device(clock, setup.costs), clock=clock, depth=setup.depth)  # type: ignore[arg-type]
    loop.watch(host)
    replies: list[Any] = []
    while clock.coming or scheduler.has_work:
        while clock.coming and clock.coming[0][1].time <= clock.at:
            index, arrival = clock.coming.popleft()
            request: Request = make_request(f"r{index}", arrival, arrival.time, 0, setup.limits)
            loop.submit(request, replies.append)
        loop._turn()
    loop.stop()
    return host


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", BUILT_IN)
@pytest.mark.parametrize("costs", [ConstantCosts(), ConstantCosts(0.013, 0.002), LinearCosts()], ids=["s", "sh", "l"])
def test_the_simulator_makes_the_plans_of_the_real_loop_at_its_times(policy: str, depth: int, costs: CostModel) -> None:
    arrivals = workload(60, rate=40.0, seed=depth)
    sizes = limits(policy=policy, num_blocks=(48,))
    sinks: list[Digests] = []

    def make_sink(scheduler: Scheduler) -> Digests:
        sinks.append(Digests())
        return sinks[-1]

    setup = Setup(sizes, costs, depth=depth, make_sink=make_sink)
    run = simulate(arrivals, setup)
    real = serve(arrivals, setup)
    simulated = sinks[0]
    assert simulated.admissions == real.admissions
    assert simulated.decisions == real.decisions
    assert simulated.steps == real.steps[: len(simulated.steps)]
    assert len(real.steps) - len(simulated.steps) <= 1  # the last freed slots are told to nobody
    assert any(event.kind.name == "PREEMPTED" for event in real.decisions)
    assert len(run.outcomes) == len(arrivals)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", BUILT_IN)
def test_steps_forwarded_together_lead_to_the_same_outcome(policy: str, depth: int) -> None:
    for seed, rate in enumerate((5.0, 40.0)):
        arrivals = workload(50, rate=rate, seed=seed)
        sizes = limits(policy=policy, num_blocks=(60,))
        fast, slow = (
            simulate(arrivals, Setup(sizes, LinearCosts(), depth=depth, fast_forward=is_fast, sample_s=0.5))
            for is_fast in (True, False)
        )
        assert columns(fast.outcomes) == columns(slow.outcomes)
        totals = fast.replicas[0]
        assert totals.forwarded_steps > 0 and slow.replicas[0].forwarded_steps == 0
        totals.forwarded_steps = 0
        assert totals == slow.replicas[0]
        assert [list(getattr(fast.samples, name)) for name in vars(fast.samples)] == [
            list(getattr(slow.samples, name)) for name in vars(slow.samples)
        ]


def without_numbers(plan: StepPlan) -> StepPlan:
    """The plan without numbers of blocks, which depend on whether other blocks are only counted."""
    return replace(plan, edits=array("i"), copies=array("i", bytes(4 * len(plan.copies))))


class Unnumbered(Digests):
    """Digests of plans without numbers of blocks."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        super().stepped(without_numbers(plan), outcome, events)


def test_the_steps_that_are_planned_by_themselves_have_the_digests_of_the_slow_way() -> None:
    arrivals, setup = workload(120, rate=10.0), Setup(limits(), LinearCosts())
    slow = Unnumbered()
    simulate(arrivals, Setup(limits(), LinearCosts(), make_sink=lambda _: slow))
    from octavo.simulator import replica

    made: list[tuple[int, bytes, float]] = []
    launch = replica.Replica._launch

    def note(self: replica.Replica, flight: replica.StepInFlight, now: float) -> None:
        plan, rows = flight.plan, self.scheduler._rows
        if flight.beside is not None:
            assert rows is not None
            plan = rows._whole(plan)
        made.append((plan.step, without_numbers(plan).digest(), now))
        launch(self, flight, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica.Replica, "_launch", note)
        run = simulate(arrivals, setup)
    by_step = {step: (digest, planned) for step, digest, planned, _ in slow.steps}
    assert all(by_step[step] == (digest, planned) for step, digest, planned in made)
    assert 0 < len(made) < len(by_step) / 2
    assert len(made) + run.replicas[0].forwarded_steps == len(by_step)


def test_samples_say_what_bounds_a_step_and_what_the_first_request_waits_for() -> None:
    arrivals = [Arrival(0.0, 10, 60) for _ in range(5)]
    run = simulate(arrivals, Setup(limits(max_sequences=2), ConstantCosts(), sample_s=0.1))
    samples, totals = run.samples, run.replicas[0]
    assert samples.part_names == ("device",) and len(samples.parts) == len(samples.waiting) == len(samples)
    assert samples.waiting[0] == 3 and samples.reasons[0] == WaitReason.SEQUENCE_CAP and samples.rows[0] == 2
    assert samples.waiting[-1] == 0 and samples.reasons[-1] == -1 and samples.rows[-1] == 1
    assert list(samples.parts) == pytest.approx([0.013] * len(samples)) and {*samples.compute} == {-1.0}
    assert totals.rows == sum(run.outcomes.output_tokens) and totals.max_sequences == 2
    assert totals.steps_at_max_sequences * 2 + (totals.steps - totals.steps_at_max_sequences) == totals.rows
    assert totals.steps_at_max_batch_tokens == 0 < totals.steps_at_max_sequences
    tight = simulate(arrivals[:1], Setup(limits(max_batch_tokens=10), ConstantCosts()))
    assert tight.replicas[0].steps_at_max_batch_tokens == 1


def test_a_long_run_is_sampled_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(limits(), ConstantCosts(), sample_s=0.1)
    many = simulate([Arrival(0.0, 4, 100)] * 20, setup)
    monkeypatch.setattr(Samples, "MANY", 5)
    few = simulate([Arrival(0.0, 4, 100)] * 20, setup)
    assert 5 < len(few.samples) < len(many.samples) / 2 and few.duration == many.duration


def test_a_request_that_cannot_be_served_ends_with_an_error() -> None:
    arrivals = [Arrival(0.0, 500, 10), Arrival(0.1, 10, 10), Arrival(0.11, 10, 10), Arrival(0.12, 10, 10)]
    run = simulate(arrivals, Setup(limits(max_sequences=1), ConstantCosts(), max_waiting=1))
    by_index = dict(zip(run.outcomes.indices, run.outcomes.reasons, strict=True))
    assert [by_index[index] for index in range(4)] == [4, 1, 1, 4]
    assert run.replicas[0].rejected == 2
