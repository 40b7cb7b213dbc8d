"""S06 through the scheduler: who is admitted, who gets the tokens, who is preempted, under every policy."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.core.harness import Run, limits, prompt

from octavo.core.plan import EventKind
from octavo.core.policy import Policy, register_policy
from octavo.core.policy.basic import PrefixAffinity, Priority, ShortestPrefill

ALL = ("deadline", "fair", "fcfs", "fifo", "prefill_first", "prefix_affinity", "priority", "shortest_prefill")


def run_with(policy: str, **changes: Any) -> Run:
    return Run(limits(policy=policy, **changes))


def admissions(run: Run) -> list[str]:
    """Every admission and resumption, in order."""
    return [new.request_id for plan in run.plans for new in plan.new_sequences]


def one_by_one(policy: str, requests: list[dict[str, Any]], **changes: Any) -> list[int]:
    """Admit requests at once into an engine that runs one at a time; give the order in which they start."""
    run = run_with(policy, max_sequences=1, prefix_caching=False, num_blocks=64, max_batch_tokens=64, **changes)
    run.is_ordered = False
    for index, fields in enumerate(requests):
        run.admit(prompt(fields.pop("length", 8), index), fields.pop("max_tokens", 2), f"r{index}", **fields)
    run.finish()
    return [int(name[1:]) for name in admissions(run)]


@pytest.mark.parametrize("policy", ALL)
def test_S06_equal_requests_start_in_order_of_arrival(policy: str) -> None:
    assert one_by_one(policy, [{} for _ in range(6)]) == [0, 1, 2, 3, 4, 5]


def test_S06_priority_starts_the_smaller_number_first_and_ages() -> None:
    requests = [{"priority": number, "arrival": 0.0} for number in (3, 1, 2, 1, 0)]
    assert one_by_one("priority", requests) == [4, 1, 3, 2, 0]
    requests = [{"priority": 1, "arrival": 0.0}, {"priority": 0, "arrival": 61.0}, {"priority": 0, "arrival": 59.0}]
    assert one_by_one("priority", requests) == [2, 0, 1]


def test_S06_fair_takes_turns_between_tenants() -> None:
    requests = [{"tenant": "a"} for _ in range(5)] + [{"tenant": "b"} for _ in range(3)]
    assert one_by_one("fair", requests) == [0, 5, 1, 6, 2, 7, 3, 4]


def test_S06_fair_gives_a_tenant_of_weight_two_two_turns() -> None:
    requests = [{"tenant": "a"} for _ in range(3)] + [{"tenant": "b"} for _ in range(6)]
    order = one_by_one("fair", requests, tenant_weights=(("b", 2.0),))
    assert order == [0, 3, 4, 1, 5, 6, 2, 7, 8]


def test_S06_fair_counts_tokens_not_requests() -> None:
    requests = [{"tenant": "long", "length": 40} for _ in range(3)] + [
        {"tenant": "short", "length": 6} for _ in range(9)
    ]
    order = one_by_one("fair", requests)
    assert sum(index >= 3 for index in order[: order.index(1)]) >= 4  # (40 + 4) / (6 + 4) short ones for a long one


def test_S06_deadline_starts_what_is_due_first() -> None:
    requests = [{"ttft_objective": 5.0}, {}, {"ttft_objective": 0.5}, {"ttft_objective": 9.0, "deadline": 0.9}]
    assert one_by_one("deadline", requests)[:4] == [2, 3, 1, 0]


def test_S06_shortest_prefill_starts_short_prompts_first_within_its_bound() -> None:
    assert one_by_one("shortest_prefill", [{"length": length} for length in (60, 9, 50, 8)]) == [1, 0, 3, 2]


def test_S10_shortest_prefill_never_lets_more_pass_than_its_bound() -> None:
    """A long prompt under an endless stream of one-token prompts."""
    run = run_with("shortest_prefill", max_sequences=1, prefix_caching=False, max_model_len=260, num_blocks=80)
    run.is_ordered = False
    run.admit(prompt(1, 1), 3, "first")
    run.admit(prompt(200, 2), 1, "long")
    for index in range(40):
        run.admit(prompt(1, 3 + index), 1, f"s{index}")
        run.step()
    run.finish()
    started = admissions(run)
    num_passed = started.index("long") - 1
    assert 1 <= num_passed <= (200 - 1) / ShortestPrefill.weight


def test_S06_prefix_affinity_starts_the_longest_cached_prefix_first_within_its_bound() -> None:
    shared = prompt(48, 99)
    run = run_with("prefix_affinity", max_sequences=1, num_blocks=64, max_batch_tokens=64)
    run.is_ordered = False
    run.admit(shared, 1, "warm")
    run.finish_all()
    run.admit(prompt(8, 1), 2, "busy")
    run.step()
    for index in range(4):
        run.admit(prompt(49, 10 + index), 1, f"cold{index}")
    run.admit([*shared, 5], 1, "hot")
    run.finish()
    # 48 cached tokens are worth fewer than three places: it passes two of the four.
    num_passed = math.ceil(48 / PrefixAffinity.weight) - 1
    assert admissions(run) == ["warm", "busy", "cold0", "cold1", "hot", "cold2", "cold3"] and num_passed == 2


def test_S10_prefix_affinity_never_lets_more_pass_than_its_bound() -> None:
    """A prompt that nothing is cached of, under an endless stream of prompts that are cached but for their end."""
    shared = prompt(160, 99)
    run = run_with("prefix_affinity", max_sequences=1, num_blocks=100, max_batch_tokens=256, max_model_len=200)
    run.is_ordered = False
    run.admit(shared, 3, "warm")
    run.step()
    run.admit(prompt(8, 1), 1, "cold")
    for index in range(40):
        run.admit([*shared, 3 + index], 1, f"hot{index}")
        run.step()
    run.finish()
    num_passed = admissions(run).index("cold") - 1
    assert 1 <= num_passed <= (160 - 1) / PrefixAffinity.weight


def test_S06_fifo_gives_tokens_to_decodes_first_and_prefill_first_to_prompts() -> None:
    for policy, expected in (("fifo", {"r0": 1, "r1": 3}), ("prefill_first", {"r1": 4})):
        run = run_with(policy, max_batch_tokens=4, num_blocks=40)
        run.admit(prompt(3, 1), 9)
        run.step()
        run.admit(prompt(12, 2), 2)
        run.step()
        run.now += 0.01
        assert run.counts(run.fill()) == expected
        run.commit()
        run.finish()


# -- victims


def preempted(run: Run) -> list[tuple[str, str | None]]:
    """(victim, by whom), in order."""
    events = [event for event in run.decisions(EventKind.PREEMPTED)]
    return [(event.request_id, event.by) for event in sorted(events, key=lambda event: event.step)]


def crowded(policy: str, first: dict[str, Any], second: dict[str, Any]) -> Run:
    """Two that grow beyond the pool: together they need 12 blocks of 4, there are 9."""
    run = run_with(policy, num_blocks=9, prefix_caching=False)
    run.is_ordered = False
    run.admit(prompt(12, 1), 12, "r0", **first)
    run.admit(prompt(12, 2), 12, "r1", **second)
    run.finish()
    return run


@pytest.mark.parametrize("policy", ALL)
def test_S06_between_equals_the_latest_arrival_is_preempted(policy: str) -> None:
    assert preempted(crowded(policy, {}, {}))[0][0] == "r1"


@pytest.mark.parametrize(
    ("policy", "first", "second", "victim"),
    [
        ("priority", {"priority": 1}, {"priority": 0}, "r0"),
        ("priority", {"priority": 0}, {"priority": 1}, "r1"),
        ("priority", {"priority": 1, "arrival": 0.0}, {"priority": 0, "arrival": 100.0}, "r1"),
        ("deadline", {"ttft_objective": 50.0}, {"ttft_objective": 1.0}, "r0"),
        ("deadline", {"tpot_objective": 0.01}, {"tpot_objective": 5.0}, "r1"),
        ("deadline", {"tpot_objective": 5.0}, {"tpot_objective": 0.01}, "r0"),
        ("fair", {"tenant": "a"}, {"tenant": "b"}, "r1"),
        ("fcfs", {"priority": 1}, {"priority": 0}, "r1"),
        ("shortest_prefill", {}, {}, "r1"),
    ],
)
def test_S06_the_victim_is_the_policys_last(policy: str, first: Any, second: Any, victim: str) -> None:
    assert {name for name, _ in preempted(crowded(policy, first, second))} == {victim}


def test_S06_fair_preempts_the_tenant_with_most_service() -> None:
    run = run_with("fair", num_blocks=12, prefix_caching=False)
    run.admit(prompt(12, 1), 12, "heavy0", tenant="heavy")
    run.admit(prompt(8, 2), 12, "heavy1", tenant="heavy")
    run.admit(prompt(8, 3), 16, "light", tenant="light")
    run.finish()
    assert preempted(run)[0][0] == "heavy1"
    assert "light" not in {name for name, _ in preempted(run)}


@pytest.mark.parametrize("policy", ["priority", "shortest_prefill", "prefix_affinity", "fcfs", "fifo", "prefill_first"])
@pytest.mark.parametrize("seed", range(4))
def test_S06_nobody_is_preempted_for_one_of_later_rank(policy: str, seed: int) -> None:
    """Where the rank of victims is fixed, it can be held against every preemption of a crowded run."""
    run = run_with(policy, num_blocks=20, headroom=0.0, prefix_caching=False)
    run.is_ordered = False
    for index in range(12):
        length = 4 + (index * 7 + seed * 3) % 13
        run.admit(prompt(length, index), 20, f"r{index}", priority=(index * 5 + seed) % 4)
        if index % 3 == seed % 3:
            run.step()

    def place(name: str | None) -> Any:
        assert name is not None
        record = run.records[name]
        number = record.request.priority * Priority.age_s + record.request.arrival if policy == "priority" else 0
        return number, record.order

    run.finish()
    found = preempted(run)
    assert found
    assert all(place(by) <= place(victim) for victim, by in found)


@pytest.mark.parametrize("policy", ALL)
def test_S08_whoever_was_preempted_comes_before_all_that_would_be_later(policy: str) -> None:
    """The preempted one is admitted before the one that came after it, which needs at least as much room."""
    run = run_with(policy, num_blocks=9, prefix_caching=False)
    run.admit(prompt(12, 1), 12)
    run.admit(prompt(12, 2), 12)
    run.until(lambda: bool(run.decisions(EventKind.PREEMPTED)))
    run.admit(prompt(28, 3), 2)
    run.finish()
    assert admissions(run)[:4] == ["r0", "r1", "r1", "r2"]


# -- an arrival that preempts


class Urgent(Priority):
    """Priority whose arrivals do not wait for room."""

    name = "urgent"
    preempt_on_arrival = True


@pytest.fixture
def urgent(registry: None) -> type[Policy]:
    return register_policy(Urgent)


@pytest.mark.parametrize("is_urgent", [False, True])
def test_S06_an_arrival_preempts_only_when_the_policy_says_so(urgent: type[Policy], is_urgent: bool) -> None:
    run = run_with("urgent" if is_urgent else "priority", num_blocks=8, prefix_caching=False)
    run.is_ordered = False
    run.admit(prompt(24, 1), 7, "batch", priority=5)
    run.step()
    run.admit(prompt(20, 2), 4, "chat", priority=0)
    run.finish()
    assert preempted(run) == ([("batch", "chat")] if is_urgent else [])
    ends = [run.records[name].finished.time for name in ("chat", "batch")]  # type: ignore[union-attr]
    assert (ends[0] < ends[1]) == is_urgent


def test_S06_an_arrival_never_preempts_what_is_ahead_of_it(urgent: type[Policy]) -> None:
    run = run_with("urgent", num_blocks=8, prefix_caching=False)
    run.is_ordered = False
    run.admit(prompt(24, 1), 7, "chat", priority=0)
    run.step()
    run.admit(prompt(20, 2), 4, "batch", priority=5)
    run.finish()
    assert preempted(run) == []
