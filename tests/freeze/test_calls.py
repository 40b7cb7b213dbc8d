"""A decode step of 256 sequences makes no more Python calls than when the behaviour was frozen."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.freeze.core_names import Limits, Request, SamplingParams, Scheduler, StepPlan, StepResult

NUM_ROWS = 256
BLOCK = 16
# Calls of Python functions by commit and plan together, as measured when frozen: a plain step, and one in which every
# sequence fills a block and needs the next; then those of admitting one request and planning its prompt.
FROZEN = {"plain": 64, "block": 7744, "admit": 306}


class Decoding:
    """A scheduler whose sequences all decode, and its last plan."""

    def __init__(self) -> None:
        limits = Limits(
            block_size=BLOCK, num_blocks=(4000,), max_model_len=400, vocab_size=997, max_batch_tokens=8192,
            max_sequences=NUM_ROWS,
        )  # fmt: skip
        self.scheduler = Scheduler(limits)
        for index in range(NUM_ROWS):
            ids = array("i", [3 + (index * 131 + at * 7) % 990 for at in range(BLOCK + 1)])
            params = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0.0)
            self.scheduler.admit(Request(f"r{index}", ids, params), 0.0)
        self.now = 0.0
        self.plan = self.scheduler.plan(self.now)

    def step(self) -> StepPlan:
        """Commit the plan in flight and make the next."""
        result = StepResult(array("i", [5]) * len(self.plan.slots))
        self.scheduler.commit(self.plan, result, self.now)
        self.plan = self.scheduler.plan(self.now)
        return self.plan


def count_calls(work: Callable[[], object]) -> int:
    """Calls of Python functions while `work` runs."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def measure() -> dict[str, int]:
    """The most calls of each kind of step, over 64 steps."""
    decoding = Decoding()
    found = {"plain": 0, "block": 0}
    for _ in range(4):
        decoding.step()
    for _ in range(4 * BLOCK):
        count = count_calls(decoding.step)
        assert len(decoding.plan.slots) == NUM_ROWS and not decoding.plan.new_sequences
        kind = "block" if decoding.plan.edits else "plain"
        found[kind] = max(found[kind], count)
    return {**found, "admit": _measure_admission()}


def _measure_admission() -> int:
    """Calls by admitting a request and planning it, in an engine that knows others."""
    scheduler = Scheduler(Limits(block_size=BLOCK, num_blocks=(4000,), max_model_len=400, vocab_size=997))
    ids, params = array("i", range(3, 3 + 2 * BLOCK)), SamplingParams(max_tokens=300, seed=1)

    def enter(name: str) -> None:
        scheduler.admit(Request(name, ids, params), 0.0)
        plan = scheduler.plan(0.0)
        assert len(plan.new_sequences) == 1
        scheduler.commit(plan, StepResult(array("i", [5]) * len(plan.slots)), 0.0)

    enter("a")
    return count_calls(lambda: enter("b"))


def test_a_step_makes_no_more_python_calls_than_when_frozen() -> None:
    measured = measure()
    assert all(measured[kind] <= FROZEN[kind] for kind in FROZEN), f"{measured}, frozen: {FROZEN}"


if __name__ == "__main__":
    print(measure())
