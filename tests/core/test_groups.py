"""Blocks of several cache groups and of several requests: de-duplication (K04), windows (K07, bug_07), prefixes that
rows share (K08), through the public verbs.
"""

from __future__ import annotations

import pytest
from tests.core.harness import Run, limits, prompt
from tests.fake_model import quads

from octavo.core.limits import GroupKind, GroupSpec
from octavo.core.plan import DROP_BLOCK, EventKind, StepPlan, WaitReason


def of_windows(*windows: int) -> tuple[GroupSpec, ...]:
    """Groups by their windows; 0 is full attention."""
    return tuple(GroupSpec(GroupKind.SLIDING if window else GroupKind.FULL, window) for window in windows)


def used(run: Run) -> int:
    return run.scheduler.statistics().num_blocks_used


def cached(run: Run, request_id: str) -> int:
    return run.records[request_id].of_kind(EventKind.ADMITTED)[0].cached_tokens


# -- K04


def test_K04_a_block_that_became_equal_to_a_cached_one_adopts_it_in_the_next_plan() -> None:
    run = Run()
    for _ in range(2):
        run.admit(prompt(6), 8)
    first = run.step()
    (shared, tail), (again, own) = [
        [block for at, _, _, block in quads(first.edits) if at == slot] for slot in first.slots
    ]
    assert shared == again and tail != own
    run.step()
    assert (used(run), run.scheduler.statistics().num_adopted_blocks) == (3, 0)
    run.step()  # both fill their second block, with the same tokens
    assert (used(run), run.scheduler.statistics().num_adopted_blocks) == (2, 1)
    plan = run.step()
    assert (first.slots[1], 0, 1, tail) in list(quads(plan.edits))
    tables = [state.tables[0] for state in run.executor.slots.values()]
    assert tables[0][:2] == tables[1][:2] == [shared, tail] and own in tables[0] + tables[1]  # reused at once
    run.finish()


@pytest.mark.parametrize("depth", [2, 3])
def test_K04_the_own_block_is_free_only_after_the_last_plan_that_names_it_is_committed(depth: int) -> None:
    run = Run(depth=depth)
    for _ in range(2):
        run.admit(prompt(6), 12)
    run.fill()
    own = [block for slot, _, index, block in quads(run.plans[0].edits) if slot == run.plans[0].slots[1]][1]
    while not run.scheduler.statistics().num_adopted_blocks:
        run.fill()
        run.commit()
    naming = [plan.step for plan, _ in run.flight]  # their tables still have the own block
    assert len(naming) == depth - 1
    held = used(run)
    while run.flight:
        assert used(run) == held
        run.commit()
    assert used(run) == held - 1
    plan = run.plan()
    replaced = [entry for entry in quads(plan.edits) if entry[2] == 1]
    assert len(replaced) == 1 and replaced[0][3] != own
    run.submit(plan)
    run.finish()


@pytest.mark.parametrize("depth", [1, 2])
def test_K04_equal_prompt_blocks_of_one_plan_become_one(depth: int) -> None:
    run = Run(depth=depth)
    for _ in range(3):
        run.admit(prompt(8), 3)  # the last token of each is computed, so its block is written three times
    assert run.plan().starts.tolist() == [0, 4, 4]
    run.submit(run.plans[0])
    run.until(lambda: run.scheduler.statistics().num_adopted_blocks == 2)
    run.finish()


def test_K04_without_prefix_caching_equal_blocks_stay_apart() -> None:
    run = Run(limits(prefix_caching=False))
    for _ in range(2):
        run.admit(prompt(6), 8)
    run.finish()
    assert run.scheduler.statistics().num_adopted_blocks == 0


# -- K07


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9, 12])
@pytest.mark.parametrize("budget", [1, 3, 4, 32])
def test_K07_window_groups_keep_what_the_next_token_reads_and_give_back_the_rest(window: int, budget: int) -> None:
    """The text is the oracle's, whose window holds `window` tokens, the token itself included (bug_07)."""
    run = Run(limits(groups=of_windows(0, window), num_blocks=(16, 16), max_batch_tokens=budget))
    run.admit(prompt(21), 20)
    most = 0
    while run.scheduler.has_work:
        plan = run.step()
        if not plan.slots:
            continue
        (seat,) = run.checks.mirror.seats.values()
        full, sliding = seat.tables
        live = [index for index, block in enumerate(sliding) if block != DROP_BLOCK]
        first = max(0, plan.starts[0] - window + 1) // 4
        assert live == list(range(live[0], len(full))) and live[0] <= first
        if (0, 0) in {(slot, group) for slot, group, _, _ in quads(plan.edits)}:  # whenever it takes a block
            assert live[0] == first
        assert len(full) == len(sliding) == -(-(plan.starts[0] + plan.counts[0]) // 4)
        most = max(most, len(live))
    assert most <= -(-(window - 1 + budget + 3) // 4)
    run.finish()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 13])
def test_bug_07_a_prefill_longer_than_the_window_keeps_every_newest_token(window: int, depth: int) -> None:
    run = Run(limits(groups=of_windows(window), num_blocks=(16,), max_batch_tokens=64), depth=depth)
    for length in (window, window + 1, 3 * window + 2, 40):
        run.admit(prompt(length, length), 10)
    run.finish()


@pytest.mark.parametrize("lacking", [0, 1])
def test_K07_allocation_is_all_or_nothing_over_groups(lacking: int) -> None:
    sizes = [12, 12]
    sizes[lacking] = 6
    run = Run(limits(groups=of_windows(0, 60), num_blocks=tuple(sizes)))
    run.admit(prompt(12, 1), 8)
    second = run.admit(prompt(15, 2), 8)
    run.step()
    (deferred,) = second.of_kind(EventKind.DEFERRED)
    assert (deferred.reason, deferred.needed, deferred.available) == (WaitReason.KV_BLOCKS, 4, 3)
    assert used(run) == 2 * 3  # of the group that had enough for both, too
    run.finish()


def test_K07_growth_that_one_group_lacks_takes_nothing_from_the_other() -> None:
    run = Run(limits(groups=of_windows(0, 60), num_blocks=(20, 6), prefix_caching=False))
    run.admit(prompt(12, 1), 6)
    second = run.admit(prompt(11, 2), 4)
    run.until(lambda: bool(second.of_kind(EventKind.PREEMPTED)))
    assert run.checks.mirror.num_free() == [16, 2] and used(run) == 2 * 4
    run.finish()


@pytest.mark.parametrize("scarce", [0, 1])
def test_bug_06_a_fork_needs_blocks_of_every_group(scarce: int) -> None:
    sizes = [40, 40]
    sizes[scarce] = 9
    run = Run(limits(groups=of_windows(0, 60), num_blocks=tuple(sizes), max_batch_tokens=10))
    for seed in range(3):
        run.admit(prompt(3, seed), 3)
    record = run.admit(prompt(12, 9), 2, n=2)
    run.finish()
    deferred = [event for event in record.of_kind(EventKind.DEFERRED) if event.reason == WaitReason.FORK_BLOCKS]
    assert [(event.needed, event.available) for event in deferred] == [(1, 0)]


def hit_after_eviction(sizes: tuple[int, int], evicting: int, window: int = 5) -> tuple[Run, StepPlan]:
    """A prompt of 20 tokens was computed, then another took `evicting` blocks of each group; then it comes again."""
    run = Run(limits(groups=of_windows(0, window), num_blocks=sizes, max_batch_tokens=4))
    run.admit(prompt(20, 1), 1)
    run.finish_all()
    run.admit(prompt(4 * evicting, 2), 1)
    run.finish_all()
    run.admit([*prompt(20, 1), 7], 1)
    return run, run.step()


def test_K07_a_hit_needs_only_the_blocks_that_the_window_still_reads() -> None:
    run, plan = hit_after_eviction((20, 6), 4)  # of the sliding group the first three blocks are gone
    assert cached(run, "r2") == 20
    entered = [(group, index) for _, group, index, _ in quads(plan.edits)]
    assert [entry for entry in entered if entry[0] == 0] == [(0, index) for index in range(6)]
    assert [entry for entry in entered if entry[0] == 1] == [(1, 4), (1, 5)]  # tokens 16 to 19 are read, 20 is written
    run.finish()


@pytest.mark.parametrize("sizes", [(20, 6), (6, 20)])
def test_K07_a_hit_is_a_hit_in_every_group(sizes: tuple[int, int]) -> None:
    run, _ = hit_after_eviction(sizes, 6)
    assert cached(run, "r2") == 0
    run.finish()
    run, _ = hit_after_eviction((20, 20), 6)
    assert cached(run, "r2") == 20
    run.finish()


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("window", [1, 4, 5, 6, 8, 9, 13])
@pytest.mark.parametrize("length", [8, 9, 12, 20])
def test_K07_hits_at_the_corners_of_blocks_and_windows_give_the_right_text(
    length: int, window: int, block_size: int
) -> None:
    num_blocks = (64 // block_size, 64 // block_size)
    run = Run(limits(groups=of_windows(0, window), block_size=block_size, num_blocks=num_blocks, max_batch_tokens=5))
    said = 0
    for extra in range(3):  # behind the prompt each goes another way
        record = run.admit([*prompt(length, 1), *[(said + extra) % 97] * extra], 6)
        run.finish_all()
        said = said or record.token_ids[0]
        assert cached(run, f"r{extra}") == (length // block_size * block_size if extra else 0)
    run.finish()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("windows", [(5,), (0, 3), (4, 0, 9)])
def test_K07_choices_and_beams_in_windows_survive_preemption(
    windows: tuple[int, ...], preemption: str, depth: int
) -> None:
    num_blocks = (15 if 0 in windows else 9,) * len(windows)
    num_preempted = 0
    for seed in range(3):
        run = Run(
            limits(groups=of_windows(*windows), num_blocks=num_blocks, host_blocks=num_blocks, preemption=preemption,
                   max_batch_tokens=9),
            depth=depth,
        )  # fmt: skip
        for turn in range(5):
            several = ({}, {"n": 2}, {"beam_width": 2, "n": 2})[(turn + seed) % 3]
            run.admit(prompt(6 + turn, seed + turn), 10, **several)
        run.finish()  # the texts are the oracle's
        num_preempted += run.scheduler.statistics().num_preemptions
    assert num_preempted >= 1


# -- K08


def test_K08_rows_with_equal_leading_blocks_are_told_with_how_many_they_share() -> None:
    run = Run(limits(num_blocks=40, find_shared_prefixes=True, max_batch_tokens=64))
    for extra in range(3):
        run.admit([*prompt(8), *prompt(3 + extra, 1 + extra)], 6)
    first, second = run.step(), run.step()
    assert (first.shared_prefixes, first.num_common_blocks) == (((2, (0, 1, 2)),), 2)
    assert (second.shared_prefixes, second.num_common_blocks) == (((2, (0, 1, 2)),), 2)
    run.admit(prompt(5, 9), 2)
    with_other = run.step()
    assert (with_other.shared_prefixes, with_other.num_common_blocks) == (((2, (0, 1, 2)),), 0)
    run.admit([*prompt(8), *prompt(8, 3)[:5]], 2)  # as r2, and more blocks of it are its own
    run.admit([*prompt(5, 9), *prompt(4)], 2)
    plan = run.step()
    assert (plan.shared_prefixes, plan.num_common_blocks) == (((2, (0, 1, 2, 4)), (1, (3, 5))), 0)
    run.finish()


def test_K08_two_groups_of_rows_and_a_row_alone() -> None:
    run = Run(limits(num_blocks=40, find_shared_prefixes=True, max_batch_tokens=64))
    for seed, extra in ((1, 2), (2, 2), (1, 3), (2, 3), (3, 1)):
        run.admit([*prompt(4 * seed, seed), *prompt(extra, 10 + extra)], 3)
    plan = run.step()
    assert sorted(plan.shared_prefixes) == [(1, (0, 2)), (2, (1, 3))]
    assert plan.num_common_blocks == 0
    run.finish()


def test_K08_a_row_alone_shares_all_it_has_and_without_the_switch_nothing_is_told() -> None:
    for is_on in (True, False):
        run = Run(limits(find_shared_prefixes=is_on))
        run.admit(prompt(9), 3)
        plan = run.step()
        assert (plan.shared_prefixes, plan.num_common_blocks) == ((), 3 if is_on else 0)
        run.finish()


def test_K08_choices_share_their_prompt_and_forked_rows_are_not_counted() -> None:
    run = Run(limits(num_blocks=40, find_shared_prefixes=True))
    run.admit(prompt(10), 4, n=3)
    first, second = run.step(), run.step()
    assert first.shared_prefixes == ()  # one row reads
    assert (second.shared_prefixes, second.num_common_blocks) == (((2, (0, 1, 2)),), 2)
    run.finish()


def test_K08_what_left_the_window_is_not_shared() -> None:
    run = Run(limits(groups=of_windows(13), num_blocks=(40,), find_shared_prefixes=True, max_batch_tokens=64))
    for extra in range(2):
        run.admit([*prompt(8), *prompt(3 + extra, 1 + extra)], 20)
    assert run.step().num_common_blocks == 2
    run.until(lambda: min(seat.end for seat in run.checks.mirror.seats.values()) >= 20)
    assert (run.plans[-1].shared_prefixes, run.plans[-1].num_common_blocks) == ((), 0)
    run.finish()
