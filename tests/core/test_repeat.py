"""Steps made as one against the same steps made one by one."""

from __future__ import annotations

import copy
import random
from array import array
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from tests.core import invariants
from tests.core.random_config import BUILT_IN
from tests.core.state_digest import state_digest, state_lines
from tests.quick import one_in

from octavo.core.limits import Limits
from octavo.core.plan import Event, StepPlan, StepResult
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler


def limits(**changes: Any) -> Limits:
    fields: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": (60,),
        "max_model_len": 96,
        "vocab_size": 97,
        "max_batch_tokens": 16,
        "max_sequences": 6,
    }
    return Limits(**{**fields, **changes})


class Engine:
    """A scheduler stepped by hand: `turn` plans up to the depth and commits the oldest, one second each."""

    def __init__(self, sizes: Limits, depth: int, counts_blocks: bool = False) -> None:
        self.scheduler, self.depth = Scheduler(sizes, counts_blocks=counts_blocks), depth
        self.flight: deque[StepPlan] = deque()
        self.now = 0.0
        self.digests: list[bytes] = []
        self.decisions: list[Event] = []

    def admit(self, name: str, prompt: int, outputs: int, **fields: Any) -> None:
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, seed=0, temperature=0.0)
        self.scheduler.admit(Request(name, None, params, self.now, num_prompt_tokens=prompt, **fields), self.now)

    def turn(self, has_look: bool = False) -> None:
        """One turn; with a look at the whole state between plan and commit."""
        while len(self.flight) < self.depth:
            plan = self.scheduler.plan(self.now)
            self.decisions += plan.events
            if plan.is_empty:
                break
            self.digests.append(plan.digest())
            self.flight.append(plan)
        if has_look:
            self.digests.append(state_digest(self.scheduler))
        self.commit()

    def turn_beside(self, has_look: bool = False) -> bool:
        """One turn whose plan leaves out the repeating rows; False, and no turn, if the scheduler makes none."""
        made = self.scheduler.plan_beside(self.now)
        if made is None:
            return False
        plan, reads = made
        self.decisions += plan.events
        rows = self.scheduler._rows
        assert rows is not None
        whole, lengths = rows._whole(plan), reads.lengths()
        starts = whole.starts[: reads.num_rows]
        assert len(lengths) == len(starts) and sum(lengths) == reads.kv_sum == sum(starts) + len(starts)
        assert max(lengths) - min(lengths) <= 1
        self.digests.append(whole.digest())
        self.flight.append(plan)
        if has_look:
            self.digests.append(state_digest(self.scheduler))
        self.commit()
        return True

    def commit(self) -> None:
        if self.flight:
            events = self.scheduler.commit(self.flight.popleft(), StepResult(None), self.now + 0.5)
            self.decisions += events.decisions
        self.now += 1

    def repeat(self, num_steps: int) -> None:
        steps = self.scheduler.find_repeat()
        assert steps is not None
        planned = self.now + num_steps - 1
        plan, _ = self.scheduler.repeat(num_steps, planned, planned + 0.5)
        self.decisions += self.scheduler.take_events()
        self.now += num_steps
        assert (plan is not None) == bool(self.flight)
        if plan is not None:
            self.flight = deque([plan])


def admit_some(engine: Engine, rng: random.Random, index: int) -> None:
    prompt = rng.randint(1, 40)
    outputs = rng.randint(1, 40)
    fields: dict[str, Any] = {"tenant": rng.choice("ab"), "priority": rng.randint(0, 2)}
    if rng.random() < 0.3:
        family = rng.randint(0, 2)
        keys = (prompt + outputs) // 4 if rng.random() < 0.5 else prompt // 4
        fields["block_keys"] = tuple(bytes([family, place]) for place in range(keys))
    if rng.random() < 0.1:
        fields["deadline"] = engine.now + rng.randint(1, 60)
    engine.admit(f"r{index}", prompt, outputs, **fields)


class Twins:
    """Counts what the comparison saw, so that it cannot pass by seeing nothing."""

    def __init__(self) -> None:
        self.num_repeats = self.num_steps = self.num_waiting = self.num_ends = 0

    def step(self, engine: Engine, rng: random.Random) -> None:
        """One turn, or several as one and one by one, compared."""
        steps = engine.scheduler.find_repeat() if len(engine.flight) == engine.depth - 1 else None
        most = 0
        if steps is not None:
            most = steps.max_steps
            if steps.wake_at is not None:
                most = min(most, int(steps.wake_at - engine.now))
        if steps is None or most < 1:
            engine.turn()
            return
        count = rng.choice((1, most, rng.randint(1, most)))
        self.num_repeats += 1
        self.num_steps += count
        self.num_waiting += bool(len(engine.scheduler._state.waiting))
        self.num_ends += steps.has_end and count == steps.max_steps
        self.compare(engine, count)

    def compare(self, engine: Engine, count: int) -> None:
        twin = copy.deepcopy(engine)
        engine.repeat(count)
        for _ in range(count):
            twin.turn()
        check_equal(engine, twin, f"after {count} steps")
        engine.digests = twin.digests[:]
        if self.num_repeats % 8 == 0:  # and they go on alike
            for _ in range(6):
                engine.turn()
                twin.turn()
            assert engine.digests == twin.digests


def check_equal(engine: Engine, twin: Engine, when: str) -> None:
    if state_digest(engine.scheduler) != state_digest(twin.scheduler):
        ours, theirs = state_lines(engine.scheduler), state_lines(twin.scheduler)
        at = next(i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
        raise AssertionError(f"{when}: {ours[at - 6 : at + 3]}, one by one {theirs[at - 6 : at + 3]}")
    assert engine.decisions == twin.decisions
    assert [plan.digest() for plan in engine.flight] == [plan.digest() for plan in twin.flight]
    invariants.check(engine.scheduler)


@pytest.mark.parametrize("counts_blocks", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", one_in(2, BUILT_IN))
def test_steps_made_as_one_lead_to_the_state_of_steps_made_one_by_one(
    policy: str, depth: int, counts_blocks: bool
) -> None:
    twins = Twins()
    for seed in range(3):
        rng = random.Random(f"{policy} {depth} {seed}")
        sizes = limits(
            policy=policy,
            num_blocks=(rng.choice((26, 40, 90)),),
            max_sequences=(2, 3, 6)[seed % 3],
            prefix_caching=rng.random() < 0.7,
        )
        engine, index = Engine(sizes, depth, counts_blocks), 0
        for _ in range(100):
            if rng.random() < 0.2 and len(engine.scheduler._state.requests) < 12:
                admit_some(engine, rng, index)
                index += 1
            twins.step(engine, rng)
    assert twins.num_repeats > 15 and twins.num_steps > 80, vars(twins)
    assert twins.num_waiting > 0 and (twins.num_ends > 0 or depth == 2), vars(twins)


@pytest.mark.parametrize("counts_blocks", [False, True])
@pytest.mark.parametrize("policy", one_in(2, BUILT_IN))
def test_plans_beside_repeating_rows_are_those_of_a_scheduler_that_never_repeats(
    policy: str, counts_blocks: bool
) -> None:
    """The state is compared now and then only: a look at it brings all counters up to date."""
    num_beside = num_repeated = num_adopted = num_ended = 0
    for seed in range(6):
        rng = random.Random(f"{policy} {seed}")
        sizes = limits(policy=policy, num_blocks=(rng.choice((40, 60, 90)),), max_sequences=rng.choice((3, 6)))
        fast, slow = Engine(sizes, 1, counts_blocks), Engine(sizes, 1, counts_blocks)
        for index in range(200):
            if rng.random() < 0.25 and fast.scheduler.num_waiting < 4:
                draws = rng.getstate()
                admit_some(fast, rng, index)
                rng.setstate(draws)
                admit_some(slow, rng, index)
            steps = fast.scheduler.find_repeat()
            most = 0 if steps is None else steps.max_steps
            if steps is not None and steps.wake_at is not None:
                most = min(most, int(steps.wake_at - fast.now))
            if most > 0 and rng.random() < 0.9:
                count = rng.choice((1, most, rng.randint(1, most)))
                num_repeated += count
                fast.repeat(count)
                for _ in range(count):
                    slow.turn()
            else:
                has_look = rng.random() < 0.05
                if fast.turn_beside(has_look):
                    num_beside += 1
                else:
                    fast.turn(has_look)
                slow.turn(has_look)
                assert fast.digests[-2:] == slow.digests[-2:] or not has_look
                assert fast.digests[-1:] == slow.digests[-1:]
            assert fast.decisions == slow.decisions
            assert fast.scheduler.gauges() == slow.scheduler.gauges()
            if rng.random() < 0.05:
                check_equal(fast, slow, f"at {index}")
        num_adopted += slow.scheduler.statistics().num_adopted_blocks
        num_ended += len(slow.decisions)
        check_equal(fast, slow, "at the end")
    assert num_beside > 60 and num_repeated > 150 and num_adopted > 0 and num_ended > 100


@pytest.mark.parametrize("policy", BUILT_IN)
def test_counted_blocks_change_no_decision(policy: str) -> None:
    """Cached prefixes are evicted for counted blocks exactly when they are for blocks with numbers."""
    num_evictions = num_preemptions = num_hits = 0
    for seed in range(8):
        rng = random.Random(f"counted {policy} {seed}")
        sizes = limits(policy=policy, num_blocks=(rng.choice((26, 40)),), max_sequences=rng.choice((3, 6)))
        counting, naming = Engine(sizes, 1, counts_blocks=True), Engine(sizes, 1)
        for index in range(150):
            if rng.random() < 0.3 and naming.scheduler.num_waiting < 4:
                draws = rng.getstate()
                admit_some(counting, rng, index)
                rng.setstate(draws)
                admit_some(naming, rng, index)
            ours, theirs = (engine.scheduler.plan(engine.now) for engine in (counting, naming))
            assert replace(ours, edits=theirs.edits, copies=theirs.copies) == theirs  # these name blocks
            assert len(ours.copies) == len(theirs.copies)
            for engine in (counting, naming):
                if not ours.is_empty:
                    engine.decisions += engine.scheduler.commit(ours, StepResult(None), engine.now + 0.5).decisions
                engine.now += 1
            assert counting.decisions == naming.decisions
            assert counting.scheduler.gauges() == naming.scheduler.gauges()
            invariants.check(counting.scheduler)
        pool, gauges = naming.scheduler._state.cache.pools[0], naming.scheduler.gauges()
        num_evictions += naming.scheduler._state.cache.num_published - len(pool.block_of)
        num_preemptions += gauges.num_preemptions
        num_hits += gauges.hit_tokens
    assert num_evictions > 50 and num_preemptions > 0 and num_hits > 0


def steady(sizes: Limits, depth: int = 1, **fields: Any) -> Engine:
    """Two requests that decode, nothing else to tell."""
    engine = Engine(sizes, depth)
    engine.admit("a", 5, 20, **fields)
    engine.admit("b", 6, 30)
    for _ in range(3):
        engine.turn()
    return engine


def test_the_last_step_ends_requests_at_their_length() -> None:
    engine = steady(limits())
    steps = engine.scheduler.find_repeat()
    assert steps is not None and steps.has_end and steps.max_steps == 17
    assert steps.kv_sum == sum(one.sequences[0].num_scheduled + 1 for one in engine.scheduler._state.running.requests)
    engine.repeat(17)
    assert list(engine.scheduler._state.requests) == ["b"]
    assert engine.decisions[-1].request_id == "a" and engine.decisions[-1].time == engine.now - 0.5


def test_nothing_is_made_as_one_where_a_step_may_do_more() -> None:
    assert steady(limits()).scheduler.find_repeat() is not None
    for sizes in (limits(max_kv_read=1000), limits(find_shared_prefixes=True), limits(max_draft_tokens=2),
                  limits(host_blocks=(4,)), limits(composition="separate")):  # fmt: skip
        assert steady(sizes).scheduler.find_repeat() is None, sizes
    engine = Engine(limits(), 1)
    assert engine.scheduler.find_repeat() is None
    params = SamplingParams(max_tokens=20, seed=0)
    engine.scheduler.admit(Request("ids", array("i", [3, 4, 5]), params), 0.0)  # it may stop by what it says
    engine.turn()
    engine.turn()
    assert engine.scheduler.find_repeat() is None
    newcomer = steady(limits())
    newcomer.admit("c", 4, 4)
    assert newcomer.scheduler.find_repeat() is None
    newcomer.scheduler.pause()
    assert newcomer.scheduler.find_repeat() is not None


def test_steps_end_before_the_pool_is_empty() -> None:
    engine = steady(limits(num_blocks=(9,)))
    steps = engine.scheduler.find_repeat()
    assert steps is not None and not steps.has_end
    engine.repeat(steps.max_steps)
    invariants.check(engine.scheduler)
