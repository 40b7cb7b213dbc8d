"""KV that crosses engines: blocks are held after an end, and given before a start; none of them is lost."""

from __future__ import annotations

import random

import pytest
from tests.core import invariants
from tests.core.harness import limits

from octavo.core.limits import Limits
from octavo.core.plan import Event, EventKind, Events, StepPlan, StepResult, WaitReason
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.errors import DuplicateRequestError, InvariantError
from octavo.observe.explainer import sentence


def request(
    name: str, length: int, max_tokens: int, emitted: int = 0, keys: tuple[bytes, ...] | None = None
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, seed=0)
    ids = [0] * emitted
    return Request(name, None, params, num_prompt_tokens=length, block_keys=keys, emitted_token_ids=ids or None)  # type: ignore[arg-type]


class Steps:
    """A scheduler whose steps take a second, checked after each call."""

    def __init__(self, sizes: Limits | None = None, counts_blocks: bool = False) -> None:
        self.scheduler = Scheduler(sizes or limits(), counts_blocks=counts_blocks)
        self.now, self.events = 0.0, list[Event]()

    def step(self) -> tuple[StepPlan, Events | None]:
        plan, events = self.scheduler.plan(self.now), None
        invariants.check(self.scheduler)
        self.events += plan.events
        self.now += 1
        if not plan.is_empty:
            events = self.scheduler.commit(plan, StepResult(None), self.now)
            self.events += events.decisions
            invariants.check(self.scheduler)
        return plan, events

    def kinds(self, name: str) -> list[EventKind]:
        return [event.kind for event in self.events if event.request_id == name]


@pytest.mark.parametrize("counts_blocks", [False, True])
def test_blocks_are_held_after_the_end_until_they_are_released(counts_blocks: bool) -> None:
    run = Steps(counts_blocks=counts_blocks)
    run.scheduler.admit(request("a", 30, 1), 0.0)
    run.scheduler.keep_kv("a")
    run.step()
    assert run.kinds("a")[-1] == EventKind.FINISHED and not run.scheduler.has_work
    assert run.scheduler.num_used_blocks == 8 and run.scheduler.num_running == 0
    with pytest.raises(DuplicateRequestError):
        run.scheduler.admit(request("a", 4, 1), 1.0)
    run.scheduler.admit(request("b", 40, 1), 1.0)  # 10 blocks of 16, of which 8 are free
    plan, _ = run.step()
    plan, _ = run.step()
    assert plan.waits == ((WaitReason.KV_BLOCKS, 1),)
    assert run.scheduler.release_kv("a") and not run.scheduler.release_kv("a")
    run.step()
    run.step()
    assert run.kinds("b")[-1] == EventKind.FINISHED
    run.step()
    invariants.check_no_leaks(run.scheduler)


def test_a_cancelled_request_holds_nothing() -> None:
    run = Steps()
    run.scheduler.admit(request("a", 30, 5), 0.0)
    run.scheduler.keep_kv("a")
    run.step()
    run.scheduler.cancel(["a"], 1.0)
    assert run.scheduler.num_used_blocks == 0 and not run.scheduler.release_kv("a")


@pytest.mark.parametrize("counts_blocks", [False, True])
def test_expected_kv_gets_blocks_and_its_rows_wait_for_it(counts_blocks: bool) -> None:
    run = Steps(counts_blocks=counts_blocks)
    run.scheduler.admit(request("a", 30, 4, emitted=1), 0.0)
    run.scheduler.expect_kv("a", 30)
    plan, _ = run.step()
    assert not plan.slots and run.scheduler.num_used_blocks == 8
    assert [event.cached_tokens for event in run.events if event.kind == EventKind.ADMITTED] == [0]
    run.scheduler.admit(request("b", 8, 9), 1.0)  # another one is served meanwhile
    plan, _ = run.step()
    assert list(plan.counts) == [8]
    assert run.scheduler.receive_kv("a") and not run.scheduler.receive_kv("a")
    plan, events = run.step()
    assert sorted(zip(plan.starts, plan.counts, strict=True)) == [(8, 1), (30, 1)]
    assert events is not None and events.positions[list(events.request_ids).index("a")] == 1
    while run.scheduler.has_work:
        run.step()
    ended = {event.request_id: event.num_tokens for event in run.events if event.kind == EventKind.FINISHED}
    assert ended == {"a": 4, "b": 9}
    run.step()
    invariants.check_no_leaks(run.scheduler)


def test_alone_it_waits_for_the_transfer_and_an_empty_plan_says_so() -> None:
    run = Steps()
    run.scheduler.admit(request("a", 30, 4, emitted=1), 0.0)
    run.scheduler.expect_kv("a", 30)
    run.step()
    plan, _ = run.step()
    assert plan.is_empty and plan.waits == ((WaitReason.KV_TRANSFER, 1),)
    told = run.scheduler.explain("a")
    assert told is not None and told.reason is WaitReason.KV_TRANSFER
    assert "kv_transfer" in sentence(told)


def test_tokens_that_are_cached_here_need_not_come() -> None:
    keys = tuple(bytes([index]) * 16 for index in range(7))
    run = Steps()
    run.scheduler.admit(request("a", 30, 1, keys=keys), 0.0)
    run.step()
    for name, num_tokens, cached, is_receiving in (("b", 30, 28, True), ("c", 28, 28, False)):
        run.scheduler.admit(request(name, 30, 4, emitted=1, keys=keys), run.now)
        run.scheduler.expect_kv(name, num_tokens)
        run.step()
        found = [one.cached_tokens for one in run.events if (one.request_id, one.kind) == (name, EventKind.ADMITTED)]
        assert found == [cached] and run.scheduler.receive_kv(name) == is_receiving
        while run.scheduler.has_work:
            run.step()
    run.step()
    invariants.check_no_leaks(run.scheduler)


def test_a_preempted_request_is_computed_here() -> None:
    run = Steps(limits(num_blocks=10))
    run.scheduler.admit(request("first", 7, 20), 0.0)
    run.step()
    run.scheduler.admit(request("a", 29, 4, emitted=1), run.now)
    run.scheduler.expect_kv("a", 29)
    while EventKind.PREEMPTED not in run.kinds("a"):  # the other one needs a third block
        run.step()
    assert not run.scheduler.receive_kv("a")
    tokens = 0
    while run.scheduler.has_work:
        plan, _ = run.step()
        tokens += sum(plan.counts)
    assert tokens >= 29 + 1 + 2  # its prompt, its first token and the rest of its tokens
    assert [one.num_tokens for one in run.events if one.kind == EventKind.FINISHED and one.request_id == "a"] == [4]
    run.step()
    invariants.check_no_leaks(run.scheduler)


def test_what_cannot_be_expected_is_refused() -> None:
    run = Steps()
    run.scheduler.admit(request("a", 30, 4), 0.0)
    for count in (0, 30):
        with pytest.raises(InvariantError, match=f"KV of {count} of 30 tokens"):
            run.scheduler.expect_kv("a", count)
    run.step()
    with pytest.raises(InvariantError, match="has run"):
        run.scheduler.expect_kv("a", 8)


def new_events(run: Steps, kind: EventKind) -> list[Event]:
    """Make a step; return its events of this kind."""
    seen = len(run.events)
    run.step()
    return [event for event in run.events[seen:] if event.kind == kind]


def check_all_ended(run: Steps, num_tokens: dict[str, int]) -> None:
    """Every request has ended once, with so many tokens."""
    ended = [one for one in run.events if one.kind == EventKind.FINISHED]
    assert len(ended) == len(num_tokens)
    assert {one.request_id: one.num_tokens for one in ended} == num_tokens
    assert {one.finish_reason for one in ended} <= {FinishReason.LENGTH, FinishReason.CANCELLED}


@pytest.mark.parametrize("seed", range(12))
def test_many_requests_cross_two_engines_and_nothing_is_lost(seed: int) -> None:
    """Requests are prefilled by one scheduler and decoded by another, with transfers of random lengths and ends."""
    rng = random.Random(seed)
    sizes = limits(num_blocks=24, policy=rng.choice(("fcfs", "priority", "fair", "shortest_prefill")))
    source, target = Steps(sizes, seed % 2 == 0), Steps(sizes, seed % 3 == 0)
    wanted = {f"r{index}": (rng.randint(1, 40), rng.randint(2, 12)) for index in range(25)}
    to_come, moving = list(wanted), dict[str, int]()
    cancelled: list[str] = []
    for _ in range(600):
        if to_come and rng.random() < 0.4:
            name = to_come.pop()
            source.scheduler.admit(request(name, wanted[name][0], 1), source.now)
            source.scheduler.keep_kv(name)
        for event in new_events(source, EventKind.FINISHED):
            length, max_tokens = wanted[event.request_id]
            target.scheduler.admit(request(event.request_id, length, max_tokens, emitted=1), target.now)
            target.scheduler.expect_kv(event.request_id, length)
        for event in new_events(target, EventKind.ADMITTED):
            moving[event.request_id] = rng.randint(1, 5)
        for name in list(moving):
            moving[name] -= 1
            if not moving[name]:
                del moving[name]
                target.scheduler.receive_kv(name)
                assert source.scheduler.release_kv(name)
            elif rng.random() < 0.02:
                cancelled += [name] * target.scheduler.cancel([name], target.now)
    check_all_ended(target, {name: 1 if name in cancelled else most for name, (_, most) in wanted.items()})
    for run in (source, target):
        invariants.check_no_leaks(run.scheduler)
