"""Scheduling rows of the behaviours (S01-S08, S14-S16, S20-S24), through the public verbs."""

from __future__ import annotations

import pytest
from tests.core.harness import EOS, Run, limits, prompt
from tests.fake_model import quads

from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, ROW_SCORE, EventKind, StepPlan, WaitReason
from octavo.core.request import FinishReason, Want
from octavo.errors import AdmissionError


def names(plan: StepPlan) -> list[str]:
    """Requests that a plan admits or resumes, in order."""
    return [new.request_id for new in plan.new_sequences]


# -- S01, S02


def test_S01_chunks_decodes_and_resumed_sequences_share_one_batch() -> None:
    run = Run(limits(max_batch_tokens=8, num_blocks=9))
    run.admit(prompt(4, 1), 20)
    run.step()
    run.admit(prompt(20, 2), 4)
    run.now += 0.01
    assert run.counts(run.fill()) == {"r0": 1, "r1": 7}
    run.commit()
    assert run.rows(run.fill()) == {"r0": (5, 1, ROW_SAMPLE), "r1": (7, 7, 0)}
    run.commit()
    run.finish()


def test_S01_a_resumed_sequence_mixes_with_decodes_at_its_own_positions() -> None:
    run = Run(limits(num_blocks=6, prefix_caching=False))
    run.admit(prompt(8, 1), 9)
    run.admit(prompt(8, 2), 9)
    run.admit(prompt(3, 3), 20)
    run.until(lambda: any(record.of_kind(EventKind.RESUMED) for record in run.records.values()))
    resumed = next(plan for plan in reversed(run.plans) if plan.new_sequences)
    new = resumed.new_sequences[0]
    known = len(new.token_ids or ())
    assert known > new.num_prompt
    assert run.rows(resumed)[new.request_id] == (0, known, ROW_SAMPLE)
    run.finish()


def test_S02_the_rest_of_a_cut_prompt_goes_on_next_step_and_only_its_end_samples() -> None:
    run = Run(limits(max_batch_tokens=8))
    record = run.admit(prompt(20), 3)
    plans = [run.step() for _ in range(3)]
    assert [run.rows(plan)["r0"] for plan in plans] == [(0, 8, 0), (8, 8, 0), (16, 4, ROW_SAMPLE)]
    chunked = record.of_kind(EventKind.CHUNKED)
    assert [(event.num_tokens, event.needed) for event in chunked] == [(8, 12), (8, 4)]
    run.finish()


def test_S02_max_partial_prefills_bounds_cut_prompts() -> None:
    for bound in (1, 2):
        run = Run(limits(max_batch_tokens=8, max_partial_prefills=bound, num_blocks=40, long_prefill_threshold=3))
        for seed in range(4):
            run.admit(prompt(20, seed), 2)
        most = 0
        while run.scheduler.has_work:
            plan = run.step()
            partial = [name for name, (start, count, _) in run.rows(plan).items() if start + count < 20]
            assert len(partial) <= bound
            most = max(most, len(partial))
        assert most == bound
        run.finish()


def test_S02_long_prefill_threshold_bounds_a_grant_unless_the_request_is_alone() -> None:
    run = Run(limits(max_batch_tokens=32, long_prefill_threshold=5, num_blocks=40))
    run.admit(prompt(30, 1), 2)
    assert run.counts(run.step()) == {"r0": 30}
    run.admit(prompt(20, 2), 2)
    run.admit(prompt(20, 3), 2)
    counts = run.counts(run.step())
    assert counts["r1"] == counts["r2"] == 5
    run.finish()


def test_S02_unchunked_prompts_are_granted_whole_or_not_at_all() -> None:
    run = Run(limits(max_batch_tokens=16, chunked_prefill=False))
    run.admit(prompt(10, 1), 3)
    run.admit(prompt(10, 2), 3)
    assert run.counts(run.step()) == {"r0": 10}
    assert run.counts(run.step()) == {"r0": 1, "r1": 10}
    with pytest.raises(AdmissionError, match=r"17.*16|16.*17"):
        run.admit(prompt(17, 3), 3)
    run.finish()


def test_S02_a_resumed_sequence_that_outgrew_the_budget_is_chunked_though_chunking_is_off() -> None:
    run = Run(limits(max_batch_tokens=8, chunked_prefill=False, num_blocks=6, prefix_caching=False))
    run.admit(prompt(4, 1), 18)
    record = run.admit(prompt(4, 2), 18)
    run.finish()
    resumed = record.of_kind(EventKind.RESUMED)
    assert resumed
    assert len(record.of_kind(EventKind.CHUNKED)) >= 1


# -- S03, S05


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_S03_exactly_the_cap_runs(cap: int) -> None:
    run = Run(limits(max_sequences=cap, num_blocks=40))
    for seed in range(5):
        run.admit(prompt(3, seed), 4)
    plan = run.step()
    assert plan.num_rows == cap == run.scheduler.num_running
    assert run.scheduler.num_waiting == 5 - cap
    run.finish()


def test_S05_headroom_keeps_a_share_of_the_pool_free_at_admission() -> None:
    run = Run(limits(num_blocks=10, headroom=0.2, max_batch_tokens=64))
    run.admit(prompt(16, 1), 1 + 8)
    run.admit(prompt(16, 2), 1 + 8)
    third = run.admit(prompt(1, 3), 2)
    assert names(run.step()) == ["r0", "r1"]
    (deferred,) = third.of_kind(EventKind.DEFERRED)
    assert (deferred.reason, deferred.needed, deferred.available) == (WaitReason.HEADROOM, 3, 2)
    run.finish()


def test_S05_headroom_is_waived_for_an_empty_batch_and_never_stops_running_work() -> None:
    run = Run(limits(num_blocks=10, headroom=0.9, max_batch_tokens=12))
    run.admit(prompt(38, 1), 3)
    assert [sum(run.step().counts) for _ in range(4)] == [12, 12, 12, 2]
    run.finish()


def test_S05_evictable_blocks_count_as_free() -> None:
    run = Run(limits(num_blocks=10, headroom=0.2))
    run.admit(prompt(33, 1), 1)
    run.finish_all()
    run.admit(prompt(16, 2), 9)
    run.admit(prompt(16, 3), 9)
    assert names(run.step()) == ["r1", "r2"]
    run.finish()


def test_S05_fifo_keeps_a_fifth_free_by_default_and_fcfs_a_hundredth() -> None:
    for policy, admitted in (("fifo", ["r0"]), ("fcfs", ["r0", "r1"])):
        run = Run(limits(num_blocks=10, headroom=None, policy=policy))
        run.admit(prompt(20, 1), 2)
        run.admit(prompt(16, 2), 2)
        assert names(run.step()) == admitted
        run.finish()


# -- S07, S08


def test_S07_the_latest_arrival_is_preempted_and_resumes_as_prompt_and_outputs() -> None:
    run = Run(limits(num_blocks=4, prefix_caching=False))
    first, second = run.admit(prompt(8, 1), 9), run.admit(prompt(7, 2), 9)
    run.finish()
    (event,) = second.of_kind(EventKind.PREEMPTED)
    assert not first.of_kind(EventKind.PREEMPTED)
    assert event.by == "r0" and event.num_tokens == 7  # computed by then, so to compute again
    assert len(second.of_kind(EventKind.RESUMED)) == 1


def test_S07_the_requester_itself_goes_when_nobody_is_later() -> None:
    run = Run(limits(num_blocks=4, prefix_caching=False))
    first, second = run.admit(prompt(7, 1), 9), run.admit(prompt(8, 2), 9)
    run.steps(2)
    (event,) = second.of_kind(EventKind.PREEMPTED)
    assert event.by in (None, "r1") and not first.of_kind(EventKind.PREEMPTED)
    run.finish()


def test_S07_several_victims_go_in_one_step_when_one_is_not_enough() -> None:
    run = Run(limits(num_blocks=15, max_batch_tokens=32, long_prefill_threshold=16, prefix_caching=False))
    run.admit(prompt(48, 1), 1)
    for seed in range(2, 5):
        run.admit(prompt(4, seed), 8)
    plans = [run.step() for _ in range(3)]
    assert [plan.preempted_ids for plan in plans] == [(), (), ("r3", "r2")]
    assert run.counts(plans[2]) == {"r0": 16, "r1": 1}
    run.finish()


def test_S08_nobody_is_admitted_in_a_step_that_preempted_and_the_preempted_goes_first() -> None:
    run = Run(limits(num_blocks=5, prefix_caching=False, max_sequences=2))
    run.admit(prompt(8, 1), 10)
    second = run.admit(prompt(8, 2), 10)
    third = run.admit(prompt(1, 3), 2)
    run.until(lambda: bool(second.of_kind(EventKind.PREEMPTED)))
    preempting = run.plans[-1]
    assert preempting.preempted_ids == ("r1",) and not preempting.new_sequences
    run.until(lambda: bool(third.of_kind(EventKind.ADMITTED)))
    assert second.is_running or second.finished
    run.finish()


# -- S14, S15, S16


def test_S14_the_fast_path_flag_is_set_iff_every_grant_is_one_token_in_range() -> None:
    run = Run(limits(max_blocks_per_sequence=2))
    run.admit(prompt(4, 1), 9)
    flags = []
    while run.scheduler.has_work:
        plan = run.step()
        flags += [plan.is_fast_path] if plan.num_rows else []
    assert flags == [False] + [True] * 4 + [False] * 4
    run.admit(prompt(1, 2), 2)
    assert run.step().is_fast_path
    run.admit(prompt(2, 3), 2)
    assert not run.step().is_fast_path
    run.finish()


def test_S15_an_empty_plan_says_why() -> None:
    run = Run()
    plan = run.plan()
    assert plan.is_empty and plan.wake_at is None
    assert [reason for reason, _ in plan.waits] == [WaitReason.IDLE]


def test_S15_a_plan_with_effects_only_is_executed_and_committed_too() -> None:
    run = Run()
    run.admit(prompt(4), 1)
    run.step()
    plan = run.plan()
    assert plan.num_rows == 0 and not plan.is_empty
    assert plan.finished_ids == ("r0",) and list(plan.freed_slots)
    run.submit(plan)
    run.commit()
    assert run.plan().is_empty
    run.check_end()


def test_S15_an_empty_plan_beside_work_in_flight_names_the_wait() -> None:
    run = Run(limits(max_sequences=1), depth=2)
    run.admit(prompt(4, 1), 1)
    run.admit(prompt(4, 2), 1)
    run.submit(run.plan())
    plan = run.plan()
    if plan.is_empty:
        assert {reason for reason, _ in plan.waits} <= {WaitReason.SEQUENCE_CAP, WaitReason.UNCOMMITTED}
    run.finish()


def test_S16_running_sequences_cost_table_edits_at_block_boundaries_only() -> None:
    run = Run(limits())
    run.admit(prompt(6), 12)
    plans = []
    while run.scheduler.has_work:
        plans.append(run.step())
    sent = [[edit[2] for edit in quads(plan.edits)] for plan in plans if plan.num_rows]
    assert sent == [[0, 1], [], [], [2], [], [], [], [3], [], [], [], [4]]
    assert all(not plan.new_sequences for plan in plans[1:])
    run.finish()


def test_S16_plans_never_change_after_they_are_made() -> None:
    run = Run(limits(num_blocks=6), depth=3)
    for seed in range(6):
        run.admit(prompt(6, seed % 2), 9)
    run.finish()
    assert [plan.digest() for plan in run.plans] == run.digests


# -- S20, S21


def test_S20_every_decision_is_an_event_with_its_numbers() -> None:
    run = Run(limits(max_batch_tokens=8))
    record = run.admit(prompt(10), 2)
    run.finish()
    assert [event.kind.name for event in record.events] == ["ADMITTED", "CHUNKED", "FINISHED"]
    admitted, chunked, finished = record.events
    assert (admitted.num_tokens, admitted.cached_tokens) == (8, 0)
    assert (chunked.num_tokens, chunked.needed) == (8, 2)
    assert (finished.finish_reason, finished.num_tokens) == (FinishReason.LENGTH, 2)


def test_S20_deferred_is_told_once_per_change_and_the_others_answer_behind() -> None:
    run = Run(limits(max_sequences=1))
    run.admit(prompt(4, 1), 10)
    second, third = run.admit(prompt(4, 2), 2), run.admit(prompt(4, 3), 2)
    run.steps(8)
    (deferred,) = second.of_kind(EventKind.DEFERRED)
    assert deferred.reason == WaitReason.SEQUENCE_CAP
    assert not third.events
    last = run.scheduler.explain("r2")
    assert last is not None and last.reason is WaitReason.BEHIND
    assert run.scheduler.explain("r1") is not None
    run.finish()


def test_S20_explain_answers_for_unknown_and_finished_ids() -> None:
    run = Run()
    run.admit(prompt(4), 1)
    run.finish()
    assert run.scheduler.explain("r0") is None
    assert run.scheduler.explain("nobody") is None


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_S21_a_request_past_its_queue_timeout_or_deadline_ends_at_once(depth: int) -> None:
    run = Run(limits(max_sequences=1), depth=depth)
    runs_out = run.admit(prompt(4, 1), 40, deadline=5.0, queue_timeout=0.5)
    waits = run.admit(prompt(4, 2), 2, queue_timeout=2.0)
    late = run.admit(prompt(4, 3), 2, deadline=3.0)
    stays = run.admit(prompt(4, 4), 2)
    run.step()
    assert run.plans[-1].wake_at is None or run.plans[-1].num_rows
    run.now = 2.5
    run.step()
    assert (waits.reason, runs_out.finished, late.finished) == (FinishReason.TIMEOUT, None, None)
    run.now = 3.5
    run.step()
    assert late.reason == FinishReason.TIMEOUT and runs_out.finished is None
    run.now = 5.5
    run.step()
    assert runs_out.reason == FinishReason.TIMEOUT
    run.finish()
    assert stays.reason == FinishReason.LENGTH


# -- S23, S24


@pytest.mark.parametrize(("policy", "admitted"), [("fcfs", []), ("fifo", ["r2"])])
def test_S23_fcfs_stops_at_the_first_that_lacks_blocks_and_fifo_looks_further(policy: str, admitted: list[str]) -> None:
    run = Run(limits(num_blocks=8, policy=policy, headroom=0.0, max_batch_tokens=64))
    run.admit(prompt(16, 1), 8)
    run.step()
    run.admit(prompt(24, 2), 2)
    run.admit(prompt(4, 3), 2)
    assert names(run.step()) == admitted
    run.finish()


def test_S23_an_unchunked_prompt_over_the_rest_of_the_token_budget_is_skipped() -> None:
    run = Run(limits(max_batch_tokens=12, chunked_prefill=False, num_blocks=40))
    run.admit(prompt(4, 1), 9)
    run.admit(prompt(10, 2), 2)
    run.admit(prompt(5, 3), 2)
    assert names(run.step()) == ["r0", "r2"]
    run.finish()


def test_S24_scores_come_once_for_every_prompt_position_though_a_prefix_is_cached() -> None:
    run = Run(limits(max_batch_tokens=8))
    run.admit(prompt(16), 1)
    run.finish_all()
    record = run.admit(prompt(16), 2, wants=Want.SAMPLE | Want.SCORE, prompt_logprobs=0)
    run.finish()
    positions = [first + i for first, entries in record.scores for i in range(len(entries))]
    assert positions == list(range(1, 16))
    assert [entry.token_id for _, entries in record.scores for entry in entries] == prompt(16)[1:]


def test_S24_a_request_that_only_scores_ends_without_tokens() -> None:
    run = Run(limits(max_batch_tokens=8))
    record = run.admit(prompt(13), 1, wants=Want.SCORE)
    plans = [run.step() for _ in range(2)]
    assert all(flags & ROW_SCORE and not flags & (ROW_SAMPLE | ROW_CARRY) for plan in plans for flags in plan.flags)
    run.finish()
    assert record.token_ids == [] and record.finished is not None and record.finished.num_tokens == 0
    assert sum(len(entries) for _, entries in record.scores) == 12


def test_S24_a_request_for_an_embedding_gives_one_state_at_its_end() -> None:
    run = Run(limits(max_batch_tokens=8))
    record = run.admit(prompt(13), 1, wants=Want.POOL)
    run.step()
    assert record.pooled == []
    run.finish()
    assert len(record.pooled) == 1 and record.token_ids == []


def test_S24_a_prompt_that_is_also_continued_is_pooled_once() -> None:
    run = Run(limits())
    record = run.admit(prompt(13), 5, wants=Want.SAMPLE | Want.POOL)
    run.finish()
    assert len(record.pooled) == 1 and len(record.token_ids) == 5


@pytest.mark.parametrize("wants", [Want.POOL, Want.SCORE | Want.POOL])
def test_S24_an_embedding_preempted_in_flight_is_given_once_and_not_computed_again(wants: Want) -> None:
    run = Run(limits(num_blocks=4), depth=2)
    run.admit(prompt(8, 1), 4)
    record = run.admit(prompt(8, 2), 1, wants=wants)
    run.finish()
    assert record.of_kind(EventKind.PREEMPTED) and not record.of_kind(EventKind.RESUMED)
    assert record.reason == FinishReason.STOP and len(record.pooled) == 1
    assert sum(len(entries) for _, entries in record.scores) == (7 if wants & Want.SCORE else 0)


def test_S24_eos_ends_a_sampling_request_with_stop() -> None:
    run = Run(limits(vocab_size=5))
    record = run.admit([3, 4, 3], 50, eos_token_ids=(EOS,))
    run.finish()
    assert record.reason == FinishReason.STOP and record.token_ids[-1] == EOS
