"""What the core knows of grammars: a sequence that has one is not planned ahead of an id in flight. Nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.harness import Run, limits, prompt

from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, EventKind, StepPlan
from octavo.core.request import FinishError, FinishReason
from octavo.errors import ErrorKind

HELD = {"grammar": "any"}


class Watched(Run):
    """Sees to it that no row of a request with a grammar is planned while one that samples is in flight."""

    num_held_rows = num_carried = num_chunks_ahead = 0

    def plan(self, *args: Any, **options: Any) -> StepPlan:
        sampling = {
            slot
            for plan, _ in self.flight
            for slot, flags in zip(plan.slots, plan.flags, strict=True)
            if flags & ROW_SAMPLE
        }
        flying = {slot for plan, _ in self.flight for slot in plan.slots}
        plan = super().plan(*args, **options)
        for row in plan.rows():
            if not self.records[self.slot_owner[row.slot]].request.params.grammar:
                self.num_carried += bool(row.flags & ROW_CARRY)
                continue
            self.num_held_rows += 1
            assert not row.flags & ROW_CARRY
            assert row.slot not in sampling or row.slot in {new.slot for new in plan.new_sequences}
            self.num_chunks_ahead += row.slot in flying
        return plan


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_P06_rows_with_a_grammar_wait_for_their_id_and_no_others(depth: int, num_drafts: int) -> None:
    sizes = limits(num_blocks=60, max_batch_tokens=12, vocab_size=23, max_draft_tokens=num_drafts, max_draft_rows=9)
    run = Watched(sizes, depth=depth)
    for index in range(8):
        run.admit(prompt(5 + 4 * index, index, 23), 14, **(HELD if index % 2 else {}), n=1 + (index == 3))
    run.finish()
    assert run.num_held_rows > 5 * 14
    if not num_drafts:  # who is due for drafts waits as well
        assert (run.num_carried > 0) == (depth > 1)
    assert (run.num_chunks_ahead > 0) == (depth > 1), "prompts are planned ahead"


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
def test_P06_they_are_preempted_and_come_back_like_others(depth: int, preemption: str) -> None:
    run = Watched(limits(num_blocks=14, host_blocks=(14,), preemption=preemption, vocab_size=23), depth=depth)
    for index in range(9):
        run.admit(prompt(4 + index, index, 23), 16, **(HELD if index % 3 else {}), n=1 + (index == 4))
    run.finish()
    assert run.scheduler.statistics().num_preemptions > 0


@pytest.mark.parametrize("n", [1, 3])
def test_P06_a_row_that_nothing_can_follow_ends_its_request_and_costs_nobody_anything(n: int) -> None:
    run = Run(limits(num_blocks=40))
    first = run.admit(prompt(12), 6)  # its blocks are found by the other
    run.step()
    last = run.admit(prompt(12), 6, n=n, **HELD)
    plan = run.plan()
    run.submit(plan)
    _, ticket = run.flight.popleft()
    result = run.executor.collect(ticket)
    result.dead_ends = ((list(run.rows(plan)).index("r1"), FinishError(ErrorKind.ENGINE, "nothing is left")),)
    run.take(run.scheduler.commit(plan, result, run.now))
    assert last.finished is not None
    assert (last.finished.finish_reason, last.finished.message) == (FinishReason.ERROR, "nothing is left")
    assert not first.of_kind(EventKind.PREEMPTED) and not last.of_kind(EventKind.PREEMPTED)
    again = run.admit(prompt(12), 2)
    run.finish()
    [admitted] = again.of_kind(EventKind.ADMITTED)
    assert admitted.cached_tokens > 0, "what was computed is still found"
