"""Swap preemption and the host tier (S09, K10, S16), through the public verbs: who is swapped, what it costs, when it
comes back, and what is found on the host again.
"""

from __future__ import annotations

import pytest
from tests.core.harness import Run, limits, prompt
from tests.core.records import Record
from tests.core.test_groups import of_windows
from tests.fake_model import quads, triples

from octavo.core.plan import ROW_SAMPLE, EventKind, StepPlan, WaitReason
from octavo.core.request import FinishReason


def squeezed(preemption: str, n: int = 1, host: int = 16, depth: int = 1, **changes: object) -> tuple[Run, Record]:
    """A pool of 8 blocks of 4 in which r0 grows until r1, with `n` choices, has to go: just planned so."""
    sizes = {"num_blocks": 8 if n == 1 else 9, "host_blocks": (host,), "preemption": preemption, **changes}
    run = Run(limits(**sizes), depth=depth)
    run.admit(prompt(8, 1), 17)
    record = run.admit(prompt(9, 2), 9, n=n)
    run.until(lambda: bool(record.of_kind(EventKind.PREEMPTED)))
    return run, record


def tables_of(run: Run, request_id: str) -> list[list[int]]:
    """The executor's tables of a request's sequences, in group 0."""
    return [state.tables[0][:] for state in run.executor.slots.values() if state.request_id == request_id]


def swapping_plan(run: Run) -> StepPlan:
    return next(plan for plan in run.plans if plan.swap_outs)


@pytest.mark.parametrize(
    ("preemption", "n", "is_swapped"),
    [
        ("auto", 1, False),
        ("auto", 2, True),
        ("swap", 1, True),
        ("swap", 2, True),
        ("recompute", 1, False),
        ("recompute", 2, False),
    ],
)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_S09_the_kind_of_preemption_follows_the_setting_and_the_live_sequences(
    preemption: str, n: int, is_swapped: bool, depth: int
) -> None:
    run, record = squeezed(preemption, n, depth=depth)
    preempted, swapped = record.of_kind(EventKind.PREEMPTED), record.of_kind(EventKind.SWAPPED)
    assert len(preempted) == 1 and len(swapped) == int(is_swapped)
    assert (preempted[0].num_tokens == 0) == is_swapped  # tokens to recompute
    assert run.scheduler.statistics().num_swapped == int(is_swapped)
    run.finish()
    assert any(plan.host_loads for plan in run.plans) == is_swapped


def test_S09_auto_recomputes_when_one_live_sequence_of_several_is_left() -> None:
    run = Run(limits(num_blocks=9, host_blocks=(16,), preemption="auto"))
    run.admit(prompt(16, 1), 17)
    record = run.admit(prompt(9, 2), 11, n=2)
    run.steps(3)
    assert run.end_choice("r1", 0)
    run.until(lambda: bool(record.of_kind(EventKind.PREEMPTED)))
    assert not record.of_kind(EventKind.SWAPPED)
    run.finish()


def test_S09_each_unique_block_is_copied_once_and_sharing_is_kept() -> None:
    run = Run(limits(num_blocks=9, host_blocks=(16,)))
    run.admit(prompt(8, 1), 17)
    record = run.admit(prompt(9, 2), 9, n=2)
    tables: list[list[int]] = []
    while not record.of_kind(EventKind.PREEMPTED):
        tables = tables_of(run, "r1")
        run.step()
    assert tables[0][:2] == tables[1][:2]  # two full blocks of the prompt
    held = {block for table in tables for block in table}
    plan = swapping_plan(run)
    sources = [device for _, device, _ in triples(plan.swap_outs)]
    assert sorted(sources) == sorted(held) and len(sources) == 6  # two shared, and two of each its own
    run.until(lambda: bool(record.of_kind(EventKind.RESUMED)))
    back = next(plan for plan in run.plans if plan.host_loads)
    kept = {host for _, _, host in triples(plan.swap_outs)}
    assert {host for _, host, _ in triples(back.host_loads)} == kept and len(back.host_loads) == 3 * 6
    again = tables_of(run, "r1")
    assert again[0][:2] == again[1][:2] and again[0][2] != again[1][2]
    run.finish()


def test_S09_a_swapped_request_goes_on_where_it_was_and_computes_nothing_twice() -> None:
    run, record = squeezed("swap")
    num_known = 9 + len(record.token_ids)
    (swapped,) = record.of_kind(EventKind.SWAPPED)
    assert swapped.num_tokens == num_known - 1  # the last one sampled has no KV yet
    run.until(lambda: bool(record.of_kind(EventKind.RESUMED)))
    plan = run.plans[-1]
    assert run.rows(plan)["r1"][:2] == (num_known - 1, 1)
    (new,) = plan.new_sequences
    assert len(new.token_ids or ()) == num_known
    run.finish()
    assert run.num_scheduled == 8 + 17 - 1 + 9 + 9 - 1
    totals = run.scheduler.statistics()
    assert totals.num_swapped_out_tokens == totals.num_swapped_in_tokens == num_known - 1


@pytest.mark.parametrize("depth", [1, 2])
def test_bug_19_a_full_host_tier_means_recompute(depth: int) -> None:
    for host, is_swapped in ((3, False), (4, True)):
        run, record = squeezed("swap", host=host, depth=depth)
        assert bool(record.of_kind(EventKind.SWAPPED)) == is_swapped
        run.finish()


def test_bug_19_a_host_tier_filled_by_one_swap_makes_the_next_victim_recompute() -> None:
    run = Run(limits(num_blocks=12, host_blocks=(5,), preemption="swap"))
    run.admit(prompt(8, 1), 36)
    second, third = run.admit(prompt(8, 2), 24), run.admit(prompt(8, 3), 24)
    run.until(lambda: bool(second.of_kind(EventKind.PREEMPTED)))
    assert len(third.of_kind(EventKind.SWAPPED)) == 1 and not second.of_kind(EventKind.SWAPPED)
    run.finish()


def test_S09_what_left_a_window_does_not_go_to_the_host() -> None:
    sizes = {"groups": of_windows(0, 4), "num_blocks": (8, 12), "host_blocks": (8, 8), "prefix_caching": False}
    run = Run(limits(preemption="swap", **sizes))
    run.admit(prompt(9, 1), 17)
    record = run.admit(prompt(8, 2), 9)
    run.until(lambda: bool(record.of_kind(EventKind.SWAPPED)))
    (swapped,) = record.of_kind(EventKind.SWAPPED)
    assert (swapped.num_tokens, swapped.by) == (15, "r0")  # the next one, at position 15, reads 12 to 15
    out = [group for group, _, _ in triples(swapping_plan(run).swap_outs)]
    assert (out.count(0), out.count(1)) == (4, 1)
    run.until(lambda: bool(record.of_kind(EventKind.RESUMED)))
    back = [group for group, _, _ in triples(run.plans[-1].host_loads)]
    assert sorted(back) == sorted(out)
    run.finish()


@pytest.mark.parametrize("depth", [2, 3])
def test_S17_a_token_in_flight_when_its_request_is_swapped_is_kept_and_not_computed_again(depth: int) -> None:
    run = Run(limits(num_blocks=8, host_blocks=(16,), preemption="swap"), depth=depth)
    run.admit(prompt(8, 1), 17)
    record = run.admit(prompt(9, 2), 12)
    num_delivered = 0
    while not record.of_kind(EventKind.SWAPPED):
        num_delivered = len(record.token_ids)
        run.step()
    (swapped,) = record.of_kind(EventKind.SWAPPED)
    assert 9 + num_delivered < swapped.num_tokens + 1  # some are still to come
    run.finish_all()
    assert run.num_scheduled == 8 + 17 - 1 + 9 + 12 - 1
    # All 20 positions are known to be computed, those too that were in flight: five blocks are found again.
    again = run.admit([*prompt(9, 2), *record.token_ids], 1)
    run.step()
    assert again.of_kind(EventKind.ADMITTED)[0].cached_tokens == 20
    run.finish()


# -- the way back


@pytest.mark.parametrize(("headroom", "floor"), [(0.0, 0), (0.2, 3)])
def test_S09_a_swap_in_needs_its_blocks_one_for_each_sequence_and_the_headroom(headroom: float, floor: int) -> None:
    """r1 leaves in the end, r0 stays; for each length of r1 r2 comes back as soon as there is room, and not before."""
    reasons = set()
    for num_outputs in range(10, 30):
        run = Run(limits(num_blocks=13, host_blocks=(16,), headroom=headroom, max_model_len=32))
        run.admit(prompt(2, 1), 30)
        run.admit(prompt(8, 2), num_outputs)
        record = run.admit(prompt(9, 3), 9, n=2)
        free = 0
        while not record.of_kind(EventKind.RESUMED) and run.scheduler.has_work:
            totals = run.scheduler.statistics()
            free = totals.num_blocks - totals.num_blocks_used
            run.step()
        if not record.of_kind(EventKind.SWAPPED):
            continue
        plan = next(plan for plan in run.plans if plan.host_loads)
        others = [name for name in run.rows(plan) if name != "r2"]
        num_loaded = len(plan.host_loads) // 3
        if others:
            assert free >= num_loaded + 2 + floor
        reasons |= {event.reason for event in record.of_kind(EventKind.DEFERRED)}
        for event in record.of_kind(EventKind.DEFERRED):
            if event.reason == WaitReason.SWAP_SPACE:
                assert event.needed == num_loaded + 2 > event.available
            if event.reason == WaitReason.HEADROOM:
                # It was preempted once: each running sequence must be able to grow by a block besides.
                assert event.needed > event.available >= num_loaded + 2
                assert event.needed <= num_loaded + 2 + floor + 2
        run.finish()
    assert {WaitReason.SWAP_SPACE, WaitReason.HEADROOM} <= reasons


def test_S09_the_block_for_each_sequence_is_waived_for_an_empty_batch() -> None:
    run = Run(limits(num_blocks=5, host_blocks=(4,)))
    run.admit(prompt(2, 1), 12)
    record = run.admit(prompt(9, 2), 4, n=2)
    run.until(lambda: bool(record.of_kind(EventKind.RESUMED)))
    told = [event for event in record.of_kind(EventKind.DEFERRED) if event.reason != WaitReason.PREEMPTED_THIS_STEP]
    assert [(event.reason, event.needed) for event in told] == [(WaitReason.SWAP_SPACE, 4 + 2)]  # of a pool of 5
    assert run.records["r0"].finished and len(run.plans[-1].host_loads) == 3 * 4
    run.finish()


def test_S09_the_headroom_is_waived_for_an_empty_batch() -> None:
    run, record = squeezed("swap", n=2, headroom=0.2)
    run.finish()
    plan = next(plan for plan in run.plans if plan.host_loads)
    assert set(run.rows(plan)) == {"r1"} and len(plan.host_loads) // 3 + 2 + 2 > 9
    assert len(record.of_kind(EventKind.SWAPPED)) == 1


def test_S09_a_swapped_request_holds_back_later_admissions_and_keeps_its_place() -> None:
    run, record = squeezed("swap")
    later = run.admit(prompt(1, 3), 2)
    run.until(lambda: bool(later.of_kind(EventKind.ADMITTED)))
    assert record.of_kind(EventKind.RESUMED)
    run.finish()


def test_S09_there_is_one_order_over_swapped_and_waiting() -> None:
    run, record = squeezed("swap", policy="priority")
    urgent = run.admit(prompt(1, 3), 2, priority=-5)
    run.until(lambda: bool(record.of_kind(EventKind.RESUMED)))
    assert urgent.of_kind(EventKind.ADMITTED) and urgent.finished
    run.finish()


# -- both ways


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_S16_no_plan_swaps_out_and_loads_and_none_loads_while_it_preempts(depth: int) -> None:
    run = Run(
        limits(num_blocks=12, host_blocks=(14,), preemption="swap", host_load_min_tokens=4, max_model_len=32),
        depth=depth,
    )
    shared = prompt(8, 9)
    for seed in range(8):
        run.admit([*shared, *prompt(1 + seed, seed)], 8, n=1 + seed % 2)
    run.finish()
    out = [plan for plan in run.plans if plan.swap_outs]
    back = [plan for plan in run.plans if plan.host_loads]
    assert len(out) >= 3 and len(back) >= 3
    assert not {plan.step for plan in out} & {plan.step for plan in back}
    for plan in back:
        preempted = [event for event in plan.events if event.kind == EventKind.PREEMPTED]
        assert not preempted or not plan.slots
    for plan in run.plans:
        for column in (plan.swap_outs, plan.host_loads, plan.copies):
            targets = [(group, to) for group, _, to in triples(column)]
            assert len(set(targets)) == len(targets)
    assert [plan.digest() for plan in run.plans] == run.digests


@pytest.mark.parametrize("depth", [1, 2])
def test_L03_a_swapped_request_can_be_cancelled_and_leaves_nothing_on_the_host(depth: int) -> None:
    run, record = squeezed("swap", n=2, depth=depth, prefix_caching=False, block_sharing=False, num_blocks=12)
    assert run.scheduler.statistics().num_host_blocks_used == 8
    assert run.cancel("r1") == 1
    run.step()
    assert record.reason == FinishReason.CANCELLED
    totals = run.scheduler.statistics()
    assert totals.num_swapped == totals.num_host_blocks_used == 0
    run.finish()


def test_L03_a_choice_of_a_swapped_request_can_be_ended_and_the_other_comes_back() -> None:
    run, record = squeezed("swap", n=2)
    assert run.end_choice("r1", 0)
    run.finish()
    first, second = record.choices
    assert first.finished is not None and first.finished.finish_reason == FinishReason.STOP
    assert second.finished is None and len(second.token_ids) == 9
    plan = next(plan for plan in run.plans if plan.host_loads)
    assert [new.choice for new in plan.new_sequences] == [1] and len(plan.host_loads) == 3 * 4


@pytest.mark.parametrize("depth", [1, 2])
def test_L05_a_swap_in_a_step_that_failed_means_recompute(depth: int) -> None:
    run = Run(limits(num_blocks=8, host_blocks=(16,), preemption="swap", prefix_caching=False), depth=depth)
    run.admit(prompt(8, 1), 17)
    record = run.admit(prompt(9, 2), 9)
    while not any(plan.swap_outs for plan, _ in run.flight):
        if len(run.flight) == depth:
            run.commit()
        run.submit(run.plan())
    while not run.flight[0][0].swap_outs:
        run.commit()
    num_delivered = len(record.token_ids)
    assert num_delivered < 9
    run.fail_oldest()
    totals = run.scheduler.statistics()
    assert totals.num_swapped == totals.num_host_blocks_used == 0
    run.finish()
    assert not any(plan.host_loads for plan in run.plans)
    resumed = [plan for plan in run.plans if any(new.request_id == "r1" for new in plan.new_sequences)]
    assert run.rows(resumed[-1])["r1"] == (0, 9 + num_delivered, ROW_SAMPLE)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_S09_a_swap_of_a_block_planned_on_a_token_that_never_came_means_recompute(preemption: str) -> None:
    run = Run(limits(num_blocks=4, host_blocks=(8,), preemption=preemption, prefix_caching=False), depth=3)
    run.admit(prompt(8, 1), 2)
    record = run.admit(prompt(4, 2), 6)
    run.submit(run.plan(["r0"]))
    run.commit()
    for name in ("r1", "r1", "r0"):  # r1's second row opens its second block; then r0 needs the room
        run.submit(run.plan([name]))
    assert len(run.plans[-1].swap_outs) == (3 * 2 if preemption == "swap" else 0)
    run.executor.faults.zero_tokens = 1.0
    run.commit()
    run.executor.faults.zero_tokens = 0.0
    totals = run.scheduler.statistics()
    assert totals.num_swapped == totals.num_host_blocks_used == 0
    run.finish()
    assert not any(plan.host_loads for plan in run.plans)
    assert len(record.of_kind(EventKind.SWAPPED)) == (preemption == "swap") and len(record.token_ids) == 6


# -- prefixes on the host


def evicted(host: int = 8, **changes: object) -> Run:
    """r0's prompt of 16 tokens was computed, then its blocks were given to r1: they are on the host only."""
    run = Run(limits(num_blocks=8, host_blocks=(host,), max_batch_tokens=64, **changes))
    run.admit(prompt(16, 1), 1)
    run.finish_all()
    run.admit(prompt(32, 2), 1)
    run.finish_all()
    return run


@pytest.mark.parametrize(("at_least", "hit"), [(0, 16), (15, 16), (16, 16), (17, 0), (64, 0)])
def test_K10_a_prefix_on_the_host_is_loaded_back_from_host_load_min_tokens_on(at_least: int, hit: int) -> None:
    run = evicted(host_load_min_tokens=at_least)
    record = run.admit([*prompt(16, 1), 5], 2)
    plan = run.step()
    assert record.of_kind(EventKind.ADMITTED)[0].cached_tokens == hit
    assert run.rows(plan)["r2"][:2] == (hit, 17 - hit)
    assert len(plan.host_loads) == 3 * hit // 4
    assert run.scheduler.statistics().num_host_hit_tokens == hit
    run.finish()


def test_K10_evicted_prefixes_are_saved_once_and_the_host_forgets_the_least_recently_used() -> None:
    run = Run(limits(num_blocks=8, host_blocks=(2,), max_batch_tokens=4, host_load_min_tokens=1))
    for ids in (prompt(16, 1), prompt(32, 2)):  # a block in each plan
        run.admit(ids, 1)
        run.finish_all()
    saved = [device for plan in run.plans for _, device, _ in triples(plan.swap_outs)]
    assert len(saved) == 4 == len(set(saved))
    run.admit([*prompt(16, 1), 5], 2)
    plan = run.step()
    assert run.rows(plan)["r2"][:2] == (8, 4)  # the head of the chain was evicted last
    run.finish()


def test_K10_a_plan_saves_no_more_than_the_host_holds() -> None:
    run = evicted(host=2)
    (plan,) = [plan for plan in run.plans if plan.swap_outs]
    assert len(plan.swap_outs) == 3 * 2  # each destination once, whatever else is evicted in the plan
    run.finish()


def test_K10_only_what_the_device_has_not_is_loaded_and_counts_towards_the_least() -> None:
    for at_least, hit in ((8, 16), (9, 8)):
        run = Run(limits(num_blocks=8, host_blocks=(8,), max_batch_tokens=64, host_load_min_tokens=at_least))
        run.admit(prompt(16, 1), 1)
        run.finish_all()
        run.admit(prompt(24, 2), 1)  # takes the tail of that chain
        run.finish_all()
        run.admit([*prompt(16, 1), 5], 2)
        plan = run.step()
        assert run.rows(plan)["r2"][:2] == (hit, 17 - hit)
        assert len(plan.host_loads) // 3 == (hit - 8) // 4
        run.finish()


def test_K10_without_a_host_tier_an_evicted_prefix_is_computed_again() -> None:
    run = Run(limits(num_blocks=8, max_batch_tokens=64, host_load_min_tokens=1))
    for ids in (prompt(16, 1), prompt(32, 2)):
        run.admit(ids, 1)
        run.finish_all()
    run.admit([*prompt(16, 1), 5], 2)
    assert run.rows(run.step())["r2"][:2] == (0, 17)
    run.finish()


def test_K10_resetting_the_prefix_cache_forgets_the_host_too() -> None:
    run = evicted(host_load_min_tokens=1)
    run.step()
    assert run.scheduler.reset_prefix_cache()
    run.admit([*prompt(16, 1), 5], 2)
    assert run.rows(run.step())["r2"][:2] == (0, 17)
    run.finish()


def test_K10_blocks_that_are_loaded_back_are_shared_with_the_next_request() -> None:
    run = evicted(host_load_min_tokens=1)
    run.admit([*prompt(16, 1), 5], 8)
    run.admit([*prompt(16, 1), 6], 2)
    plan = run.step()
    assert len(plan.host_loads) == 3 * 4
    tables = [[block for slot, _, _, block in quads(plan.edits) if slot == at][:4] for at in plan.slots]
    assert tables[0] == tables[1]
    run.finish()
