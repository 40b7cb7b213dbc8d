"""What may share a step: text and media (S12, bug_24), prefills and decodes (S13, bug_25), through the public verbs."""

from __future__ import annotations

import pytest
from tests.core.harness import Run, limits, prompt
from tests.core.records import Record

from octavo.core.plan import EventKind, StepPlan, WaitReason
from octavo.core.request import Span


def media_run(depth: int = 1, **changes: object) -> Run:
    sizes = {"separate_modalities": True, "encoder_budget": 8, "encoder_cache": 24, "num_blocks": 60}
    return Run(limits(**{**sizes, **changes}), depth=depth)


def with_item(run: Run, seed: int, max_tokens: int = 6) -> Record:
    """A prompt of 8 tokens with a media item at positions 2 to 5."""
    return run.admit(prompt(8, seed), max_tokens, spans=(Span(2, 4, bytes([seed])),))


def kinds(run: Run, plan: StepPlan) -> set[bool]:
    """Whether media is in the rows of a plan, and whether text is."""
    return {bool(run.records[name].request.spans) for name in run.rows(plan)}


def admitted(run: Run) -> list[str]:
    """Requests in the order of their admission."""
    return [new.request_id for plan in run.plans for new in plan.new_sequences]


# -- S12


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_S12_text_and_media_run_in_alternate_batches_in_order_of_arrival(depth: int) -> None:
    run = media_run(depth)
    text = [run.admit(prompt(5, 1), 6), run.admit(prompt(6, 2), 6)]
    media = [with_item(run, 3), with_item(run, 4)]
    assert text and media
    run.finish()
    turns = [kinds(run, plan) for plan in run.plans if plan.slots]
    assert all(len(turn) == 1 for turn in turns)
    assert turns[:8] == [{False}, {True}] * 4
    assert admitted(run) == ["r0", "r1", "r2", "r3"]


def test_S12_a_kind_alone_runs_in_every_step() -> None:
    for seed_of_media in (None, 7):
        run = media_run()
        for seed in range(3):
            if seed_of_media is None:
                run.admit(prompt(8, seed), 6)
            else:
                with_item(run, seed)
        plans = [run.step() for _ in range(6)]
        assert all(plan.num_rows == 3 for plan in plans)
        run.finish()


def test_S12_a_request_of_the_other_kind_is_skipped_not_bypassed() -> None:
    run = media_run(max_bypass=1)
    run.is_ordered = False
    run.admit(prompt(5, 1), 12)
    with_item(run, 2, 12)
    plans = [run.step(), run.step()]
    waiting, text = with_item(run, 3), run.admit(prompt(5, 4), 12)
    plans.append(run.step())
    assert text.is_running and not waiting.is_running
    plans.append(run.step())
    assert waiting.is_running and run.scheduler.statistics().num_bypasses == 0
    assert [kinds(run, plan) for plan in plans] == [{False}, {True}] * 2
    run.finish()
    assert {event.reason for event in run.decisions(EventKind.DEFERRED)} == {WaitReason.MODALITY}


def test_S12_by_default_text_and_media_share_a_step() -> None:
    run = media_run(separate_modalities=False)
    run.admit(prompt(5, 1), 6)
    with_item(run, 3)
    assert kinds(run, run.step()) == {False, True}
    run.finish()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("composition", ["mixed", "separate"])
def test_bug_24_neither_kind_waits_for_more_than_one_step_of_the_other(depth: int, composition: str) -> None:
    run = media_run(depth, composition=composition, max_sequences=6, num_blocks=24)
    run.is_ordered = False
    waited = {False: 0, True: 0}
    bound = 1 if composition == "mixed" and depth == 1 else 2 * depth + run.limits.max_prefill_run
    for turn in range(40):
        if turn < 12:
            run.admit(prompt(5, turn), 9)
            with_item(run, 100 + turn, 9)
        plan = run.step()
        if not plan.slots:
            continue
        (kind,) = kinds(run, plan)
        running = {bool(record.request.spans) for record in run.records.values() if record.is_running}
        waited[kind] = 0
        waited[not kind] = waited[not kind] + 1 if kind not in running else 0
        assert waited[not kind] <= bound
    run.finish()


def test_bug_24_the_first_in_line_of_one_kind_never_blocks_the_other_for_good() -> None:
    run = media_run(encoder_budget=4, encoder_cache=4, max_sequences=2)
    run.is_ordered = False
    for seed in range(6):
        with_item(run, seed, 3)
    for seed in range(6, 12):
        run.admit(prompt(5, seed), 3)
    num_empty = 0
    while run.scheduler.has_work:
        num_empty += not run.step().slots
    assert num_empty <= 2  # every step has rows: nothing turns in circles
    run.finish()
    order = admitted(run)
    assert [name for name in order if int(name[1:]) < 6] == [f"r{i}" for i in range(6)]
    assert [name for name in order if int(name[1:]) >= 6] == [f"r{i}" for i in range(6, 12)]


# -- S13


def phases(run: Run, plan: StepPlan) -> set[str]:
    """What is in a plan: rows of prompts, rows behind them. Slots must not have been given to others since."""
    lengths = {row.slot: run.records[run.slot_owner[row.slot]].request.num_prompt_tokens for row in plan.rows()}
    return {"prefill" if row.start < lengths[row.slot] else "decode" for row in plan.rows() if row.count}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_S13_a_separate_step_is_all_prefill_or_all_decode(depth: int) -> None:
    run = Run(limits(composition="separate", num_blocks=60, max_batch_tokens=8), depth=depth)
    for seed in range(6):
        run.admit(prompt(3 + 4 * seed, seed), 6)
    run.finish()
    seen = [phases(run, plan) for plan in run.plans if plan.slots]
    assert all(len(phase) == 1 for phase in seen)
    assert {"prefill"} in seen and {"decode"} in seen


def test_S13_by_default_they_mix() -> None:
    run = Run(limits(num_blocks=60))
    run.admit(prompt(5, 1), 6)
    run.step()
    run.admit(prompt(5, 2), 6)
    assert phases(run, run.step()) == {"prefill", "decode"}
    run.finish()


@pytest.mark.parametrize("max_prefill_run", [1, 2, 4])
def test_bug_25_a_stream_of_prompts_stalls_decodes_for_max_prefill_run_steps_and_no_more(max_prefill_run: int) -> None:
    run = Run(limits(composition="separate", max_prefill_run=max_prefill_run, num_blocks=200, max_sequences=64))
    run.admit(prompt(5), 30)
    seen = []
    for seed in range(30):
        run.admit(prompt(5, 1 + seed), 2)
        seen.append(min(phases(run, run.step())))
    cycle = ["prefill"] * max_prefill_run + ["decode"]
    assert seen == (cycle * 30)[:30]
    run.finish()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_prefill_run", [1, 3])
def test_bug_25_a_long_prompt_in_chunks_stalls_decodes_no_longer(max_prefill_run: int, depth: int) -> None:
    run = Run(
        limits(composition="separate", max_prefill_run=max_prefill_run, num_blocks=60, max_batch_tokens=4), depth=depth
    )
    first = run.admit(prompt(4), 20)
    run.until(lambda: len(first.token_ids) >= 2)
    run.admit(prompt(40, 1), 3)
    num_prompt = 0
    for plan in [run.step() for _ in range(12)]:
        num_prompt = num_prompt + 1 if phases(run, plan) == {"prefill"} else 0
        assert num_prompt <= max_prefill_run
    assert run.records["r1"].is_running
    run.finish()


def test_S13_prompts_that_lack_room_do_not_keep_decodes_waiting() -> None:
    run = Run(limits(composition="separate", num_blocks=8))
    run.admit(prompt(12), 12)
    run.step()
    waiting = run.admit(prompt(24, 1), 2)
    plans = [run.step() for _ in range(8)]
    assert all(phases(run, plan) == {"decode"} for plan in plans)
    assert waiting.of_kind(EventKind.DEFERRED)[0].reason == WaitReason.KV_BLOCKS
    run.finish()


def test_S13_choices_that_enter_by_themselves_are_prefills() -> None:
    run = Run(limits(composition="separate", num_blocks=60, block_sharing=False, prefix_caching=False))
    run.admit(prompt(6, 1), 8)
    run.step()
    run.admit(prompt(9, 2), 4, n=3)
    run.finish()
    assert all(len(phases(run, plan)) == 1 for plan in run.plans if plan.slots)
