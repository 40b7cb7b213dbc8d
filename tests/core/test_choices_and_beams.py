"""Requests with several sequences (P03, P04, P05, K05, K06, L03, bugs 06, 18, 20), through the public verbs."""

from __future__ import annotations

import pytest
from tests.core.harness import EOS, Run, limits, prompt
from tests.core.records import Record
from tests.fake_model import quads, triples

from octavo.core.plan import ROW_BEAM, ROW_FORK, ROW_SAMPLE, EventKind, WaitReason
from octavo.core.request import FinishReason
from octavo.errors import AdmissionError


def used(run: Run) -> int:
    """Blocks in use now."""
    return run.scheduler.statistics().num_blocks_used


def texts(record: Record) -> list[list[int]]:
    return [choice.token_ids for choice in record.choices]


def long_run(**changes: object) -> Run:
    sizes = {"block_size": 16, "num_blocks": 400, "max_model_len": 1024, "max_batch_tokens": 8192}
    return Run(limits(**{**sizes, **changes}))


# -- P03: the prompt once


@pytest.mark.parametrize(("length", "in_first", "in_second", "copies"), [(512, 32, 40, 0), (520, 33, 40, 7)])
def test_P03_eight_choices_hold_the_blocks_of_a_long_prompt_once(
    length: int, in_first: int, in_second: int, copies: int
) -> None:
    run = long_run()
    record = run.admit(prompt(length), 5, n=8)
    first = run.step()
    assert first.counts.tolist() == [length] + [0] * 7
    assert first.flags.tolist() == [ROW_SAMPLE] + [ROW_SAMPLE | ROW_FORK] * 7
    assert (used(run), [len(text) for text in texts(record)]) == (in_first, [1] * 8)
    second = run.step()
    assert (used(run), len(second.copies) // 3) == (in_second, copies)
    tables = [state.tables[0] for state in run.executor.slots.values()]
    assert len(tables) == 8 and len({tuple(table[:32]) for table in tables}) == 1
    assert len({table[32] for table in tables}) == 8
    run.finish()
    assert run.num_scheduled == length + 8 * 4
    assert len({tuple(text) for text in texts(record)}) == 8  # choices differ by their number alone


@pytest.mark.parametrize(
    ("block_sharing", "prefix_caching", "computed"),
    [(True, False, 512), (True, True, 512), (False, False, 8 * 512), (False, True, 512 + 7)],
)
def test_P03_without_block_sharing_each_choice_has_its_own(
    block_sharing: bool, prefix_caching: bool, computed: int
) -> None:
    run = long_run(block_sharing=block_sharing, prefix_caching=prefix_caching)
    run.admit(prompt(512), 5, n=8)
    most = 0
    while run.scheduler.has_work:
        run.step()
        most = max(most, used(run))
    assert run.num_scheduled == computed + 8 * 4
    assert (most >= 8 * 32) == (computed == 8 * 512)
    assert any(row.flags & ROW_FORK for plan in run.plans for row in plan.rows()) == block_sharing
    run.finish()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_P03_best_of_runs_all_its_choices_with_logprobs(depth: int) -> None:
    run = Run(depth=depth)
    record = run.admit(prompt(6), 5, n=2, best_of=4)
    run.finish()
    assert [len(text) for text in texts(record)] == [5] * 4
    assert run.num_scheduled == 6 + 4 * 4


def test_P03_choices_after_a_preemption_share_the_prompt_again() -> None:
    run = Run(limits(num_blocks=11, preemption="recompute"))
    run.admit(prompt(8, 1), 17)
    record = run.admit(prompt(9, 2), 9, n=3)
    run.until(lambda: bool(record.of_kind(EventKind.PREEMPTED)))
    known = [9 + len(text) for text in texts(record)]
    run.until(lambda: len(run.checks.mirror.seats_of("r1")) == 3)
    tables = [seat.tables[0] for seat in run.checks.mirror.seats_of("r1")]
    assert len({tuple(table[:2]) for table in tables}) == 1 and len({table[2] for table in tables}) == 3
    entered = [new for plan in run.plans[1:] for new in plan.new_sequences]
    assert sorted((new.choice, len(new.token_ids or ())) for new in entered) == list(enumerate(known))
    run.finish()
    least = 8 + 17 - 1 + 9 + 3 * 8
    tails = sum(count - 8 for count in known)  # what is behind the two blocks of the prompt that they share
    assert least < run.num_scheduled <= least + tails


# -- bug_18, bug_06, K05, K06


def test_bug_18_the_cap_counts_sequences_not_requests() -> None:
    run = Run(limits(max_sequences=4, num_blocks=60))
    run.admit(prompt(4, 1), 6, n=3)
    second = run.admit(prompt(4, 2), 6, n=2)
    run.step()
    assert run.scheduler.num_running == 3
    (deferred,) = second.of_kind(EventKind.DEFERRED)
    assert (deferred.reason, deferred.needed, deferred.available) == (WaitReason.SEQUENCE_CAP, 2, 1)
    assert run.end_choice("r0", 1)
    run.step()
    assert run.scheduler.num_running == 4 and second.is_running
    run.finish()


def test_bug_18_a_beam_search_takes_the_places_of_all_its_beams_from_the_start() -> None:
    run = Run(limits(max_sequences=4, num_blocks=60))
    run.admit(prompt(4, 1), 6, beam_width=3)
    second, third = run.admit(prompt(4, 2), 6), run.admit(prompt(4, 3), 6)
    plan = run.step()
    assert plan.num_rows == 2 and run.scheduler.num_running == 4
    assert second.is_running and not third.is_running
    with pytest.raises(AdmissionError, match=r"5.*4"):
        run.admit(prompt(4, 3), 6, beam_width=5)
    run.finish()


def failed_fork(n: int, num_blocks: int) -> tuple[Run, Record]:
    """Three others take the blocks that a fork would have needed, in the very step in which it would fork."""
    run = Run(limits(num_blocks=num_blocks, max_batch_tokens=10))
    for seed in range(3):
        run.admit(prompt(3, seed), 3)
    return run, run.admit(prompt(12, 9), 2, n=n)


@pytest.mark.parametrize(("n", "num_blocks"), [(2, 9), (4, 10)])
def test_bug_06_a_fork_that_lacks_blocks_waits_and_is_served_from_the_prefix_cache(n: int, num_blocks: int) -> None:
    run, record = failed_fork(n, num_blocks)
    run.finish()
    (deferred,) = [event for event in record.of_kind(EventKind.DEFERRED) if event.reason == WaitReason.FORK_BLOCKS]
    assert (deferred.needed, deferred.available) == (n - 1, num_blocks - 9)
    assert not record.of_kind(EventKind.PREEMPTED)
    starts: dict[int, int] = {}
    for plan in run.plans:
        children = {new.slot: new.choice for new in plan.new_sequences if new.request_id == "r3" and new.choice}
        if any(event.reason == WaitReason.FORK_BLOCKS for event in plan.events):
            assert not any(row.flags & ROW_FORK for row in plan.rows())  # all or nothing: nobody was forked
        starts |= {children[row.slot]: row.start for row in plan.rows() if row.slot in children}
    assert sorted(starts) == list(range(1, n)) and min(starts.values()) >= 8


def test_K06_a_fork_shares_every_block_and_the_tail_is_copied_on_the_first_write() -> None:
    run = Run(limits(num_blocks=40))
    run.admit(prompt(10), 4, n=3)
    forking = run.step()
    tables: dict[int, list[int]] = {}
    for slot, _, _, block in quads(forking.edits):
        tables.setdefault(slot, []).append(block)
    assert len(tables) == 3 and len({tuple(table) for table in tables.values()}) == 1
    (table,) = {tuple(table) for table in tables.values()}
    assert not forking.copies and len(table) == 3
    writing = run.step()
    copies = list(triples(writing.copies))
    assert [(group, source) for group, source, _ in copies] == [(0, table[2])] * 2  # the last keeps it
    replaced = {block for _, _, index, block in quads(writing.edits) if index == 2}
    assert replaced == {to for _, _, to in copies} and len(replaced) == 2
    assert writing.starts.tolist() == [10, 10, 10]
    run.finish()


def test_K05_a_shared_tail_that_only_one_still_holds_is_not_copied() -> None:
    run = Run(limits(num_blocks=40))
    run.admit(prompt(10), 4, n=3)
    run.step()
    assert run.end_choice("r0", 0) and run.end_choice("r0", 2)
    plan = run.step()
    assert not plan.copies and plan.num_rows == 1 and not list(quads(plan.edits))
    run.finish()


def test_K05_a_fork_of_whole_blocks_copies_nothing() -> None:
    run = Run(limits(num_blocks=40))
    run.admit(prompt(8), 4, n=3)
    run.finish()
    assert not any(plan.copies for plan in run.plans)


# -- P05, L03: each choice ends by itself


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_P05_choices_stop_one_by_one_with_their_own_reasons(depth: int) -> None:
    free = Run()
    said = free.admit(prompt(6), 10, n=3)
    free.finish()
    first, second, third = texts(said)
    stop = next(token for token in first if token not in second + third)
    eos = next(token for token in second if token not in first + third)
    run = Run(depth=depth)
    record = run.admit(prompt(6), 10, n=3, stop_token_ids=(stop,), eos_token_ids=(eos,))
    run.finish()
    ends = {event.choice: event for event in record.events if event.finish_reason is not None}
    assert sorted(ends) == [0, 1, 2] and len(record.of_kind(EventKind.CHOICE_FINISHED)) == 2
    assert (ends[0].finish_reason, ends[0].stop_token_id) == (FinishReason.STOP, stop)
    assert (ends[1].finish_reason, ends[1].stop_token_id) == (FinishReason.STOP, None)
    assert (ends[2].finish_reason, len(texts(record)[2])) == (FinishReason.LENGTH, 10)
    assert record.finished is ends[2] and record.finished.num_tokens == sum(map(len, texts(record)))
    assert texts(record)[0][-1] == stop and texts(record)[1][-1] == eos


@pytest.mark.parametrize("depth", [1, 2])
def test_P05_min_tokens_holds_for_each_choice(depth: int) -> None:
    seeds = range(6)
    lengths = []
    for seed in seeds:
        run = Run(limits(vocab_size=5), depth=depth)
        record = run.admit(prompt(5, seed, 5), 12, n=3, min_tokens=4, eos_token_ids=(EOS,))
        run.finish()
        lengths += [len(text) for text in texts(record)]
        assert all(EOS not in text[:4] for text in texts(record))
    assert min(lengths) == 5 < max(lengths)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_L03_a_choice_can_be_ended_in_any_state_and_its_blocks_are_free_at_once(depth: int, num_steps: int) -> None:
    run = Run(limits(num_blocks=40), depth=depth)
    record = run.admit(prompt(6), 10, n=3)
    run.steps(num_steps)
    before = used(run)
    assert run.end_choice("r0", 1)
    for name, choice in (("r0", 1), ("r0", 7), ("nobody", 0)):
        assert not run.scheduler.end_choice(name, choice, run.now)
    (event,) = record.of_kind(EventKind.CHOICE_FINISHED)
    assert (event.choice, event.finish_reason) == (1, FinishReason.STOP)
    assert used(run) < before or num_steps < 2  # its own tail, once it had one
    run.finish()
    assert [len(text) for text in texts(record)] == [10, event.num_tokens, 10]
    assert not run.scheduler.end_choice("r0", 0, run.now)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_L03_a_choice_can_be_ended_while_its_request_is_preempted(preemption: str) -> None:
    run = Run(limits(num_blocks=9, preemption=preemption, host_blocks=(9,)))
    run.admit(prompt(8, 1), 17)
    record = run.admit(prompt(9, 2), 9, n=2)
    run.until(lambda: bool(record.of_kind(EventKind.PREEMPTED)))
    assert bool(record.of_kind(EventKind.SWAPPED)) == (preemption == "swap")
    num_tokens = len(record.choices[0].token_ids)
    assert run.end_choice("r1", 0)
    run.finish()
    assert [len(text) for text in texts(record)] == [num_tokens, 9]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_L03_ending_the_last_choice_ends_the_request_once(depth: int) -> None:
    run = Run(depth=depth)
    record = run.admit(prompt(6), 10, n=2)
    run.steps(2)
    assert run.end_choice("r0", 1) and record.finished is None
    assert run.end_choice("r0", 0)
    assert record.finished is not None and record.finished.choice == 0
    assert len(record.of_kind(EventKind.CHOICE_FINISHED)) == 1
    run.finish()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_L03_cancelling_ends_all_choices_with_one_answer(depth: int, num_steps: int) -> None:
    run = Run(depth=depth)
    several, beams = run.admit(prompt(6), 10, n=3), run.admit(prompt(5, 1), 6, beam_width=2)
    run.steps(num_steps)
    assert run.cancel("r0", "r1", "r0", "nobody") == 2
    run.finish()
    for record in (several, beams):
        assert record.reason == FinishReason.CANCELLED and not record.of_kind(EventKind.CHOICE_FINISHED)
    assert beams.finished is not None and beams.finished.num_tokens == 0


# -- P04: beams


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_P04_beams_give_the_oracles_text_at_the_end_and_never_run_ahead(width: int, depth: int) -> None:
    run = Run(limits(num_blocks=60), depth=depth)
    record = run.admit(prompt(6, 3), 7, beam_width=width, n=width, eos_token_ids=(EOS,))
    run.admit(prompt(5, 4), 12)
    while record.finished is None:
        run.step()
        beams = [plan for plan, _ in run.flight if any(flag & ROW_BEAM for flag in plan.flags)]
        assert len(beams) <= 1
        assert record.finished or not record.num_outputs
    run.finish()
    assert all(choice.token_ids for choice in record.choices)
    assert [event.choice for event in record.of_kind(EventKind.CHOICE_FINISHED)] == list(range(1, width))
    assert not run.end_choice("r0", 0)


def test_P04_the_choices_of_a_search_are_not_ended_alone() -> None:
    run = Run()
    run.admit(prompt(6), 6, beam_width=3)
    run.steps(2)
    assert not run.end_choice("r0", 1)
    run.finish()


def test_bug_20_no_fork_overwrites_a_beam_that_lives_whatever_their_order() -> None:
    moves = {"crossed": 0, "copied": 0, "dropped": 0}
    for seed in range(12):
        run = Run(limits(num_blocks=40, vocab_size=23))
        run.admit(prompt(3 + seed % 5, seed, 23), 9, beam_width=4, n=4)
        while run.scheduler.has_work:
            plan = run.step()
            beams = [slot for slot in plan.slots]
            moves["crossed"] += beams != sorted(beams)
            moves["copied"] += bool(plan.copies)
            moves["dropped"] += bool(plan.freed_slots) and bool(plan.slots)
        run.finish()  # the texts are the oracle's
    assert min(moves.values()) >= 12, moves


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
def test_P04_preempted_beams_come_back_and_find_the_same(preemption: str, depth: int) -> None:
    kinds = {EventKind.PREEMPTED: 0, EventKind.SWAPPED: 0}
    for seed in range(8):
        run = Run(limits(num_blocks=13, preemption=preemption, host_blocks=(20,)), depth=depth)
        run.admit(prompt(19, 1), 24)
        record = run.admit(prompt(9, 10 + seed), 9, beam_width=3, n=2)
        run.finish()  # the texts are the oracle's
        for kind in kinds:
            kinds[kind] += len(record.of_kind(kind))
    assert kinds[EventKind.PREEMPTED] >= 8
    assert (kinds[EventKind.SWAPPED] > 0) == (preemption != "recompute")
