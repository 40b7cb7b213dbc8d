"""Bugs of other engines that must be impossible here (BEHAVIOURS.md, section 9), as far as the core can have them."""

from __future__ import annotations

import random

import pytest
from tests.core.harness import EOS, Run, limits, prompt
from tests.core.test_lifecycle import prompt_ending_after
from tests.fake_model import Faults, quads

from octavo.core.plan import EventKind, WaitReason
from octavo.core.request import FinishReason, SamplingParams
from octavo.errors import AdmissionError, InvalidRequestError

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


@pytest.mark.parametrize("length", [4, 8, 12])
def test_bug_01_a_prompt_of_whole_blocks_takes_no_block_more_and_none_less(length: int) -> None:
    run = Run()
    record = run.admit(prompt(length), 3)
    run.step()
    assert run.num_blocks_of(record) == length // 4
    run.step()
    assert run.num_blocks_of(record) == length // 4 + 1
    run.finish()


def test_bug_02_a_match_before_a_failed_admission_changes_no_state() -> None:
    run = Run(limits(num_blocks=8))
    run.admit(prompt(8, 1), 1)
    run.finish_all()
    run.admit(prompt(12, 2), 9)
    run.step()
    before = run.scheduler.statistics()
    waits = run.admit([*prompt(8, 1), *prompt(20, 3)], 2)
    for _ in range(3):
        run.submit(run.plan())
        run.commit()
    after = run.scheduler.statistics()
    assert [event.kind for event in waits.events] == [EventKind.DEFERRED]
    assert (run.scheduler.num_waiting, run.scheduler.num_running) == (1, 1)
    assert after.num_blocks_used == before.num_blocks_used + 1  # the runner's own growth
    assert after.prefix_hit_tokens == before.prefix_hit_tokens
    run.finish()


def test_bug_04_the_oldest_is_never_preempted_and_the_preempted_keeps_its_place() -> None:
    for policy in ("fcfs", "fifo"):
        run = Run(limits(num_blocks=6, policy=policy, prefix_caching=False))
        records = [run.admit(prompt(5, seed), 15) for seed in range(4)]
        run.finish()
        assert not records[0].of_kind(EventKind.PREEMPTED) and records[-1].finished is not None
        if policy == "fcfs":
            ends = [record.finished.time for record in records if record.finished]
            assert ends == sorted(ends)


def test_bug_05_admission_goes_on_when_those_who_stood_in_the_way_are_cancelled() -> None:
    for depth in (1, 2):
        run = Run(limits(num_blocks=8, headroom=0.2), depth=depth)
        run.admit(prompt(20, 1), 9)
        waits = [run.admit(prompt(20, seed), 9) for seed in (2, 3)]
        run.steps(3)
        assert waits[0].of_kind(EventKind.DEFERRED)
        run.cancel("r0", "r1")
        run.step()
        assert waits[1].is_running
        run.finish()


def test_bug_06_a_request_that_can_never_fit_is_refused_and_the_loop_goes_on() -> None:
    run = Run(limits(num_blocks=4))
    run.admit(prompt(6), 5)
    with pytest.raises(AdmissionError):
        run.admit(prompt(30), 5)
    run.admit(prompt(7), 5)
    run.finish()


@DEPTHS
def test_bug_08_positions_go_on_after_a_preemption_and_outputs_are_snapshots(depth: int) -> None:
    run = Run(limits(num_blocks=5), depth=depth)
    records = [run.admit(prompt(6, seed), 12) for seed in range(3)]
    snapshots = []
    while run.scheduler.has_work:
        plan = run.step()
        snapshots += [(new, list(new.token_ids or ())) for new in plan.new_sequences]
    assert any(record.of_kind(EventKind.PREEMPTED) for record in records)
    assert all(list(new.token_ids or ()) == ids for new, ids in snapshots)
    run.finish()


def test_bug_08_a_second_batch_on_a_live_engine_loses_nothing() -> None:
    run = Run()
    for _ in range(3):
        batch = [run.admit(prompt(5, seed), 4) for seed in range(4)]
        run.finish_all()
        assert all(record.reason == FinishReason.LENGTH for record in batch)
    run.finish()


@DEPTHS
def test_bug_09_a_cancelled_request_always_answers_also_in_flight(depth: int) -> None:
    run = Run(depth=depth)
    records = [run.admit(prompt(5, seed), 20) for seed in range(4)]
    for name in list(run.records):
        run.fill()
        assert run.cancel(name) == 1 and run.cancel(name) == 0
        run.step()
    run.finish()
    assert all(record.reason == FinishReason.CANCELLED for record in records)


def test_bug_10_prefixes_are_evicted_oldest_first_and_hits_compare_ids() -> None:
    run = Run(limits(num_blocks=6))
    for seed in (1, 2, 3, 4):
        run.admit(prompt(8, seed), 1)
        run.finish_all()
    newest = run.admit(prompt(8, 4), 1)
    run.finish_all()
    oldest = run.admit(prompt(8, 1), 1)
    run.finish_all()
    assert [r.finished.cached_tokens for r in (newest, oldest) if r.finished] == [7, 0]
    run.check_end()


def test_bug_11_a_prompt_found_whole_never_rewrites_the_shared_block() -> None:
    run = Run(limits(num_blocks=8))
    run.admit(prompt(8), 1)
    run.finish_all()
    for _ in range(3):
        run.admit(prompt(8), 2)
        plan = run.step()
        written = {block for _, _, index, block in quads(plan.edits) if index == 1}
        assert written == {plan.copies[2]} and plan.copies[1] not in written
        run.finish_all()
    run.check_end()


def test_bug_12_an_idle_plan_is_empty_and_says_when_to_look_again() -> None:
    run = Run(limits(max_sequences=1))
    run.admit(prompt(4, 1), 3, deadline=7.0)
    run.admit(prompt(4, 2), 3, queue_timeout=9.0)
    plan = run.step()
    assert plan.wake_at == 7.0
    run.finish()
    run.step()
    plan = run.plan()
    assert plan.is_empty and plan.wake_at is None and plan.waits[0][0] == WaitReason.IDLE


def test_bug_14_a_full_hit_computes_one_token_not_a_block() -> None:
    run = Run()
    for expected in (8, 1):
        run.admit(prompt(8), 1)
        plan = run.step()
        assert plan.num_query_tokens == expected
        run.finish_all()
    run.check_end()


@DEPTHS
def test_bug_15_an_end_of_sequence_on_the_last_allowed_token_is_a_stop(depth: int) -> None:
    run = Run(depth=depth)
    record = run.admit(prompt_ending_after(5), 5, eos_token_ids=(EOS,))
    run.finish()
    assert record.reason == FinishReason.STOP


def test_bug_16_nothing_is_preempted_for_blocks_not_needed_yet() -> None:
    run = Run(limits(num_blocks=6, prefix_caching=False))
    records = [run.admit(prompt(4, seed), 9) for seed in range(2)]  # 12 positions each: exactly the pool
    run.finish()
    assert not any(record.of_kind(EventKind.PREEMPTED) for record in records)


@DEPTHS
@pytest.mark.parametrize("policy", ["fcfs", "fifo"])
def test_bug_17_a_tight_pool_does_not_thrash(policy: str, depth: int) -> None:
    run = Run(limits(num_blocks=10, policy=policy, prefix_caching=False), depth=depth)
    for seed in range(10):
        run.admit(prompt(4, seed), 28)
    run.finish()
    needed = sum(r.request.num_prompt_tokens + len(r.token_ids) - 1 for r in run.records.values())
    assert run.num_scheduled <= 2 * needed
    assert max(len(record.of_kind(EventKind.PREEMPTED)) for record in run.records.values()) <= 3


@pytest.mark.parametrize("cap", [1, 2])
def test_bug_21_a_cap_of_one_admits_one(cap: int) -> None:
    run = Run(limits(max_sequences=cap))
    for seed in range(3):
        run.admit(prompt(4, seed), 3)
    run.step()
    assert run.scheduler.num_running == cap
    run.finish()


@DEPTHS
def test_bug_22_nobody_runs_without_its_kv_after_a_preemption(depth: int) -> None:
    run = Run(limits(num_blocks=5, prefix_caching=False), depth=depth)
    for seed in range(4):
        run.admit(prompt(5, seed), 12)
    run.finish()
    resumed = 0
    for plan in run.plans:
        starts = dict(zip(plan.slots, plan.starts, strict=True))
        for new in plan.new_sequences:
            assert starts[new.slot] == 0
            resumed += len(new.token_ids or ()) > new.num_prompt
    assert resumed


def test_bug_26_a_request_that_errs_gives_back_its_blocks() -> None:
    for depth in (1, 2, 3):
        run = Run(depth=depth, faults=Faults(random.Random(depth), row_error=0.1))
        records = [run.admit(prompt(6, seed % 3), 9) for seed in range(10)]
        run.finish()
        assert 0 < sum(record.reason == FinishReason.ERROR for record in records) < 10


def test_bug_27_partial_blocks_are_never_shared_and_counts_survive_a_hit() -> None:
    run = Run()
    records = [run.admit(prompt(11), 6, min_tokens=6, eos_token_ids=(EOS,))]
    run.steps(2)
    records.append(run.admit(prompt(11), 6, min_tokens=6, eos_token_ids=(EOS,)))
    plan = run.step()
    assert run.rows(plan)["r1"][:2] == (8, 3)
    run.finish()
    assert [len(record.token_ids) for record in records] == [6, 6]


@DEPTHS
def test_bug_28_no_prompt_token_is_fed_twice(depth: int) -> None:
    run = Run(limits(num_blocks=40, prefix_caching=False, max_batch_tokens=7), depth=depth)
    for seed in range(5):
        run.admit(prompt(3 + 2 * seed, seed), 4)
    run.finish()
    fed: dict[str, list[int]] = {}
    owners: dict[int, str] = {}
    for plan in run.plans:
        owners.update({new.slot: new.request_id for new in plan.new_sequences})
        for row in plan.rows():
            fed.setdefault(owners[row.slot], []).extend(range(row.start, row.start + row.count))
    assert all(positions == list(range(len(positions))) for positions in fed.values())
    assert {name: len(fed[name]) for name in fed} == {f"r{i}": 3 + 2 * i + 3 for i in range(5)}


def test_bug_29_sequences_at_different_positions_all_advance_each_step() -> None:
    run = Run(limits(num_blocks=64))
    for seed in range(6):
        run.admit(prompt(2 + 3 * seed, seed), 12)
        run.step()
    for _ in range(4):
        plan = run.step()
        assert sorted(run.counts(plan)) == [f"r{i}" for i in range(6)]
    run.finish()


def test_bug_30_content_of_reused_blocks_is_never_taken_for_a_prefix() -> None:
    run = Run(limits(num_blocks=5), depth=2)
    for round_ in range(6):
        for seed in range(3):
            run.admit(prompt(8, seed), 3 + round_ % 2)
        run.steps(round_ + 1)
        if run.flight:
            run.fail_oldest()
    run.finish()


@DEPTHS
def test_bug_31_no_table_entry_is_negative_or_out_of_the_pool(depth: int) -> None:
    run = Run(limits(num_blocks=5), depth=depth)
    for seed in range(6):
        run.admit(prompt(6, seed), 9)
    run.finish()
    assert all(0 <= block < 5 for plan in run.plans for _, _, _, block in quads(plan.edits))


def test_bug_33_one_failing_request_ends_alone() -> None:
    run = Run(faults=Faults(random.Random(1), bad=frozenset({"r0"})))
    records = [run.admit(prompt(6, seed), 9, temperature=0.0) for seed in range(1, 5)]
    run.finish()
    assert [record.reason for record in records] == [FinishReason.ERROR, *[FinishReason.LENGTH] * 3]


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_bug_34_max_tokens_below_one_is_refused(max_tokens: int) -> None:
    with pytest.raises(InvalidRequestError, match=str(max_tokens)):
        SamplingParams(max_tokens=max_tokens)


def test_bug_35_a_prompt_is_never_cut_silently() -> None:
    run = Run(limits(max_model_len=16))
    with pytest.raises(AdmissionError, match="20"):
        run.admit(prompt(20), 4)
    record = run.admit(prompt(15), 4)
    run.step()
    assert list(run.plans[-1].new_sequences[0].token_ids or ()) == prompt(15)
    run.finish()
    assert record.finished is not None and len(record.token_ids) == 1


@DEPTHS
def test_bug_36_a_place_that_falls_free_is_taken_in_the_next_plan(depth: int) -> None:
    run = Run(limits(max_sequences=1), depth=depth)
    for seed in range(3):
        run.admit(prompt(4, seed), 2)
    run.finish()
    busy = [plan.num_rows for plan in run.plans if not plan.is_empty]
    assert busy.count(0) <= 1 + (depth > 1) * 3
