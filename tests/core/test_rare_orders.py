"""Orders of events so rare that random steps do not meet them: each is arranged here, with what must come of it.

The bugs that would show only here are planted with these tests to find them (see mutants.txt).
"""

from __future__ import annotations

import random

import pytest
from tests.core.harness import Run, limits, prompt
from tests.core.records import Record
from tests.fake_model import Faults, quads

from octavo.core.plan import ROW_FORK, ROW_SAMPLE, EventKind, WaitReason
from octavo.core.policy import Policy, register_policy
from octavo.core.request import FinishReason
from octavo.core.request_state import RequestState


class Skipping(Policy):
    """Order of priority, that looks past whoever lacks room."""

    name = "test_skipping"
    skip_ahead = True

    def key(self, request: RequestState) -> tuple[float, ...]:
        return (float(request.request.priority),)


class Ousting(Policy):
    """Order of priority, but the first in it is the first to go, for arrivals too."""

    name = "test_ousting"
    headroom = 0.0
    preempt_on_arrival = True

    def key(self, request: RequestState) -> tuple[float, ...]:
        return (float(request.request.priority),)

    def victim_key(self, request: RequestState) -> tuple[float, ...]:
        return (-float(request.request.priority),)


register_policy(Skipping)
register_policy(Ousting)


def num_adopted(run: Run) -> int:
    return run.scheduler.statistics().num_adopted_blocks


# -- copies and loads


def test_K10_nothing_is_loaded_into_the_source_of_a_copy_of_the_same_plan() -> None:
    run = Run(limits(num_blocks=8, host_blocks=(8,), host_load_min_tokens=1, max_batch_tokens=64))
    run.admit(prompt(20, 1), 1)
    run.finish_all()
    for seed in range(10, 18):  # eight blocks, none of them full: the five go to the host, and all are plain then
        run.admit(prompt(3, seed), 1)
    run.step()
    run.finish_all()
    for seed in (2, 3):
        run.admit(prompt(4, seed), 1)
        run.finish_all()
    for seed in (2, 3):  # found whole: each copies its one block, which is free then
        run.admit(prompt(4, seed), 2)
    loading = run.admit([*prompt(20, 1), 5], 2)  # needs all six that are left: the first source would be the fifth
    plan = run.step()
    assert len(plan.copies) == 3 * 2
    assert [event.reason for event in loading.of_kind(EventKind.DEFERRED)] == [WaitReason.HOST_LOAD]
    assert not plan.host_loads
    run.finish()
    (admitted,) = loading.of_kind(EventKind.ADMITTED)
    assert admitted.cached_tokens > 0


def waiting_choice(**changes: object) -> tuple[Run, Record]:
    """A request of two choices: the first computed the prompt of 13 tokens and ended; the second has not come in."""
    sizes = {"policy": "test_ousting", "block_sharing": False, "max_batch_tokens": 64, **changes}
    run = Run(limits(**sizes))
    record = run.admit(prompt(13, 1), 4, n=2)
    run.step()
    assert run.end_choice("r0", 0)
    return run, record


def test_K02_a_late_choice_takes_no_block_that_another_row_of_the_same_plan_is_still_to_write() -> None:
    run, late = waiting_choice(num_blocks=10, long_prefill_threshold=8)
    assert run.scheduler.reset_prefix_cache()
    run.admit([*prompt(13, 1), *prompt(11, 2)], 2, priority=-1)  # before r0 in turn, and the first to go
    run.submit(run.plan(only=["r1"]))
    run.commit()
    run.admit(prompt(15, 3), 1, priority=5)  # for this one, in the plan in which r1 is to write two more blocks
    plan = run.plan()
    assert [event.request_id for event in plan.events if event.kind == EventKind.PREEMPTED] == ["r1"]
    assert late.is_running and run.rows(plan).keys() == {"r2"}  # it would have built on what r1 does not write now
    run.submit(plan)
    run.finish()


def test_S07_a_victim_takes_its_loads_of_this_plan_with_it() -> None:
    run, late = waiting_choice(num_blocks=8, host_blocks=(8,), host_load_min_tokens=1)
    run.admit(prompt(32, 2), 1)
    run.submit(run.plan(only=["r1"]))
    run.commit()
    assert len(run.plans[-1].swap_outs) == 3 * 3  # what the second choice would find is on the host
    run.admit(prompt(31, 3), 1, priority=5)
    plan = run.step()  # the choice came in, with three loads, and had to go again
    assert [event.request_id for event in late.of_kind(EventKind.PREEMPTED)] == ["r0"]
    assert not plan.host_loads and run.rows(plan).keys() == {"r2"}
    run.finish()


def test_S07_a_victim_takes_its_copies_of_this_plan_with_it() -> None:
    for has_arrival in (False, True):
        run = Run(limits(policy="test_ousting", num_blocks=8))
        both = run.admit(prompt(6, 1), 6, n=2)
        run.step()
        if has_arrival:
            run.admit(prompt(31, 2), 1, priority=5)
        plan = run.step()  # the first choice to write the shared tail copies it
        assert len(plan.copies) == (0 if has_arrival else 3)
        assert bool(both.of_kind(EventKind.PREEMPTED)) == has_arrival
        assert run.rows(plan).keys() == {"r1" if has_arrival else "r0"}
        run.finish()


# -- twins


def test_K04_every_choice_that_holds_a_duplicate_adopts_its_twin() -> None:
    run = Run(limits(num_blocks=40))
    run.admit(prompt(8), 5)
    run.admit(prompt(8), 5, n=3)  # computes the last block again, and its forks share that
    first = run.step()
    entered = {(slot, index): block for slot, _, index, block in quads(first.edits)}
    twin, own = (entered[slot, 1] for slot in first.slots[:2])
    assert twin != own and num_adopted(run) == 1
    plan = run.step()
    assert sorted(entry for entry in quads(plan.edits) if entry[3] == twin) == sorted(
        (slot, 0, 1, twin) for slot in first.slots[1:]
    )
    assert run.scheduler.statistics().num_blocks_used == 2 + 4  # nobody holds the duplicate
    run.finish()


def test_K04_a_twin_that_a_plan_in_flight_still_writes_is_not_adopted() -> None:
    alone = Run()
    said = alone.admit(prompt(6), 12).token_ids
    alone.finish()
    run = Run(depth=2)
    writer = run.admit(prompt(6), 12)
    for _ in range(2):
        run.submit(run.plan())
    run.commit()
    run.submit(run.plan())  # computes position 7, so that block 1 is full
    run.commit()
    run.admit([*prompt(6), *said[:2], 5], 3)  # what that one is about to have said is in this prompt
    run.submit(run.plan())
    assert len(run.flight) == 2 and run.rows(run.plans[-1])["r1"][:2] == (4, 5)
    run.commit()
    assert writer.token_ids == said[:3]  # the first request's block 1 is full, and the other's is pending
    assert num_adopted(run) == 0
    plan, ticket = run.flight.popleft()
    result = run.executor.collect(ticket)
    result.errors = ((list(run.rows(plan)).index("r1"), "not finite"),)
    run.take(run.scheduler.commit(plan, result, run.now))
    assert not run.records["r1"].is_running and not writer.of_kind(
        EventKind.PREEMPTED
    )  # the failure is the other's own
    run.finish()


# -- forks behind a row that failed


def test_P05_forks_behind_a_row_that_failed_are_not_taken_though_the_root_has_ended() -> None:
    run = Run(limits(num_blocks=40))
    record = run.admit(prompt(3), 4, n=3)  # no full block: nothing that could be withdrawn
    run.submit(run.plan())
    assert [bool(flags & ROW_FORK) for flags in run.plans[-1].flags] == [False, True, True]
    assert run.end_choice("r0", 0)  # so its own row is void, and what went wrong in it would be passed over
    plan, ticket = run.flight.popleft()
    result = run.executor.collect(ticket)
    result.errors = ((0, "not finite"),)
    events = run.take(run.scheduler.commit(plan, result, run.now))
    assert not events.token_ids and len(record.of_kind(EventKind.PREEMPTED)) == 1
    run.finish()


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("depth", [2, 3])
def test_P05_forks_in_flight_behind_a_chunk_that_failed_are_not_taken(depth: int, has_ended: bool) -> None:
    run = Run(limits(num_blocks=40, max_batch_tokens=2), depth=depth)
    record = run.admit(prompt(3), 4, n=2)  # no full block: nothing that could be withdrawn
    run.fill()
    assert not run.plans[0].flags[0] & ROW_SAMPLE and run.plans[1].flags[1] & ROW_FORK
    if has_ended:  # the root's rows are void then; the other choice goes on
        assert run.end_choice("r0", 0)
    run.executor.faults = Faults(random.Random(1), bad=frozenset({"r0"}))
    run.executor.run(run.flight[0][1])
    run.executor.faults = Faults(random.Random(1))
    for _ in range(depth):  # later rows compute on what the failed one wrote, and do not notice
        assert not run.commit().token_ids
    assert len(record.of_kind(EventKind.PREEMPTED)) == 1
    run.finish()
    assert record.reason == FinishReason.LENGTH


# -- who waits


def test_S05_what_a_request_lacked_is_looked_up_again_when_blocks_came_back() -> None:
    run = Run(limits(num_blocks=10, prefix_caching=False))
    run.admit(prompt(8, 1), 24)
    run.admit(prompt(16, 2), 3)
    waiting = run.admit(prompt(20, 3), 2)
    run.until(lambda: run.records["r1"].finished is not None)
    assert [event.reason for event in waiting.of_kind(EventKind.DEFERRED)] == [WaitReason.KV_BLOCKS]
    run.step()
    assert waiting.is_running and run.records["r0"].is_running
    run.finish()


def test_S10_who_was_passed_too_often_goes_before_whoever_ranks_first_now() -> None:
    run = Run(limits(policy="test_skipping", max_sequences=4, num_blocks=60, max_bypass=1, max_batch_tokens=64))
    for seed in (1, 2):
        run.admit(prompt(4, seed), 30)
    run.step()
    passed = run.admit(prompt(4, 3), 4, n=3, priority=1)
    run.admit(prompt(4, 4), 1, priority=2)
    run.step()
    assert run.scheduler.statistics().num_bypasses == 1 and run.records["r3"].finished
    run.cancel("r1")
    first = run.admit(prompt(4, 5), 4, priority=0)
    run.step()
    assert passed.is_running and not first.is_running
    run.finish()


class Urgent(Policy):
    """Order of priority, for victims and arrivals alike."""

    name = "test_urgent"
    headroom = 0.0
    preempt_on_arrival = True

    def key(self, request: RequestState) -> tuple[float, ...]:
        return (float(request.request.priority),)

    victim_key = key


register_policy(Urgent)


def test_S07_what_was_kept_for_a_victim_counts_as_free_once_it_has_gone() -> None:
    run = Run(limits(policy="test_urgent", num_blocks=12, max_batch_tokens=64, long_prefill_threshold=8))
    kept = run.admit(prompt(8, 1), 8, priority=1)
    partial = run.admit(prompt(24, 2), 2, priority=2)  # has 2 blocks, and 4 are kept for it
    run.step()
    urgent = run.admit(prompt(30, 3), 2, priority=0)  # 8 blocks
    run.plan()
    assert partial.of_kind(EventKind.PREEMPTED) and not kept.of_kind(EventKind.PREEMPTED)
    assert not urgent.of_kind(EventKind.ADMITTED)  # nobody comes in by a plan that preempted and still has rows
