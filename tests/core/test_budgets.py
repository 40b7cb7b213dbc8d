"""Budgets and the reasons they give (S04, S05, S20, S23, bugs 03 and 13), through the public verbs."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from tests.core.harness import Run, limits, prompt
from tests.core.test_groups import of_windows

from octavo.core.plan import EventKind, StepPlan, WaitReason
from octavo.core.request import Span


def names(plan: StepPlan) -> list[str]:
    """Requests that a plan admits or resumes, in order."""
    return [event.request_id for event in plan.events if event.kind in (EventKind.ADMITTED, EventKind.RESUMED)]


def reading(max_kv_read: int, **changes: object) -> Run:
    """An engine that is short of nothing but context to read; order is not strict then."""
    run = Run(limits(**{"max_kv_read": max_kv_read, "num_blocks": 60, "max_batch_tokens": 64, **changes}))
    run.is_ordered = False
    return run


# -- S04


def test_S04_a_plan_carries_what_it_computes_and_what_it_reads() -> None:
    run = reading(1000)
    run.admit(prompt(10, 1), 4)
    run.admit(prompt(7, 2), 4)
    totals = [(plan.num_query_tokens, plan.num_kv_read) for plan in (run.step(), run.step(), run.step())]
    assert totals == [(17, 17), (2, 11 + 8), (2, 12 + 9)]
    run.finish()


def test_S04_a_model_of_windows_only_reads_no_more_than_its_window() -> None:
    for windows, expected in (((5,), [9, 4 + 1, 4 + 1]), ((5, 7), [9, 6 + 1, 6 + 1]), ((0, 5), [9, 10, 11])):
        run = reading(1000, groups=of_windows(*windows), num_blocks=(60,) * len(windows))
        run.admit(prompt(9), 4)
        assert [run.step().num_kv_read for _ in range(3)] == expected
        run.finish()


@pytest.mark.parametrize(("limit", "is_in"), [(31, True), (30, False)])
def test_S04_the_budget_is_the_sum_over_the_batch(limit: int, is_in: bool) -> None:
    run = reading(limit)
    run.admit(prompt(20, 1), 4)
    run.step()
    second = run.admit(prompt(10, 2), 4)
    plan = run.step()  # 21 and 10
    assert second.is_running == is_in
    assert plan.num_kv_read == (31 if is_in else 21)
    if not is_in:
        (deferred,) = second.of_kind(EventKind.DEFERRED)
        assert (deferred.reason, deferred.needed, deferred.available) == (WaitReason.KV_READ_BUDGET, 10, 9)
    run.finish()


def test_S04_and_S23_one_over_the_budget_is_skipped_and_the_next_is_let_in() -> None:
    run = reading(30)
    run.admit(prompt(20, 1), 4)
    run.step()
    run.admit(prompt(10, 2), 4)
    run.admit(prompt(9, 3), 4)
    assert names(run.step()) == ["r2"]
    run.finish()


def test_S04_a_context_over_the_whole_budget_is_granted_alone() -> None:
    run = reading(16)
    first, second = run.admit(prompt(20, 1), 4), run.admit(prompt(3, 2), 4)
    third = run.admit(prompt(20, 3), 4)
    plans = []
    while run.scheduler.has_work:
        plans.append(run.step())
    large = [plan for plan in plans if plan.num_kv_read > 16]
    assert len(large) == 2 * 4 and all(plan.num_rows == 1 for plan in large)
    assert all(len(record.token_ids) == 4 for record in (first, second, third))
    run.finish()


def test_S04_running_sequences_that_grew_over_the_budget_take_turns() -> None:
    run = reading(24, max_bypass=2)
    records = [run.admit(prompt(8, seed), 20) for seed in range(3)]
    assert run.step().num_rows == 3
    for _ in range(30):
        plan = run.step()
        assert plan.num_kv_read <= 24 or plan.num_rows == 1
    assert any(plan.num_rows < 3 for plan in run.plans)
    assert all(len(record.token_ids) >= 8 for record in records)  # nobody starves
    run.finish()


@pytest.mark.parametrize(("limit", "is_in"), [(54, True), (53, False)])
def test_bug_03_the_context_read_is_counted_after_the_match(limit: int, is_in: bool) -> None:
    """A chunk of 8 behind 32 cached tokens reads 40, not 8; beside it 13 and one more are read."""
    run = reading(limit, max_batch_tokens=9)
    run.admit(prompt(32, 1), 1)
    run.finish_all()
    run.admit(prompt(13, 2), 6)
    run.steps(2)
    second = run.admit([*prompt(32, 1), *prompt(20, 3)], 2)
    plan = run.step()
    assert second.is_running == is_in
    if is_in:
        assert (plan.num_query_tokens, plan.num_kv_read) == (9, 14 + 40)
        assert run.rows(plan)["r2"][:2] == (32, 8)
    else:
        (deferred,) = second.of_kind(EventKind.DEFERRED)
        assert (deferred.reason, deferred.needed, deferred.available) == (WaitReason.KV_READ_BUDGET, 40, 53 - 14)
    run.finish()


# -- S05


@pytest.mark.parametrize(
    ("num_blocks", "headroom", "kept"), [(10, 0.2, 2), (100, 0.07, 7), (10, 0.01, 1), (16, 0.3, 5)]
)
def test_S05_the_headroom_is_a_share_rounded_up(num_blocks: int, headroom: float, kept: int) -> None:
    for extra, is_in in ((0, True), (1, False)):
        run = Run(limits(num_blocks=num_blocks, headroom=headroom, max_batch_tokens=512, max_model_len=512))
        run.admit(prompt(4, 1), 2)
        second = run.admit(prompt(4 * (num_blocks - kept - 1 + extra), 2), 2)
        run.step()
        assert second.is_running == is_in
        run.finish()


def test_S05_the_headroom_is_waived_for_an_empty_batch_only() -> None:
    run = Run(limits(num_blocks=10, headroom=0.5, max_batch_tokens=64))
    first, second = run.admit(prompt(36, 1), 2), run.admit(prompt(4, 2), 2)
    run.step()
    assert first.is_running and not second.is_running
    assert second.of_kind(EventKind.DEFERRED)[0].reason == WaitReason.HEADROOM
    run.finish()


def test_S05_the_headroom_is_waived_for_the_barrier() -> None:
    run = Run(limits(num_blocks=20, headroom=0.2, max_batch_tokens=64, policy="fifo", max_bypass=2))
    run.admit(prompt(32, 1), 20)
    run.step()
    waiting = run.admit(prompt(32, 2), 4)  # 8 blocks, of 11 that are free: 4 must stay
    passed = []
    for seed in (3, 4, 5):
        run.admit(prompt(4, seed), 1)
        passed.append(names(run.step()))
    assert passed == [["r2"], ["r3"], ["r1"]] and waiting.of_kind(EventKind.DEFERRED)[0].reason == WaitReason.HEADROOM
    run.finish()


def test_S05_partial_prefills_and_decodes_go_on_whatever_the_headroom() -> None:
    run = Run(limits(num_blocks=10, headroom=0.4, max_batch_tokens=8))
    run.admit(prompt(20, 1), 3)
    run.admit(prompt(4, 2), 20)
    run.finish()
    assert not run.decisions(EventKind.PREEMPTED)


# -- S23


def adapters(count: int, adapter_slots: int = 1) -> Run:
    """One request runs with adapter 1, `count` wait for adapter 2, then comes one of the base model."""
    run = Run(limits(num_blocks=200, adapter_slots=adapter_slots, max_bypass=1000, max_sequences=100))
    run.is_ordered = False
    run.admit(prompt(4, 1), 40, adapter_id=1)
    run.step()
    for seed in range(count):
        run.admit(prompt(4, 10 + seed), 2, adapter_id=2)
    run.admit(prompt(4, 2), 2, request_id="base")
    return run


@pytest.mark.parametrize(("count", "admitted"), [(1, ["base"]), (63, ["base"]), (64, [])])
def test_S23_up_to_64_candidates_are_looked_at_past_those_that_lack_their_own(count: int, admitted: list[str]) -> None:
    run = adapters(count)
    assert names(run.step()) == admitted
    run.cancel(*(name for name in run.records if name != "base"))
    run.finish()


def test_S23_adapters_share_their_slots_and_free_them_at_the_end() -> None:
    run = adapters(3, adapter_slots=2)
    assert names(run.step()) == ["r1", "r2", "r3", "base"]
    run.finish()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fifo", "prefill_first"])
@pytest.mark.parametrize("lacking", [WaitReason.KV_BLOCKS, WaitReason.HEADROOM, WaitReason.SEQUENCE_CAP])
def test_S23_for_lack_of_room_admission_stops_except_under_fifo_and_prefill_first(
    policy: str, lacking: WaitReason
) -> None:
    sizes = {"num_blocks": 12, "headroom": 0.25 if lacking == WaitReason.HEADROOM else 0.0, "max_sequences": 3}
    run = Run(limits(policy=policy, max_batch_tokens=64, **sizes))
    run.is_ordered = False
    run.admit(prompt(12, 1), 8)
    run.step()
    if lacking == WaitReason.SEQUENCE_CAP:
        second = run.admit(prompt(4, 2), 2, n=3)
    else:
        second = run.admit(prompt(28 if lacking == WaitReason.HEADROOM else 40, 2), 2)
    run.admit(prompt(4, 3), 2)
    assert names(run.step()) == (["r2"] if policy in ("fifo", "prefill_first") else [])
    assert second.of_kind(EventKind.DEFERRED)[0].reason == lacking
    run.finish()


def test_bug_13_an_exhausted_encoder_budget_cuts_or_skips_and_the_rest_goes_on() -> None:
    run = Run(limits(encoder_budget=4, encoder_cache=24, num_blocks=60, max_bypass=3))
    run.is_ordered = False
    for seed, start in ((1, 2), (2, 3), (3, 0)):
        run.admit(prompt(9, seed), 3, spans=(Span(start, 4, bytes([seed])),))
    run.admit(prompt(5, 4), 3)
    assert run.counts(run.step()) == {"r0": 9, "r1": 3, "r3": 5}  # cut to the item's start; to nothing
    assert run.records["r2"].of_kind(EventKind.DEFERRED)[0].reason == WaitReason.ENCODER_BUDGET
    assert run.counts(run.step()) == {"r0": 1, "r1": 6, "r3": 1}
    assert run.counts(run.step()) == {"r0": 1, "r1": 1, "r2": 9, "r3": 1}
    run.finish()


# -- S20: every reason and every kind of decision

PROVOKED: dict[WaitReason, Callable[[], Run]] = {}


def provokes(reason: WaitReason) -> Callable[[Callable[[], Run]], Callable[[], Run]]:
    """Register what makes a reason appear."""

    def register(provoke: Callable[[], Run]) -> Callable[[], Run]:
        PROVOKED[reason] = provoke
        return provoke

    return register


def two(first: int, second: int, depth: int = 1, max_tokens: int = 8, **changes: object) -> Run:
    """Two prompts of these lengths."""
    run = Run(limits(**changes), depth=depth)
    run.is_ordered = False
    run.admit(prompt(first, 1), max_tokens)
    run.admit(prompt(second, 2), max_tokens)
    return run


provokes(WaitReason.TOKEN_BUDGET)(lambda: two(8, 8, max_batch_tokens=8))
provokes(WaitReason.SEQUENCE_CAP)(lambda: two(8, 8, max_sequences=1))
provokes(WaitReason.KV_BLOCKS)(lambda: two(30, 40))
provokes(WaitReason.HEADROOM)(lambda: two(30, 20, headroom=0.3))
provokes(WaitReason.KV_READ_BUDGET)(lambda: two(10, 10, max_kv_read=15))
provokes(WaitReason.PARTIAL_PREFILL_CAP)(
    lambda: two(20, 20, max_partial_prefills=1, long_prefill_threshold=6, max_batch_tokens=32)
)
provokes(WaitReason.UNCOMMITTED)(lambda: two(8, 8, 3, num_blocks=4, prefix_caching=False))
provokes(WaitReason.BEHIND)(lambda: three_behind())
provokes(WaitReason.SWAP_SPACE)(lambda: two(8, 9, max_tokens=16, num_blocks=8, preemption="swap", host_blocks=(16,)))
provokes(WaitReason.COMPOSITION)(lambda: two(30, 40, 2, composition="separate"))


def three_behind() -> Run:
    run = two(30, 40, 2, max_tokens=4)
    run.admit(prompt(4, 3), 2)
    return run


@provokes(WaitReason.ENCODER_BUDGET)
def short_of_encoder() -> Run:
    run = Run(limits(encoder_budget=4, encoder_cache=8))
    for seed in (1, 2):
        run.admit(prompt(8, seed), 2, spans=(Span(0, 4, bytes([seed])),))
    return run


@provokes(WaitReason.ADAPTER_SLOTS)
def short_of_adapters() -> Run:
    run = Run(limits(adapter_slots=1))
    run.admit(prompt(4, 1), 4, adapter_id=1)
    run.admit(prompt(4, 2), 4, adapter_id=2)
    return run


@provokes(WaitReason.MODALITY)
def of_two_kinds() -> Run:
    run = Run(limits(encoder_budget=4, encoder_cache=8, separate_modalities=True))
    run.is_ordered = False
    run.admit(prompt(8, 1), 4, spans=(Span(0, 4, b"item"),))
    run.admit(prompt(4, 2), 4)
    return run


@provokes(WaitReason.HOST_LOAD)
def loads_wait_for_swaps() -> Run:
    """A prefix on the host is wanted in the very step in which growth evicts, and so saves, another."""
    run = Run(limits(num_blocks=9, host_blocks=(32,), host_load_min_tokens=4))
    for seed in range(6):
        run.admit(prompt(13, seed), 1)
        run.finish_all()
    run.admit(prompt(4, 9), 12)
    run.step()
    for seed in range(3):
        run.admit([*prompt(13, seed), 5], 6)
    return run


@provokes(WaitReason.FORK_BLOCKS)
def short_for_a_fork() -> Run:
    run = Run(limits(num_blocks=10, max_batch_tokens=10))
    for seed in range(3):
        run.admit(prompt(3, seed), 3)
    run.admit(prompt(12, 9), 2, n=4)
    return run


@provokes(WaitReason.BARRIER)
def barrier_in_the_way() -> Run:
    run = Run(limits(max_bypass=1, max_sequences=3, policy="fifo"))
    run.admit(prompt(4, 1), 12)
    run.step()
    run.admit(prompt(4, 2), 4, n=3)
    run.admit(prompt(4, 3), 12)
    run.step()
    run.cancel("r0")
    return run


@provokes(WaitReason.PAUSED)
def paused() -> Run:
    run = two(4, 4)
    run.pause()
    run.step()
    run.resume()
    return run


@provokes(WaitReason.EXCLUDED)
def excluded() -> Run:
    run = two(4, 4, 2)
    run.plan(["nobody"])
    return run


@provokes(WaitReason.KV_TRANSFER)
def waits_for_kv_of_another_engine() -> Run:
    run = Run()
    run.admit(8, 4, emitted_token_ids=array("i", [5]))
    run.scheduler.expect_kv("r0", 8)
    for _ in range(2):
        run.step()
    run.cancel("r0")
    return run


provokes(WaitReason.IDLE)(lambda: Run())


@provokes(WaitReason.DRAINING)
def drained() -> Run:
    run = Run()
    run.scheduler.drain()
    return run


@provokes(WaitReason.PREEMPTED_THIS_STEP)
def behind_a_preemption() -> Run:
    run = Run(limits(num_blocks=9))
    run.admit(prompt(8, 1), 25)
    run.admit(prompt(9, 2), 9)
    run.admit(prompt(9, 3), 9)
    return run


# There are no structured outputs in this core yet, so nobody waits for a grammar's mask.
NEVER = {WaitReason.GRAMMAR}


@pytest.mark.parametrize("reason", sorted(PROVOKED))
def test_S20_every_reason_to_wait_can_be_provoked(reason: WaitReason) -> None:
    run = PROVOKED[reason]()
    for _ in range(60):
        run.step()
    run.plan()
    told = {event.reason for record in run.records.values() for event in record.events}
    told |= {reason for plan in run.plans for reason, _ in plan.waits}
    assert reason in told
    run.finish()


def test_S20_no_reason_is_left_out() -> None:
    assert set(PROVOKED) | NEVER == set(WaitReason) and not set(PROVOKED) & NEVER


def test_S20_every_kind_of_decision_can_be_provoked() -> None:
    run = Run(limits(num_blocks=9, host_blocks=(16,), max_batch_tokens=8))
    run.admit(prompt(8, 1), 25)
    run.admit(prompt(9, 2), 9, n=2)
    run.finish()
    assert {event.kind for record in run.records.values() for event in record.events} == set(EventKind)


def test_S20_explain_names_the_reason_and_who_is_ahead() -> None:
    run = three_behind()
    run.step()
    first, second = run.scheduler.explain("r1"), run.scheduler.explain("r2")
    assert first is not None and first.reason is WaitReason.KV_BLOCKS
    assert second is not None and (second.position, second.behind, second.reason) == (2, "r1", WaitReason.BEHIND)
    assert run.scheduler.statistics().waiting_by_reason == {"kv_blocks": 1, "behind": 1}
    run.finish()
