"""What the scheduler costs by itself: plan and commit of a decode step, admission, with many waiting beside.

Owns: the set-up (as vLLM's scheduler is measured: prompts of 120, block size 16, 8192 tokens a step) and the medians.
Does not: run a model; results are made up, one id a row.
"""

from __future__ import annotations

import statistics
import time
from array import array
from dataclasses import asdict, dataclass

from octavo.core.limits import Limits
from octavo.core.plan import ROW_SAMPLE, StepPlan, StepResult
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.errors import InvariantError
from octavo.plugins import find_policy

RUNNING = (32, 256, 1024)
WAITING = (0, 10_000, 100_000)
NUM_PROMPT = 120
NUM_OUTPUT = 2000
BLOCKS_PER_SEQUENCE = 40  # room for 640 positions: no sequence runs out while it is measured
MAX_FILL_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians in microseconds: a decode step's plan and commit, and one admission."""

    running: int
    waiting: int
    plan_us: float
    commit_us: float
    step_us: float
    step_p99_us: float
    admit_us: float

    def as_dict(self) -> dict[str, float]:
        """Plain numbers."""
        return asdict(self)


def measure_one(running: int, waiting: int, steps: int, policy: str = "fcfs") -> Cost:
    """Fill a scheduler with `running` decoding sequences and `waiting` queued requests, then time its steps."""
    limits = Limits(
        block_size=16,
        num_blocks=(running * BLOCKS_PER_SEQUENCE + 100,),
        max_model_len=4096,
        vocab_size=49152,
        max_batch_tokens=8192,
        max_sequences=running,
        policy=find_policy(policy),
    )
    scheduler = Scheduler(limits)
    admit_s = _admit(scheduler, "r", running)
    now = 1.0
    for _ in range(MAX_FILL_STEPS):
        plan = _step(scheduler, now)[0]
        now += 0.01
        if plan.num_query_tokens == running and plan.num_rows == running:
            break
    else:
        raise InvariantError(f"{running} sequences are not all decoding after {MAX_FILL_STEPS} steps")
    admit_s += _admit(scheduler, "w", waiting)
    times = [_step(scheduler, now + 0.01 * index)[1:] for index in range(steps + 4)][4:]
    totals = sorted(plan_s + commit_s for plan_s, commit_s in times)
    return Cost(
        running=running,
        waiting=waiting,
        plan_us=round(statistics.median(plan_s for plan_s, _ in times) * 1e6, 1),
        commit_us=round(statistics.median(commit_s for _, commit_s in times) * 1e6, 1),
        step_us=round(statistics.median(totals) * 1e6, 1),
        step_p99_us=round(totals[min(len(totals) - 1, len(totals) * 99 // 100)] * 1e6, 1),
        admit_us=round(statistics.median(admit_s) * 1e6, 1),
    )


def _admit(scheduler: Scheduler, tag: str, count: int) -> list[float]:
    params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True, seed=0)
    seconds = []
    for index in range(count):
        ids = array("i", ((index * 131 + place) % 40_000 for place in range(NUM_PROMPT)))
        request = Request(f"{tag}{index}", ids, params)
        start = time.perf_counter()
        scheduler.admit(request, 0.0)
        seconds.append(time.perf_counter() - start)
    return seconds


def _step(scheduler: Scheduler, now: float) -> tuple[StepPlan, float, float]:
    start = time.perf_counter()
    plan = scheduler.plan(now)
    planned = time.perf_counter()
    result = StepResult(array("i", [7]) * sum(flag & ROW_SAMPLE for flag in plan.flags))
    made = time.perf_counter()
    scheduler.commit(plan, result, now)
    return plan, planned - start, time.perf_counter() - made
