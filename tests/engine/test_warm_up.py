"""Warm-up: steps of each kind are run and measured before an engine is ready, and leave nothing behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from tests.engine.direct_client import start_engine
from tests.engine.fakes import GatedExecutor, Harness, expected, make_limits, make_request, open_fake
from tests.reliability.deaths import FAKE, config

from octavo.core.plan import StepPlan
from octavo.engine.warm_up import MAX_PROMPT, MIN_PROMPT, warm_up
from octavo.errors import EngineDeadError


def clock(step_s: float) -> Callable[[], float]:
    """Return a clock that goes on by so much with each step: it is read before and after one."""
    ticks = itertools.count()
    return lambda: step_s * (next(ticks) // 2 + next(ticks) % 2)


def test_each_kind_of_step_is_measured_and_nothing_is_left() -> None:
    executor, limits = GatedExecutor(), make_limits()
    open_fake(executor, limits)
    plans: list[StepPlan] = []

    def note(plan: StepPlan, owners: list[str]) -> None:
        plans.append(plan)

    executor.fail = note
    seconds = warm_up(limits, executor, False, clock(0.5))
    assert sorted(seconds) == [1, 2, MIN_PROMPT] and min(seconds.values()) > 0.0
    kinds = [new.params for plan in plans for new in plan.new_sequences]
    assert {params.temperature for params in kinds} == {0.0, 0.8} and kinds[-1].prompt_logprobs is not None
    assert not executor.slots and not executor.queue
    quick = GatedExecutor()
    open_fake(quick, limits)
    assert max(warm_up(limits, quick, False, clock(1e-4))) == MAX_PROMPT


def test_requests_after_a_warm_up_say_what_they_would_without() -> None:
    harness, request = Harness(), make_request("a", length=30, max_tokens=20)
    harness.loop.warm_up = lambda: warm_up(harness.limits, harness.executor, False, harness.loop.clock.now)
    with harness:
        assert harness.loop.wait_warm()
        harness.post(request)
        harness.end("a")
    assert harness.inbox("a").ids == expected(request)


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 18])
def test_what_a_small_pool_cannot_hold_is_left_out(num_blocks: int) -> None:
    executor, limits = GatedExecutor(), make_limits(num_blocks=(num_blocks,), max_sequences=1, max_batch_tokens=16)
    open_fake(executor, limits)
    assert 1 in warm_up(limits, executor, False, clock(1e-4)) and not executor.slots


def test_a_warm_up_that_runs_out_of_memory_leaves_the_rest_out() -> None:
    executor, limits = GatedExecutor(), make_limits()
    open_fake(executor, limits)
    executor.fail = lambda plan, owners: MemoryError("no room") if plan.num_query_tokens > 8 else None
    assert list(warm_up(limits, executor, False, clock(0.5))) == [1] and not executor.slots


async def test_an_engine_whose_warm_up_fails_does_not_start(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineDeadError, match=r"ended before it was ready: exit status 1"):
        await start_engine(config("cold"), command=FAKE)
    assert "RuntimeError: no kernel for this" in capfd.readouterr().err
