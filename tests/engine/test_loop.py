"""The step loop: from any thread, in any state, everyone is answered once."""

import gc
import random
import threading
import weakref
from array import array

import pytest
from tests.engine.fakes import (
    GatedExecutor,
    Harness,
    Recorder,
    expected,
    is_cancelled,
    make_limits,
    make_request,
)
from tests.engine.manual_clock import ManualClock

from octavo.core.plan import EventKind, StepPlan, StepResult
from octavo.core.request import FinishReason
from octavo.engine.client import Accepted
from octavo.engine.loop import EngineLoop
from octavo.errors import AdmissionError, DuplicateRequestError, EngineDeadError, QueueFullError


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_S17_tokens_are_the_oracles_at_any_depth(depth: int) -> None:
    with Harness(GatedExecutor(lazy=depth > 1), depth=depth) as harness:
        requests = [make_request(f"r{i}", length=3 + i, max_tokens=1 + i) for i in range(12)]
        harness.submit_all(requests)
        harness.ends()
        for request in requests:
            assert harness.inbox(request.request_id).ids == expected(request)
            assert harness.end(request.request_id).finish_reason is FinishReason.LENGTH


def test_S17_depth_tickets_are_in_flight() -> None:
    executor = GatedExecutor(lazy=True)
    executor.gate.clear()
    with Harness(executor, depth=3) as harness:
        harness.post(make_request("a", max_tokens=10))
        assert executor.reached.wait(20)
        assert executor.num_submits == 3
        executor.gate.set()
        harness.end("a")


def test_L03_cancel_from_any_thread_in_any_state() -> None:
    """Waiting, running, in flight, finished, unknown, twice: one end each, nothing leaks."""
    rng = random.Random(1)
    with Harness(GatedExecutor(lazy=True), limits=make_limits(max_sequences=4), depth=2) as harness:
        requests = [make_request(f"r{i}", max_tokens=40) for i in range(40)]
        harness.submit_all(requests)
        ids = [request.request_id for request in requests] + ["unknown"]

        def cancel_some(seed: int) -> None:
            mine = random.Random(seed)
            for _ in range(30):
                harness.loop.cancel(mine.sample(ids, 3))

        threads = [threading.Thread(target=cancel_some, args=(rng.random(),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        harness.loop.cancel(ids)
        ends = harness.ends()
        assert {end.finish_reason for end in ends.values()} <= {FinishReason.CANCELLED, FinishReason.LENGTH}
        for request in requests:
            got = harness.inbox(request.request_id).ids
            assert got == expected(request)[: len(got)]


@pytest.mark.parametrize("state", ["waiting", "in flight"])
def test_bug_9_cancelled_request_answers(state: str) -> None:
    executor = GatedExecutor(lazy=True)
    executor.gate.clear()
    with Harness(executor, limits=make_limits(max_sequences=1), depth=2) as harness:
        harness.submit(make_request("first", max_tokens=20))
        assert executor.reached.wait(20)
        harness.post(make_request("second", max_tokens=20))
        target = "first" if state == "in flight" else "second"
        harness.loop.cancel([target], FinishReason.CANCELLED)
        executor.gate.set()
        assert is_cancelled(harness.end(target))
        other = {"first": "second", "second": "first"}[target]
        assert harness.end(other).finish_reason is FinishReason.LENGTH


def test_L03_the_reason_given_is_the_reason_told() -> None:
    with Harness() as harness:
        harness.executor.gate.clear()
        harness.post(make_request("a", max_tokens=50))
        harness.loop.cancel(["a"], FinishReason.STOP)
        harness.executor.gate.set()
        assert harness.end("a").finish_reason is FinishReason.STOP


def test_L04_bug_32_stop_answers_everyone_and_joins() -> None:
    executor = GatedExecutor(lazy=True)
    executor.gate.clear()
    with Harness(executor, limits=make_limits(max_sequences=2), depth=2) as harness:
        answers: dict[str, list[object]] = {f"r{i}": [] for i in range(6)}
        for name, answer in answers.items():
            harness.loop.submit(make_request(name, max_tokens=60), answer.append)
        assert executor.reached.wait(20)
        harness.loop.stop()
        executor.gate.set()
        assert harness.loop.join(20)
        # Whoever was taken is ended; whoever was still before the door is told so. Nobody hears nothing, or twice.
        assert all(
            len(answer) == 1 and isinstance(answer[0], Accepted | EngineDeadError) for answer in answers.values()
        )
        taken = [name for name, answer in answers.items() if isinstance(answer[0], Accepted)]
        assert "r0" in taken
        for name in taken:
            end = harness.end(name)
            assert is_cancelled(end) and end.message
        assert executor.is_closed


def test_L04_start_stop_join_are_idempotent() -> None:
    with Harness() as harness:
        harness.loop.start()
        harness.loop.start()
        harness.submit(make_request("a"))
        harness.end("a")
        for _ in range(2):
            harness.loop.stop()
            assert harness.loop.join(20)
        assert isinstance(harness.ask(harness.loop.submit, make_request("b")), EngineDeadError)
        assert isinstance(harness.ask(harness.loop.control, "statistics", ""), EngineDeadError)
        harness.loop.cancel(["a"])
        with pytest.raises(EngineDeadError, match="stopped"):
            harness.loop.start()


def test_L04_stop_without_start_answers_too() -> None:
    harness = Harness()
    assert not harness.loop.join(0)
    answers: list[object] = []
    harness.loop.submit(make_request("a"), answers.append)
    harness.loop.stop()
    harness.loop.stop()
    assert harness.loop.join(0)
    assert isinstance(answers[0], EngineDeadError)


def test_L04_bug_12_bug_36_idle_takes_no_turns() -> None:
    with Harness() as harness:
        harness.submit(make_request("a"))
        harness.end("a")
        before = harness.ask(harness.loop.control, "statistics", "")["loop"]["turns"]
        threading.Event().wait(0.3)  # a loop that polled even each 10 ms would turn 30 times
        assert harness.ask(harness.loop.control, "statistics", "")["loop"]["turns"] <= before + 2


def test_S21_queue_timeout_wakes_an_idle_loop_once() -> None:
    clock = ManualClock(100.0)
    with Harness(limits=make_limits(max_sequences=1), clock=clock) as harness:
        harness.ask(harness.loop.control, "pause", "")
        harness.submit(make_request("a", arrival=100.0, queue_timeout=5.0))
        harness.submit(make_request("b", arrival=100.0, deadline=107.0))
        turns = harness.ask(harness.loop.control, "statistics", "")["loop"]["turns"]
        clock.advance(6.0)
        assert harness.end("a").finish_reason is FinishReason.TIMEOUT
        assert not harness.inbox("b").ends
        clock.advance(6.0)
        end = harness.end("b")
        assert end.finish_reason is FinishReason.TIMEOUT and "deadline" in (end.message or "")
        assert harness.ask(harness.loop.control, "statistics", "")["loop"]["turns"] <= turns + 6


def test_S19_pause_resume_drain() -> None:
    with Harness() as harness:
        assert harness.ask(harness.loop.control, "pause", "") is True
        harness.submit(make_request("a"))
        assert harness.ask(harness.loop.control, "statistics", "")["scheduler"]["num_waiting"] == 1
        assert harness.ask(harness.loop.control, "explain", "a")["reason"] == "paused"
        assert harness.ask(harness.loop.control, "drain", "") is True
        assert isinstance(harness.submit(make_request("b")), QueueFullError)
        harness.ask(harness.loop.control, "resume", "")
        assert harness.end("a").finish_reason is FinishReason.LENGTH
        assert isinstance(harness.submit(make_request("b")), Accepted)
        assert isinstance(harness.ask(harness.loop.control, "dance", ""), Exception)


def test_L06_duplicate_ids_are_refused() -> None:
    with Harness() as harness:
        harness.executor.gate.clear()
        answers: list[object] = []
        for _ in range(2):
            harness.loop.submit(make_request("a"), answers.append)
        harness.executor.gate.set()
        harness.end("a")
        assert isinstance(answers[0], Accepted) and isinstance(answers[1], DuplicateRequestError)
        assert isinstance(harness.submit(make_request("b", length=500)), AdmissionError)


def test_the_queue_has_a_bound() -> None:
    with Harness(max_waiting=2) as harness:
        harness.ask(harness.loop.control, "pause", "")
        answers = [harness.submit(make_request(f"r{i}")) for i in range(3)]
        assert isinstance(answers[2], QueueFullError) and "2 requests" in str(answers[2])
        harness.ask(harness.loop.control, "resume", "")


def test_S20_every_decision_reaches_the_sinks_once() -> None:
    recorder, broken = Recorder(), Recorder()
    broken.decided = lambda _: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    harness = Harness(limits=make_limits(max_sequences=2))
    harness.loop.watch(broken)
    harness.loop.watch(recorder)
    with harness:
        harness.submit_all([make_request(f"r{i}") for i in range(6)])
        harness.ends()
    assert recorder.admissions == [f"r{i}" for i in range(6)]
    for kind in (EventKind.ADMITTED, EventKind.FINISHED):
        assert sorted(e.request_id for e in recorder.decisions if e.kind == kind) == [f"r{i}" for i in range(6)]
    assert recorder.num_steps > 0 and broken.num_steps <= 1  # switched off at its first failure


def test_step_times_are_split_and_bounded() -> None:
    with Harness() as harness:
        harness.submit_all([make_request(f"r{i}", max_tokens=9) for i in range(3)])
        harness.ends()
        steps = harness.ask(harness.loop.control, "statistics", "")["steps"]
        assert steps["num_steps"] >= 9
        assert set(steps["total_s"]) == {"schedule", "prepare", "forward", "sample", "emit", "step"}
        assert steps["total_s"]["schedule"] > 0


# --- failing steps


def poisoned(names: set[str]):  # type: ignore[no-untyped-def]
    def fail(plan: StepPlan, owners: list[str]) -> Exception | None:
        return RuntimeError("device error") if names & set(owners) else None

    return fail


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("culprits", [{"r7"}, {"r0"}, {"r31"}, {"r3", "r20"}])
def test_L05_bug_6_a_failing_step_bisects_to_the_culprit(culprits: set[str], depth: int) -> None:
    """32 requests; whoever makes steps fail ends with an error, the others with their own text."""
    executor = GatedExecutor(lazy=depth > 1)
    executor.gate.clear()
    executor.fail = poisoned(culprits)
    with Harness(executor, depth=depth) as harness:
        requests = [make_request(f"r{i}", max_tokens=8) for i in range(32)]
        for request in requests:
            harness.post(request)
        executor.gate.set()
        ends = harness.ends()
        for request in requests:
            name = request.request_id
            if name in culprits:
                assert ends[name].finish_reason is FinishReason.ERROR
                assert "device error" in (ends[name].message or "")
            else:
                assert ends[name].finish_reason is FinishReason.LENGTH
                assert harness.inbox(name).ids == expected(request)
        assert harness.scheduler.statistics().num_failed_steps <= 8 * len(culprits) + 4


def test_L05_a_culprit_that_fails_late_is_found() -> None:
    """It fails at its fifth token, long after it was admitted; tokens before that are kept."""

    def fail(plan: StepPlan, owners: list[str]) -> Exception | None:
        ends = {owner: start + count for owner, start, count in zip(owners, plan.starts, plan.counts, strict=True)}
        return MemoryError("no room") if ends.get("r5", 0) >= 10 else None

    executor = GatedExecutor()
    executor.fail = fail
    with Harness(executor) as harness:
        requests = [make_request(f"r{i}", length=6, max_tokens=20) for i in range(16)]
        harness.submit_all(requests)
        ends = harness.ends()
        assert [name for name, end in ends.items() if end.finish_reason is FinishReason.ERROR] == ["r5"]
        assert harness.inbox("r5").ids == expected(requests[5])[:4]
        assert all(harness.inbox(r.request_id).ids == expected(r) for r in requests if r.request_id != "r5")


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("where", ["submit", "collect"])
def test_L05_a_failure_that_passes_costs_nobody_anything(where: str, depth: int) -> None:
    """Every third step fails, whoever is in it: never twice in a row."""

    class Flaky(GatedExecutor):
        num_calls = 0

        def is_flaky(self, here: str) -> bool:
            self.num_calls += here == where
            return here == where and self.num_calls % 3 == 0

        def submit(self, plan):  # type: ignore[no-untyped-def]
            if self.is_flaky("submit"):
                raise self.refuse(plan, MemoryError("a passing fault"))
            return super().submit(plan)

        def is_poisoned(self, plan: StepPlan) -> bool:
            return self.is_flaky("collect")

    with Harness(Flaky(lazy=depth > 1), depth=depth) as harness:
        requests = [make_request(f"r{i}", max_tokens=10) for i in range(10)]
        harness.submit_all(requests)
        harness.ends()
        assert all(harness.inbox(r.request_id).ids == expected(r) for r in requests)
        assert harness.scheduler.statistics().num_failed_steps > 0


def test_row_19_steps_without_memory_are_halved_and_grow_again() -> None:
    """Steps of more than 20 tokens fail: everybody says what they should, and the limit is there to be seen."""

    def fail(plan: StepPlan, owners: list[str]) -> Exception | None:
        return MemoryError("no room") if plan.num_query_tokens > 20 else None

    executor = GatedExecutor()
    executor.fail = fail
    with Harness(executor) as harness:
        assert harness.ask(harness.loop.control, "statistics", "")["loop"]["max_step_tokens"] is None
        requests = [make_request(f"r{i}", length=30, max_tokens=20) for i in range(8)]
        harness.submit_all(requests)
        harness.ends()
        assert all(harness.inbox(r.request_id).ids == expected(r) for r in requests)
        assert harness.scheduler.statistics().num_failed_steps <= 12
        executor.fail = None
        for turn in range(8):  # each failure before doubled the steps that it takes
            harness.submit_all([make_request(f"s{turn}-{i}", max_tokens=100) for i in range(8)])
            harness.ends()
        assert harness.ask(harness.loop.control, "statistics", "")["loop"]["max_step_tokens"] is None


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_row_19_the_memory_of_a_failed_step_is_free_before_the_next_plan(where: str) -> None:
    """Without the garbage collector: nothing but the error held the frames of the step, and nothing keeps the error."""

    class Memory:
        pass

    class Short(GatedExecutor):
        held: weakref.ref[Memory] | None = None
        was_free: bool | None = None

        def run_out(self) -> None:
            memory = Memory()
            self.held = weakref.ref(memory)
            raise MemoryError("no room")

        def submit(self, plan):  # type: ignore[no-untyped-def]
            if self.held is not None and self.was_free is None:
                self.was_free = self.held() is None
            if self.held is None and where == "submit":
                self.refuse(plan, MemoryError())
                self.run_out()
            return super().submit(plan)

        def collect(self, ticket):  # type: ignore[no-untyped-def]
            result = super().collect(ticket)
            if self.held is None:
                self.run_out()
            return result

    executor = Short()
    gc.collect()
    gc.disable()
    try:
        with Harness(executor) as harness:
            request = make_request("a", max_tokens=4)
            harness.submit_all([request])
            harness.ends()
            assert harness.inbox("a").ids == expected(request)
    finally:
        gc.enable()
    assert executor.was_free is True


def test_bug_26_bug_33_a_bad_row_ends_alone() -> None:
    class BadRow(GatedExecutor):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            result.errors = tuple(
                (i, "not finite") for i, slot in enumerate(plan.slots) if self.slots[slot].request_id == "r2"
            )
            return result

    with Harness(BadRow()) as harness:
        requests = [make_request(f"r{i}") for i in range(5)]
        harness.submit_all(requests)
        ends = harness.ends()
        assert ends["r2"].finish_reason is FinishReason.ERROR and "not finite" in (ends["r2"].message or "")
        assert all(harness.inbox(r.request_id).ids == expected(r) for r in requests if r.request_id != "r2")


@pytest.mark.parametrize("error", [EngineDeadError("the device is gone"), RuntimeError("every step fails")])
def test_a_fatal_executor_ends_everyone_with_an_error(error: Exception) -> None:
    executor = GatedExecutor()
    executor.fail = lambda plan, owners: error
    with Harness(executor, limits=make_limits(max_sequences=8)) as harness:
        requests = [make_request(f"r{i}") for i in range(100)]
        answers: list[object] = []
        for request in requests:
            harness.loop.submit(request, answers.append)
        assert harness.loop.join(20)
        assert harness.loop.failure is not None and str(error) in harness.loop.failure
        taken = [answer.request_id for answer in answers if isinstance(answer, Accepted)]
        assert len(answers) == len(requests) and taken
        assert all(harness.end(name).finish_reason is FinishReason.ERROR for name in taken)
        assert isinstance(harness.ask(harness.loop.submit, make_request("x")), EngineDeadError)
        assert executor.is_closed


@pytest.mark.parametrize("stops", [False, True])
def test_a_receiver_that_fails_to_the_last_keeps_nobody_from_being_answered(stops: bool) -> None:
    harness, answers, told = Harness(), [], threading.Event()
    entered = threading.Event()

    def receive(_: object) -> None:
        entered.set()
        raise RuntimeError("the event loop is closed")

    def fail(_: object) -> None:
        raise RuntimeError("whoever asked is gone")

    harness.loop.attach(receive, told.set)
    harness.executor.gate.clear()
    harness.loop.submit(make_request("a", max_tokens=50), answers.append)
    harness.loop.start()
    assert harness.executor.reached.wait(20)
    harness.loop.submit(make_request("b"), fail)
    harness.loop.submit(make_request("c"), answers.append)
    if stops:
        harness.loop.stop()
    harness.executor.gate.set()
    assert harness.loop.join(20) and told.wait(20) and entered.is_set()
    assert len(answers) == 2 and harness.executor.is_closed
    assert isinstance(harness.ask(harness.loop.submit, make_request("d")), EngineDeadError)


def test_commands_without_end_do_not_keep_steps_from_being_made() -> None:
    """Each answer brings the next question: they and the steps take turns."""
    with Harness() as harness:
        num_asked = 0

        def ask_again(_: object) -> None:
            nonlocal num_asked
            num_asked += 1
            if not harness.inbox("a").ends and num_asked < 100_000:
                harness.loop.control("statistics", "", ask_again)

        harness.loop.control("statistics", "", ask_again)
        harness.post(make_request("a", max_tokens=30))
        harness.end("a")
        assert num_asked < 200


def test_a_bug_in_the_scheduler_still_answers_everyone() -> None:
    with Harness() as harness:
        harness.executor.gate.clear()
        harness.post(make_request("a", max_tokens=30))
        assert harness.executor.reached.wait(20)

        class Broken:
            def __getattr__(self, name: str) -> object:
                raise AssertionError("a bug")

        harness.loop._scheduler = Broken()  # type: ignore[assignment]
        harness.executor.gate.set()
        assert "a bug" in (harness.end("a").message or "")
        assert harness.loop.join(20)
        assert isinstance(harness.ask(harness.loop.submit, make_request("b")), EngineDeadError)


def test_bug_31_length_only_requests_pass_through_the_loop() -> None:
    """A recording knows lengths, not ids; the loop must not care."""
    request = make_request("a", max_tokens=3)
    request = type(request)("a", None, request.params, num_prompt_tokens=9)
    with Harness(GatedExecutor(durations_only=True)) as harness:
        harness.submit(request)
        harness.end("a")
        assert array("i", harness.inbox("a").ids) == array("i", [-1, -1, -1])


def test_a_loop_needs_no_front_end() -> None:
    harness = Harness()
    loop = EngineLoop(harness.scheduler, harness.executor)
    loop.start()
    done = threading.Event()
    loop.submit(make_request("a"), lambda _: done.set())
    assert done.wait(20)
    loop.stop()
    assert loop.join(20)
