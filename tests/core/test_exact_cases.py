"""Cases with exact numbers: chunks, skips, plans in flight, growth at the pool's edge, hits and the order of reuse."""

from __future__ import annotations

import pytest
from tests.core.harness import Run, limits, prompt
from tests.fake_model import quads

from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, EventKind, StepPlan


def big(**changes: object) -> Run:
    """An engine of blocks of 16 with room for everything that the case does not limit."""
    sizes = {"block_size": 16, "num_blocks": 400, "max_model_len": 2048, "max_batch_tokens": 1024}
    depth = changes.pop("depth", 1)
    assert isinstance(depth, int)
    return Run(limits(**{**sizes, **changes}), depth=depth)


def given_blocks(plan: StepPlan, slot: int | None = None) -> list[int]:
    """Blocks that a plan puts into tables, in order."""
    return [block for at, _, _, block in quads(plan.edits) if slot is None or at == slot]


def test_S02_three_long_prompts_share_a_budget_of_1024_under_a_threshold_of_400() -> None:
    run = big(long_prefill_threshold=400)
    for seed in range(3):
        run.admit(prompt(800, seed), 4)
    plans = [run.step() for _ in range(4)]
    assert [plan.counts.tolist() for plan in plans] == [[400, 400, 224], [400, 400, 224], [1, 1, 352], [1, 1, 1]]
    assert [plan.num_query_tokens for plan in plans] == [1024, 1024, 354, 3]
    assert [plan.flags.tolist() for plan in plans[:3]] == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert len(run.decisions(EventKind.CHUNKED)) == 4  # three in the first step, the third prompt again in the second
    run.finish()


def test_S23_without_chunks_short_prompts_fill_what_a_long_one_leaves() -> None:
    run = big(chunked_prefill=False)
    for seed, length in enumerate((800, 800, 10, 10)):
        run.admit(prompt(length, seed), 4)
    assert run.counts(run.step()) == {"r0": 800, "r2": 10, "r3": 10}
    assert run.counts(run.step()) == {"r0": 1, "r2": 1, "r3": 1, "r1": 800}
    run.finish()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_S17_stops_by_length_schedule_prompt_and_outputs_less_one_and_nothing_more(depth: int) -> None:
    run = big(depth=depth)
    lengths, outputs = (5, 17, 32, 48), (1, 2, 3, 5)
    for seed, (length, max_tokens) in enumerate(zip(lengths, outputs, strict=True)):
        run.admit(prompt(length, seed), max_tokens)
    run.finish()
    assert run.num_scheduled == sum(lengths) + sum(outputs) - 4 == 109
    assert run.executor.num_tokens == 109


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_S17_an_end_found_late_wastes_at_most_one_token_for_each_plan_in_flight(depth: int) -> None:
    run = big(depth=depth)
    prompts, cuts = [prompt(20, seed) for seed in range(4)], (1, 2, 3, 5)
    for ids, cut in zip(prompts, cuts, strict=True):
        free = Run(limits(block_size=16))  # what it would say, to know what to stop at
        said = free.admit(ids, 8)
        free.finish()
        stop = said.token_ids[cut - 1]
        cut = said.token_ids.index(stop) + 1
        run.admit(ids, 40, stop_token_ids=(stop,))
    run.finish()
    outputs = sum(record.num_outputs for record in run.records.values())
    least = sum(20 + record.num_outputs - 1 for record in run.records.values())
    assert outputs <= sum(cuts)
    assert least <= run.num_scheduled <= least + 4 * (depth - 1)
    assert (run.num_scheduled == least) == (depth == 1)  # with one plan at a time there is nothing to waste


@pytest.mark.parametrize("depth", [1, 2])
def test_S07_growth_of_the_first_preempts_the_second_and_its_late_token_comes_once(depth: int) -> None:
    run = big(num_blocks=10, depth=depth, max_model_len=128)
    first, second = run.admit(prompt(80, 1), 8), run.admit(prompt(80, 2), 8)
    run.now = 0.01
    plan = run.plan()
    assert plan.counts.tolist() == [80, 80] and len(set(given_blocks(plan))) == 10
    run.submit(plan)
    if depth == 1:
        run.commit()
    growing = run.plan()
    assert run.rows(growing) == {"r0": (80, 1, ROW_SAMPLE | (ROW_CARRY if depth == 2 else 0))}
    (event,) = second.of_kind(EventKind.PREEMPTED)
    assert (event.by, event.num_tokens) == ("r0", 80)
    assert len(given_blocks(growing)) == 1 and growing.preempted_ids == ("r1",)
    assert not first.of_kind(EventKind.PREEMPTED)
    assert len(second.token_ids) == 2 - depth
    run.submit(growing)
    if depth == 2:
        run.commit()
    assert len(second.token_ids) == 1  # sampled before it had to go, delivered once
    run.until(lambda: bool(second.of_kind(EventKind.RESUMED)))
    (new,) = [new for plan in run.plans[1:] for new in plan.new_sequences]
    assert (new.num_prompt, len(new.token_ids or ())) == (80, 81)
    run.finish()
    assert len(first.token_ids) == len(second.token_ids) == 8


@pytest.mark.parametrize(("length", "hit"), [(15, 0), (16, 15), (17, 16), (47, 32), (48, 47), (49, 48), (64, 63)])
def test_K02_a_hit_is_at_most_all_tokens_but_one(length: int, hit: int) -> None:
    run = big()
    run.admit(prompt(64), 1)
    run.finish_all()
    record = run.admit(prompt(64)[:length], 1)
    plan = run.step()
    assert run.rows(plan) == {record.request.request_id: (hit, length - hit, ROW_SAMPLE)}
    assert record.of_kind(EventKind.ADMITTED)[0].cached_tokens == hit
    run.finish()


def test_K02_two_prompts_that_share_48_tokens_hit_48_and_one_block_is_new() -> None:
    run = big(num_blocks=10)
    shared = prompt(48)
    run.admit([*shared, *prompt(10, 1)], 1)
    first = given_blocks(run.step())
    assert len(first) == 4
    record = run.admit([*shared, *prompt(16, 2)], 1)
    plan = run.step()
    assert run.rows(plan)["r1"] == (48, 16, ROW_SAMPLE)
    table = given_blocks(plan)
    assert table[:3] == first[:3] and len(table) == 4
    run.finish_all()
    assert record.of_kind(EventKind.FINISHED)[0].cached_tokens == 48


def test_K03_blocks_are_reused_un_hashed_first_then_never_used_then_hashed_tail_first() -> None:
    run = big(num_blocks=8, max_model_len=128)
    run.admit(prompt(58, 1), 1)  # three full blocks, and a part of a fourth
    table = given_blocks(run.step())
    assert len(set(table)) == 4
    never = [block for block in range(8) if block not in table]
    run.admit(prompt(128 - 1, 2), 1)
    order = given_blocks(run.step())
    assert order[0] == table[3]  # un-hashed
    assert sorted(order[1:5]) == never
    assert order[5:] == [table[2], table[1], table[0]]  # hashed, the tail of the chain first
    run.finish()
