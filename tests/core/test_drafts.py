"""P07 in the scheduler: drafts take what is left, change no id, and leave nothing behind when they are rejected."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from tests.core.harness import EOS, Run, limits, prompt
from tests.core.random_driver import Driver
from tests.hash_chain import HABIT

from octavo.core.drafts import Drafter, allows
from octavo.core.limits import Limits
from octavo.core.ngrams import PAUSES, WORTH, DraftHistory
from octavo.core.plan import ROW_SAMPLE, StepPlan, StepResult, WaitReason
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.errors import ConfigError, InvariantError
from octavo.observe.explainer import sentence

LOOP = [5, 6, 7, 8] * 4


def sizes(**changes: Any) -> Limits:
    return limits(**{"max_draft_tokens": 4, "num_blocks": 64, "vocab_size": 11, "max_model_len": 96, **changes})


def speak(run: Run, max_tokens: int = 40, seed: int = HABIT, **fields: Any) -> Any:
    """A request whose ids can be foreseen seven times in eight."""
    return run.admit([*prompt(6, len(run.records), 11)], max_tokens, seed=seed, **fields)


def fly(run: Run) -> StepPlan:
    """Go on until a plan with drafts is in flight."""
    for _ in range(200):
        plan = run.plan()
        run.submit(plan)
        if plan.num_drafts:
            return plan
        run.commit()
    raise AssertionError("no drafts")


def num_drafted(run: Run) -> tuple[int, int]:
    totals = run.scheduler.statistics()
    return totals.num_drafted_tokens, totals.num_accepted_tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_P07_drafts_save_steps_and_change_no_id(depth: int) -> None:
    """The record compares the ids with the oracle's at its end."""
    runs = []
    for most in (0, 4):
        run = Run(sizes(max_draft_tokens=most), depth=depth)
        for index in range(3):
            speak(run, seed=HABIT + index, eos_token_ids=(EOS,), ignore_eos=index > 0)
        runs.append(run.finish())
    plain, drafted = runs
    assert [r.token_ids for r in plain.records.values()] == [r.token_ids for r in drafted.records.values()]
    num, accepted = num_drafted(drafted)
    assert num_drafted(plain) == (0, 0) and 0 < accepted < num
    assert sum(bool(p.slots) for p in drafted.plans) < sum(bool(p.slots) for p in plain.plans)


def test_P07_several_tokens_come_at_once_and_the_end_is_exact() -> None:
    run = Run(sizes())
    record = speak(run, 37)
    most = 0
    while record.finished is None:
        before = len(record.token_ids)
        run.step()
        most = max(most, len(record.token_ids) - before)
    assert most > 2 and len(record.token_ids) == 37 and record.reason == FinishReason.LENGTH
    run.finish()


def test_P07_a_row_counts_its_drafts_against_every_budget() -> None:
    run = Run(sizes(max_batch_tokens=6, max_kv_read=200))
    for _ in range(2):
        speak(run)
    run.finish()
    with_drafts = [plan for plan in run.plans if plan.num_drafts]
    assert with_drafts
    for plan in with_drafts:
        assert plan.num_query_tokens == sum(plan.counts) <= 6 and not plan.is_fast_path
        assert sum(plan.num_drafts) == len(plan.draft_token_ids)
        for row, drafts in zip(plan.rows(), plan.num_drafts, strict=True):
            assert len(row.drafts) == drafts and (not drafts or (row.count, row.flags) == (1 + drafts, ROW_SAMPLE))


def test_P07_a_plan_of_many_rows_has_no_drafts() -> None:
    run = Run(sizes(max_draft_rows=2))
    for index in range(4):
        speak(run, 12 + 12 * index)
    run.finish()
    assert any(plan.num_drafts for plan in run.plans)
    assert all(plan.num_rows <= 2 for plan in run.plans if plan.num_drafts)


def test_P07_drafts_leave_the_headroom_and_a_block_for_each_running_sequence() -> None:
    run = Run(sizes(num_blocks=14, headroom=0.1))
    speak(run, 44)
    num_taken = num_scarce = 0
    while run.scheduler.has_work:
        plan = run.step()
        free = run.checks.mirror.num_free()[0]
        num_scarce += free < 2 + 1
        for row in plan.rows():
            if row.drafts and -(-(row.start + row.count) // 4) > -(-(row.start + 1) // 4):
                num_taken += 1
                assert free >= 2 + 1, "drafts took a block of the headroom"
    assert num_taken and num_scarce
    run.finish()


def test_P07_blocks_of_rejected_drafts_go_back() -> None:
    """Invariants compare tables with tokens after every commit; here it happens that a block goes."""
    run = Run(sizes(block_size=2, num_blocks=96))
    speak(run, 60)
    run.finish()
    dropped = [plan for plan in run.plans if -1 in plan.edits[3::4]]
    assert dropped, "no draft was rejected behind a block's edge"


def test_P07_S17_a_sequence_with_drafts_in_flight_waits_for_them() -> None:
    run = Run(sizes(), depth=2)
    record = speak(run)
    fly(run)
    plan = run.plan()
    assert plan.is_empty and (WaitReason.UNCOMMITTED, 1) in plan.waits
    other = speak(run, 3)
    run.submit(run.plan())
    assert [*run.rows(run.plans[-1])] == [other.request.request_id] and record.finished is None, "others go on"
    run.finish()


def test_P07_nothing_that_was_rejected_is_found_in_the_cache() -> None:
    run = Run(sizes(block_size=2, num_blocks=96))
    record = speak(run, 40)
    run.finish_all()
    again = run.admit([*record.request.prompt_token_ids, *record.token_ids], 8, seed=HABIT)
    run.finish_all()
    assert again.finished is not None and again.finished.cached_tokens > 30  # and its text is the oracle's
    run.check_end()


@pytest.mark.parametrize("verb", ["cancel", "deadline", "fail", "end_choice"])
def test_P07_whatever_ends_a_row_in_flight_leaves_nothing(verb: str) -> None:
    run = Run(sizes(), depth=2)
    record = speak(run, 50, deadline=100.0, n=2 if verb == "end_choice" else 1)
    fly(run)
    if verb == "cancel":
        run.cancel(record.request.request_id)
    elif verb == "deadline":
        run.now = 101.0
    elif verb == "fail":
        run.fail_oldest()
    else:
        run.end_choice(record.request.request_id, 0)
    run.finish()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_P07_a_request_preempted_with_drafts_in_flight_keeps_what_they_gave(mode: str) -> None:
    run = Run(sizes(preemption=mode, host_blocks=(64,)), depth=2)
    record = speak(run, 50)
    plan = fly(run)
    state = run.scheduler._state
    state.preempt(state.requests[record.request.request_id], run.now, "another", None, may_swap=True)
    assert not state.num_swapped, "what drafts in flight write cannot be swapped"
    before = len(record.token_ids)
    run.commit()
    assert 1 <= len(record.token_ids) - before <= 1 + sum(plan.num_drafts)
    run.finish()


def test_P07_who_is_drafted_for() -> None:
    ids = array("i", LOOP)

    def may(**fields: Any) -> bool:
        return allows(Request("r", ids, SamplingParams(**fields)))

    assert may() and may(temperature=1.0, seed=3) and may(logprobs=3) and may(n=2) and may(bad_words_ids=((5, 6),))
    assert may(min_tokens=3) and may(logit_bias=((5, 1.0),))
    for fields in ({"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}):
        assert not may(**fields)
    assert not may(dry_multiplier=0.8) and not may(beam_width=2)
    assert not Drafter().knows(Request("r", None, num_prompt_tokens=5))


def test_P07_drafts_that_fail_bring_pauses_and_success_ends_them() -> None:
    track = DraftHistory()
    assert track.num_wanted(7) == 4
    known, pauses = 10, []
    for _ in range(40):
        track.learn(4, 0, known)
        if track.resume_at > known:
            pauses.append(track.resume_at - known)
            known = track.resume_at
    assert pauses[:3] == [16, 32, 64] and max(pauses) == PAUSES[1]
    for _ in range(8):
        track.learn(4, 4, known)
    assert track.pause == PAUSES[0] and track.num_wanted(7) == 7 and track.rate > WORTH


def test_P07_a_text_that_cannot_be_foreseen_is_soon_left_alone() -> None:
    run = Run(sizes(vocab_size=5, max_model_len=400, num_blocks=200))
    run.admit(prompt(6, 1, 5), 300, seed=1)
    run.finish()
    num, accepted = num_drafted(run)
    assert accepted < num < 150


def test_P07_an_executor_that_verifies_nothing_is_right_too() -> None:
    """It may give one id for each row; and durations only."""
    run = Run(sizes(), durations_only=True)
    speak(run, 20)
    run.check = False
    plan = StepPlan(0, 0.0)
    while not plan.num_drafts:
        plan = run.plan()
        if not plan.num_drafts:
            run.submit(plan)
            run.commit()
    events = run.scheduler.commit(plan, StepResult(array("i", [3])), run.now)
    assert list(events.token_ids) == [3] and num_drafted(run)[1] == 0


@pytest.mark.parametrize("extra", [(), (0, 0, 0, 0, 0, 0, 0)])
def test_P07_a_result_that_is_not_the_drafts_is_refused(extra: tuple[int, ...]) -> None:
    run = Run(sizes())
    speak(run)
    plan = fly(run)
    ids = [(plan.draft_token_ids[0] + 1) % 11, 0, *extra]
    with pytest.raises(InvariantError, match="accepted drafts"):
        run.scheduler.commit(plan, StepResult(array("i", ids), array("i", [len(ids)])), run.now)


def test_P07_explain_says_how_drafts_do() -> None:
    run = Run(sizes())
    record = speak(run)
    run.until(lambda: num_drafted(run)[1] > 0)
    num, accepted = num_drafted(run)
    found = run.scheduler.explain(record.request.request_id)
    assert found is not None and sentence(found).endswith(f", {accepted} of {num} drafts accepted")


def test_P07_limits_have_ranges() -> None:
    for name in ("max_draft_tokens", "max_draft_rows"):
        with pytest.raises(ConfigError, match=name):
            sizes(**{name: -1})


@pytest.mark.parametrize("seed", range(24))
def test_P07_random_steps_with_drafts_and_faults(seed: int) -> None:
    rng = random.Random(seed)
    faults = (0.0, 0.0, 0.0, 0.0) if seed % 2 else (0.02, 0.02, 0.02, 0.02)
    changes = {"max_draft_tokens": rng.choice((1, 3, 7)), "max_draft_rows": rng.choice((2, 8)), "faults": faults}
    driver = Driver(50_000 + seed, 1, **changes)
    driver.drive(250)
