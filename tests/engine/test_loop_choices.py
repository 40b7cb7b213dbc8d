"""The step loop with several choices per request: ends, cancels, failures and pauses at any depth."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.engine.fakes import GatedExecutor, Harness, Recorder, expected, make_limits, make_request

from octavo.core.plan import EventKind, StepPlan
from octavo.core.request import FinishReason, Request, SamplingParams

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def lazy(depth: int) -> GatedExecutor:
    return GatedExecutor(lazy=depth > 1)


def several(name: str, n: int, max_tokens: int = 10, **options: Any) -> Request:
    params = SamplingParams(temperature=1.0, n=n, max_tokens=max_tokens, seed=sum(name.encode()), ignore_eos=True)
    return make_request(name, params=params, **options)


def check_texts(harness: Harness, request: Request) -> None:
    for choice in range(request.params.n):
        assert harness.inbox(request.request_id, choice).ids == expected(request, choice), (request.request_id, choice)


@DEPTHS
def test_S17_choices_are_the_oracles_under_pressure_at_any_depth(depth: int) -> None:
    """A pool too small for all: forks, preemptions in flight, resumption of several sequences."""
    executor = lazy(depth)
    executor.gate.clear()
    with Harness(executor, limits=make_limits(num_blocks=(44,), max_sequences=12), depth=depth) as harness:
        requests = [several(f"r{i}", 1 + i % 4, max_tokens=24 + i, length=5 + i) for i in range(8)]
        for request in requests:
            harness.post(request)
        executor.gate.set()
        harness.ends()
        for request in requests:
            check_texts(harness, request)
        assert harness.scheduler.statistics().num_preemptions > 0


@DEPTHS
def test_L03_one_choice_is_ended_in_flight_and_the_others_go_on(depth: int) -> None:
    executor = lazy(depth)
    executor.shut_after = 4
    with Harness(executor, depth=depth) as harness:
        request = several("a", 3, max_tokens=20)
        harness.post(request)
        assert executor.shut.wait(20)
        harness.loop.cancel(["a"], FinishReason.STOP, 1)
        harness.loop.cancel(["a", "unknown"], FinishReason.STOP, 1)
        harness.loop.cancel(["a"], FinishReason.STOP, 7)
        executor.gate.set()
        assert harness.end("a").finish_reason is FinishReason.LENGTH
        (end,) = harness.inbox("a", 1).choice_ends
        assert end.finish_reason is FinishReason.STOP
        got = harness.inbox("a", 1).ids
        assert len(got) < 20 and got == expected(request, 1)[: len(got)]
        for choice in (0, 2):
            assert harness.inbox("a", choice).ids == expected(request, choice)


@DEPTHS
def test_L03_ending_every_choice_ends_the_request(depth: int) -> None:
    executor = lazy(depth)
    executor.shut_after = 3
    with Harness(executor, depth=depth) as harness:
        harness.post(several("a", 3, max_tokens=50))
        assert executor.shut.wait(20)
        for choice in (2, 0, 1):
            harness.loop.cancel(["a"], FinishReason.STOP, choice)
        executor.gate.set()
        assert harness.end("a").finish_reason is FinishReason.STOP
        assert [len(harness.inbox("a", choice).choice_ends) for choice in range(3)] == [1, 0, 1]


@DEPTHS
def test_L03_choices_and_requests_are_cancelled_at_any_moment(depth: int) -> None:
    """A storm: nothing leaks, nobody hears after an end, whatever came is a prefix of the truth."""
    rng = random.Random(depth)
    with Harness(lazy(depth), limits=make_limits(num_blocks=(40,), max_sequences=10), depth=depth) as harness:
        requests = [several(f"r{i}", rng.randrange(1, 5), max_tokens=rng.randrange(4, 30)) for i in range(30)]
        for request in requests:
            harness.post(request)
            for _ in range(2):
                target = rng.choice(requests)
                choice = rng.choice([None, *range(target.params.n)])
                harness.loop.cancel([target.request_id], FinishReason.CANCELLED, choice)
        harness.ends()
        for request in requests:
            for choice in range(request.params.n):
                got = harness.inbox(request.request_id, choice).ids
                assert got == expected(request, choice)[: len(got)]


@DEPTHS
def test_S19_pause_keeps_running_choices_and_resume_lets_the_others_in(depth: int) -> None:
    executor = lazy(depth)
    executor.shut_after = 3
    with Harness(executor, limits=make_limits(max_sequences=3), depth=depth) as harness:
        running_one, waiting_one = several("a", 3), several("b", 2)
        harness.post(running_one)
        assert executor.shut.wait(20)
        harness.post(waiting_one)
        harness.loop.control("pause", "", lambda _: None)
        executor.gate.set()
        harness.end("a")
        assert harness.ask(harness.loop.control, "statistics", "")["scheduler"]["num_waiting"] == 1
        assert not harness.inbox("b").ids
        harness.ask(harness.loop.control, "resume", "")
        harness.end("b")
        check_texts(harness, running_one)
        check_texts(harness, waiting_one)


@DEPTHS
def test_S19_cancel_all_ends_running_and_waiting_and_the_engine_goes_on(depth: int) -> None:
    executor = lazy(depth)
    executor.shut_after = 3
    with Harness(executor, limits=make_limits(max_sequences=4), depth=depth) as harness:
        names = [f"r{i}" for i in range(5)]
        for name in names:
            harness.post(several(name, 2, max_tokens=40))
        assert executor.shut.wait(20)
        answers: list[object] = []
        harness.loop.control("cancel_all", "", answers.append)
        executor.gate.set()
        assert {harness.end(name).finish_reason for name in names} == {FinishReason.CANCELLED}
        assert answers == [5]
        again = several("again", 2)
        harness.submit(again)
        harness.end("again")
        check_texts(harness, again)
        assert harness.ask(harness.loop.control, "cancel_all", "") == 0


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("where", ["submit", "collect"])
def test_L05_forked_choices_survive_failing_steps(where: str, depth: int) -> None:
    """Every third step fails; slots of forked choices are known to their request, and sent again in full."""

    class Flaky(GatedExecutor):
        num_calls = 0

        def is_flaky(self, here: str) -> bool:
            self.num_calls += here == where
            return here == where and self.num_calls % 3 == 0

        def submit(self, plan: StepPlan) -> Any:
            if self.is_flaky("submit"):
                raise self.refuse(plan, MemoryError("a passing fault"))
            return super().submit(plan)

        def is_poisoned(self, plan: StepPlan) -> bool:
            return self.is_flaky("collect")

    with Harness(Flaky(lazy=depth > 1), depth=depth) as harness:
        requests = [several(f"r{i}", 1 + i % 3) for i in range(6)]
        harness.submit_all(requests)
        harness.ends()
        for request in requests:
            check_texts(harness, request)
        assert harness.scheduler.statistics().num_failed_steps > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_L05_a_culprit_of_several_choices_ends_alone(depth: int) -> None:
    executor = lazy(depth)
    executor.gate.clear()
    executor.fail = lambda plan, owners: RuntimeError("device error") if "r2" in owners else None
    with Harness(executor, depth=depth) as harness:
        requests = [several(f"r{i}", 1 + i % 3) for i in range(6)]
        for request in requests:
            harness.post(request)
        executor.gate.set()
        ends = harness.ends()
        assert [name for name, end in ends.items() if end.finish_reason is FinishReason.ERROR] == ["r2"]
        for request in requests:
            if request.request_id != "r2":
                check_texts(harness, request)


def test_L05_a_beam_search_on_trial_is_cleared_by_steps_that_succeed() -> None:
    """It gives no token before its end; the others need not wait for that."""
    executor = GatedExecutor()
    executor.gate.clear()
    failures = [RuntimeError("once")]
    executor.fail = lambda plan, owners: failures.pop() if failures and len(plan.slots) > 2 else None
    recorder, harness = Recorder(), Harness(executor)
    harness.loop.watch(recorder)
    with harness:
        beams = make_request("beams", params=SamplingParams(beam_width=3, n=1, max_tokens=40, seed=1))
        plain = make_request("plain", max_tokens=4)
        harness.post(beams)
        harness.post(plain)
        executor.gate.set()
        harness.ends()
        assert harness.inbox("plain").ids == expected(plain)
    order = [event.request_id for event in recorder.decisions if event.kind == EventKind.FINISHED]
    assert order == ["plain", "beams"], "the beam search ran alone to its end"
