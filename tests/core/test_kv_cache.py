"""Paged KV cache rows of the behaviours (K01-K12), through plans, events and statistics."""

from __future__ import annotations

import random
from array import array

import pytest
from tests.core import invariants
from tests.core.harness import Record, Run, limits, prompt
from tests.fake_model import quads, triples

from octavo.core.kv.pool import BlockPool
from octavo.core.kv.prefix import prompt_keys
from octavo.core.plan import EventKind, StepPlan
from octavo.core.request import Request, SamplingParams, Span, Want
from octavo.errors import ConfigError, InvariantError


def cached(record: Record) -> int:
    """Prompt tokens found in the cache when the request was first admitted."""
    return record.of_kind(EventKind.ADMITTED)[0].cached_tokens


def serve(run: Run, ids: list[int], max_tokens: int = 1, **fields: object) -> Record:
    """Run one request to its end; the cache stays."""
    record = run.admit(ids, max_tokens, **fields)
    run.finish_all()
    return record


def used(run: Run) -> int:
    return run.scheduler.statistics().num_blocks_used


# -- K01


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_K01_a_table_holds_exactly_the_blocks_of_its_positions(length: int) -> None:
    run = Run()
    record = run.admit(prompt(length), 9)
    sizes = []
    while run.scheduler.has_work:
        run.step()
        sizes.append(run.num_blocks_of(record))
    assert sizes[:9] == [-(-(length + step) // 4) for step in range(9)]
    run.finish()


def test_K01_free_referenced_and_evictable_blocks_sum_to_the_pool() -> None:
    run = Run(limits(num_blocks=10))
    serve(run, prompt(8, 1))
    assert (used(run), run.scheduler.statistics().num_blocks_cached) == (0, 2)
    run.admit(prompt(8, 1), 4)
    run.admit(prompt(9, 2), 4)
    run.step()
    statistics = run.scheduler.statistics()
    assert statistics.num_blocks == 10
    # r1 shares the first block; its copy of the second, full and equal, gave way to the source; r2 holds three.
    assert (statistics.num_blocks_used, statistics.num_blocks_cached) == (5, 0)
    run.finish()


def test_K01_a_double_free_raises() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(InvariantError, match=str(block)):
        pool.release(block)
    assert pool.num_free == 2


# -- K02


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 3), (5, 4), (8, 7), (11, 8), (12, 11)])
def test_K02_the_longest_match_leaves_at_least_one_token_to_compute(length: int, hit: int) -> None:
    run = Run()
    serve(run, prompt(12))
    record = run.admit(prompt(12)[:length], 3)
    plan = run.step()
    assert cached(record) == hit
    assert list(plan.counts) == [length - hit] and plan.num_kv_read == length
    run.finish()


def test_K02_prompt_blocks_are_found_by_rows_of_the_same_plan() -> None:
    run = Run()
    records = [run.admit([*prompt(8), 50 + i], 3) for i in range(3)]
    plan = run.step()
    assert [cached(record) for record in records] == [0, 8, 8]
    assert list(plan.counts) == [9, 1, 1]
    run.finish()


def test_K02_equal_prompts_in_one_plan_share_all_but_the_block_being_written() -> None:
    run = Run()
    records = [run.admit(prompt(8), 3) for _ in range(2)]
    plan = run.step()
    assert [cached(record) for record in records] == [0, 4]
    assert not plan.copies  # a copy would read what was there before the step
    run.finish()


def test_K02_prompt_blocks_are_found_by_a_later_plan_before_the_first_commits() -> None:
    run = Run(depth=2)
    run.admit(prompt(8), 3)
    run.submit(run.plan())
    second = run.admit(prompt(8), 3)
    run.submit(run.plan())
    assert cached(second) == 7 and len(run.plans[-1].copies) == 3
    run.finish()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_K02_a_failure_unpublishes_what_its_plan_promised(depth: int) -> None:
    run = Run(depth=depth)
    first, second = run.admit(prompt(9), 3), run.admit(prompt(9), 3)
    run.fill()
    assert cached(second) == 8
    run.fail_oldest()
    assert used(run) == 0
    run.step()
    assert first.of_kind(EventKind.RESUMED)[0].cached_tokens == 0
    run.finish()


def test_K02_generated_blocks_are_published_at_commit() -> None:
    run = Run()
    first = run.admit(prompt(4), 9)
    run.steps(5)
    assert len(first.token_ids) == 5  # positions 0 to 7 computed: two full blocks
    second = run.admit([*prompt(4), *first.token_ids, 50], 2)
    run.step()
    assert cached(second) == 8
    run.finish()


def test_K02_a_preempted_request_finds_its_own_blocks_again() -> None:
    run = Run(limits(num_blocks=6))
    run.admit(prompt(8, 1), 9)
    second = run.admit(prompt(9, 2), 12)
    run.finish_all()
    assert second.of_kind(EventKind.PREEMPTED)
    assert second.of_kind(EventKind.RESUMED)[0].cached_tokens > 0
    run.finish()


def test_K02_a_media_item_counts_by_its_content_and_its_place() -> None:
    """The placeholders are the same ids everywhere, so nothing but the key tells the blocks apart."""
    ids = [9] * 16

    def keys(*spans: Span) -> tuple[bytes, ...]:
        return prompt_keys(Request("a", array("i", ids), SamplingParams(), spans=spans), 4)

    at = {start: keys(Span(start, 2, b"item")) for start in range(4, 8)}
    assert len({found[0] for found in at.values()}) == 1  # before the item
    assert len({found[1] for found in at.values()}) == 4  # the same item, elsewhere in the block
    assert keys(Span(4, 2, b"other"))[1] != at[4][1] != keys()[1]
    # The second half of an item is not its first half.
    assert keys(Span(2, 4, b"item"))[1] != keys(Span(4, 4, b"item"))[1]
    assert keys(Span(3, 4, b"item"))[1] != keys(Span(2, 4, b"item"))[1]


def test_K02_the_same_media_at_another_place_is_not_hit() -> None:
    sizes = {"encoder_budget": 8, "encoder_cache": 24}
    run = Run(limits(**sizes))
    first = run.admit([9] * 12, 3, spans=(Span(4, 2, b"item"),))
    run.finish_all()
    for start, hit in ((4, 11), (5, 4)):
        record = run.admit([9] * 12, 3, spans=(Span(start, 2, b"item"),))
        run.step()
        assert cached(record) == hit, start
        run.finish_all()
    assert cached(first) == 0
    run.finish()


@pytest.mark.parametrize("fields", [{"cache_salt": b"other"}, {"tenant": "other"}])
def test_K02_another_tenant_never_hits(fields: dict[str, object]) -> None:
    run = Run()
    serve(run, prompt(8))
    assert cached(serve(run, prompt(8), **fields)) == 0
    assert cached(serve(run, prompt(8), **fields)) == 7
    assert cached(serve(run, prompt(8))) == 7


def test_K02_the_switch_turns_sharing_across_requests_off() -> None:
    run = Run(limits(prefix_caching=False))
    serve(run, prompt(8))
    assert cached(serve(run, prompt(8))) == 0
    statistics = run.scheduler.statistics()
    assert (statistics.prefix_hit_tokens, statistics.num_blocks_cached) == (0, 0)


def test_K02_equal_keys_with_other_ids_are_no_hit() -> None:
    run = Run()
    keys = (b"k" * 16, b"l" * 16)
    serve(run, prompt(8, 1), block_keys=keys)
    forged = serve(run, prompt(8, 2), 4, block_keys=keys)
    assert cached(forged) == 0
    assert cached(serve(run, prompt(8, 1), 4, block_keys=keys)) == 7


def test_K02_keys_from_the_front_equal_those_computed_here() -> None:
    run = Run()
    serve(run, prompt(9))
    keys = prompt_keys(Request("x", array("i", prompt(9))), 4)
    assert len(keys) == 2 and all(len(key) >= 16 for key in keys)
    assert cached(serve(run, prompt(9), block_keys=keys)) == 8
    assert prompt_keys(Request("x", array("i", prompt(9)), tenant="a"), 4) != keys


def test_K02_a_request_known_by_length_hits_by_its_keys() -> None:
    run = Run(durations_only=True)
    keys = (b"a" * 16, b"b" * 16)
    first = run.admit(9, 5, block_keys=keys)
    run.finish_all()
    second = run.admit(10, 5, block_keys=keys)
    run.finish_all()
    assert (cached(first), cached(second)) == (0, 8)
    assert len(first.token_ids) == len(second.token_ids) == 5
    run.check_end()


def test_K02_keys_over_the_outputs_of_a_request_known_by_length_are_found_once_they_are_made() -> None:
    run = Run(durations_only=True)
    keys = tuple(bytes([number]) * 16 for number in range(6))
    first = run.admit(9, 16, block_keys=keys)  # 25 tokens; the last is never computed
    run.step()
    early = run.admit(18, 1, block_keys=keys[:4])
    run.steps(2)
    assert cached(early) == 8  # what it is to generate cannot be found before
    run.finish_all()
    late = run.admit(25, 1, block_keys=keys)
    run.finish_all()
    assert cached(first) == 0 and cached(late) == 24
    run.check_end()


@pytest.mark.parametrize("caching", [True, False])
def test_K02_choices_of_a_request_known_by_length_share_its_prompt_alone(caching: bool) -> None:
    run = Run(limits(prefix_caching=caching, num_blocks=12), durations_only=True)
    keys = tuple(bytes([number]) * 16 for number in range(6))
    both = run.admit(9, 16, n=2, block_keys=keys)
    run.until(lambda: len(both.choices[0].token_ids) > 8)
    tables = [sequence.tables[0] for sequence in run.scheduler._state.requests["r0"].sequences]
    assert tables[0][:2] == tables[1][:2] and not {*tables[0][2:]} & {*tables[1][2:]}
    run.finish()


def test_K02_scores_cap_the_match_before_the_first_position_asked_for() -> None:
    run = Run()
    serve(run, prompt(12))
    whole = run.admit(prompt(12), 1, wants=Want.SAMPLE | Want.SCORE)
    tail = run.admit(prompt(12), 1, wants=Want.SAMPLE | Want.SCORE, score_from=9)
    run.finish_all()
    assert (cached(whole), cached(tail)) == (0, 8)
    assert [[first + i for first, entries in r.scores for i in range(len(entries))] for r in (whole, tail)] == [
        list(range(1, 12)),
        [9, 10, 11],
    ]
    run.finish()


# -- K03


def test_K03_the_least_recently_used_prefix_goes_first_and_its_tail_before_its_head() -> None:
    run = Run(limits(num_blocks=8))
    serve(run, prompt(12, 1))
    serve(run, prompt(12, 2))
    serve(run, prompt(12, 3))  # two plain blocks, then one eviction
    assert cached(serve(run, prompt(12, 1))) == 8  # and this evicts one of the other prefix
    assert cached(serve(run, prompt(12, 2))) == 8


@pytest.mark.parametrize(("seed", "hit"), [(1, 7), (2, 4)])
def test_K03_a_hit_makes_a_prefix_recent(seed: int, hit: int) -> None:
    run = Run(limits(num_blocks=6))
    serve(run, prompt(8, 1))
    serve(run, prompt(8, 2))
    serve(run, [*prompt(8, 1), 50])  # hits the older one
    serve(run, prompt(12, 3))  # two plain blocks, then one eviction
    assert cached(serve(run, prompt(8, seed))) == hit


def test_K03_blocks_without_a_key_are_reused_before_cached_ones() -> None:
    run = Run(limits(num_blocks=8))
    serve(run, prompt(12, 1))
    serve(run, prompt(19, 2), 2)
    assert cached(serve(run, prompt(12, 1))) == 11


@pytest.mark.parametrize(("seed", "hit"), [(1, 4), (2, 7)])
def test_K03_a_match_that_is_not_admitted_changes_nothing(seed: int, hit: int) -> None:
    run = Run(limits(num_blocks=8))
    serve(run, prompt(8, 1))
    serve(run, prompt(8, 2))
    run.admit(prompt(2, 3), 9)
    run.step()
    waits = run.admit([*prompt(8, 1), *prompt(24, 4)], 1)
    run.step()
    assert waits.of_kind(EventKind.DEFERRED) and used(run) == 1
    run.cancel("r2", "r3")
    run.finish_all()
    serve(run, prompt(20, 5))  # four plain blocks, then one eviction: the older prefix's tail
    assert cached(serve(run, prompt(8, seed))) == hit


# -- K05


def test_K05_a_prompt_found_whole_copies_its_last_block_and_writes_the_copy() -> None:
    run = Run()
    serve(run, prompt(8))
    run.admit(prompt(8), 5)
    run.admit(prompt(8), 5)
    plan = run.step()
    tables = [[block for slot, _, _, block in quads(plan.edits) if slot == own] for own in plan.slots]
    copies = list(triples(plan.copies))
    assert len({source for _, source, _ in copies}) == 1 and len(copies) == 2
    assert tables[0][0] == tables[1][0] and [table[1] for table in tables] == [to for _, _, to in copies]
    assert not {to for _, _, to in copies} & {source for _, source, _ in copies}
    run.finish()


def test_K05_shared_blocks_survive_the_writers_beside_them() -> None:
    run = Run(limits(num_blocks=24), depth=3)
    for round_ in range(4):
        for length in (4, 8, 12):
            run.admit(prompt(length), 3 + round_)
        run.steps(2)
    run.finish()


# -- K09, K11, K12


def test_K09_the_cache_is_reset_only_while_nothing_is_held() -> None:
    run = Run()
    serve(run, prompt(8))
    run.admit(prompt(5, 2), 4)
    run.step()
    assert run.scheduler.reset_prefix_cache() is False
    run.finish_all()
    assert cached(serve(run, prompt(8))) == 7  # nothing was changed
    assert run.scheduler.reset_prefix_cache() is True
    assert cached(serve(run, prompt(8))) == 0


def test_K09_hits_are_counted_in_tokens() -> None:
    run = Run()
    for length in (8, 8, 11):
        serve(run, prompt(11)[:length])
    statistics = run.scheduler.statistics()
    assert (statistics.prefix_queried_tokens, statistics.prefix_hit_tokens) == (27, 0 + 7 + 8)
    finished = [record.finished for record in run.records.values()]
    assert [event.cached_tokens for event in finished if event] == [0, 7, 8]


@pytest.mark.parametrize("blocks", [(0,), (), (4, 4)])
def test_K11_a_pool_without_blocks_is_an_error_with_the_numbers(blocks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        limits(num_blocks=blocks)


def test_K12_the_leak_check_is_public_and_notices() -> None:
    run = Run()
    run.admit(prompt(8), 4)
    run.step()
    with pytest.raises(InvariantError):
        invariants.check_no_leaks(run.scheduler)
    run.finish_all()
    invariants.check_no_leaks(run.scheduler)
    assert used(run) == 0


def test_plans_name_no_block_twice_for_writing() -> None:
    run = Run(limits(num_blocks=12), depth=2)
    for seed in range(8):
        run.admit(prompt(9, seed % 3), 6)
    run.finish()

    def appended(plan: StepPlan) -> list[int]:
        starts = dict(zip(plan.slots, plan.starts, strict=True))
        return [block for slot, _, index, block in quads(plan.edits) if index * 4 >= starts[slot]]

    assert all(len(set(appended(plan))) == len(appended(plan)) for plan in run.plans)


# -- several blocks at once


def state_of(pool: BlockPool) -> list[object]:
    lists = pool.references, pool.plain, list(pool.cached), pool.key_of, pool.ids_of, pool.block_of, pool.pending
    return [*lists, pool.num_free, pool.num_freed]


@pytest.mark.parametrize("seed", range(20))
def test_blocks_taken_and_freed_together_are_those_of_single_calls(seed: int) -> None:
    lots, together, single = random.Random(seed), BlockPool(24), BlockPool(24)
    tables: list[list[int]] = []
    for number in range(200):
        count = lots.randrange(1, 9)
        if tables and (count > single.num_free or lots.random() < 0.4):
            table = tables.pop(lots.randrange(len(tables)))
            for block in reversed(table):
                single.release(block)
            together.release_table(table)
        elif count <= single.num_free:
            table = [single.allocate() for _ in range(count)]
            assert together.allocate_several(count) == table
            for index, block in enumerate(table[: lots.randrange(count + 1)]):
                key, step = b"%d/%d" % (number, index), lots.choice((None, number))
                assert not together.publish([block], [key], None, step)
                assert not single.publish([block], [key], None, step)
                if step is not None and lots.random() < 0.8:  # else it is evicted while it is pending
                    together.confirm([block], step)
                    single.confirm([block], step)
            tables.append(table)
        assert state_of(together) == state_of(single)
