"""S22: what a step costs, counted in calls, comparisons and bytes, never in time."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from tests.core.harness import Run, limits, prompt
from tests.fake_model import quads

from octavo.core import policy
from octavo.core.policy.basic import Fcfs, Fifo
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.core.request_state import RequestState


class Counted(float):
    """A key that counts how often it is compared."""

    num_compared = 0

    def __lt__(self, other: object) -> bool:
        Counted.num_compared += 1
        return float.__lt__(self, other)  # type: ignore[operator]


class CountedFcfs(Fcfs):
    name = "counted_fcfs"

    def key(self, request: RequestState) -> tuple[float, ...]:
        return (Counted(request.order),)


class CountedFifo(Fifo):
    name = "counted_fifo"

    def key(self, request: RequestState) -> tuple[float, ...]:
        return (*super().key(request), Counted(request.order))


def count_calls(work: Callable[[], object]) -> tuple[int, int]:
    """Calls of Python functions and of built-in ones while `work` runs."""
    counts = {"call": 0, "c_call": 0}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    gc.collect()
    gc.disable()  # hypothesis has a callback of the collector, whose calls are not the scheduler's
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts["call"], counts["c_call"]


def count_bytes(work: Callable[[], object]) -> int:
    """Most memory that `work` held at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def saturated(name: str, num_waiting: int, **sizes: Any) -> Run:
    """Eight that decode for long, and many behind them for whom there is no room."""
    run = Run(limits(policy=name, num_blocks=200, max_model_len=400, max_batch_tokens=256, **sizes), check=False)
    for seed in range(8):
        run.admit(prompt(80, seed), 20)
    run.steps(3)
    prompts, params = [array("i", prompt(160, seed)) for seed in range(100, 150)], SamplingParams(max_tokens=3)
    for index in range(num_waiting):
        run.scheduler.admit(
            Request(f"w{index}", prompts[index % 50], params, run.now, queue_timeout=1e6 + index), run.now
        )
    return run


class Stepper:
    """Takes the scheduler's share of a step apart from the executor's."""

    def __init__(self, run: Run) -> None:
        self.run, self.executor = run.scheduler, run.executor
        self.plan = self.run.plan(0.0)
        self.answer()

    def answer(self) -> None:
        self.result = self.executor.collect(self.executor.submit(self.plan))

    def __call__(self) -> None:
        self.run.commit(self.plan, self.result, 0.0)
        self.plan = self.run.plan(0.0)


@pytest.fixture(autouse=True)
def counted_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (CountedFcfs, CountedFifo):
        monkeypatch.setitem(policy.POLICIES, kind.name, kind)


@pytest.mark.parametrize(
    ("name", "max_sequences", "num_many"),
    [("counted_fcfs", 64, 100_000), ("counted_fcfs", 8, 20_000), ("counted_fifo", 64, 20_000)],
)
def test_S22_a_hundred_thousand_waiting_requests_add_no_work_per_step(
    name: str, max_sequences: int, num_many: int
) -> None:
    measured = []
    for num_waiting in (100, num_many):
        run = saturated(name, num_waiting, max_sequences=max_sequences)
        step = Stepper(run)
        assert (run.scheduler.num_waiting, run.scheduler.num_running) == (num_waiting, 8)
        step()
        step.answer()
        Counted.num_compared = 0
        python, built_in = count_calls(step)
        compared = Counted.num_compared
        step.answer()
        measured.append(((python - compared, built_in), compared, count_bytes(step)))
    (few_calls, few_compared, few_bytes), (many_calls, many_compared, many_bytes) = measured
    assert many_calls == few_calls
    # Up to 64 candidates leave a heap and come back: a path of log2(n) each.
    assert many_compared <= 3 * few_compared + 64
    assert many_bytes <= 2 * few_bytes + 4096


def test_S22_cancelling_the_whole_queue_costs_no_scan_per_request() -> None:
    costs = []
    for num_waiting in (1000, 10_000):
        run = saturated("counted_fcfs", num_waiting, max_sequences=8)
        names = [f"w{index}" for index in range(num_waiting)]
        Counted.num_compared = 0
        calls = count_calls(lambda run=run, names=names: run.scheduler.cancel(names, run.now, FinishReason.CANCELLED))
        costs.append((sum(calls) + Counted.num_compared) / num_waiting)
    assert costs[1] <= 1.5 * costs[0]


def test_S22_steady_decode_allocates_at_block_boundaries_only() -> None:
    run = Run(
        limits(block_size=16, num_blocks=200, max_sequences=32, max_model_len=200, max_batch_tokens=600), check=False
    )
    for seed in range(32):
        run.admit(prompt(17, seed), 100)
    run.step()
    for step in range(48):
        plan = run.step()
        assert plan.num_rows == 32 and not plan.new_sequences
        assert len(list(quads(plan.edits))) == (32 if (17 + step) % 16 == 0 else 0)
        assert plan.is_fast_path and not plan.copies and not plan.freed_slots


def test_S22_a_steady_decode_step_makes_a_few_calls_per_row() -> None:
    calls = []
    for num_rows in (32, 256):
        sizes = limits(block_size=16, num_blocks=1000, max_sequences=256, max_model_len=60, max_batch_tokens=8192)
        run = Run(sizes, check=False)
        for seed in range(num_rows):
            run.admit(prompt(17, seed), 30)
        run.steps(3)
        calls.append(count_calls(Stepper(run)))
    python, built_in = ((calls[1][i] - calls[0][i]) / 224 for i in range(2))
    assert python <= 2 and built_in <= 12, f"{python} Python calls and {built_in} built-in calls per row"
