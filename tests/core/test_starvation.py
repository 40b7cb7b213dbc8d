"""The starvation bound (S10, bug_23): bypasses, the barrier, what it reserves and whom it may preempt."""

from __future__ import annotations

import pytest
from tests.core.harness import Run, limits, prompt
from tests.core.records import Record

from octavo.core.plan import EventKind, StepPlan, WaitReason


def names(plan: StepPlan) -> list[str]:
    """Requests that a plan admits or resumes, in order."""
    return [event.request_id for event in plan.events if event.kind in (EventKind.ADMITTED, EventKind.RESUMED)]


def num_bypasses(run: Run) -> int:
    return run.scheduler.statistics().num_bypasses


def crowded(max_bypass: int, depth: int = 1, **changes: object) -> tuple[Run, Record]:
    """Four places: r0 has one for long, r1 one for a while, r2 needs three, and a policy that looks further."""
    sizes = {"policy": "fifo", "max_sequences": 4, "num_blocks": 60, "max_bypass": max_bypass, "max_batch_tokens": 64}
    run = Run(limits(**{**sizes, **changes}), depth=depth)
    run.admit(prompt(4, 1), 30)
    run.admit(prompt(4, 2), 30)
    run.step()
    return run, run.admit(prompt(4, 3), 4, n=3)


def test_S10_a_bypass_is_counted_once_for_each_step_that_lets_a_later_one_in() -> None:
    run, waiting = crowded(64)
    first, second = run.admit(prompt(4, 4), 2), run.admit(prompt(4, 5), 2)
    assert names(run.step()) == ["r3", "r4"]  # two in one step
    assert num_bypasses(run) == 1
    run.step()
    assert num_bypasses(run) == 1  # nobody was let in
    assert first.finished and second.finished
    run.admit(prompt(4, 6), 2)
    assert names(run.step()) == ["r5"] and num_bypasses(run) == 2
    assert not waiting.is_running
    run.finish()


def test_S10_whoever_only_stands_behind_is_not_bypassed() -> None:
    run = Run(limits(num_blocks=8, policy="fcfs"))
    run.admit(prompt(12, 1), 8)
    for seed in range(2, 6):
        run.admit(prompt(20, seed), 2)
    run.finish()
    assert num_bypasses(run) == 0


@pytest.mark.parametrize("max_bypass", [1, 2, 5])
def test_S10_after_max_bypass_nobody_later_is_let_in_and_the_barrier_is_admitted_first(max_bypass: int) -> None:
    run, waiting = crowded(max_bypass)
    passed: list[str] = []
    while not waiting.is_running:
        run.admit(prompt(4, len(run.records)), 2)
        admitted = names(run.step())
        if waiting.is_running:
            assert admitted[0] == "r2"
        else:
            passed += admitted
    assert len(passed) == max_bypass == num_bypasses(run)  # one a step, then nobody until the way is free
    run.finish()


@pytest.mark.parametrize("depth", [1, 2])
def test_S10_places_that_fall_free_are_kept_for_the_barrier(depth: int) -> None:
    run, waiting = crowded(1, depth)
    run.admit(prompt(4, 4), 25)
    run.until(lambda: num_bypasses(run) == 1)
    run.cancel("r3")
    later = [run.admit(prompt(4, seed), 2) for seed in range(5, 8)]
    run.steps(4)
    assert run.scheduler.num_running == 2 and not any(record.is_running for record in later)
    run.cancel("r1")
    run.until(lambda: waiting.is_running)
    assert not any(record.of_kind(EventKind.ADMITTED) for record in later[1:])
    run.finish()
    assert all(record.finished for record in later)


def test_bug_23_only_later_work_goes_for_the_barrier_the_latest_first_and_as_few_as_need_be() -> None:
    run, waiting = crowded(3)
    early, late = [run.records["r0"], run.records["r1"]], []
    for seed in (4, 5):
        late.append(run.admit(prompt(4, seed), 25))
        run.step()
    assert num_bypasses(run) == 2
    run.cancel("r1")
    late.append(run.admit(prompt(4, 6), 25))  # takes the place of r1
    run.step()
    assert num_bypasses(run) == 3 and run.scheduler.num_running == 4
    clearing = run.step()
    preempted = [event for record in late for event in record.of_kind(EventKind.PREEMPTED)]
    assert [(event.by, event.reason) for event in preempted] == [("r2", WaitReason.BARRIER)] * 3
    assert not names(clearing) and run.rows(clearing).keys() == {"r0"}
    assert names(run.step())[0] == "r2" and waiting.is_running
    run.finish()
    assert not any(record.of_kind(EventKind.PREEMPTED) for record in early)


def test_bug_23_nobody_goes_when_that_would_not_make_enough_room() -> None:
    run, waiting = crowded(2)
    for seed in (4, 5):
        run.admit(prompt(4, seed), 6)
        run.step()
    run.steps(3)  # r0 and r1 are earlier, and without their places there are but two
    assert not run.decisions(EventKind.PREEMPTED) and not waiting.is_running
    run.finish()


def test_bug_23_as_few_as_need_be() -> None:
    run, waiting = crowded(2)
    kept = run.admit(prompt(4, 4), 25)
    run.step()
    gone = run.admit(prompt(4, 5), 25)
    run.step()
    run.cancel("r1", "r0")
    run.step()
    assert [event.by for event in gone.of_kind(EventKind.PREEMPTED)] == ["r2"]
    assert not kept.of_kind(EventKind.PREEMPTED)
    run.step()
    assert waiting.is_running and kept.is_running and not gone.is_running
    run.finish()


def test_S10_the_count_begins_anew_at_admission() -> None:
    run, waiting = crowded(3, num_blocks=10, prefix_caching=False)
    run.cancel("r2")
    waiting = run.admit(prompt(4, 3), 7, n=3)
    for seed in (4, 5):
        run.admit(prompt(4, seed), 1)
        run.step()
    assert num_bypasses(run) == 2
    run.cancel("r1")
    run.until(lambda: bool(waiting.of_kind(EventKind.PREEMPTED)))  # r0 grew
    passed = []
    for seed in range(6, 14):
        run.admit(prompt(4, seed), 1)
        passed += names(run.step())
    assert passed == ["r6", "r7", "r8"] and num_bypasses(run) == 2 + 3
    run.finish()


@pytest.mark.parametrize("max_bypass", [1, 3])
def test_S10_bounds_what_the_read_budget_skips(max_bypass: int) -> None:
    run = Run(limits(max_kv_read=40, max_bypass=max_bypass, num_blocks=60, prefix_caching=False))
    run.is_ordered = False
    run.admit(prompt(20, 1), 12)
    run.step()
    waiting = run.admit(prompt(30, 2), 4)
    passed: list[str] = []
    while not waiting.is_running:
        run.admit(prompt(2, len(run.records)), 1)
        passed += names(run.step())
    assert passed.index("r1") == max_bypass and names(run.plans[-1])[0] == "r1"
    run.finish()


def test_S10_bounds_what_an_unchunked_prompt_is_skipped_for() -> None:
    run = Run(limits(max_batch_tokens=12, chunked_prefill=False, num_blocks=60, max_bypass=2))
    run.admit(prompt(4, 1), 20)
    run.step()
    waiting = run.admit(prompt(12, 2), 3)  # whole or not at all: never beside a decode
    passed = []
    for seed in range(10):
        run.admit(prompt(3, 10 + seed), 1)
        passed += names(run.step())
    assert passed == ["r2", "r3"]
    run.finish()
    assert waiting.finished


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "shortest_prefill", "prefix_affinity", "fcfs"])
@pytest.mark.parametrize("depth", [1, 2])
def test_S10_under_a_stream_of_small_requests_a_large_one_is_served(policy: str, depth: int) -> None:
    run = Run(limits(policy=policy, num_blocks=12, max_bypass=4, prefix_caching=False), depth=depth)
    run.admit(prompt(6, 1), 8)
    run.step()
    large = run.admit(prompt(40, 2), 4)
    for seed in range(80):
        if large.finished:
            break
        run.admit(prompt(4, 10 + seed), 6)
        run.step()
    assert large.finished, run.scheduler.explain("r1")
    run.finish()
