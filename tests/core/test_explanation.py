"""Explanations: the numbers are those of the state, the sentence is made of the numbers, and asking changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.core.harness import Run, limits, prompt
from tests.core.policy.test_order import ALL
from tests.core.random_driver import Driver
from tests.core.test_budgets import PROVOKED

from octavo.core.explain import Explanation, Standing, explain_all
from octavo.core.plan import EventKind, StepPlan, WaitReason
from octavo.core.policy import Policy, create_policy
from octavo.core.request_state import RequestState, Status
from octavo.observe.explainer import plain_values, sentence, unit

# No numbers go with these: they are about somebody else, or about a moment.
WORDLESS = {WaitReason.BEHIND, WaitReason.BARRIER, WaitReason.PAUSED, WaitReason.MODALITY, WaitReason.COMPOSITION,
            WaitReason.PREEMPTED_THIS_STEP}  # fmt: skip
# Of an empty plan; of rows, not of requests; of a moment that is over when the plan is made.
NO_STANDING = {WaitReason.IDLE, WaitReason.DRAINING, WaitReason.EXCLUDED, WaitReason.COMPOSITION,
               WaitReason.FORK_BLOCKS, WaitReason.BARRIER,
               WaitReason.KV_TRANSFER}  # fmt: skip  # tests/core/test_kv_transfer.py has it


def told(run: Run, name: str) -> Explanation:
    found = run.scheduler.explain(name)
    assert found is not None
    return found


def check(run: Run, one: Explanation) -> None:
    """An explanation says what the state is."""
    state = run.scheduler._state
    entry = state.requests[one.name]
    assert sentence(one).startswith(f"{one.name} ") and one.name not in sentence(one, is_named=False).split()
    json.dumps(plain_values(one, run.now))
    if entry.status == Status.RUNNING:
        assert (one.position, one.behind, one.ahead, one.room) == (0, None, (), ())
        assert one.state is (Standing.DECODE if entry.is_decoding else Standing.PREFILL)
        assert 0 <= one.num_computed <= one.num_known
        assert one.num_blocks <= sum(sum(map(len, seq.tables)) for seq in entry.sequences)
        return
    if run.limits.policy not in ALL:
        return  # its order is another at each call
    order = state.waiting.in_order()
    assert order[one.position - 1] is entry and one.num_waiting == len(order)
    assert [ahead.name for ahead in one.ahead] == [other.name for other in order[: min(5, one.position - 1)]]
    assert one.num_blocks == 0 and (one.num_host_blocks > 0) == (one.state is Standing.SWAPPED)
    assert one.num_bypassed <= one.max_bypass + len(state.requests)
    assert (one.reason is WaitReason.PAUSED) == state.is_paused
    if one.reason in (WaitReason.BEHIND, WaitReason.BARRIER):
        assert one.behind is not None and one.behind != one.name
    elif one.reason not in (None, WaitReason.PAUSED):
        assert one.shortage is not None and one.shortage.reason is one.reason and not one.is_first_short
    shortage = one.shortage
    if shortage is not None and shortage.reason not in WORDLESS:
        assert shortage.needed > shortage.available >= 0 and unit(shortage)
        assert shortage.available <= shortage.limit or not shortage.limit
    for group, room in enumerate(one.room):
        pool = state.cache.pools[group]
        assert room.free == pool.num_plain and 0 <= room.evictable <= len(pool.cached)
        assert room.needed >= 0 and room.promised >= 0


class Watch:
    """Looks at every explanation behind every plan of a run: what was refused for blocks is short of blocks there."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.num_short = 0

    def look(self, plan: StepPlan) -> None:
        run = self.run
        everybody = explain_all(run.scheduler._state)
        assert len(everybody) == len(run.scheduler._state.requests)
        has_preempted = any(event.kind == EventKind.PREEMPTED and event.step == plan.step for event in plan.events)
        for one in everybody:
            check(run, one)
            short_now = one.shortage is not None and one.shortage.step == plan.step and not has_preempted
            if short_now and one.room and not plan.is_empty:
                assert max(room.short for room in one.room) > 0, one
                self.num_short += 1


@pytest.mark.parametrize("reason", sorted(set(PROVOKED) - NO_STANDING))
def test_S20_every_reason_is_explained_with_its_numbers(reason: WaitReason) -> None:
    run = PROVOKED[reason]()
    texts: list[str] = []

    def look(plan: StepPlan) -> None:
        for one in explain_all(run.scheduler._state):
            check(run, one)
            if reason in (one.reason, one.shortage and one.shortage.reason):
                texts.append(sentence(one))

    after_each_plan(run, look)
    if reason is WaitReason.PAUSED:
        run.admit(prompt(4, 50), 2)
        run.pause()
        run.step()
        run.resume()
    run.finish()
    assert texts and all(reason.name.lower() in text for text in texts)


def after_each_plan(run: Run, look: Callable[[StepPlan], None]) -> None:
    make = run.plan

    def plan(only: Any = None) -> StepPlan:
        made = make(only)
        if only is None:
            look(made)
        return made

    run.plan = plan  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(12))
def test_S20_explanations_agree_with_the_state_over_random_runs(seed: int) -> None:
    driver = Driver(seed)
    watch = Watch(driver.run)
    after_each_plan(driver.run, watch.look)
    driver.drive(250)


def test_S20_lacking_blocks_is_told_with_all_that_counts() -> None:
    run = Run(limits(num_blocks=16, headroom=0.2, max_batch_tokens=64))
    run.admit(prompt(30, 1), 12)
    run.admit(prompt(24, 2), 4)
    run.admit(prompt(4, 3), 4)
    run.step()
    first, second = told(run, "r1"), told(run, "r2")
    assert (first.state, first.position, first.reason) == (Standing.WAITING, 1, WaitReason.HEADROOM)
    (room,) = first.room
    assert (room.total, room.needed, room.free, room.headroom, room.short) == (16, 6, 8, 4, 2)
    assert sentence(first) == (
        "r1 waits at position 1 of 2: headroom: needs 6 blocks, 8 free, 0 evictable, 4 kept as headroom"
    )
    assert (second.position, second.reason, second.behind, second.is_first_short) == (2, WaitReason.BEHIND, "r1", True)
    lacks = "the first in line lacks headroom: needs 10 of 16 blocks, 8 left"
    assert sentence(second) == f"r2 waits at position 2 of 2, after r1: behind; {lacks}"
    assert "r1" not in sentence(second, is_named=False)
    assert [(ahead.name, ahead.why) for ahead in second.ahead] == [("r1", "arrival 2")]
    run.finish()


def test_S20_an_explanation_of_what_runs() -> None:
    run = Run(limits(max_batch_tokens=8))
    run.admit(prompt(12, 1), 4)
    run.step()
    assert sentence(told(run, "r0")) == "r0 is prefilling: 8 of 12 known tokens computed, 2 blocks held"
    run.step()
    decoding = told(run, "r0")
    assert (decoding.state, decoding.num_outputs, decoding.max_tokens) == (Standing.DECODE, 1, 4)
    assert sentence(decoding) == "r0 is decoding: 12 of 13 known tokens computed, 3 blocks held"
    run.finish()
    assert run.scheduler.explain("r0") is None


def test_S20_a_preempted_request_says_that_it_was() -> None:
    run = Run(limits(num_blocks=9))
    run.admit(prompt(8, 1), 25)
    run.admit(prompt(9, 2), 12)
    run.until(lambda: bool(run.records["r1"].of_kind(EventKind.PREEMPTED)))
    one = told(run, "r1")
    assert one.state is Standing.PREEMPTED and one.num_preemptions == 1
    assert sentence(one).startswith("r1 waits (preempted once) at position 1 of 1: ")
    run.finish()


def test_S20_a_request_put_back_after_a_failed_step_is_not_called_preempted() -> None:
    run = Run()
    run.admit(prompt(8, 1), 4)
    run.step()
    plan = run.plan()
    assert plan is not None
    run.fail(plan)
    one = told(run, "r0")
    assert one.num_preemptions == 0
    assert sentence(one).startswith("r0 waits (put back after a failure) at position 1 of 1: ")
    figures = run.scheduler.statistics()
    assert (figures.num_preemptions, figures.num_requeued) == (0, 1)
    run.finish()


def test_S20_whoever_was_not_looked_at_yet_is_told_so() -> None:
    run = Run()
    run.admit(prompt(4, 1), 4, deadline=9.0, queue_timeout=2.0)
    one = told(run, "r0")
    assert (one.reason, one.shortage, one.deadline, one.queue_until) == (None, None, 9.0, 2.0)
    assert sentence(one) == "r0 waits at position 1 of 1: not looked at yet"
    run.finish()


def test_S20_nobody_passes_the_barrier_and_everybody_is_told_who_that_is() -> None:
    run = Run(limits(max_bypass=1, max_sequences=3, policy="fifo", num_blocks=64))
    run.admit(prompt(4, 1), 12)
    run.step()
    run.admit(prompt(4, 2), 4, n=3)
    run.admit(prompt(4, 3), 12)
    run.step()
    run.admit(prompt(4, 4), 4)
    run.step()
    barrier, last = told(run, "r1"), told(run, "r3")
    assert (barrier.reason, barrier.num_bypassed, barrier.max_bypass) == (WaitReason.SEQUENCE_CAP, 1, 1)
    assert (last.reason, last.behind, last.is_first_short) == (WaitReason.BARRIER, "r1", True)
    assert sentence(last).endswith("needs 3 of 3 sequences, 1 left")
    run.finish()


WHY = {
    "fcfs": "arrival 2",
    "fifo": "arrival 2",
    "prefill_first": "arrival 2",
    "priority": "priority 3, as if it had arrived 180 s later",
    "fair": "its tenant was given 6 (of weight 2), arrival 2",
    "deadline": "its first token is due 0.5 s after its arrival",
    "shortest_prefill": "8 prompt tokens + 32 for each of 1 earlier arrivals = 40",
    "prefix_affinity": "arrival 2, 0 tokens cached, 16 of which are worth a place",
}


@pytest.mark.parametrize("policy", ALL)
def test_S06_S20_every_policy_says_what_gives_a_request_its_place(policy: str) -> None:
    run = Run(limits(policy=policy, max_sequences=1, tenant_weights=(("acme", 2.0),)))
    run.is_ordered = False
    run.admit(prompt(4, 1), 8)
    run.step()
    run.admit(prompt(8, 2), 2, tenant="acme", priority=3, ttft_objective=0.5)
    run.step()
    one = told(run, "r1")
    assert one.policy == policy and one.rule == create_policy(policy, run.limits).rule != ""
    expected = WHY[policy] if policy != "prefix_affinity" else "arrival 2, a prefix not looked up yet, 16"
    assert one.why.startswith(expected)
    assert "acme" not in one.why
    run.finish()


class Silent(Policy):
    """Says nothing, or fails to."""

    name = "silent"
    rule = 5  # type: ignore[assignment]

    def why(self, request: RequestState) -> str:
        raise ValueError("no words")


def test_S06_a_policy_that_cannot_explain_itself_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.core.policy import POLICIES

    monkeypatch.setitem(POLICIES, "silent", Silent)
    run = Run(limits(policy="silent"))
    run.admit(prompt(4, 1), 8)
    one = told(run, "r0")
    assert (one.rule, one.why) == ("as the policy ranks them", "")
    assert run.scheduler.statistics().num_policy_errors == 0
    run.finish()


@pytest.mark.parametrize("policy", ["fcfs", "fair", "prefix_affinity"])
def test_S20_asking_changes_no_plan(policy: str) -> None:
    def digests(asks: bool) -> list[bytes]:
        run = Run(limits(policy=policy, num_blocks=12, preemption="swap", host_blocks=(8,)))
        run.is_ordered = False
        for index in range(8):
            run.admit(prompt(5 + index % 3 * 6, index % 3), 9, tenant=f"t{index % 2}")
        while run.scheduler.has_work:
            run.step()
            if asks:
                explain_all(run.scheduler._state)
        return run.digests

    assert digests(False) == digests(True)
